"""Preparation of expert weights, from bfloat16 or from NVFP4 codes, one expert at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from . import _library  # noqa: F401  (registers the operators)
from .errors import DTypeError, translate
from .layout import fc1_row_order, fc2_row_order, interleave_scales
from .prepared_weights import (
    LogicalWeights,
    PreparedWeights,
    check_expert,
    check_tensor,
    decode_scales,
    require_tensor,
    unprepare,
)
from .quantize import BLOCK, E2M1_MAX, E4M3_MAX

__all__ = [
    "LogicalWeights",
    "PreparedWeights",
    "prepare_expert",
    "prepare_quantized_expert",
    "prepare_weights",
    "unprepare",
]

W13Order = Literal["up_gate", "gate_up"]
# None is 1.0; "amax" is amax / 2688 of each expert.
WeightScale = float | Tensor | Literal["amax"] | None

_MAX_BLOCK_SCALE = 0x7E  # 448; 0x7F is NaN, bit 7 is the sign


def prepare_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    w13_order: W13Order,
    w13_scale: WeightScale = None,
    w2_scale: WeightScale = None,
    device: torch.device | str | None = None,
    out: PreparedWeights | None = None,
    progress: bool = False,
) -> PreparedWeights:
    """Quantize and lay out the experts of a layer.

    Experts pass one by one, so that beyond the result only one of them is held in extra memory.

    Parameters
    ----------
    w13 : Tensor
        bfloat16 [E, 2I, H], the up (linear) and gate projections; H a multiple of 128.
    w2 : Tensor
        bfloat16 [E, H, I], the down projection; I a multiple of 64.
    w13_order : {"up_gate", "gate_up"}
        Which half of w13 comes first. There is no default: a swap gives plausible wrong results.
        Checkpoints with gate_proj or w1 first are "gate_up".
    w13_scale, w2_scale : float, Tensor, "amax" or None
        Decode scales: float32 [E], one number, ``amax / 2688`` of each expert, or 1 (None).
    device : torch.device or str, optional
        Where the result lives; default: where w13 is.
    out : PreparedWeights, optional
        Written in place instead of a new allocation.
    progress : bool
        Show a progress bar if ``rich`` is installed and stderr is a terminal.

    Returns
    -------
    PreparedWeights
        ``out`` or a new object. Equal to calling :func:`prepare_expert` for every expert.

    Raises
    ------
    ValueError
        If a shape, a scale or ``w13_order`` is wrong, or an expert has a NaN or infinite weight;
        also a TypeError if a dtype is wrong. Experts before a refused one are written.
    """
    _check_order(w13_order)
    require_tensor("w13", w13)
    if w13.ndim != 3:
        raise ValueError(f"w13: expected shape [E, 2I, H], got {tuple(w13.shape)}")
    experts, rows, hidden = w13.shape
    check_tensor("w13", w13, torch.bfloat16, (experts, rows, hidden))
    check_tensor("w2", w2, torch.bfloat16, (experts, hidden, rows // 2))
    if out is None:
        target = w13.device if device is None else device
        out = PreparedWeights.empty(experts, hidden, rows // 2, target)
    elif not isinstance(out, PreparedWeights):
        raise DTypeError(f"out: expected PreparedWeights, got {type(out).__name__}")
    elif device is not None and torch.empty(0, device=device).device != out.device:
        raise ValueError(f"device: expected that of out, {out.device}, got {device}")
    if out.num_experts != experts:
        raise ValueError(f"out: expected {experts} experts, got {out.num_experts}")
    scales13 = _per_expert("w13_scale", w13_scale, experts)
    scales2 = _per_expert("w2_scale", w2_scale, experts)
    for e in expert_range(experts, progress):
        prepare_expert(
            out,
            e,
            w13[e],
            w2[e],
            w13_order=w13_order,
            w13_scale=scales13[e],
            w2_scale=scales2[e],
        )
    return out


def prepare_expert(
    out: PreparedWeights,
    expert: int,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_order: W13Order,
    w13_scale: WeightScale = None,
    w2_scale: WeightScale = None,
) -> None:
    """Quantize one expert into its place in ``out``; its storage stays, so a layer can be refitted.

    Parameters
    ----------
    out : PreparedWeights
        Where to write.
    expert : int
        0 .. E-1.
    w13, w2 : Tensor
        bfloat16 [2I, H] and [H, I] on any device; not modified.
    w13_order : {"up_gate", "gate_up"}
        Which half of w13 comes first.
    w13_scale, w2_scale : float, Tensor, "amax" or None
        Decode scale of this expert, see :func:`prepare_weights`.

    Raises
    ------
    ValueError
        If a shape, a scale, ``expert`` or ``w13_order`` is wrong, or a weight is NaN or infinite;
        also a TypeError if a dtype is wrong. Nothing is written then.
    """
    _check_order(w13_order)
    check_expert(out, expert)
    check_tensor("w13", w13, torch.bfloat16, (2 * out.intermediate, out.hidden))
    check_tensor("w2", w2, torch.bfloat16, (out.hidden, out.intermediate))
    w13, w2 = (w.to(out.device).contiguous() for w in (w13, w2))
    d13 = _expert_scale("w13", w13, w13_scale, expert)
    d2 = _expert_scale("w2", w2, w2_scale, expert)
    w13_codes, w13_sf = quantize_rows(w13, 1.0 / d13)
    w2_codes, w2_sf = quantize_rows(w2, 1.0 / d2)
    _store(out, expert, w13_codes, w13_sf, w2_codes, w2_sf, w13_order)
    out.w13_scale[expert] = d13[0]
    out.w2_scale[expert] = d2[0]


def prepare_quantized_expert(
    out: PreparedWeights,
    expert: int,
    w13_codes: Tensor,
    w13_sf: Tensor,
    w2_codes: Tensor,
    w2_sf: Tensor,
    *,
    w13_order: W13Order,
    w13_scale: float | Tensor,
    w2_scale: float | Tensor,
) -> None:
    """Lay out one expert that already is NVFP4; no value changes.

    Parameters
    ----------
    out : PreparedWeights
        Where to write.
    expert : int
        0 .. E-1.
    w13_codes, w2_codes : Tensor
        uint8 [2I, H/2] and [H, I/2], low nibble first, rows in logical order.
    w13_sf, w2_sf : Tensor
        float8_e4m3fn or uint8 [2I, H/16] and [H, I/16], linear.
    w13_order : {"up_gate", "gate_up"}
        Which half of w13_codes and w13_sf comes first.
    w13_scale, w2_scale : float or Tensor
        Decode scale, one value each.

    Raises
    ------
    ValueError
        If a shape, ``expert`` or ``w13_order`` is wrong, a decode scale is not finite and positive
        or a block scale is NaN or negative; also a TypeError if a dtype is wrong. Nothing is
        written then.
    """
    _check_order(w13_order)
    check_expert(out, expert)
    intermediate, hidden = out.intermediate, out.hidden
    check_tensor("w13_codes", w13_codes, torch.uint8, (2 * intermediate, hidden // 2))
    check_tensor("w2_codes", w2_codes, torch.uint8, (hidden, intermediate // 2))
    w13_sf = check_block_scales(
        f"w13_sf of expert {expert}", w13_sf, (2 * intermediate, hidden // BLOCK)
    )
    w2_sf = check_block_scales(f"w2_sf of expert {expert}", w2_sf, (hidden, intermediate // BLOCK))
    d13 = decode_scales(f"w13_scale of expert {expert}", w13_scale, 1)
    d2 = decode_scales(f"w2_scale of expert {expert}", w2_scale, 1)
    _store(out, expert, w13_codes, w13_sf, w2_codes, w2_sf, w13_order)
    out.w13_scale[expert] = d13[0]
    out.w2_scale[expert] = d2[0]


def expert_range(count: int, progress: bool) -> Iterable[int]:
    """Iterate over 0 .. count-1, with a bar on stderr if asked for and possible."""
    if progress and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            return range(count)
        bar: Iterable[int] = track(range(count), "experts", console=Console(stderr=True))
        return bar
    return range(count)


def check_block_scales(name: str, sf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return E4M3 block scales as uint8 after checking them.

    Raises
    ------
    ValueError
        If the shape differs or a scale is NaN or has its sign bit set (the tensor cores read it
        as part of the magnitude); also a TypeError if the dtype is neither uint8 nor float8_e4m3fn.
    """
    check_tensor(name, sf, torch.uint8 if sf.dtype == torch.uint8 else torch.float8_e4m3fn, shape)
    sf = sf.view(torch.uint8)
    if bool((sf > _MAX_BLOCK_SCALE).any()):
        nan = int((sf & 0x7F == 0x7F).sum())
        negative = int((sf > 0x7F).sum())
        raise ValueError(
            f"{name}: expected E4M3 block scales in 0 .. 448, got {nan} NaN and "
            f"{negative} with the sign bit set among {sf.numel()}"
        )
    return sf


