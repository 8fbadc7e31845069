"""Prepared weights of a layer as a value, and the way back to logical order.

A prepared layer is what the op reads (:mod:`cake.layout` gives the byte order), together with the
decode scales that its bytes were made with: ``W ~= e2m1 * e4m3 * scale[e]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import DTypeError
from .layout import (
    check_geometry,
    deinterleave_scales,
    fc1_row_order,
    fc2_row_order,
    invert_order,
    require_integer,
)
from .quantize import BLOCK, dequantize


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeights:
    """Weights of one layer in the layout that the op reads.

    Attributes
    ----------
    w13 : Tensor
        uint8 [E, 2I, H/2], E2M1 codes of up and gate rows, rows in prepared order.
    w13_sf : Tensor
        float8_e4m3fn [E, 2I, H/16], block scales, interleaved.
    w2 : Tensor
        uint8 [E, H, I/2].
    w2_sf : Tensor
        float8_e4m3fn [E, H, I/16], interleaved.
    w13_scale, w2_scale : Tensor
        float32 [E], decode scales dW13 and dW2.

    Raises
    ------
    ValueError
        If the tensors do not have these types and shapes, are not contiguous, or are spread over
        several devices.
    """

    w13: Tensor
    w13_sf: Tensor
    w2: Tensor
    w2_sf: Tensor
    w13_scale: Tensor
    w2_scale: Tensor

    LAYOUT_VERSION: ClassVar[int] = 1  # changes with any change of the byte order

    def __post_init__(self) -> None:
        check_geometry(self.hidden, self.intermediate)
        experts, hidden, intermediate = self.num_experts, self.hidden, self.intermediate
        check_tensor("w13", self.w13, torch.uint8, (experts, 2 * intermediate, hidden // 2))
        check_tensor("w2", self.w2, torch.uint8, (experts, hidden, intermediate // 2))
        f8 = torch.float8_e4m3fn
        check_tensor("w13_sf", self.w13_sf, f8, (experts, 2 * intermediate, hidden // BLOCK))
        check_tensor("w2_sf", self.w2_sf, f8, (experts, hidden, intermediate // BLOCK))
        check_tensor("w13_scale", self.w13_scale, torch.float32, (experts,))
        check_tensor("w2_scale", self.w2_scale, torch.float32, (experts,))
        for name, tensor in self.tensors().items():
            if tensor.device != self.device or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: expected a contiguous tensor on {self.device}, got one on "
                    f"{tensor.device} with strides {tensor.stride()}"
                )

    @classmethod
    def empty(
        cls,
        num_experts: int,
        hidden: int,
        intermediate: int,
        device: torch.device | str | None = None,
    ) -> PreparedWeights:
        """Allocate a layer to be filled expert by expert; scales are 1, the rest is undefined.

        Raises
        ------
        ValueError
            If ``num_experts`` is not positive, ``hidden`` no multiple of 128 or ``intermediate``
            none of 64.
        """
        if num_experts <= 0:
            raise ValueError(f"num_experts: expected a positive number, got {num_experts}")
        check_geometry(hidden, intermediate)

        def allocate(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((num_experts, rows, cols), dtype=dtype, device=device)

        return cls(
            w13=allocate(2 * intermediate, hidden // 2, torch.uint8),
            w13_sf=allocate(2 * intermediate, hidden // BLOCK, torch.float8_e4m3fn),
            w2=allocate(hidden, intermediate // 2, torch.uint8),
            w2_sf=allocate(hidden, intermediate // BLOCK, torch.float8_e4m3fn),
            w13_scale=torch.ones(num_experts, dtype=torch.float32, device=device),
            w2_scale=torch.ones(num_experts, dtype=torch.float32, device=device),
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w2.shape[-2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.w13.shape[-2] // 2

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.w13.device

    def tensors(self) -> dict[str, Tensor]:
        """Give the tensors by name; the first dimension of each is the expert."""
        return {name: getattr(self, name) for name in self.__slots__}

    def quant_scales(
        self, input_scale: Tensor | float, intermediate_scale: Tensor | float
    ) -> list[Tensor]:
        """Combine activation scales with these weights to the six scales of the op.

        Parameters
        ----------
        input_scale : Tensor or float
            Decode scale dX of the layer's input (a checkpoint's ``input_scale``), one value.
        intermediate_scale : Tensor or float
            Decode scale dA of the activation, one value or float32 [E].

        Returns
        -------
        list of Tensor
            ``[1/dX, w13_sf, dX*dW13, 1/dA, w2_sf, dA*dW2]``: float32 [1], then float32 [E] next to
            each block-scale tensor, all on the weights' device.

        Raises
        ------
        ValueError
            If a scale is not finite and positive or has another number of elements.
        """
        dx = decode_scales("input_scale", input_scale, 1).to(self.device)
        da = decode_scales("intermediate_scale", intermediate_scale, self.num_experts)
        da = da.to(self.device)
        fc1_alpha, fc2_alpha = dx * self.w13_scale, da * self.w2_scale
        return [1.0 / dx, self.w13_sf, fc1_alpha, 1.0 / da, self.w2_sf, fc2_alpha]


@dataclass(frozen=True, slots=True, eq=False)
class LogicalWeights:
    """NVFP4 weights in logical order, of one expert or (with a leading E) of all.

    Attributes
    ----------
    w13_codes : Tensor
        uint8 [..., 2I, H/2], rows [up; gate].
    w13_sf : Tensor
        float8_e4m3fn [..., 2I, H/16], linear.
    w2_codes : Tensor
        uint8 [..., H, I/2].
    w2_sf : Tensor
        float8_e4m3fn [..., H, I/16], linear.
    w13_scale, w2_scale : Tensor
        float32 [...], decode scales.
    """

    w13_codes: Tensor
    w13_sf: Tensor
    w2_codes: Tensor
    w2_sf: Tensor
    w13_scale: Tensor
    w2_scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Decode to w13 [..., 2I, H] and w2 [..., H, I], through float32 and int64 temporaries."""
        w13 = dequantize(self.w13_codes, self.w13_sf, self.w13_scale[..., None, None], dtype=dtype)
        w2 = dequantize(self.w2_codes, self.w2_sf, self.w2_scale[..., None, None], dtype=dtype)
        return w13, w2


