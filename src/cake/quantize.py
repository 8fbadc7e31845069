"""NVFP4 encode and decode in plain torch.

The format: sixteen consecutive elements of a row share one E4M3 block scale, every element is one
E2M1 code, and a float32 factor per tensor is kept outside::

    value ~= e2m1 * e4m3 * decode_scale          decode_scale = 1 / encode_scale

This module is written from the format, with float32 operations in the order that the kernels use,
and shares no code with them. It is meant to be read and compared with, not to be fast; weights are
prepared by ``torch.ops.cake.quantize_nvfp4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DTypeError

BLOCK = 16  # elements that share one block scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0

_FLT_MIN = torch.finfo(torch.float32).tiny
_FLT_MAX = torch.finfo(torch.float32).max
# Magnitudes of codes 0..7; code 8 + c is the negative of code c, so 8 is -0.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A magnitude m gets one code more for each bound that it passes. A bound is half way between two
# values and belongs to the even code: m >= bound counts where the code above is even.
_E2M1_BOUNDS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def e2m1_encode(values: Tensor) -> Tensor:
    """Round to E2M1: nearest, ties to even, saturating at 6.

    Parameters
    ----------
    values : Tensor
        float32 (or narrower, widened exactly), any shape.

    Returns
    -------
    Tensor
        uint8 codes 0..15, same shape. The sign bit is kept (-0.0 gives 8); NaN gives 7. This is
        what ``cvt.rn.satfinite.e2m1x2.f32`` computes.
    """
    values = values.float()
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for bound, inclusive in _E2M1_BOUNDS:
        code += (magnitude >= bound) if inclusive else (magnitude > bound)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code.masked_fill_(values.isnan(), 7)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Give the float32 values of uint8 E2M1 codes (0..15), same shape."""
    table = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return torch.cat((table, -table))[codes.long()]


def e4m3_encode(values: Tensor) -> Tensor:
    """Round to E4M3: nearest, ties to even, saturating at 448; NaN gives 0x7F.

    Parameters
    ----------
    values : Tensor
        float32 (or narrower), any shape.

    Returns
    -------
    Tensor
        uint8 bytes, same shape; ``.view(torch.float8_e4m3fn)`` reinterprets them.
    """
    values = values.float()
    # Torch turns what lies above 448 into NaN, hence the clamp.
    code = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, code)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Give the float32 values of E4M3 bytes (uint8 or float8_e4m3fn), same shape."""
    return codes.view(torch.float8_e4m3fn).float()


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] to bytes [..., K/2]: element 2j low, 2j+1 high nibble of byte j."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo :func:`pack_e2m1`: uint8 [..., K/2] to codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    """View [..., K] as float32 blocks [..., K/16, 16]."""
    if not values.is_floating_point():
        raise DTypeError(f"values: expected a floating-point tensor, got {values.dtype}")
    if values.ndim == 0 or values.shape[-1] % BLOCK:
        raise ValueError(
            f"values: expected a last dimension that is a multiple of {BLOCK}, "
            f"got shape {tuple(values.shape)}"
        )
    return values.float().reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


def _block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, [...]; a NaN is ignored unless all sixteen are NaN."""
    nan = blocks.isnan()
    amax = blocks.abs().masked_fill(nan, 0.0).amax(-1)
    return amax.masked_fill(nan.all(-1), float("nan"))


def _flush(values: Tensor) -> Tensor:
    """Replace subnormal numbers by zero of the same sign."""
    return torch.where(values.abs() < _FLT_MIN, values * 0.0, values)


def _scale_tensor(scale: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def quantize_precise(values: Tensor, encode_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantize to NVFP4 with correctly rounded divisions (the input and weight quantizer).

    Per block, in float32, with ``q = encode_scale``::

        sf   = e4m3(amax * (q * (1/6)))
        inv  = min(1 / (sf * (1/q)), FLT_MAX)      0 where amax is 0
        code = e2m1(x * inv)

    Parameters
    ----------
    values : Tensor
        bfloat16 or float32 [..., K], K a multiple of 16.
    encode_scale : Tensor or float
        The factor q, float32, broadcastable to [..., K/16]; ``2688 / amax(values)`` uses the whole
        range of the format.

    Returns
    -------
    packed : Tensor
        uint8 [..., K/2], see :func:`pack_e2m1`.
    sf : Tensor
        uint8 [..., K/16], E4M3 block scales in linear order.

    Raises
    ------
    ValueError
        If K is not a multiple of 16 or ``values`` is not floating-point (then also a TypeError).
    """
    blocks = _blocks(values)
    q = _scale_tensor(encode_scale, values.device)
    sixth = _scale_tensor(1.0 / 6.0, values.device)
    amax = _block_amax(blocks)
    empty = amax == 0
    sf = e4m3_encode((amax * (q * sixth)).masked_fill(empty, 0.0))
    inverse = (1.0 / (e4m3_decode(sf) * (1.0 / q))).clamp(max=_FLT_MAX).masked_fill(empty, 0.0)
    codes = e2m1_encode(blocks * inverse.unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2)), sf


def quantize_intermediate(
    values: Tensor, encode_scale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Quantize to NVFP4 the way the FC1 epilogue does: products flush subnormals to zero.

    Per block, in float32, with ``q = encode_scale``::

        sf   = e4m3((amax * q) * (1/6))
        r    = 1 / sf                              0 where sf is 0
        code = e2m1((a * r) * q)

    Parameters
    ----------
    values : Tensor
        float32 activations [..., K], K a multiple of 16.
    encode_scale : Tensor or float
        The factor q, float32, broadcastable to [..., K/16].

    Returns
    -------
    packed : Tensor
        uint8 [..., K/2].
    sf : Tensor
        uint8 [..., K/16], E4M3 block scales in linear order.

    Raises
    ------
    ValueError
        If K is not a multiple of 16 or ``values`` is not floating-point (then also a TypeError).
    """
    blocks = _flush(_blocks(values))
    q = _flush(_scale_tensor(encode_scale, values.device))
    sixth = _scale_tensor(1.0 / 6.0, values.device)
    sf = e4m3_encode(_flush(_flush(_block_amax(blocks) * q) * sixth))
    scale = e4m3_decode(sf)
    reciprocal = (1.0 / scale).masked_fill(scale == 0, 0.0).unsqueeze(-1)
    scaled = _flush(_flush(blocks * reciprocal) * q.expand(scale.shape).unsqueeze(-1))
    return pack_e2m1(e2m1_encode(scaled).flatten(-2)), sf


def dequantize(
    packed: Tensor,
    sf: Tensor,
    decode_scale: Tensor | float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode NVFP4: ``e2m1 * e4m3 * decode_scale``.

    Parameters
    ----------
    packed : Tensor
        uint8 [..., K/2].
    sf : Tensor
        uint8 or float8_e4m3fn [..., K/16], linear order.
    decode_scale : Tensor or float
        float32, broadcastable to [..., K/16].
    dtype : torch.dtype
        Type of the result. The product e2m1 * e4m3 is exact in float32; the decode scale rounds
        once, a narrower ``dtype`` once more.

    Returns
    -------
    Tensor
        [..., K] in ``dtype``.
    """
    values = e2m1_decode(unpack_e2m1(packed)).reshape(*sf.shape, BLOCK)
    scale = _scale_tensor(decode_scale, packed.device).expand(sf.shape).unsqueeze(-1)
    return (values * e4m3_decode(sf).unsqueeze(-1) * scale).flatten(-2).to(dtype)
