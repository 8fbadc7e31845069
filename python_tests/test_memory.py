"""Poisoned memory, guard bands, and inputs with zeros and tiny values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layer_calls import (
    Call,
    H,
    I,
    Layer,
    assert_same_bits,
    reference,
    run,
    workspace_size,
)
from torch import Tensor

import cake
from cake.testing.numeric import compare_outputs
from cake.testing.reference import unquantized_reference
from cake.testing.synthetic import make_expert, make_tokens
from cake.weights import prepare_expert

T = 3
GUARD = 4096
FILLS = [0x00, 0x7F, 0xFF, 0x80, None]


def poison(memory: Tensor, fill: int | None) -> None:
    if fill is None:
        memory.random_(0, 256)
    else:
        memory.fill_(fill)


def guarded(size: int, fill: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Poisoned bytes of the wanted size between guard bands, and copies of the two bands."""
    memory = torch.empty(size + 2 * GUARD, dtype=torch.uint8)
    poison(memory, fill)
    return memory, memory[:GUARD].clone(), memory[-GUARD:].clone()


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: "random" if fill is None else hex(fill))
def test_old_contents_do_not_matter_and_guards_stay(layer: Layer, fill: int | None) -> None:
    call = layer.call(T)
    expected = run(call)
    output_memory, *output_guards = guarded(2 * T * H, fill)
    workspace_memory, *workspace_guards = guarded(workspace_size(T), fill)
    workspace = workspace_memory[GUARD:-GUARD]
    cake.cake_fused_moe_prepare_workspace(workspace, T)
    rows = torch.full((T + 2, H + 64), float("nan"), dtype=torch.bfloat16)
    rows[1:-1, :H] = call["input"]
    output = output_memory[GUARD:-GUARD].view(torch.bfloat16).view(T, H)
    for _ in range(2):
        run(call, input=rows[1:-1, :H], output=output, workspace_buffer=workspace)
        assert_same_bits(output, expected)
    for memory, guards in (
        (output_memory, output_guards),
        (workspace_memory, workspace_guards),
    ):
        assert_same_bits(memory[:GUARD], guards[0])
        assert_same_bits(memory[-GUARD:], guards[1])


def test_operands_are_not_written(layer: Layer) -> None:
    call = layer.call(T)
    read = [call[n] for n in ("input", "token_selected_experts", "token_final_scales")]
    small = [s for s in call["quant_scales"] if s.numel() <= 896]
    used = int(call["token_selected_experts"][0, 0])
    weights = [t[used] for t in layer.weights.tensors().values()]
    before = [t.clone() for t in (*read, *small, *weights)]
    run(call)
    for tensor, copy in zip((*read, *small, *weights), before, strict=True):
        assert_same_bits(tensor, copy)


def test_inference_mode_gives_the_same_bits(layer: Layer) -> None:
    expected = run(layer.call(T))
    with torch.inference_mode():
        call = layer.call(T)
        assert_same_bits(run(call), expected)
        assert_same_bits(run(call, output=None), expected)


def _tiny_inputs() -> dict[str, Tensor]:
    x = make_tokens(1, 3)
    zeros = torch.zeros_like(x)
    one_block = x.clone()
    one_block[:, 160:176] = 0.0
    underflow = x.clone()
    underflow[:, 32:48] = 1e-9  # its block scale is below the smallest E4M3 number
    mixed = x.clone()
    mixed[:, ::2] = -0.0
    subnormal = zeros.clone()
    subnormal.view(torch.int16)[:] = torch.arange(H).remainder(127).short() + 1
    return {
        "zero-row": zeros,
        "negative-zero-row": -zeros,
        "zero-block": one_block,
        "negative-zeros-inside": mixed,
        "subnormals": subnormal,
        "underflowing-block": underflow,
        "underflowing-row": torch.full_like(x, 1e-9),
        "largest": torch.full_like(x, torch.finfo(torch.bfloat16).max),
    }


@pytest.mark.parametrize("name", _tiny_inputs())
def test_zeros_and_tiny_values(layer: Layer, name: str) -> None:
    call = layer.call(2)
    x = torch.cat([_tiny_inputs()[name], call["input"][1:]])
    actual = run(call, input=x)
    assert actual.isfinite().all()
    assert_same_bits(actual[1], run(call)[1])
    if name.endswith("-row") or name == "subnormals":
        assert not actual[0].any()
    assert_same_bits(actual, reference({**call, "input": x}))


# ---- Gate and up --------------------------------------------------------------------------------


@pytest.fixture
def refitted(layer: Layer) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """The layer, whose expert 0 a test may overwrite, and real weights for it, [up; gate]."""
    saved = {name: t[0].clone() for name, t in layer.weights.tensors().items()}
    scales = [s.clone() for s in layer.scales]
    w13, w2 = make_expert(0, 11)
    try:
        yield layer, w13, w2
    finally:
        for name, tensor in layer.weights.tensors().items():
            tensor[0] = saved[name]
        for scale, old in zip(layer.scales, scales, strict=True):
            if scale.numel() <= 896:
                scale.copy_(old)


def _run_expert_0(layer: Layer, w13: Tensor, w2: Tensor, order: str) -> tuple[Call, Tensor]:
    prepare_expert(
        layer.weights,
        0,
        w13,
        w2,
        w13_order=order,  # type: ignore[arg-type]
        w13_scale="amax",
        w2_scale="amax",
    )
    call = layer.call(T, seed=11)
    call["token_selected_experts"] = torch.full((T, 16), -1, dtype=torch.int32)
    call["token_selected_experts"][:, 0] = 0
    call["token_final_scales"] = torch.ones(T, 16, dtype=torch.bfloat16)
    scales = layer.scales
    scales[2][0] = layer.weights.w13_scale[0] / scales[0][0]
    scales[5][0] = layer.weights.w2_scale[0] / scales[3][0]
    return call, run(call)


def test_gate_and_up_order(refitted: tuple[Layer, Tensor, Tensor]) -> None:
    layer, w13, w2 = refitted
    gate_up = torch.cat([w13[I:], w13[:I]])
    call, output = _run_expert_0(layer, w13, w2, "up_gate")
    exact = unquantized_reference(
        call["input"],
        call["token_selected_experts"],
        call["token_final_scales"],
        lambda _: (w13, w2),
        num_experts=896,
    )
    assert compare_outputs(output, exact).calc_diff < 0.03  # the error of NVFP4
    assert_same_bits(_run_expert_0(layer, gate_up, w2, "gate_up")[1], output)
    swapped = _run_expert_0(layer, w13, w2, "gate_up")[1]
    assert compare_outputs(swapped, exact).worst_row_error > 0.5
    assert compare_outputs(swapped, output).calc_diff > 0.3