def unprepare(prepared: PreparedWeights, expert: int | None = None) -> LogicalWeights:
    """Undo the layout: codes and linear block scales in logical order, rows of w13 [up; gate].

    Parameters
    ----------
    prepared : PreparedWeights
        Not modified.
    expert : int, optional
        Only this expert, without the leading dimension; default: all.

    Returns
    -------
    LogicalWeights
        New tensors on the same device. ``.dequantize()`` gives the weights as numbers.

    Raises
    ------
    ValueError
        If ``expert`` is outside 0 .. E-1; also a TypeError if it is no integer, or ``prepared`` is
        something else.
    """
    if not isinstance(prepared, PreparedWeights):
        raise DTypeError(f"prepared: expected PreparedWeights, got {type(prepared).__name__}")
    if expert is not None:
        check_expert(prepared, expert)
    chosen: slice | int = slice(None) if expert is None else expert
    row_of_w13 = invert_order(fc1_row_order(prepared.intermediate)).to(prepared.device)
    row_of_w2 = invert_order(fc2_row_order(prepared.hidden)).to(prepared.device)

    def linear(sf: Tensor, rows: Tensor) -> Tensor:
        scales = deinterleave_scales(sf[chosen].view(torch.uint8)).index_select(-2, rows)
        return scales.view(torch.float8_e4m3fn)

    return LogicalWeights(
        w13_codes=prepared.w13[chosen].index_select(-2, row_of_w13),
        w13_sf=linear(prepared.w13_sf, row_of_w13),
        w2_codes=prepared.w2[chosen].index_select(-2, row_of_w2),
        w2_sf=linear(prepared.w2_sf, row_of_w2),
        w13_scale=prepared.w13_scale[chosen].clone(),
        w2_scale=prepared.w2_scale[chosen].clone(),
    )


def require_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor (DTypeError) by name."""
    if not isinstance(value, Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse no tensor, another dtype (DTypeError) or another shape (ValueError) by name."""
    require_tensor(name, tensor)
    if tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def check_expert(out: PreparedWeights, expert: int) -> None:
    """Refuse what is no integer (DTypeError), and an expert outside 0 .. E-1 (ValueError)."""
    require_integer("expert", expert)
    if not 0 <= expert < out.num_experts:
        raise ValueError(f"expert: expected 0 .. {out.num_experts - 1}, got {expert}")


def decode_scales(name: str, scale: Tensor | float, count: int) -> Tensor:
    """Give a new contiguous float32 [count] tensor on the scale's device, checked usable.

    It requires no gradient, or what it is stored in would keep alive all that it came from.
    """
    values = torch.as_tensor(scale, dtype=torch.float32).detach().flatten()
    if values.numel() not in (1, count):
        raise ValueError(f"{name}: expected one value or {count}, got {tuple(values.shape)}")
    # The reciprocal is used too, so it must be finite as well.
    usable = values.isfinite() & (values > 0) & (1.0 / values).isfinite()
    if not bool(usable.all()):
        worst = int((~usable).nonzero()[0])
        raise ValueError(
            f"{name}: expected finite positive decode scales, got {float(values[worst])} "
            f"at index {worst}"
        )
    return values.expand(count).clone()