def quantize_rows(rows: Tensor, encode_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize bf16 [R, K] to uint8 codes [R, K/2] and block scales [R, K/16] by the operator."""
    count, width = rows.shape
    packed = torch.empty((count, width // 2), dtype=torch.uint8, device=rows.device)
    sf = torch.empty((count, width // BLOCK), dtype=torch.uint8, device=rows.device)
    try:
        torch.ops.cake.quantize_nvfp4(rows, encode_scale.to(rows.device), packed, sf)
    except RuntimeError as error:
        raise translate(error) from None
    return packed, sf


def _store(
    out: PreparedWeights,
    expert: int,
    w13_codes: Tensor,
    w13_sf: Tensor,
    w2_codes: Tensor,
    w2_sf: Tensor,
    w13_order: W13Order,
) -> None:
    """Gather rows in prepared order into the expert's place, and interleave its scales (uint8)."""
    rows13 = fc1_row_order(out.intermediate)
    if w13_order == "gate_up":
        rows13 = (rows13 + out.intermediate) % (2 * out.intermediate)
    rows2 = fc2_row_order(out.hidden)
    for codes, sf, rows, codes_out, sf_out in (
        (w13_codes, w13_sf, rows13, out.w13[expert], out.w13_sf[expert]),
        (w2_codes, w2_sf, rows2, out.w2[expert], out.w2_sf[expert]),
    ):
        rows = rows.to(out.device)
        torch.index_select(codes.to(out.device), 0, rows, out=codes_out)
        scales = sf.to(out.device).index_select(0, rows)
        interleave_scales(scales, out=sf_out.view(torch.uint8))


def _check_order(order: str) -> None:
    if order not in ("up_gate", "gate_up"):
        raise ValueError(f"w13_order: expected 'up_gate' or 'gate_up', got {order!r}")


def _per_expert(name: str, scale: WeightScale, count: int) -> list[float | Literal["amax"] | None]:
    if scale is None or isinstance(scale, str):
        return [scale] * count
    return list(decode_scales(name, scale, count).tolist())


def _expert_scale(name: str, weights: Tensor, scale: WeightScale, expert: int) -> Tensor:
    """Give the decode scale of one expert, float32 [1]; refuse weights that are not finite."""
    low, high = torch.aminmax(weights.detach())  # either is NaN if any weight is
    amax = torch.maximum(low.abs(), high.abs()).float().reshape(1)
    if not bool(amax.isfinite()):
        raise ValueError(f"{name} of expert {expert}: expected finite weights, got NaN or infinity")
    if scale is None:
        return torch.ones(1, dtype=torch.float32)
    if not isinstance(scale, str):
        return decode_scales(f"{name}_scale of expert {expert}", scale, 1)
    if scale != "amax":
        raise ValueError(f"{name}_scale: expected a number, a tensor or 'amax', got {scale!r}")
    # An expert of zeros decodes to zero with any scale; the bound keeps the reciprocal finite.
    tiny = torch.finfo(torch.float32).tiny
    decode = (amax.cpu() / (E2M1_MAX * E4M3_MAX)).clamp(min=tiny)
    return decode.masked_fill(amax.cpu() == 0, 1.0)
