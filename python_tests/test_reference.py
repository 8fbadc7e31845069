from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Golden
from torch import Tensor

from cake.layout import deinterleave_scales, interleave_scales
from cake.testing.numeric import bitwise_difference, check_outputs, compare_codes
from cake.testing.reference import Stages, finalize, fused_moe_reference, unquantized_reference


class TinyLayer:
    """The golden operation: E = 4, H = 128, I = 64, T = 5, k = 3, distinct scales per expert."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = {
            name: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
            if a.dtype == np.uint16
            else torch.from_numpy(a)
            for name, a in arrays.items()
        }
        get = self.arrays.__getitem__
        self.x, self.ids, self.weights = get("x_bf16"), get("ids"), get("route_w_bf16")
        self.scales = [get(name) for name in ("qx", "s1", "dec1", "qa", "s2", "dec2")]

    def stages(self, **changes: Any) -> Stages:
        arguments = {
            "input": self.x,
            "topk_ids": self.ids,
            "topk_weights": self.weights,
            "w13": self.arrays["w1"],
            "w2": self.arrays["w2p"],
            "quant_scales": self.scales,
        }
        return fused_moe_reference(**(arguments | changes), return_stages=True)

    def output(self, **changes: Any) -> Tensor:
        return self.stages(**changes).output


@pytest.fixture
def tiny(golden: Golden) -> TinyLayer:
    return TinyLayer(golden("tiny_op_model"))


def test_every_stage_equals_the_golden_operation(tiny: TinyLayer) -> None:
    stages, arrays = tiny.stages(), tiny.arrays
    assert bitwise_difference(stages.input_codes, arrays["x_packed"]) is None
    assert bitwise_difference(stages.input_scales, arrays["x_sf"]) is None
    # The golden activation was evaluated in float32; 3.5e-7 is the largest difference.
    torch.testing.assert_close(stages.activation, arrays["act"], rtol=1e-6, atol=0)
    assert bitwise_difference(stages.intermediate_codes, arrays["inter_packed"]) is None
    assert bitwise_difference(stages.intermediate_scales, arrays["inter_sf"]) is None
    assert bitwise_difference(stages.expert_rows, arrays["rows_bf16"]) is None
    assert bitwise_difference(stages.output, arrays["out_bf16"]) is None


def test_output_alone_is_that_of_the_stages(tiny: TinyLayer) -> None:
    alone = fused_moe_reference(
        tiny.x, tiny.ids, tiny.weights, tiny.arrays["w1"], tiny.arrays["w2p"], tiny.scales
    )
    assert bitwise_difference(alone, tiny.output()) is None


def test_stages_follow_the_scale_formulas(tiny: TinyLayer) -> None:
    stages = tiny.stages()
    alpha = tiny.scales[2][tiny.ids.long()].unsqueeze(-1)
    up, gate = (alpha * stages.up_accumulator, alpha * stages.gate_accumulator)
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(stages.activation, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("position", range(6), ids=["qX", "sf1", "dec1", "qA", "sf2", "dec2"])
def test_every_scale_matters(tiny: TinyLayer, position: int) -> None:
    scales = list(tiny.scales)
    changed = scales[position].clone()
    if changed.dtype == torch.uint8:
        changed[3, 0, 0] ^= 0x08  # one exponent bit of one block of an expert that all tokens use
    else:
        changed *= 1.5
    scales[position] = changed
    assert not torch.equal(tiny.output(quant_scales=scales), tiny.output())


@pytest.mark.parametrize("empty", [-1, 4, 2**31 - 1, -(2**31)])
def test_ids_outside_the_experts_are_empty_slots(tiny: TinyLayer, empty: int) -> None:
    ids, weights = tiny.ids.clone(), tiny.weights.clone()
    ids[1, 2] = empty
    ids[3] = empty
    weights[1, 2] = float("nan")
    zero_weight = tiny.weights.clone()
    zero_weight[1, 2] = 0.0
    output = tiny.output(topk_ids=ids, topk_weights=weights)
    assert bitwise_difference(output[1], tiny.output(topk_weights=zero_weight)[1]) is None
    assert bitwise_difference(output[3], torch.zeros_like(output[3])) is None
    assert bitwise_difference(output[[0, 2, 4]], tiny.output()[[0, 2, 4]]) is None


def test_int64_ids_beyond_int32_are_empty_slots(tiny: TinyLayer) -> None:
    ids = tiny.ids.long()
    assert bitwise_difference(tiny.output(topk_ids=ids), tiny.output()) is None
    wraps = ids + 2**32  # truncation to 32 bits would give valid ids
    assert not tiny.output(topk_ids=wraps).any()


def test_float32_weights_are_rounded_to_bfloat16(tiny: TinyLayer) -> None:
    weights = tiny.weights.float() * (1 + 2.0**-10)
    assert bitwise_difference(tiny.output(topk_weights=weights), tiny.output()) is None
    weights = tiny.weights.float() * (1 + 2.0**-6)
    assert not torch.equal(tiny.output(topk_weights=weights), tiny.output())


@pytest.mark.parametrize("poisoned", ["input", "weight"])
def test_nan_stays_in_its_token(tiny: TinyLayer, poisoned: str) -> None:
    x, weights = tiny.x.clone(), tiny.weights.clone()
    if poisoned == "input":
        x[2] = float("nan")
    else:
        weights[2, 0] = float("nan")
    output = tiny.output(input=x, topk_weights=weights)
    assert output[2].isnan().all()
    others = [0, 1, 3, 4]
    assert bitwise_difference(output[others], tiny.output()[others]) is None


def test_repeated_experts_count_once_per_slot(tiny: TinyLayer) -> None:
    stages = tiny.stages(topk_ids=torch.full_like(tiny.ids, 2))
    rows = stages.expert_rows
    assert rows.any() and (rows == rows[:, :1]).all()
    single = stages.expert_rows[:, 0].float() * tiny.weights.float().sum(1, keepdim=True)
    torch.testing.assert_close(stages.output.float(), single, rtol=2.0**-8, atol=1e-6)


def test_slots_are_added_in_ascending_order() -> None:
    # 2^24 + 1 rounds back to 2^24 in float32, so the order decides.
    rows = torch.tensor([2.0**24, 1.0, -(2.0**24)], dtype=torch.bfloat16).reshape(1, 3, 1)
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    assert finalize(rows, ones).item() == 0.0
    assert finalize(rows[:, [0, 2, 1]], ones).item() == 1.0


def test_finalize_rounds_each_sum_once() -> None:
    """As a fused multiply-add does: checked against exact rational sums."""
    generator = torch.Generator().manual_seed(5)
    rows = (torch.randn(8, 16, 4, generator=generator) * 8).bfloat16()
    weights = torch.randn(8, 16, generator=generator).softmax(-1).bfloat16()
    expected = torch.empty(8, 4)
    for t, h in itertools.product(range(8), range(4)):
        total = Fraction(0)
        for s in range(16):
            exact = total + Fraction(weights[t, s].item()) * Fraction(rows[t, s, h].item())
            total = Fraction(float(np.float32(exact)))
        expected[t, h] = float(total)
    assert bitwise_difference(finalize(rows, weights), expected.bfloat16()) is None


def test_situ_scales_default_to_4_and_25_and_are_per_expert(tiny: TinyLayer) -> None:
    beta, linear_beta = torch.full((4,), 4.0), torch.full((4,), 25.0)
    explicit = tiny.output(situ_beta=beta, situ_linear_beta=linear_beta)
    assert bitwise_difference(explicit, tiny.output()) is None
    crossed = tiny.output(situ_beta=linear_beta, situ_linear_beta=beta)
    assert not torch.equal(crossed, tiny.output())
    beta[2] = 1.0
    rows, plain = tiny.stages(situ_beta=beta).expert_rows, tiny.stages().expert_rows
    changed = tiny.ids == 2
    assert bitwise_difference(rows[~changed], plain[~changed]) is None
    assert not torch.equal(rows[changed], plain[changed])


def test_codes_bear_a_small_activation_error(tiny: TinyLayer) -> None:
    """A perturbed input scale changes input codes by single steps at most."""
    stages = tiny.stages()
    scales = [tiny.scales[0] * (1 + 2.0**-12), *tiny.scales[1:]]
    other = tiny.stages(quant_scales=scales)
    figures = compare_codes(
        other.input_codes, other.input_scales, stages.input_codes, stages.input_scales
    )
    assert figures.max_scale_step <= 1 and figures.max_code_step <= 1


def test_swapped_gate_and_up_fail_the_output_gates(tiny: TinyLayer) -> None:
    def swap(rows: Tensor) -> Tensor:  # groups of 8 prepared rows are up, gate, up, gate
        return rows.unflatten(1, (-1, 2, 8)).flip(2).flatten(1, 3)

    sf = interleave_scales(swap(deinterleave_scales(tiny.scales[1])))
    scales = [tiny.scales[0], sf, *tiny.scales[2:]]
    swapped = tiny.stages(w13=swap(tiny.arrays["w1"]), quant_scales=scales)
    plain = tiny.stages()
    assert bitwise_difference(swapped.up_accumulator, plain.gate_accumulator) is None
    with pytest.raises(AssertionError, match=r"relative rms.*calc_diff.*worst row.*outliers"):
        check_outputs(swapped.output, plain.output)
    check_outputs(plain.output, tiny.arrays["out_bf16"])


def test_unquantized_reference_is_near_and_not_equal(tiny: TinyLayer) -> None:
    w13, w2 = tiny.arrays["w13_bf16"], tiny.arrays["w2_bf16"]
    exact = unquantized_reference(
        tiny.x, tiny.ids, tiny.weights, lambda e: (w13[e], w2[e]), num_experts=4
    )
    error = (tiny.output().double() - exact).norm() / exact.norm()
    assert 0.02 < error < 0.4


def test_unquantized_reference_against_a_loop_over_slots(tiny: TinyLayer) -> None:
    w13, w2 = tiny.arrays["w13_bf16"].double(), tiny.arrays["w2_bf16"].double()
    ids = tiny.ids.clone()
    ids[0, 1], ids[4, 0] = -1, 4
    x = tiny.x.double()
    expected = torch.zeros_like(x)
    for t in range(5):
        for s in range(3):
            e = int(ids[t, s])
            if 0 <= e < 4:
                u, g = w13[e, :64] @ x[t], w13[e, 64:] @ x[t]
                a = 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)
                expected[t] += tiny.weights[t, s].double() * (w2[e] @ a)
    actual = unquantized_reference(
        tiny.x, ids, tiny.weights, lambda e: (w13[e], w2[e]), num_experts=4
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_wrong_number_of_scales_raises(tiny: TinyLayer) -> None:
    with pytest.raises(ValueError, match="unpack"):
        tiny.output(quant_scales=tiny.scales[:5])
