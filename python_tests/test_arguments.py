"""Layouts, shapes, types, devices and overlaps of every tensor argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from layer_calls import (
    OPERANDS,
    SCALE_NAMES,
    Call,
    H,
    Layer,
    assert_refused,
    assert_same_bits,
    betas,
    operand,
    run,
    with_operand,
    workspace_size,
)
from torch import Tensor

import cake

T = 2
ALL = (*OPERANDS, "output", "workspace_buffer")
CONTIGUOUS = tuple(name for name in ALL if name not in ("input", "quant_scales[0]"))
# Not the four weight tensors: they are larger than a second copy of them is worth.
SMALL = tuple(
    name
    for name in ALL
    if not name.startswith("fc") and name not in ("quant_scales[1]", "quant_scales[4]")
)


@pytest.fixture
def call(layer: Layer) -> Call:
    return {**layer.call(T), **betas()}


def column_major(tensor: Tensor) -> Tensor:
    """The same shape in the same memory, the first dimension innermost; 1-D tensors step by two."""
    if tensor.dim() == 1:
        return torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[::2]
    strides = [1]
    for size in tensor.shape[:-1]:
        strides.append(strides[-1] * size)
    return tensor.as_strided(tensor.shape, strides)


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """A copy that starts some elements into its memory and has as many behind it."""
    memory = torch.zeros(tensor.numel() + 2 * elements, dtype=tensor.dtype)
    inside = memory[elements:-elements].view(tensor.shape)
    inside.copy_(tensor)
    return inside


# ---- Layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [column_major, lambda t: t[:1].expand(t.shape)],
    ids=["column-major", "expanded"],
)
@pytest.mark.parametrize("name", CONTIGUOUS)
def test_strided_operand_is_refused(
    call: Call, name: str, layout: Callable[[Tensor], Tensor]
) -> None:
    strided = layout(operand(call, name))
    assert not strided.is_contiguous()
    # What .contiguous() returns is a copy: no advice for what is written.
    advice = (
        "pass a contiguous buffer" if name in ("output", "workspace_buffer") else "contiguous()"
    )
    assert_refused(with_operand(call, name, strided), name, advice)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "workspace_buffer"])
@pytest.mark.parametrize("elements", [1, 64])
def test_operand_at_an_offset_gives_the_same_bits(call: Call, name: str, elements: int) -> None:
    expected = run(call)
    assert_same_bits(
        run(with_operand(call, name, shifted(operand(call, name), elements))), expected
    )


@pytest.mark.parametrize("name", ["quant_scales[1]", "quant_scales[4]"])
@pytest.mark.parametrize("offset", [1, 16])
def test_block_scales_at_an_offset_give_the_same_bits(
    layer: Layer, call: Call, name: str, offset: int
) -> None:
    scales = operand(call, name).view(torch.uint8)
    assert_same_bits(run(with_operand(call, name, shifted(scales, offset))), run(call))


@pytest.mark.parametrize("row_stride", [H, H + 1, H + 8, 3 * H])
def test_input_rows_may_be_strided(call: Call, row_stride: int) -> None:
    memory = torch.full((T, row_stride), float("nan"), dtype=torch.bfloat16)
    memory[:, :H] = call["input"]
    assert_same_bits(run(call, input=memory[:, :H]), run(call))


def test_input_rows_may_be_expanded_reversed_or_overlapping(call: Call) -> None:
    x = call["input"]
    for rows in (
        x[:1].expand(T, H),
        x.flip(0),
        x.view(-1)[: H + 16].as_strided((T, H), (16, 1)),
        torch.stack([x, x], dim=1)[:, 1],
    ):
        assert_same_bits(run(call, input=rows), run(call, input=rows.contiguous()))


def test_input_with_strided_columns_is_refused(call: Call) -> None:
    wide = torch.zeros(T, 2 * H, dtype=torch.bfloat16)
    for x in (column_major(call["input"]), wide[:, ::2], wide[:, :1].expand(T, H)):
        assert_refused({**call, "input": x}, "input", "contiguous")


def test_negated_view_is_read_as_its_values(call: Call) -> None:
    assert_same_bits(run(call, input=torch._neg_view(-call["input"])), run(call))


# ---- Shape, type, device ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name != "workspace_buffer"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1] if len(t) > 1 else t.expand(2).contiguous(),
        lambda t: t.view(-1)[: t.numel() // 2] if t.numel() > 1 else t.view(-1)[:0],
        lambda t: torch.stack([t, t]) if t.numel() == 1 else t.unsqueeze(0),
        lambda t: t.view(t.shape[::-1]) if t.dim() > 1 else t.view(-1)[:0],
    ],
    ids=["fewer", "flat", "deeper", "reversed"],
)
def test_wrong_shape_is_refused(call: Call, name: str, change: Callable[[Tensor], Tensor]) -> None:
    named = with_operand(call, name, change(operand(call, name)))
    # One row fewer in the input makes every other operand look wrong.
    message = assert_refused(named, "shape")
    assert name in message or (name == "input" and "token_selected_experts" in message)


@pytest.mark.parametrize("tokens", [16385, 20000])
def test_too_many_tokens_are_refused(call: Call, tokens: int) -> None:
    x = call["input"][:1].expand(tokens, H)
    assert_refused({**call, "input": x, "output": None}, "input", "16384")


_WRONG_TYPES = {
    "input": (torch.float16, torch.int16),
    "fc1_expert_weights": (torch.int8, torch.float8_e4m3fn),
    "fc2_expert_weights": (torch.int8, torch.float8_e4m3fn),
    "quant_scales[1]": (torch.int8, torch.float8_e5m2, torch.float8_e4m3fnuz),
    "quant_scales[4]": (torch.int8, torch.float8_e5m2, torch.float8_e4m3fnuz),
    "quant_scales[0]": (torch.int32,),
    "quant_scales[2]": (torch.int32,),
    "quant_scales[3]": (torch.int32,),
    "quant_scales[5]": (torch.int32,),
    "situ_beta": (torch.int32,),
    "situ_linear_beta": (torch.int32,),
    "output": (torch.float16, torch.int16),
    "workspace_buffer": (torch.float8_e4m3fn,),
}


@pytest.mark.parametrize(
    "name, dtype", [(name, dtype) for name, dtypes in _WRONG_TYPES.items() for dtype in dtypes]
)
def test_wrong_type_of_the_same_width_is_refused(call: Call, name: str, dtype: torch.dtype) -> None:
    wrong = with_operand(call, name, operand(call, name).view(dtype))
    assert_refused(wrong, name, "expected", raises=TypeError)


# torch's stable interface cannot name the first two to the operator.
@pytest.mark.parametrize(
    "dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz]
)
@pytest.mark.parametrize("name", ["fc1_expert_weights", "quant_scales[4]", "workspace_buffer"])
def test_type_that_checkpoints_have_is_refused_by_its_name(
    call: Call, name: str, dtype: torch.dtype
) -> None:
    wrong = operand(call, name).view(torch.uint8).view(dtype)
    got = f"got {str(dtype).removeprefix('torch.')}"
    assert_refused(with_operand(call, name, wrong), name, got, raises=TypeError)
    if name == "workspace_buffer":
        with pytest.raises(TypeError, match="workspace_buffer: expected uint8 or int8, got float"):
            cake.cake_fused_moe_prepare_workspace(wrong, T)


def test_nested_tensor_is_refused(call: Call) -> None:
    nested = torch.nested.nested_tensor([torch.ones(16, dtype=torch.bfloat16)])
    assert_refused({**call, "token_final_scales": nested}, "token_final_scales", "strided")


def test_batch_invariant_is_a_bool(call: Call) -> None:
    assert_refused({**call, "batch_invariant": "yes"}, "batch_invariant", "bool", raises=TypeError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["quant_scales[0]", "quant_scales[3]", "situ_beta", "output"])
def test_converted_float_is_refused(call: Call, name: str, dtype: torch.dtype) -> None:
    if name == "output" and dtype is torch.bfloat16:
        dtype = torch.float32
    wrong = with_operand(call, name, operand(call, name).to(dtype))
    assert_refused(wrong, name, "expected", raises=TypeError)


@pytest.mark.parametrize("name", ALL)
def test_operand_on_another_device_is_refused(call: Call, name: str) -> None:
    elsewhere = torch.empty_like(operand(call, name), device="meta")
    message = assert_refused(with_operand(call, name, elsewhere), "meta", "cpu")
    assert name in message or name == "input"


@pytest.mark.parametrize("name", OPERANDS[:-2])
@pytest.mark.parametrize(
    "value", [None, "text", 1.0, np.zeros((T, 16)), [0]], ids=lambda v: type(v).__name__
)
def test_not_a_tensor_is_refused(call: Call, name: str, value: Any) -> None:
    assert_refused(with_operand(call, name, value), name, type(value).__name__, raises=TypeError)


@pytest.mark.parametrize("name", ["situ_beta", "situ_linear_beta", "output", "workspace_buffer"])
def test_optional_not_a_tensor_is_refused(call: Call, name: str) -> None:
    assert_refused({**call, name: 4.0}, name, "float", raises=TypeError)


def test_sparse_input_is_refused(call: Call) -> None:
    sparse = call["input"].to_sparse()
    assert_refused({**call, "input": sparse}, "input")


@pytest.mark.parametrize("count", [0, 5, 7])
def test_another_number_of_scales_is_refused(call: Call, count: int) -> None:
    scales = (call["quant_scales"] * 2)[:count]
    assert_refused({**call, "quant_scales": scales}, "quant_scales", "six", str(count))


@pytest.mark.parametrize("scales", [None, 1, torch.ones(6)], ids=["none", "number", "tensor"])
def test_scales_that_are_no_list_are_refused(call: Call, scales: Any) -> None:
    message = assert_refused({**call, "quant_scales": scales}, "quant_scales", "six")
    assert len(message) < 300


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_input_scale_is_any_single_element(call: Call, shape: tuple[int, ...]) -> None:
    one = call["quant_scales"][0].reshape(shape)
    assert_same_bits(run(with_operand(call, "quant_scales[0]", one)), run(call))


@pytest.mark.parametrize("name", ["situ_beta", "situ_linear_beta"])
def test_one_smoothing_parameter_alone(layer: Layer, name: str) -> None:
    plain = layer.call(T)
    assert_same_bits(run(plain, **{name: betas()[name]}), run(plain))


# ---- Overlap ------------------------------------------------------------------------------------


def output_over(call: Call, name: str) -> tuple[Call, Tensor]:
    """The call with an output in memory that it shares with the last bytes of an operand."""
    tensor = operand(call, name)
    output_bytes = 2 * T * H
    size = tensor.numel() * tensor.element_size()
    if size >= output_bytes:
        flat = tensor.view(-1).view(torch.uint8)
        return call, flat[-output_bytes:].view(torch.bfloat16).view(T, H)
    memory = torch.zeros(output_bytes, dtype=torch.uint8)
    shared = memory[-size:].view(tensor.dtype).view(tensor.shape)
    shared.copy_(tensor)
    return with_operand(call, name, shared), memory.view(torch.bfloat16).view(T, H)


@pytest.mark.parametrize("name", (*OPERANDS, "workspace_buffer"))
def test_output_that_overlaps_an_operand_is_refused(call: Call, name: str) -> None:
    if name == "workspace_buffer":
        workspace = call[name]
        output = workspace[: 2 * T * H].view(torch.bfloat16).view(T, H)
    else:
        call, output = output_over(call, name)
    before = operand(call, name)[-1].clone()
    assert_refused({**call, "output": output}, "output", "overlap", name)
    assert_same_bits(operand(call, name)[-1], before)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "workspace_buffer"])
def test_workspace_that_overlaps_an_operand_is_refused(call: Call, name: str) -> None:
    tensor = operand(call, name)
    size = tensor.numel() * tensor.element_size()
    memory = torch.zeros(max(size, workspace_size(T)) + 64, dtype=torch.uint8)
    workspace = cake.cake_fused_moe_prepare_workspace(memory[:-64], T)
    shared = memory[-64 - size : -64].view(tensor.dtype).view(tensor.shape)
    shared.copy_(tensor)
    overlapping = with_operand({**call, "workspace_buffer": workspace}, name, shared)
    assert_refused(overlapping, "workspace_buffer" if name != "output" else "output", "overlap")


def test_neighbours_in_one_buffer_do_not_overlap(call: Call) -> None:
    memory = torch.empty(3 * T * H, dtype=torch.bfloat16)
    before, x, after = (part.view(T, H) for part in memory.chunk(3))
    x.copy_(call["input"])
    expected = run(call)
    for output in (before, after):
        assert_same_bits(run(call, input=x, output=output), expected)


def test_operands_may_share_memory_with_each_other(call: Call) -> None:
    scale = torch.full_like(call["quant_scales"][2], 0.01)
    scales = list(call["quant_scales"])
    scales[2] = scales[3] = scales[5] = scale
    expected = run(call, quant_scales=[s.clone() if s is scale else s for s in scales])
    assert_same_bits(run(call, quant_scales=scales), expected)


def test_names_cover_the_scales() -> None:
    assert set(SCALE_NAMES) < set(OPERANDS)
