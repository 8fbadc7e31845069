"""Comparisons of outputs and of NVFP4 codes, with figures that name the worst place.

One figure alone lets errors through: an elementwise tolerance hides small outputs, a figure over
the whole output hides one broken token among 16384, and the cosine-like ``calc_diff`` hides a gain.
:func:`check_outputs` therefore requires all of them at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantize import unpack_e2m1

# Rows that are widened to float64 at a time: 1024 x 3584 x 8 B = 29 MB per operand.
_ROWS_PER_CHUNK = 1024

# A root-mean-square difference of 0.15 at an output rms of 13. Activation errors of up to 2^-11,
# the size of a hardware tanh approximation, give 0.009 .. 0.010; an activation rounded to bfloat16
# before requantization gives 0.022 .. 0.033.
MAX_RELATIVE_RMS = 0.15 / 13.0


@dataclass(frozen=True)
class OutputComparison:
    """Figures of ``actual`` against ``expected``, both [T, N]; non-finite places count apart.

    Attributes
    ----------
    shape : tuple of int
        ``(T, N)``.
    nonfinite_mismatch : tuple of int or None
        First ``(token, column)`` where NaN, +Inf, -Inf or finite disagree in kind.
    nonfinite_mismatches : int
        How many such places there are.
    calc_diff : float
        ``1 - 2<x,y> / (|x|^2 + |y|^2)``; 0 for equal tensors, 1 for orthogonal ones.
    norm_ratio : float
        ``|actual| / |expected|``.
    rms_difference, expected_rms : float
        Root mean squares over finite places.
    worst_row_error, median_row_error : float
        Of the relative L2 errors ``|x_t - y_t| / |y_t|`` of the rows; infinite where only the
        expected row is zero.
    worst_row : int
        The token with the worst row error.
    max_abs_error : float
        Largest ``|x - y|``.
    max_abs_error_at : tuple of int
        Its ``(token, column)``.
    worst_over_limit : float
        Largest ``|x - y| / (atol + rtol |y|)``; an outlier is above 1.
    worst_over_limit_at : tuple of int
        Its ``(token, column)``.
    outliers : int
        Number of elements above 1.
    expected_peak : float
        Largest finite ``|expected|``.
    """

    shape: tuple[int, int]
    nonfinite_mismatch: tuple[int, int] | None
    nonfinite_mismatches: int
    calc_diff: float
    norm_ratio: float
    rms_difference: float
    expected_rms: float
    worst_row_error: float
    median_row_error: float
    worst_row: int
    max_abs_error: float
    max_abs_error_at: tuple[int, int]
    worst_over_limit: float
    worst_over_limit_at: tuple[int, int]
    outliers: int
    expected_peak: float

    @property
    def relative_rms(self) -> float:
        """Rms difference divided by the rms of the expected output."""
        return _ratio(self.rms_difference, self.expected_rms)

    def __str__(self) -> str:
        """Every figure, one a line, with (token, column) coordinates."""
        mismatch = "none"
        if self.nonfinite_mismatch is not None:
            mismatch = f"{self.nonfinite_mismatches}, first at {self.nonfinite_mismatch}"
        return "\n".join(
            (
                f"shape               {self.shape}, expected rms {self.expected_rms:.4g}, "
                f"peak {self.expected_peak:.4g}",
                f"NaN/Inf mismatches  {mismatch}",
                f"rms difference      {self.rms_difference:.4g} (relative {self.relative_rms:.4g})",
                f"norm ratio          {self.norm_ratio:.6g}",
                f"calc_diff           {self.calc_diff:.4g}",
                f"row error           worst {self.worst_row_error:.4g} at token {self.worst_row}, "
                f"median {self.median_row_error:.4g}",
                f"max abs error       {self.max_abs_error:.4g} at {self.max_abs_error_at}",
                f"error / limit       {self.worst_over_limit:.4g} at {self.worst_over_limit_at}, "
                f"{self.outliers} elements above 1",
            )
        )


def compare_outputs(
    actual: Tensor, expected: Tensor, *, atol: float = 1.0, rtol: float = 0.1
) -> OutputComparison:
    """Compute every figure of :class:`OutputComparison` in float64, in chunks of rows.

    Parameters
    ----------
    actual, expected : Tensor
        [T, N], any floating dtype and device.
    atol, rtol : float
        Elementwise limit ``atol + rtol |expected|``.

    Raises
    ------
    ValueError
        If the tensors are not two non-empty matrices of one shape.
    """
    if actual.shape != expected.shape or expected.ndim != 2 or expected.numel() == 0:
        raise ValueError(
            "actual and expected must be non-empty [T, N] of one shape, "
            f"got {tuple(actual.shape)} and {tuple(expected.shape)}"
        )
    rows, columns = expected.shape
    mismatch: tuple[int, int] | None = None
    mismatches = outliers = 0
    dot = actual_square = expected_square = difference_square = peak = 0.0
    worst_abs, worst_abs_at = -1.0, (0, 0)
    worst_limit, worst_limit_at = -1.0, (0, 0)
    row_errors = []
    for begin in range(0, rows, _ROWS_PER_CHUNK):
        x = actual[begin : begin + _ROWS_PER_CHUNK].detach().cpu().double()
        y = expected[begin : begin + _ROWS_PER_CHUNK].detach().cpu().double()
        kind_differs = _kind(x) != _kind(y)
        mismatches += int(kind_differs.sum())
        if mismatch is None and bool(kind_differs.any()):
            row, column = divmod(int(kind_differs.flatten().int().argmax()), columns)
            mismatch = (begin + row, column)
        finite = x.isfinite() & y.isfinite()
        x, y = x.where(finite, 0.0), y.where(finite, 0.0)
        error = (x - y).abs()
        over_limit = error / (atol + rtol * y.abs()).clamp_min(torch.finfo(torch.float64).tiny)
        outliers += int((over_limit > 1.0).sum())
        dot += float((x * y).sum())
        actual_square += float(x.square().sum())
        expected_square += float(y.square().sum())
        difference_square += float(error.square().sum())
        peak = max(peak, float(y.abs().max()))
        worst_abs, worst_abs_at = _worse(worst_abs, worst_abs_at, error, begin)
        worst_limit, worst_limit_at = _worse(worst_limit, worst_limit_at, over_limit, begin)
        error_norm, row_norm = error.norm(dim=1), y.norm(dim=1)
        row_errors.append(torch.where(error_norm == 0, 0.0, error_norm / row_norm))
    row_error = torch.cat(row_errors)
    worst_row = int(row_error.argmax())
    elements = rows * columns
    total_square = actual_square + expected_square
    return OutputComparison(
        shape=(rows, columns),
        nonfinite_mismatch=mismatch,
        nonfinite_mismatches=mismatches,
        calc_diff=1.0 - 2.0 * dot / total_square if total_square else 0.0,
        norm_ratio=math.sqrt(_ratio(actual_square, expected_square)) if total_square else 1.0,
        rms_difference=math.sqrt(difference_square / elements),
        expected_rms=math.sqrt(expected_square / elements),
        worst_row_error=float(row_error[worst_row]),
        median_row_error=float(row_error.median()),
        worst_row=worst_row,
        max_abs_error=worst_abs,
        max_abs_error_at=worst_abs_at,
        worst_over_limit=worst_limit,
        worst_over_limit_at=worst_limit_at,
        outliers=outliers,
        expected_peak=peak,
    )


def check_outputs(
    actual: Tensor,
    expected: Tensor,
    *,
    atol: float = 1.0,
    rtol: float = 0.1,
    max_relative_rms: float = MAX_RELATIVE_RMS,
    max_norm_error: float = 0.01,
    max_calc_diff: float = 1e-3,
    max_row_error: float = 0.1,
    max_outliers: float = 0.0,
    min_peak: float = 2.0,
    context: str = "",
) -> OutputComparison:
    """Require that an output agrees with the reference by every figure.

    The defaults suit an implementation that quantizes as the reference does.  FP4 steps are coarse:
    an activation error changes hardly any code, but where it flips a block scale it moves sixteen
    values by a step of that scale, and few such flips decide a row's error.  Measured over 1024
    tokens at full width, for activation errors that are uniform up to 2^-11: typical row 0.005,
    worst row 0.055, and up to 2e-4 of the elements above the elementwise limit; for errors up to
    2^-22: worst row 0.015 and no such element.  A row that lost one of sixteen slots of equal
    weight is off by 0.25.  So ``max_row_error`` leaves a factor of two above the former, and an
    implementation with approximate functions may need ``max_outliers`` at large T.

    Parameters
    ----------
    actual, expected : Tensor
        [T, N], any floating dtype and device.
    atol, rtol : float
        Elementwise limit ``atol + rtol |expected|``.
    max_relative_rms : float
        Bound of the rms difference, relative to the rms of ``expected``.
    max_norm_error : float
        Bound of ``|norm_ratio - 1|``.
    max_calc_diff : float
        Bound of ``calc_diff``.
    max_row_error : float
        Bound of the worst row's relative L2 error.
    max_outliers : float
        Fraction of the elements that may be above the elementwise limit.
    min_peak : float
        ``expected`` must reach this magnitude, for below it ``atol`` checks nothing.
    context : str
        Put in front of the failure message, for example the routing and the device.

    Returns
    -------
    OutputComparison
        The figures, for reports.

    Raises
    ------
    AssertionError
        If any bound is exceeded; the message names the failed ones and lists every figure.
    ValueError
        If the shapes differ or are empty.
    """
    figures = compare_outputs(actual, expected, atol=atol, rtol=rtol)
    # Written as "not within", so that a NaN figure fails.
    checks = (
        ("NaN/Inf positions", figures.nonfinite_mismatches == 0),
        (f"relative rms <= {max_relative_rms:.4g}", figures.relative_rms <= max_relative_rms),
        (f"norm ratio within {max_norm_error:.4g}", abs(figures.norm_ratio - 1) <= max_norm_error),
        (f"calc_diff <= {max_calc_diff:.4g}", figures.calc_diff <= max_calc_diff),
        (f"worst row error <= {max_row_error:.4g}", figures.worst_row_error <= max_row_error),
        (
            f"outliers above {atol:g} + {rtol:g} |expected| <= {max_outliers:.4g}",
            figures.outliers <= max_outliers * expected.numel(),
        ),
        (f"expected peak >= {min_peak:g}", figures.expected_peak >= min_peak),
    )
    failed = [name for name, passed in checks if not passed]
    if failed:
        prefix = f"{context}: " if context else ""
        raise AssertionError(f"{prefix}failed: {'; '.join(failed)}\n{figures}")
    return figures


@dataclass(frozen=True)
class CodeComparison:
    """Agreement of two block-quantized tensors.

    Attributes
    ----------
    scales_equal : float
        Fraction of equal E4M3 bytes.
    max_scale_step : int
        Largest distance of two scale bytes, in steps of the E4M3 ladder.
    codes_equal : float
        Fraction of equal E2M1 codes, over all blocks.
    max_code_step : int
        Largest distance of two codes on the E2M1 ladder -6 .. -0.5, 0, 0.5 .. 6, in blocks whose
        scales agree; where the scales differ, codes are not comparable.
    worst_code_at : tuple of int
        Index of that code, the last one counting elements.
    """

    scales_equal: float
    max_scale_step: int
    codes_equal: float
    max_code_step: int
    worst_code_at: tuple[int, ...]


def compare_codes(
    actual: Tensor, actual_scales: Tensor, expected: Tensor, expected_scales: Tensor
) -> CodeComparison:
    """Compare packed NVFP4 rows and their linear block scales.

    Parameters
    ----------
    actual, expected : Tensor
        uint8 [..., K/2], two E2M1 codes a byte.
    actual_scales, expected_scales : Tensor
        uint8 or float8_e4m3fn [..., K/16].

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    scales_a = actual_scales.detach().cpu().view(torch.uint8)
    scales_b = expected_scales.detach().cpu().view(torch.uint8)
    blocks = (*expected.shape[:-1], expected.shape[-1] // 8)
    if actual.shape != expected.shape or scales_a.shape != blocks or scales_b.shape != blocks:
        raise ValueError(
            f"codes {tuple(actual.shape)} and {tuple(expected.shape)} do not fit "
            f"scales {tuple(scales_a.shape)} and {tuple(scales_b.shape)}"
        )
    codes_a, codes_b = unpack_e2m1(actual.detach().cpu()), unpack_e2m1(expected.detach().cpu())
    scale_steps = (scales_a.int() - scales_b.int()).abs()
    agrees = (scale_steps == 0).repeat_interleave(16, dim=-1)
    code_steps = (_ladder(codes_a) - _ladder(codes_b)).abs().where(agrees, 0)
    worst = int(code_steps.argmax())
    return CodeComparison(
        scales_equal=float((scale_steps == 0).double().mean()),
        max_scale_step=int(scale_steps.max()),
        codes_equal=float((codes_a == codes_b).double().mean()),
        max_code_step=int(code_steps.flatten()[worst]),
        worst_code_at=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), agrees.shape)),
    )


