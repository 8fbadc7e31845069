from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cake.quantize import pack_e2m1, quantize_precise, unpack_e2m1
from cake.testing import numeric
from cake.testing.numeric import (
    bitwise_difference,
    check_outputs,
    compare_codes,
    compare_outputs,
)

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """An output of rms 13, as in the data the gates were measured on."""
    generator = torch.Generator().manual_seed(1)
    return (13 * torch.randn(3000, 96, generator=generator)).bfloat16()


def noisy(expected: Tensor, rms: float) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(expected.shape, generator=generator)
    return expected.float() + rms * noise


def test_figures_of_equal_outputs(expected: Tensor) -> None:
    figures = check_outputs(expected, expected.clone())
    assert figures.calc_diff == pytest.approx(0.0, abs=1e-12)
    assert figures.norm_ratio == 1.0
    assert (figures.relative_rms, figures.worst_row_error, figures.max_abs_error) == (0, 0, 0)
    assert figures.nonfinite_mismatch is None and figures.outliers == 0


def test_noise_of_an_approximate_tanh_passes(expected: Tensor) -> None:
    figures = check_outputs(noisy(expected, 0.084), expected)
    assert figures.relative_rms == pytest.approx(0.084 / 13, rel=0.02)
    assert 0 < figures.median_row_error < figures.worst_row_error < 2 * figures.median_row_error


def test_figures_against_plain_formulas(expected: Tensor) -> None:
    x, y = noisy(expected, 1.0).double(), expected.double()
    figures = compare_outputs(x, y, atol=0.5, rtol=0.25)
    error = (x - y).abs()
    over = error / (0.5 + 0.25 * y.abs())
    rows = error.norm(dim=1) / y.norm(dim=1)
    assert figures.calc_diff == pytest.approx(
        float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))
    )
    assert figures.norm_ratio == pytest.approx(float(x.norm() / y.norm()))
    assert figures.rms_difference == pytest.approx(float(error.square().mean().sqrt()))
    assert figures.expected_rms == pytest.approx(float(y.square().mean().sqrt()))
    assert figures.expected_peak == float(y.abs().max())
    assert figures.median_row_error == pytest.approx(float(rows.median()))
    assert figures.worst_row_error == pytest.approx(float(rows.max()))
    assert figures.worst_row == int(rows.argmax())
    assert figures.max_abs_error == float(error.max())
    assert error[figures.max_abs_error_at] == error.max()
    assert figures.worst_over_limit == float(over.max())
    assert over[figures.worst_over_limit_at] == over.max()
    assert figures.outliers == int((over > 1).sum())


def broken_row(y: Tensor) -> Tensor:
    y = y.clone()
    y[2777] = y[2777].flip(0)
    return y


def one_slot_lost(y: Tensor) -> Tensor:
    y = y.clone()
    y[1500] *= 0.85
    return y


def one_element(y: Tensor) -> Tensor:
    y = y.clone()
    y[1234, 56] += 1.02 + 0.1 * y[1234, 56].abs()
    return y


PLANTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gain": (lambda y: 1.2 * y, "norm ratio"),
    "small gain": (lambda y: 1.011 * y, "norm ratio"),
    "broken row": (broken_row, r"worst row(.|\n)*at token 2777"),
    "lost slot": (one_slot_lost, r"worst row(.|\n)*at token 1500"),
    "outlier": (one_element, r"outliers above(.|\n)*at \(1234, 56\)"),
    "bf16 activation": (lambda y: noisy(y, 0.45), "relative rms"),
    "sign": (lambda y: -y, "calc_diff"),
    "zeros": (torch.zeros_like, "relative rms"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_fail(expected: Tensor, name: str) -> None:
    plant, message = PLANTED[name]
    with pytest.raises(AssertionError, match=message):
        check_outputs(plant(expected.float()), expected, context=name)


@pytest.mark.parametrize("name", ["broken row", "lost slot", "outlier"])
def test_local_errors_need_their_own_figure(expected: Tensor, name: str) -> None:
    """Without the figure that catches it, each planted local error would pass."""
    actual = PLANTED[name][0](expected.float())
    check_outputs(
        actual,
        expected,
        atol=100.0,
        max_row_error=10.0,
        max_relative_rms=0.03,
    )


def test_a_gain_passes_calc_diff_alone(expected: Tensor) -> None:
    assert compare_outputs(1.2 * expected.float(), expected).calc_diff < 0.02


def test_one_broken_row_in_16384() -> None:
    generator = torch.Generator().manual_seed(3)
    y = 3 * torch.randn(16384, 32, generator=generator)
    x = y.clone()
    x[16383] += 0.5 * torch.randn(32, generator=generator)
    figures = compare_outputs(x, y)
    assert figures.outliers == 0 and figures.calc_diff < 1e-5
    assert figures.relative_rms < numeric.MAX_RELATIVE_RMS
    with pytest.raises(AssertionError, match="at token 16383"):
        check_outputs(x, y)


def test_outliers_are_counted_as_a_fraction(expected: Tensor) -> None:
    actual = one_element(expected.float())
    check_outputs(actual, expected, max_outliers=1 / expected.numel())
    with pytest.raises(AssertionError, match="1 elements above 1"):
        check_outputs(actual, expected, max_outliers=0.9 / expected.numel())


def test_swapped_halves_fail(expected: Tensor) -> None:
    with pytest.raises(AssertionError, match="calc_diff"):
        check_outputs(torch.cat(expected.chunk(2, dim=1)[::-1], dim=1), expected)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_places_must_agree(expected: Tensor, value: float) -> None:
    y = expected.clone()
    y[1100, 7] = value
    check_outputs(y.clone(), y)
    moved = expected.clone()
    moved[1100, 8] = value
    with pytest.raises(AssertionError, match=r"NaN/Inf(.|\n)*2, first at \(1100, 7\)"):
        check_outputs(moved, y)
    other = y.clone()
    other[1100, 7] = NAN if value != value or value > 0 else INF
    if value == value:
        with pytest.raises(AssertionError, match="NaN/Inf"):
            check_outputs(other, y)


def test_small_expected_outputs_need_another_tolerance(expected: Tensor) -> None:
    small = expected.float() / 100
    with pytest.raises(AssertionError, match="peak"):
        check_outputs(small, small)
    check_outputs(small, small, atol=0.01, min_peak=0.0)


def test_zero_rows(expected: Tensor) -> None:
    y = expected.clone()
    y[5] = 0
    assert compare_outputs(y, y).worst_row_error == 0
    x = y.clone()
    x[5, 3] = 1e-3
    figures = compare_outputs(x, y)
    assert figures.worst_row_error == INF and figures.worst_row == 5
    zeros = torch.zeros(2, 3)
    assert compare_outputs(zeros, zeros).norm_ratio == 1.0
    assert compare_outputs(torch.ones(2, 3), zeros).norm_ratio == INF


@pytest.mark.parametrize("shape", [(0, 4), (4,), (4, 5)])
def test_wrong_shapes_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one shape"):
        compare_outputs(torch.zeros(4, 4), torch.zeros(shape))


@pytest.fixture
def quantized() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return quantize_precise(torch.randn(64, 128, generator=generator), 100.0)


def with_code(packed: Tensor, row: int, column: int, code: int) -> Tensor:
    codes = unpack_e2m1(packed)
    codes[row, column] = code
    return pack_e2m1(codes)


def test_equal_codes(quantized: tuple[Tensor, Tensor]) -> None:
    figures = compare_codes(*quantized, *quantized)
    assert (figures.scales_equal, figures.codes_equal) == (1.0, 1.0)
    assert (figures.max_scale_step, figures.max_code_step) == (0, 0)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [(1, 3, 2), (7, 6, 1), (1, 9, 2), (0, 9, 1), (0, 8, 0), (7, 15, 14), (12, 10, 2)],
)
def test_code_steps(quantized: tuple[Tensor, Tensor], before: int, after: int, steps: int) -> None:
    packed, scales = quantized
    old, new = (with_code(packed, 17, 33, code) for code in (before, after))
    figures = compare_codes(new, scales, old, scales)
    assert figures.max_code_step == steps
    assert figures.codes_equal == 1 - 1 / (64 * 128)
    if steps:
        assert figures.worst_code_at == (17, 33)


def test_codes_count_only_where_scales_agree(quantized: tuple[Tensor, Tensor]) -> None:
    packed, scales = quantized
    other = with_code(with_code(packed, 9, 20, 0), 9, 40, 7)
    base = with_code(with_code(packed, 9, 20, 7), 9, 40, 5)
    moved = scales.clone()
    moved[9, 1] += 3  # block of columns 16 .. 31
    figures = compare_codes(other, moved, base, scales)
    assert figures.max_scale_step == 3
    assert figures.scales_equal == 1 - 1 / (64 * 8)
    assert figures.max_code_step == 2 and figures.worst_code_at == (9, 40)
    float8 = (moved.view(torch.float8_e4m3fn), scales.view(torch.float8_e4m3fn))
    assert compare_codes(other, float8[0], base, float8[1]) == figures


def test_codes_and_scales_must_fit(quantized: tuple[Tensor, Tensor]) -> None:
    packed, scales = quantized
    with pytest.raises(ValueError, match="do not fit"):
        compare_codes(packed, scales[:, :4], packed, scales[:, :4])
    with pytest.raises(ValueError, match="do not fit"):
        compare_codes(packed[:8], scales, packed, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bitwise_difference_names_the_first_place(dtype: torch.dtype) -> None:
    a = torch.arange(24, dtype=dtype).reshape(2, 3, 4)
    b = a.clone()
    assert bitwise_difference(a, b) is None
    b[1, 0, 2] = -1.0
    b[1, 2, 3] = -1.0
    message = bitwise_difference(a, b)
    assert message is not None
    assert message.startswith("2 of 24 elements differ, first at (1, 0, 2): 14.0 (0x")
    assert "is not -1.0 (0xbf8" in message or dtype == torch.float64


def test_bitwise_difference_sees_signed_zero_and_nan() -> None:
    nan = torch.tensor([NAN, 0.0])
    assert bitwise_difference(nan, nan.clone()) is None
    assert bitwise_difference(nan, torch.tensor([NAN, -0.0])) is not None
    payload = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert bitwise_difference(nan, payload) is not None


def test_bitwise_difference_of_types_shapes_and_bytes() -> None:
    a = torch.zeros(2, 3)
    assert bitwise_difference(a, a.double()) is not None
    assert bitwise_difference(a, a.T) is not None
    assert bitwise_difference(a[:0], a[:0]) is None
    assert bitwise_difference(a.T, a.T.contiguous()) is None
    code = torch.tensor([1, 2], dtype=torch.uint8)
    assert bitwise_difference(code, code + 1) == (
        "2 of 2 elements differ, first at (0,): 1 (0x01) is not 2 (0x02)"
    )
