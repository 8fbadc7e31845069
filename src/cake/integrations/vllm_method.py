"""What vLLM uses for ModelOpt NVFP4 once `cake.integrations.vllm.register` installs it.

Imported only then: this needs vLLM.
"""

from __future__ import annotations

from logging import WARNING, getLogger
from typing import Any

from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)

from cake.integrations.serving import ExpertsLayer, LoadedExperts, check_fit, log_once
from cake.support import Geometry

_logger = getLogger("vllm.cake")  # shown by vLLM's handler


def install() -> None:
    """Put the two configurations in the place of vLLM's, under vLLM's names."""
    register_quantization_config("modelopt_fp4")(CakeModelOptNvFp4Config)
    register_quantization_config("modelopt_mixed")(CakeModelOptMixedPrecisionConfig)


class CakeModelOptNvFp4Config(ModelOptNvFp4Config):
    """`modelopt_fp4` with cake's experts where they are SiTU."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Give cake's method for SiTU experts, vLLM's for any other layer."""
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
            method = _experts_method(self, layer, prefix)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)


class CakeModelOptMixedPrecisionConfig(ModelOptMixedPrecisionConfig):
    """`modelopt_mixed` with cake's experts where they are NVFP4 and SiTU."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Give cake's method for NVFP4 SiTU experts, vLLM's for any other layer."""
        if (
            isinstance(layer, RoutedExperts)
            and not self.is_layer_excluded(prefix)
            and self._resolve_quant_algo(prefix) == "NVFP4"
        ):
            method = _experts_method(self.nvfp4_config, layer, prefix)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)


def _experts_method(
    quant_config: ModelOptNvFp4Config, layer: RoutedExperts, prefix: str
) -> CakeModelOptNvFp4FusedMoE | None:
    """Make the method of a layer of NVFP4 experts; None if they do not concern cake."""
    moe = layer.moe_config
    activation = moe.activation.value
    if activation != "situ" or quant_config.quant_method != "NVFP4":
        log_once(
            _logger,
            WARNING,
            f"vLLM, not cake, runs the {quant_config.quant_method} experts with {activation}: cake "
            "has NVFP4 with situ",
        )
        return None
    parallel = moe.moe_parallel_config
    experts = ExpertsLayer(
        name=prefix,
        geometry=Geometry(
            hidden=moe.hidden_dim,
            intermediate=moe.intermediate_size_per_partition,
            num_experts=moe.num_local_experts,
            top_k=moe.experts_per_token,
        ),
        dtype=moe.in_dtype,
        situ_beta=moe.activation_situ_beta,
        situ_linear_beta=moe.activation_situ_linear_beta,
        max_tokens=moe.max_num_tokens,
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
    )
    asked = {
        "--enable-expert-parallel": parallel.use_ep,
        "--enable-eplb": parallel.enable_eplb,
        "--data-parallel-size": parallel.dp_size > 1,
        "--prefill-context-parallel-size": parallel.pcp_size > 1,
        "sequence parallelism": parallel.is_sequence_parallel,
        "--enable-lora": moe.is_lora_enabled,
        "biases": moe.has_bias,
        "apply_router_weight_on_input": layer.apply_router_weight_on_input,
        "an override of the activations' quantization": (
            quant_config.moe_activation_override is not None
        ),
    }
    check_fit(experts, asked, "vLLM")
    return CakeModelOptNvFp4FusedMoE(quant_config, moe, experts)


class CakeModelOptNvFp4FusedMoE(ModelOptNvFp4FusedMoE):
    """One layer of experts. vLLM's loader knows a ModelOpt method by that word in its name."""

    supports_pre_processed_weights = False
    supports_eplb = False
    use_global_sf = False

    def __init__(self, quant_config: ModelOptNvFp4Config, moe: Any, experts: ExpertsLayer) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # the parent's would choose one of vLLM's kernels
        self.quant_config = quant_config
        self.loaded = LoadedExperts(experts, _logger)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters that vLLM's loader fills."""
        super().create_weights(layer, *args, **kwargs)
        self.loaded.forget_input_scales(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Lay out what was loaded."""
        self.loaded.take(layer)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: cake quantizes, vLLM does not."""

    def apply(
        self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: object
    ) -> Tensor:
        """Run the routed experts; shared experts are the runner's."""
        return self.loaded(x, topk_ids, topk_weights)
