"""Types and values of expert ids and routing weights, and batches without tokens."""

from __future__ import annotations

import pytest
import torch
from layer_calls import (
    Call,
    E,
    H,
    K,
    Layer,
    assert_refused,
    assert_same_bits,
    new_workspace,
    run,
    workspace_size,
)
from torch import Tensor

import cake

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
INVALID = [-1, E, INT32_MAX, INT32_MIN]
# Their low 32 bits are ids of experts.
INVALID_INT64 = [2**32 + 5, -(2**32) + 7, 2**63 - 1, -(2**63), 2**40]


@pytest.fixture
def call(layer: Layer) -> Call:
    return layer.call(3)


def test_int64_ids_give_the_same_bits(call: Call) -> None:
    ids = call["token_selected_experts"]
    assert ids.dtype == torch.int32
    assert_same_bits(run(call, token_selected_experts=ids.long()), run(call))


@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.uint8, torch.float32, torch.bool],
    ids=str,
)
def test_other_ids_are_refused(call: Call, dtype: torch.dtype) -> None:
    ids = call["token_selected_experts"].to(dtype)
    message = assert_refused(
        {**call, "token_selected_experts": ids},
        "token_selected_experts",
        "int32 or int64",
        raises=TypeError,
    )
    assert str(dtype).removeprefix("torch.") in message


def test_float32_weights_are_rounded_to_nearest_even(call: Call) -> None:
    weights = call["token_final_scales"].float()
    step = 2.0**-8  # of bfloat16 at 1: half a unit is 2^-8, so ties and their neighbours
    weights[0] = 1.0 + step * torch.arange(K) + torch.tensor([0.0, 1e-7]).repeat(K // 2)
    weights[1] = -weights[0] * 3.0
    weights[2, :4] = torch.tensor([0.0, -0.0, 1e-40, 2.0**-133])
    expected = run(call, token_final_scales=weights.bfloat16())
    assert_same_bits(run(call, token_final_scales=weights), expected)
    cut = (weights.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert not torch.equal(run(call, token_final_scales=cut), expected)


def test_float32_weights_beyond_bfloat16_and_nan(call: Call) -> None:
    weights = call["token_final_scales"].float()
    weights[0, 0], weights[1, 0], weights[2, 0] = 3.4e38, float("inf"), float("nan")
    expected = run(call, token_final_scales=weights.bfloat16())
    torch.testing.assert_close(
        run(call, token_final_scales=weights), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32], ids=str)
def test_other_weights_are_refused(call: Call, dtype: torch.dtype) -> None:
    weights = call["token_final_scales"].to(dtype)
    assert_refused(
        {**call, "token_final_scales": weights},
        "token_final_scales",
        "bfloat16 or float32",
        str(dtype).removeprefix("torch."),
        raises=TypeError,
    )


def _with_ids(call: Call, dtype: torch.dtype, where: Tensor, ids: list[int]) -> Call:
    changed = call["token_selected_experts"].to(dtype)
    changed[where] = torch.tensor(ids, dtype=dtype).repeat(E)[: int(where.sum())]
    return {**call, "token_selected_experts": changed}


@pytest.mark.parametrize(
    "dtype, ids",
    [
        *((torch.int32, [value]) for value in INVALID),
        *((torch.int64, [value]) for value in INVALID + INVALID_INT64),
        (torch.int32, INVALID),
        (torch.int64, INVALID + INVALID_INT64),
    ],
    ids=str,
)
def test_invalid_ids_are_empty_slots(call: Call, dtype: torch.dtype, ids: list[int]) -> None:
    """Token 0 has some, token 1 has none but, token 2 has none."""
    where = torch.zeros(3, K, dtype=torch.bool)
    where[0, ::3], where[1] = True, True
    weights = call["token_final_scales"].clone()
    weights[where] = float("nan")  # of an empty slot, never read
    actual = run(_with_ids(call, dtype, where, ids), token_final_scales=weights)

    expected = run(call, token_final_scales=call["token_final_scales"].masked_fill(where, 0.0))
    assert torch.equal(actual[0], expected[0])
    assert_same_bits(actual[1], torch.zeros(H, dtype=torch.bfloat16))
    assert_same_bits(actual[2], expected[2])


def test_a_batch_of_empty_slots_gives_zeros(call: Call) -> None:
    everywhere = torch.ones(3, K, dtype=torch.bool)
    weights = torch.full((3, K), float("nan"))
    actual = run(_with_ids(call, torch.int32, everywhere, INVALID), token_final_scales=weights)
    assert_same_bits(actual, torch.zeros(3, H, dtype=torch.bfloat16))


# ---- No tokens ----------------------------------------------------------------------------------


def test_zero_tokens_need_no_workspace(layer: Layer) -> None:
    some = torch.zeros(256, dtype=torch.uint8)
    call = layer.call(0, workspace=some)
    assert call["input"].shape == (0, H)
    for workspace in (None, some, some[:0]):
        for output in (None, call["output"]):
            actual = run(call, workspace_buffer=workspace, output=output)
            assert actual.shape == (0, H) and actual.dtype == torch.bfloat16
    assert not some.any()


def test_zero_tokens_size_and_preparation() -> None:
    assert 0 <= workspace_size(0) <= workspace_size(1)
    for bytes_ in (workspace_size(0), 0):
        buffer = torch.zeros(bytes_, dtype=torch.uint8)
        assert cake.cake_fused_moe_prepare_workspace(buffer, 0) is buffer
    assert new_workspace(0).dtype == torch.uint8


def test_zero_tokens_are_checked_like_others(layer: Layer) -> None:
    call = layer.call(0, workspace=torch.zeros(0, dtype=torch.uint8))
    assert_refused({**call, "token_selected_experts": torch.zeros(0, 8).int()}, "experts", "shape")
    assert_refused({**call, "input": torch.zeros(0, 7168).bfloat16(), "output": None}, "input")
    assert_refused({**call, "tp_size": 1}, "tp_size")
