"""The plug-in in the vLLM that is installed: its own layer and loader, on the CPU.

Skipped where vLLM cannot be imported or is of another version. Needs 5 GB of memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import serving_doubles
import torch
from serving_layers import NAME, RANK, TP, check_filled, fill

import cake
from cake.integrations import serving, vllm
from cake.support import KIMI_K3


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip(
        "vllm.model_executor.layers.quantization.modelopt",
        reason="vLLM is not installed: pip install '.[vllm]'",
        exc_type=ImportError,
    )
    try:
        serving.require_version("vllm", *vllm.VERSIONS)
    except cake.UnsupportedError as error:
        pytest.skip(str(error))
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import quantization

    monkeypatch.setenv("CAKE_EXPERTS", "1")
    customized = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", dict(customized))
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: RANK)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: TP)
    yield quantization


def make_layer(quantization: Any, activation: str = "situ", tp_size: int = TP) -> Any:
    """vLLM's container of routed experts, as a model makes it."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    parallel = FusedMoEParallelConfig(
        tp_size=tp_size,
        pcp_size=1,
        dp_size=1,
        ep_size=1,
        tp_rank=RANK,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=0,
        sp_size=1,
        use_ep=False,
        all2all_backend="naive",
        enable_eplb=False,
    )
    experts, top_k = KIMI_K3.num_experts, KIMI_K3.top_k
    moe = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=KIMI_K3.hidden,
        intermediate_size=TP * KIMI_K3.intermediate,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=MoEActivation.from_str(activation),
        device="cpu",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        max_num_tokens=4,
    )
    config = quantization.get_quantization_config("modelopt_fp4").from_config(
        {"quant_algo": "NVFP4", "quant_method": "modelopt"}
    )
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        return RoutedExperts(
            NAME,
            torch.bfloat16,
            moe,
            config,
            ExpertMapManager(4, top_k, experts, 0, 1, parallel, "linear", False),
            ckpt_gate_proj_name="w1",
            ckpt_down_proj_name="w2",
            ckpt_up_proj_name="w3",
        )


def test_the_doubles_are_like_it(real: Any) -> None:
    doubles, methods = serving_doubles.vllm(), serving_doubles.VLLM_METHODS
    assert not [*serving_doubles.differences(doubles, methods)]


def test_register_replaces_the_two_configurations(real: Any) -> None:
    names = ("modelopt_fp4", "modelopt_mixed")
    before = [real.get_quantization_config(name) for name in names]
    vllm.register()
    for name, theirs in zip(names, before, strict=True):
        config = real.get_quantization_config(name)
        assert config.__module__ == "cake.integrations.vllm_method"
        assert issubclass(config, theirs)
        checkpoint_config = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
        override = config.override_quantization_method(checkpoint_config, None, hf_config=None)
        assert override == theirs.override_quantization_method(checkpoint_config, None)
        assert pickle.loads(pickle.dumps(config)) is config  # as it reaches a worker


def test_other_layers_are_refused_or_left(real: Any) -> None:
    vllm.register()
    with pytest.raises(cake.UnsupportedError, match=r"intermediate: expected 384 .*, got 768"):
        make_layer(real, tp_size=4)
    try:
        method = type(make_layer(real, activation="silu").quant_method).__name__
    except (NotImplementedError, ValueError) as error:
        assert "backend" in str(error)  # vLLM has no kernel for this machine
    else:
        assert not method.startswith("Cake")


def test_a_layer_from_loading_to_a_call(real: Any) -> None:
    vllm.register()
    layer = make_layer(real)
    assert not layer.quant_method.is_monolithic
    tensors = fill(layer, partial(layer.weight_loader, return_success=True))
    layer.quant_method.process_weights_after_loading(layer)
    check_filled(
        layer.quant_method.loaded.experts,
        tensors,
        lambda x, ids, weights: layer.forward_modular(x, topk_weights=weights, topk_ids=ids),
    )
