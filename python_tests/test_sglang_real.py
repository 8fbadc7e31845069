"""The plug-in in the SGLang that is installed: its own hooks, layer and loader, on the CPU.

Skipped where SGLang cannot be imported or is of another version. Needs 5 GB of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import serving_doubles
import torch
from serving_layers import NAME, RANK, TP, check_filled, fill

import cake
from cake.integrations import serving, sglang
from cake.support import KIMI_K3


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modelopt = pytest.importorskip(
        "sglang.srt.layers.quantization.modelopt_quant",
        reason="SGLang is not installed: pip install '.[sglang]'",
        exc_type=ImportError,
    )
    try:
        serving.require_version("sglang", *sglang.VERSIONS)
    except cake.UnsupportedError as error:
        pytest.skip(str(error))
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_context, get_parallel

    monkeypatch.setenv("CAKE_EXPERTS", "1")
    sglang.register()
    HookRegistry.apply_hooks()  # they stay; what they do hangs on the layer
    parallel = {"moe_tp_size": TP, "moe_tp_rank": RANK, "moe_ep_size": 1, "moe_ep_rank": 0}
    with (
        get_context().override_server_args(tp_size=TP, device="cpu"),
        get_parallel().override(**parallel),
    ):
        yield modelopt


def make_layer(modelopt: Any, **changes: Any) -> Any:
    """SGLang's layer of experts, as a model makes it."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    config = modelopt.ModelOptFp4Config(
        is_checkpoint_nvfp4_serialized=True, group_size=16, packed_modules_mapping={}
    )
    arguments = {
        "num_experts": KIMI_K3.num_experts,
        "hidden_size": KIMI_K3.hidden,
        "intermediate_size": TP * KIMI_K3.intermediate,
        "layer_id": 1,
        "top_k": KIMI_K3.top_k,
        "quant_config": config,
        "prefix": NAME,
        "activation": "situ",
        "gemm1_alpha": 4.0,
        "gemm1_clamp_limit": 25.0,
        "params_dtype": torch.bfloat16,
    }
    return FusedMoE(**{**arguments, **changes})


def test_the_doubles_are_like_it(real: Any) -> None:
    doubles, methods = serving_doubles.sglang(), serving_doubles.SGLANG_METHODS
    assert not [*serving_doubles.differences(doubles, methods)]


def test_other_layers_are_refused_or_left(real: Any) -> None:
    with pytest.raises(cake.UnsupportedError, match=r"intermediate: expected 384 .*, got 256"):
        make_layer(real, intermediate_size=2048)
    with pytest.raises(ValueError, match="Current platform does not support NVFP4"):
        make_layer(real, activation="silu")  # SGLang has no kernel for this machine


def test_a_layer_from_loading_to_a_call(real: Any) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer = make_layer(real)
    assert type(layer.quant_method).__module__ == "cake.integrations.sglang_method"
    assert layer.runner_backend is None  # routing in SGLang, ids and weights as they are
    assert layer.should_fuse_routed_scaling_factor_in_topk
    tensors = fill(layer, layer.weight_loader)
    layer.quant_method.process_weights_after_loading(layer)

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        topk = StandardTopKOutput(weights, ids, torch.zeros(x.shape[0], KIMI_K3.num_experts))
        return layer.run_moe_core(layer.dispatcher.dispatch(x, topk)).hidden_states

    check_filled(layer.quant_method.loaded.experts, tensors, call)
