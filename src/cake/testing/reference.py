"""The definition of the fused operation, in float64 torch and in the order of the formulas.

It takes the prepared tensors exactly as the operation does, for any geometry that the layout
allows, and works expert by expert, so that one expert's decoded weights (33 MB in float64) are all
that it adds to the stages.  It calls none of the compiled operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from ..layout import deinterleave_scales, fc1_row_order, fc2_row_order, invert_order
from ..quantize import BLOCK, dequantize, quantize_intermediate, quantize_precise

DEFAULT_BETA = 4.0  # scale of the gate's tanh
DEFAULT_LINEAR_BETA = 25.0  # scale of the linear (up) half's tanh


@dataclass(frozen=True)
class Stages:
    """Every intermediate result; per-slot tensors are zero in empty slots.

    Attributes
    ----------
    input_codes, input_scales : Tensor
        uint8 [T, H/2] and uint8 [T, H/16]: the quantized input, scales in linear order.
    up_accumulator, gate_accumulator : Tensor
        float32 [T, k, I]: FC1 sums of (E2M1 * E4M3) products, without ``fc1_alpha``.
    activation : Tensor
        float32 [T, k, I].
    intermediate_codes, intermediate_scales : Tensor
        uint8 [T, k, I/2] and uint8 [T, k, I/16]: the quantized activation.
    expert_rows : Tensor
        bfloat16 [T, k, H]: what each slot gives before it is weighted.
    output : Tensor
        bfloat16 [T, H].
    """

    input_codes: Tensor
    input_scales: Tensor
    up_accumulator: Tensor
    gate_accumulator: Tensor
    activation: Tensor
    intermediate_codes: Tensor
    intermediate_scales: Tensor
    expert_rows: Tensor
    output: Tensor


@overload
def fused_moe_reference(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    quant_scales: Sequence[Tensor],
    *,
    situ_beta: Tensor | None = ...,
    situ_linear_beta: Tensor | None = ...,
    return_stages: Literal[False] = ...,
) -> Tensor: ...


@overload
def fused_moe_reference(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    quant_scales: Sequence[Tensor],
    *,
    situ_beta: Tensor | None = ...,
    situ_linear_beta: Tensor | None = ...,
    return_stages: Literal[True],
) -> Stages: ...


def fused_moe_reference(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    quant_scales: Sequence[Tensor],
    *,
    situ_beta: Tensor | None = None,
    situ_linear_beta: Tensor | None = None,
    return_stages: bool = False,
) -> Tensor | Stages:
    """Compute the operation.

    Sums are exact in float64 for all but absurd spreads of block scales, hence independent of their
    order, and are rounded to float32 once.

    Parameters
    ----------
    input : Tensor
        bfloat16 [T, H].
    topk_ids : Tensor
        int32 or int64 [T, k]; ids outside [0, E) are empty slots, whatever their weight.
    topk_weights : Tensor
        bfloat16 or float32 [T, k]; float32 is rounded to bfloat16 first.
    w13, w2 : Tensor
        Prepared uint8 [E, 2I, H/2] and [E, H, I/2].
    quant_scales : sequence of Tensor
        ``input_scale`` float32 [1]; ``w13_sf`` [E, 2I, H/16], uint8 or float8_e4m3fn, prepared;
        ``fc1_alpha`` float32 [E]; ``fc2_input_scale`` float32 [E]; ``w2_sf`` [E, H, I/16],
        prepared; ``fc2_alpha`` float32 [E].
    situ_beta, situ_linear_beta : Tensor, optional
        float32 [E], scales of the gate's and of the linear half's tanh; 4 and 25 if not given.
    return_stages : bool
        Give every stage and not the output alone.

    Returns
    -------
    Tensor or Stages
        bfloat16 [T, H], or with ``return_stages`` all of :class:`Stages`; on the CPU.

    Raises
    ------
    ValueError
        If ``quant_scales`` has not six entries or the widths do not suit the layout.
    """
    input_scale, w13_sf, fc1_alpha, fc2_input_scale, w2_sf, fc2_alpha = quant_scales
    input, ids = input.cpu(), topk_ids.cpu().long()
    experts, hidden = w2.shape[:2]
    intermediate = w13.shape[1] // 2
    input_codes, input_scales = quantize_precise(input, input_scale.cpu())
    xq = dequantize(input_codes, input_scales, dtype=torch.float64)

    slots = tuple(ids.shape)
    up_accumulator = torch.zeros(*slots, intermediate, dtype=torch.float32)
    gate_accumulator = torch.zeros(*slots, intermediate, dtype=torch.float32)
    activation = torch.zeros(*slots, intermediate, dtype=torch.float32)
    intermediate_codes = torch.zeros(*slots, intermediate // 2, dtype=torch.uint8)
    intermediate_scales = torch.zeros(*slots, intermediate // BLOCK, dtype=torch.uint8)
    expert_rows = torch.zeros(*slots, hidden, dtype=torch.bfloat16)
    logical_w13 = invert_order(fc1_row_order(intermediate))
    logical_w2 = invert_order(fc2_row_order(hidden))
    used = (ids >= 0) & (ids < experts)
    for expert in sorted(set(ids[used].tolist())):
        pairs = torch.nonzero(ids == expert, as_tuple=True)  # tokens and slots, [pairs] each
        weights = _logical_values(w13[expert], w13_sf[expert], logical_w13)
        accumulator = (xq[pairs[0]] @ weights.T).float()
        up, gate = accumulator.chunk(2, dim=-1)
        beta = DEFAULT_BETA if situ_beta is None else float(situ_beta[expert])
        linear_beta = (
            DEFAULT_LINEAR_BETA if situ_linear_beta is None else float(situ_linear_beta[expert])
        )
        alpha = fc1_alpha[expert].cpu()
        a = situ((alpha * up).double(), (alpha * gate).double(), beta, linear_beta).float()
        codes, scales = quantize_intermediate(a, fc2_input_scale[expert].cpu())

        weights = _logical_values(w2[expert], w2_sf[expert], logical_w2)
        aq = dequantize(codes, scales, dtype=torch.float64)
        rows = (aq @ weights.T).float() * fc2_alpha[expert].cpu()

        up_accumulator[pairs], gate_accumulator[pairs], activation[pairs] = up, gate, a
        intermediate_codes[pairs], intermediate_scales[pairs] = codes, scales
        expert_rows[pairs] = rows.bfloat16()
    output = finalize(expert_rows, topk_weights.cpu().bfloat16().where(used, 0.0))
    if not return_stages:
        return output
    return Stages(
        input_codes=input_codes,
        input_scales=input_scales,
        up_accumulator=up_accumulator,
        gate_accumulator=gate_accumulator,
        activation=activation,
        intermediate_codes=intermediate_codes,
        intermediate_scales=intermediate_scales,
        expert_rows=expert_rows,
        output=output,
    )


def situ(up: Tensor, gate: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU: ``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``."""
    bounded_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return bounded_gate * linear_beta * torch.tanh(up / linear_beta)


