"""What SGLang uses for ModelOpt NVFP4 once `cake.integrations.sglang.register` installs it.

Imported only then: this needs SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from logging import WARNING, getLogger
from typing import Any

from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4Config,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4FusedMoEMethod,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_lora
from torch import nn

from cake.integrations.serving import ExpertsLayer, LoadedExperts, check_fit, log_once
from cake.support import Geometry

_logger = getLogger("sglang.cake")


@cache
def install() -> None:
    """Hook into the two configurations that choose the method of a layer; once."""
    for config in (ModelOptFp4Config, ModelOptMixedPrecisionConfig):
        target = f"{config.__module__}.{config.__qualname__}.get_quant_method"
        HookRegistry.register(target, choose, HookType.AROUND)


def choose(original: Callable[..., Any], config: Any, layer: nn.Module, prefix: str) -> Any:
    """Give cake's method for NVFP4 SiTU experts, what SGLang chooses for any other layer."""
    if isinstance(layer, FusedMoE) and not config.is_layer_excluded(prefix):
        nvfp4 = _nvfp4_config(config, prefix)
        method = None if nvfp4 is None else _experts_method(nvfp4, layer, prefix)
        if method is not None:
            return method
    return original(config, layer, prefix)


def _nvfp4_config(config: Any, prefix: str) -> ModelOptFp4Config | None:
    """Give the configuration of a layer of experts that a checkpoint holds in NVFP4."""
    if isinstance(config, ModelOptMixedPrecisionConfig):
        return config.nvfp4_config if config.resolve_quant_algo(prefix) == "NVFP4" else None
    return config if config.is_checkpoint_nvfp4_serialized and not config.is_w4a16 else None


def _experts_method(
    config: ModelOptFp4Config, layer: FusedMoE, prefix: str
) -> CakeModelOptNvFp4FusedMoEMethod | None:
    """Make the method of a layer of NVFP4 experts; None if they do not concern cake."""
    moe = layer.moe_runner_config
    if moe.activation != "situ":
        log_once(
            _logger,
            WARNING,
            f"SGLang, not cake, runs the NVFP4 experts with {moe.activation}: cake has situ",
        )
        return None
    experts = ExpertsLayer(
        name=prefix,
        geometry=Geometry(
            hidden=moe.hidden_size,
            intermediate=moe.intermediate_size_per_partition,
            num_experts=moe.num_local_experts,
            top_k=moe.top_k,
        ),
        dtype=moe.params_dtype,
        situ_beta=moe.gemm1_alpha,
        situ_linear_beta=moe.gemm1_clamp_limit,
    )
    backend, dispatch = get_moe_runner_backend(), get_moe_a2a_backend()
    asked = {
        f"--moe-runner-backend {backend.value}": not backend.is_auto(),
        f"--moe-a2a-backend {dispatch.value}": not dispatch.is_none(),
        "--ep-size": layer.moe_ep_size > 1,
        "--enable-lora": bool(get_lora().enable_lora or get_lora().lora_paths),
        "fusion of shared experts (--disable-shared-experts-fusion)": (
            layer.num_fused_shared_experts > 0
        ),
        "biases": layer.with_bias,
        "apply_router_weight_on_input": moe.apply_router_weight_on_input,
        "no_combine": moe.no_combine,
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": config.use_per_token_activation,
    }
    check_fit(experts, asked, "SGLang")
    return CakeModelOptNvFp4FusedMoEMethod(config, experts)


class CakeModelOptNvFp4FusedMoEMethod(ModelOptNvFp4FusedMoEMethod):
    """One layer of experts. SGLang's loader knows a ModelOpt method by that word in its name."""

    load_up_proj_weight_first = False
    # With the TRTLLM backend's name but not its layout, create_weights makes no swizzled copy of
    # the block scales.
    enable_flashinfer_trtllm_moe = True
    use_flashinfer_trtllm_weight_layout = False

    def __init__(self, config: ModelOptFp4Config, experts: ExpertsLayer) -> None:
        # Not the parent's, which refuses GPUs that SGLang's own kernels do not run on.
        self.quant_config = config
        self.loaded = LoadedExperts(experts, _logger)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters that SGLang's loader fills."""
        super().create_weights(layer, *args, **kwargs)
        self.loaded.forget_input_scales(layer)

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Have none: `apply` is the kernel."""
        self.moe_runner_config, self.runner = moe_runner_config, None

    def get_moe_runner_backend(self, layer: nn.Module) -> None:
        """None: a kernel that takes the router's ids and weights as they are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Lay out what was loaded."""
        self.loaded.take(layer)

    def apply(self, layer: nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """Run the routed experts."""
        routed = dispatch_output.topk_output
        output = self.loaded(dispatch_output.hidden_states, routed.topk_ids, routed.topk_weights)
        return StandardCombineInput(hidden_states=output)
