"""Other backends go to FlashInfer, and code that was written for it runs by its import."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch
from layer_calls import SIZE_ARGUMENTS, Layer, assert_refused, assert_same_bits, run

import cake
from cake import ActivationType


class FlashInferActivation(IntEnum):
    Swiglu = 3
    Situ = 10


class Recorder:
    """A stand-in for one FlashInfer function."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.arguments: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> Any:
        self.arguments = arguments
        return self.result


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `flashinfer.fused_moe` that records how it is called."""
    package, fused_moe = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    enums: Any = ModuleType("flashinfer.tllm_enums")
    enums.ActivationType = FlashInferActivation
    package.__path__ = []
    for module in (package, fused_moe, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fused_moe


@pytest.fixture
def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.tllm_enums"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_flashinfer")
@pytest.mark.parametrize("backend", ["cutlass", "trtllm", "", None])
def test_another_backend_without_flashinfer_says_how_to_get_it(layer: Layer, backend: Any) -> None:
    call = {**layer.call(1), "backend": backend}
    message = assert_refused(call, "backend", "unsupported", "pip install flashinfer-python")
    assert repr(backend) in message
    with pytest.raises(ValueError, match=r"(?s)unsupported.*backend.*pip install"):
        cake.cutlass_fused_moe_workspace_size(**{**SIZE_ARGUMENTS, "backend": backend})


def test_another_backend_gets_the_given_arguments(flashinfer: Any) -> None:
    result = torch.zeros(1)
    flashinfer.cutlass_fused_moe = recorder = Recorder(result)
    x, ids, weights, w1, w2, scale = (torch.zeros(1) for _ in range(6))
    given = {
        "input": x,
        "token_selected_experts": ids,
        "token_final_scales": weights,
        "fc1_expert_weights": w1,
        "fc2_expert_weights": w2,
        "output_dtype": torch.float16,
        "quant_scales": [scale],
        "tp_size": 2,
        "ep_size": 4,
        "enable_alltoall": True,
        "enable_pdl": False,
        "clamped_relu2_limit": scale,
        "nvfp4_4over6": False,
        "backend": "cutlass",
    }
    assert cake.cutlass_fused_moe(**given) is result
    assert recorder.arguments.keys() == given.keys()
    for name, value in given.items():
        assert recorder.arguments[name] is value, name


def test_another_backend_gets_its_own_activation_type(flashinfer: Any) -> None:
    flashinfer.cutlass_fused_moe = recorder = Recorder(None)
    operands = [torch.zeros(1) for _ in range(5)]
    cake.cutlass_fused_moe(
        *operands, torch.bfloat16, [], activation_type=ActivationType.Situ, backend="cutlass"
    )
    assert recorder.arguments["activation_type"] is FlashInferActivation.Situ


def test_another_backends_size_is_flashinfers(flashinfer: Any) -> None:
    flashinfer.cutlass_fused_moe_workspace_size = recorder = Recorder(12345)
    arguments = {**SIZE_ARGUMENTS, "hidden_size": 7168, "backend": "cutlass"}
    assert cake.cutlass_fused_moe_workspace_size(**arguments) == 12345
    assert recorder.arguments["hidden_size"] == 7168
    assert recorder.arguments["backend"] == "cutlass"


def test_errors_of_flashinfer_pass_through(flashinfer: Any) -> None:
    def failing(**_: Any) -> None:
        raise RuntimeError("from FlashInfer")

    flashinfer.cutlass_fused_moe = failing
    operands = [torch.zeros(1) for _ in range(5)]
    with pytest.raises(RuntimeError, match="from FlashInfer"):
        cake.cutlass_fused_moe(*operands, torch.bfloat16, [], backend="cutlass")


def test_foreign_activation_enum_is_taken(layer: Layer) -> None:
    call = layer.call(1)
    assert_same_bits(run(call, activation_type=FlashInferActivation.Situ), run(call))


def test_caller_owned_example_runs(layer: Layer) -> None:
    """The example of the operation's documentation; only the package's name differs."""
    call = layer.call(3)
    x, expert_ids, route_weights = (
        call[name] for name in ("input", "token_selected_experts", "token_final_scales")
    )
    w13, w2, quant_scales = layer.weights.w13, layer.weights.w2, layer.scales
    max_tokens = 8

    from cake import (
        ActivationType,
        cake_fused_moe_prepare_workspace,
        cutlass_fused_moe,
        cutlass_fused_moe_workspace_size,
    )

    nbytes = cutlass_fused_moe_workspace_size(
        max_tokens, 3584, 384, 896, 16,
        x_dtype=torch.bfloat16, weight_dtype=torch.uint8,
        activation_type=ActivationType.Situ, tp_size=8, backend="cake",
    )  # fmt: skip
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    output = torch.empty_like(x)
    cake_fused_moe_prepare_workspace(workspace, x.shape[0], backend="cake")
    cutlass_fused_moe(
        x, expert_ids, route_weights, w13, w2, torch.bfloat16, quant_scales,
        activation_type=ActivationType.Situ, tp_size=8, backend="cake",
        workspace_buffer=workspace, output=output,
    )  # fmt: skip
    assert_same_bits(output, run(call))