def finalize(expert_rows: Tensor, weights: Tensor) -> Tensor:
    """Add up the slots in float32, in ascending order.

    A product of two bfloat16 numbers has 16 significant bits and is exact in float32 unless it
    underflows, so that a multiplication and an addition give what a fused multiply-add gives.

    Parameters
    ----------
    expert_rows : Tensor
        bfloat16 [T, k, H].
    weights : Tensor
        bfloat16 [T, k].

    Returns
    -------
    Tensor
        bfloat16 [T, H].
    """
    total = torch.zeros(expert_rows.shape[0], expert_rows.shape[2], dtype=torch.float32)
    for slot in range(expert_rows.shape[1]):
        total += weights[:, slot, None].float() * expert_rows[:, slot].float()
    return total.bfloat16()


def unquantized_reference(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_weights: Callable[[int], tuple[Tensor, Tensor]],
    *,
    num_experts: int,
    beta: float = DEFAULT_BETA,
    linear_beta: float = DEFAULT_LINEAR_BETA,
) -> Tensor:
    """Compute the layer without any quantization, to show the error of the format.

    Parameters
    ----------
    input, topk_ids, topk_weights : Tensor
        As for :func:`fused_moe_reference`.
    expert_weights : callable
        Maps an expert id to its logical ``w13`` [2I, H] (rows [up ; gate]) and ``w2`` [H, I], any
        floating dtype.  Called once for every expert in use.
    num_experts : int
        E; ids outside [0, E) are empty slots.
    beta, linear_beta : float
        Scales of the gate's and of the linear half's tanh.

    Returns
    -------
    Tensor
        float64 [T, H].
    """
    x, ids = input.cpu().double(), topk_ids.cpu().long()
    weights = topk_weights.cpu().bfloat16().double()
    output = torch.zeros_like(x)
    used = (ids >= 0) & (ids < num_experts)
    for expert in sorted(set(ids[used].tolist())):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        w13, w2 = (w.cpu().double() for w in expert_weights(expert))
        up, gate = (x[tokens] @ w13.T).chunk(2, dim=-1)
        rows = situ(up, gate, beta, linear_beta) @ w2.T
        output.index_add_(0, tokens, weights[tokens, slots, None] * rows)
    return output


def _logical_values(packed: Tensor, scales: Tensor, logical: Tensor) -> Tensor:
    """Decode one expert's prepared matrix to float64 [rows, K]; row m lies at ``logical[m]``."""
    linear = deinterleave_scales(scales.cpu().view(torch.uint8))
    return dequantize(packed.cpu()[logical], linear[logical], dtype=torch.float64)