def bitwise_difference(a: Tensor, b: Tensor) -> str | None:
    """Describe the first bitwise difference of two tensors, or return None for identical ones.

    Signed zeros and NaN payloads count. A differing shape or dtype is a difference.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
    if a.numel() == 0:
        return None
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    # [numel, bytes of an element], which view() gives of any dtype.
    differs = (a.reshape(-1, 1).view(torch.uint8) != b.reshape(-1, 1).view(torch.uint8)).any(dim=1)
    count = int(differs.sum())
    if count == 0:
        return None
    first = int(differs.int().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape))
    values = [t.flatten()[first] for t in (a, b)]
    words = [bytes(v.reshape(1).view(torch.uint8).tolist())[::-1].hex() for v in values]
    return (
        f"{count} of {a.numel()} elements differ, first at {index}: "
        f"{values[0].item()} (0x{words[0]}) is not {values[1].item()} (0x{words[1]})"
    )


def _kind(values: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf."""
    return values.isnan() * 1 + values.isposinf() * 2 + values.isneginf() * 3


def _ladder(codes: Tensor) -> Tensor:
    """Position of E2M1 codes on the ladder of values, -7 .. 7; both zeros are 0."""
    magnitude = (codes & 7).int()
    return torch.where(codes >= 8, -magnitude, magnitude)


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return 0.0 if numerator == 0 else math.inf


def _worse(
    worst: float, at: tuple[int, int], values: Tensor, first_row: int
) -> tuple[float, tuple[int, int]]:
    """Keep the larger of ``worst`` and the largest of ``values``, with its place."""
    index = int(values.argmax())
    value = float(values.flatten()[index])
    if value <= worst:
        return worst, at
    row, column = divmod(index, values.shape[1])
    return value, (first_row + row, column)
