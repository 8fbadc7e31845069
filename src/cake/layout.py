"""Row order and block-scale order of prepared weights.

Prepared weights keep every row intact (K in natural order) and move rows inside blocks of 32::

    w13, 32-row block b    rows  0..7   up    features 16b + 0, 2, .., 14
                           rows  8..15  gate  features 16b + 0, 2, .., 14
                           rows 16..23  up    features 16b + 1, 3, .., 15
                           rows 24..31  gate  features 16b + 1, 3, .., 15
    w2, 32-row block b     row 8q + r holds output 32b + 4r + q

Block scales get the same row order; then each expert's [R, C] byte matrix is stored as
[R/128][C/4][32][4][4] = (row tile)(column tile)(n mod 32)((n mod 128) div 32)(c mod 4).
It is still declared as [R, C], so indexing a prepared scale tensor by row has no meaning.

An order is a gather: ``prepared[n] = logical[order[n]]``. It is not its own inverse.
"""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor

from .errors import DTypeError

ROW_TILE = 128
COLUMN_TILE = 4


def require_integer(name: str, value: object) -> None:
    """Refuse what is no integer (DTypeError) by name; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise DTypeError(f"{name}: expected an integer, got {value!r}")


def _require_multiple(name: str, value: int, multiple: int) -> None:
    require_integer(name, value)
    if value <= 0 or value % multiple:
        raise ValueError(f"{name}: expected a positive multiple of {multiple}, got {value}")


def check_geometry(
    hidden: int, intermediate: int, names: tuple[str, str] = ("hidden", "intermediate")
) -> None:
    """Refuse widths for which the layout has no whole 128x4 scale tiles; `names` are the caller's.

    Raises
    ------
    ValueError
        If ``hidden`` is not a multiple of 128 or ``intermediate`` not one of 64 (2I of 128).
    """
    _require_multiple(names[0], hidden, ROW_TILE)
    _require_multiple(names[1], intermediate, ROW_TILE // 2)


def fc1_row_order(intermediate: int) -> Tensor:
    """Give the logical row of every prepared w13 row.

    Parameters
    ----------
    intermediate : int
        I, a multiple of 64.

    Returns
    -------
    Tensor
        int64 [2I]. Logical rows 0..I-1 are up, I..2I-1 are gate.

    Raises
    ------
    ValueError
        If ``intermediate`` is not a positive multiple of 64.
    """
    _require_multiple("intermediate", intermediate, ROW_TILE // 2)
    n = torch.arange(2 * intermediate)
    block, group, r = n // 32, n % 32 // 8, n % 8
    return group % 2 * intermediate + 16 * block + 2 * r + group // 2


def fc2_row_order(hidden: int) -> Tensor:
    """Give the logical row (output feature) of every prepared w2 row.

    Parameters
    ----------
    hidden : int
        H, a multiple of 128.

    Returns
    -------
    Tensor
        int64 [H].

    Raises
    ------
    ValueError
        If ``hidden`` is not a positive multiple of 128.
    """
    _require_multiple("hidden", hidden, ROW_TILE)
    n = torch.arange(hidden)
    return n // 32 * 32 + 4 * (n % 8) + n % 32 // 8


def invert_order(order: Tensor) -> Tensor:
    """Invert a permutation, int64 [N]: ``logical[m] = prepared[invert_order(order)[m]]``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def scale_offset(rows: int, cols: int) -> Tensor:
    """Give the byte offset, inside one expert, of the scale of prepared row n and column c.

    Parameters
    ----------
    rows, cols : int
        R, a multiple of 128, and C = K/16, a multiple of 4.

    Returns
    -------
    Tensor
        int64 [R, C].

    Raises
    ------
    ValueError
        If ``rows`` or ``cols`` is not such a multiple.
    """
    _require_multiple("rows", rows, ROW_TILE)
    _require_multiple("cols", cols, COLUMN_TILE)
    n = torch.arange(rows).unsqueeze(1)
    c = torch.arange(cols)
    tile = n // ROW_TILE * (cols // COLUMN_TILE) + c // COLUMN_TILE
    return tile * 512 + n % 32 * 16 + n % ROW_TILE // 32 * 4 + c % COLUMN_TILE


def interleave_scales(scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Store linear block scales 128x4-interleaved.

    Parameters
    ----------
    scales : Tensor
        One-byte elements [..., R, C], rows already in prepared order.
    out : Tensor, optional
        Contiguous destination of the same shape and type.

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor, of the same shape: byte (n, c) of each leading index
        lies at ``scale_offset(R, C)[n, c]``.

    Raises
    ------
    ValueError
        If R is not a multiple of 128 or C not one of 4.
    """
    rows, cols = scales.shape[-2:]
    _require_multiple("scales: rows", rows, ROW_TILE)
    _require_multiple("scales: columns", cols, COLUMN_TILE)
    lead = scales.shape[:-2]
    if out is None:
        out = torch.empty(scales.shape, dtype=scales.dtype, device=scales.device)
    tiles = scales.reshape(*lead, rows // ROW_TILE, 4, 32, cols // COLUMN_TILE, COLUMN_TILE)
    stored = out.view(*lead, rows // ROW_TILE, cols // COLUMN_TILE, 32, 4, COLUMN_TILE)
    stored.copy_(tiles.transpose(-4, -2))
    return out


def deinterleave_scales(scales: Tensor) -> Tensor:
    """Undo :func:`interleave_scales`: a new tensor [..., R, C] in linear order.

    Raises
    ------
    ValueError
        If R is not a multiple of 128 or C not one of 4.
    """
    rows, cols = scales.shape[-2:]
    _require_multiple("scales: rows", rows, ROW_TILE)
    _require_multiple("scales: columns", cols, COLUMN_TILE)
    stored = scales.reshape(
        *scales.shape[:-2], rows // ROW_TILE, cols // COLUMN_TILE, 32, 4, COLUMN_TILE
    )
    return stored.transpose(-4, -2).reshape(scales.shape)
