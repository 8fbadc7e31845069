"""Configuration values and the weight preparation that FlashInfer's users call by these names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

from .errors import DTypeError, UnsupportedError
from .layout import check_geometry
from .prepared_weights import check_tensor, require_tensor
from .weights import prepare_weights, quantize_rows


class ActivationType(IntEnum):
    """TensorRT-LLM's activation numbers; cake computes ``Situ``."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11


class QuantFormat(Enum):
    """Number format of one operand or of the output; cake computes NVFP4 with BF16 output."""

    BF16 = 0
    FP16 = 1
    FP8PerTensor = 2
    DeepSeekFp8 = 3
    MXFP8 = 4
    NVFP4 = 5
    MXFP4 = 6
    MXINT4 = 7
    INT4 = 8


@dataclass(frozen=True)
class QuantConfig:
    """Formats of the weights, of the activations as the multiplication sees them, of the output.

    Raises
    ------
    ValueError
        If a field is not a :class:`QuantFormat`.
    """

    weight: QuantFormat = QuantFormat.BF16
    activation: QuantFormat = QuantFormat.BF16
    output: QuantFormat = QuantFormat.BF16

    def __post_init__(self) -> None:
        for name in ("weight", "activation", "output"):
            value = getattr(self, name)
            if not isinstance(value, QuantFormat):
                raise ValueError(f"{name}: expected a QuantFormat, got {value!r}")


@dataclass(frozen=True)
class SiTU:
    """The activation ``s*tanh(g/s)*sigmoid(g) * l*tanh(u/l)`` of gate g and linear (up) value u.

    Attributes
    ----------
    gate_scale : float
        s, bound of the gate branch.
    linear_scale : float
        l, bound of the linear branch.
    clamp_limit : float or None
        Upstream's optional clamp of g and u before the activation. cake's preparation refuses it.

    Raises
    ------
    ValueError
        If a value is not a finite positive number.
    """

    gate_scale: float = 4.0
    linear_scale: float = 25.0
    clamp_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("gate_scale", "linear_scale", "clamp_limit"):
            value = getattr(self, name)
            if name == "clamp_limit" and value is None:
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}: expected a finite positive number, got {value!r}")


_NVFP4 = QuantConfig(weight=QuantFormat.NVFP4, activation=QuantFormat.NVFP4)


def _check_quant(quant: QuantConfig) -> None:
    if not isinstance(quant, QuantConfig):
        raise DTypeError(f"quant: expected QuantConfig, got {type(quant).__name__}")
    for name, expected in (
        ("weight", QuantFormat.NVFP4),
        ("activation", QuantFormat.NVFP4),
        ("output", QuantFormat.BF16),
    ):
        got: QuantFormat = getattr(quant, name)
        if got is not expected:
            raise UnsupportedError(f"quant.{name}: expected {expected}, got {got}")


@dataclass(frozen=True)
class TrtllmFp4Config:
    """Preparation with every global scale 1: block scales alone carry the magnitude.

    The tensors are those of FlashInfer's class of this name. :func:`cake.weights.prepare_weights`
    also takes decode scales, which small weights need: without, a block whose largest magnitude is
    below about 0.006 becomes zero.
    """

    @staticmethod
    def prepare_weights(
        w1_bf16: Tensor,
        w2_bf16: Tensor,
        *,
        quant: QuantConfig = _NVFP4,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: SiTU | None = None,
        device: torch.device | str | None = None,
        permute_cache: object = None,
    ) -> dict[str, Tensor]:
        """Quantize and lay out expert weights.

        Parameters
        ----------
        w1_bf16 : Tensor
            bfloat16 [E, 2I, H], rows [up; gate].
        w2_bf16 : Tensor
            bfloat16 [E, H, I].
        quant : QuantConfig
            Only NVFP4 weights and activations with BF16 output.
        num_local_experts, hidden_size, intermediate_size : int
            E, H (a multiple of 128) and I (a multiple of 64).
        activation : SiTU, optional
            None is ``SiTU()``.
        device : torch.device or str, optional
            Where the result lives; default: where w1_bf16 is.
        permute_cache : object
            Accepted and unused: the row order is a formula.

        Returns
        -------
        dict of Tensor
            ``gemm1_weights`` uint8 [E, 2I, H/2] and ``gemm2_weights`` uint8 [E, H, I/2];
            ``gemm1_weights_scale`` and ``gemm2_weights_scale`` float8_e4m3fn [E, 2I, H/16] and
            [E, H, I/16]; ``output1_scale_scalar``, ``output1_scale_gate_scalar`` and
            ``output2_scale_scalar``, one float32 [E] tensor of ones; ``gemm1_alpha`` (gate scale)
            and ``gemm1_beta`` (linear scale), float32 [E].

        Raises
        ------
        ValueError
            If a shape does not follow from the sizes or a weight is NaN or infinite; also a
            TypeError for a wrong dtype, a NotImplementedError for another format or activation.
        """
        _check_quant(quant)
        activation = SiTU() if activation is None else activation
        if not isinstance(activation, SiTU):
            raise UnsupportedError(f"activation: expected SiTU or None, got {activation!r}")
        if activation.clamp_limit is not None:
            raise UnsupportedError(
                f"activation.clamp_limit: expected None, got {activation.clamp_limit}"
            )
        check_geometry(hidden_size, intermediate_size, ("hidden_size", "intermediate_size"))
        experts, h, i = num_local_experts, hidden_size, intermediate_size
        check_tensor("w1_bf16", w1_bf16, torch.bfloat16, (experts, 2 * i, h))
        check_tensor("w2_bf16", w2_bf16, torch.bfloat16, (experts, h, i))
        prepared = prepare_weights(w1_bf16, w2_bf16, w13_order="up_gate", device=device)
        ones = torch.ones(experts, dtype=torch.float32, device=prepared.device)
        return {
            "gemm1_weights": prepared.w13,
            "gemm1_weights_scale": prepared.w13_sf,
            "gemm2_weights": prepared.w2,
            "gemm2_weights_scale": prepared.w2_sf,
            "output1_scale_scalar": ones,
            "output1_scale_gate_scalar": ones,
            "output2_scale_scalar": ones,
            "gemm1_alpha": torch.full_like(ones, activation.gate_scale),
            "gemm1_beta": torch.full_like(ones, activation.linear_scale),
        }

    @staticmethod
    def prepare_activations(
        hidden_states_bf16: Tensor, *, quant: QuantConfig = _NVFP4
    ) -> tuple[Tensor, Tensor]:
        """Quantize activations with encoding scale 1. The op does this itself, from BF16.

        Parameters
        ----------
        hidden_states_bf16 : Tensor
            bfloat16 [T, H], H a multiple of 16.
        quant : QuantConfig
            Only NVFP4 weights and activations with BF16 output.

        Returns
        -------
        packed : Tensor
            uint8 [T, H/2].
        scales : Tensor
            float8_e4m3fn [T, H/16], linear.

        Raises
        ------
        ValueError
            If the shape is wrong; also a TypeError for a wrong dtype, a NotImplementedError for
            another format.
        """
        _check_quant(quant)
        x = hidden_states_bf16
        require_tensor("hidden_states_bf16", x)
        if x.ndim != 2 or x.shape[1] % 16:
            raise ValueError(
                "hidden_states_bf16: expected shape [T, H] with H a multiple of 16, "
                f"got {tuple(x.shape)}"
            )
        check_tensor("hidden_states_bf16", x, torch.bfloat16, tuple(x.shape))
        packed, sf = quantize_rows(x.contiguous(), torch.ones(1, dtype=torch.float32))
        return packed, sf.view(torch.float8_e4m3fn)
