"""Synthetic layers, tokens and routings with the statistics that matter to a quantized layer.

Values come from a Tukey h distribution, ``z exp(h z^2 / 2)`` of a normal ``z``, whose tails are
heavier than normal ones; rows have log-normal gains and a few columns are outliers.  So block and
tensor scales vary, as they do in trained layers.  Everything is a function of its seed: not of
thread counts, nor of what else was generated before; only the softmax router, a float32 matrix
product, may choose otherwise between almost equal experts on another machine.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from ..prepared_weights import PreparedWeights
from ..quantize import E2M1_MAX, E4M3_MAX
from ..support import KIMI_K3
from ..weights import expert_range, prepare_expert
from .reference import DEFAULT_BETA, DEFAULT_LINEAR_BETA

HIDDEN, INTERMEDIATE = KIMI_K3.hidden, KIMI_K3.intermediate
EXPERTS, TOP_K = KIMI_K3.num_experts, KIMI_K3.top_k

Routing = Literal[
    "softmax", "uniform", "random", "zipf", "grouped", "same", "one_expert", "duplicates"
]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)

_TUKEY_H = 0.1
_ROW_SIGMA = 0.3  # of the logarithm of a weight row's or a token's gain
_OUTLIER_STRIDE = 512  # one outlier column among so many
_WEIGHT_OUTLIER, _TOKEN_OUTLIER = 4.0, 6.0  # gains of outlier columns

# Block scales of random prepared bytes: 0x30 .. 0x3F, which is 0.5 .. 1.875 in E4M3.
_SCALE_BASE, _SCALE_MASK = 0x30, 0x0F
# Rms of E2M1 * E4M3 for uniform codes and such scales: sqrt(8.5625) * sqrt(1.3428).
_RANDOM_RMS = 3.391

# With x of rms 1: gate and up accumulators of about 2, outputs of a few units.
_FC1_RMS, _FC2_RMS = 2.0, 5.0

# Generator streams of one seed: experts count from 0, the others from the top.
_STREAMS = 4096
_TOKENS, _ROUTER, _ROUTES = _STREAMS - 1, _STREAMS - 2, _STREAMS - 3


def make_expert(
    expert: int, seed: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
) -> tuple[Tensor, Tensor]:
    """Generate one expert's weights.

    Parameters
    ----------
    expert : int
        Expert id, 0 .. 4092.
    seed : int
        Seed of the layer.
    hidden, intermediate : int
        H and I.

    Returns
    -------
    w13 : Tensor
        bfloat16 [2I, H], rows [up ; gate], rms about ``2 / sqrt(H)``.
    w2 : Tensor
        bfloat16 [H, I], rms about ``5 / sqrt(I)``.
    """
    if not 0 <= expert < _ROUTES:
        raise ValueError(f"expert must be in [0, {_ROUTES}), got {expert}")
    generator = _generator(seed, expert)
    w13 = _heavy_tailed(generator, 2 * intermediate, hidden, _WEIGHT_OUTLIER)
    w2 = _heavy_tailed(generator, hidden, intermediate, _WEIGHT_OUTLIER)
    return w13.mul_(_FC1_RMS / math.sqrt(hidden)), w2.mul_(_FC2_RMS / math.sqrt(intermediate))


def make_tokens(num_tokens: int, seed: int, hidden: int = HIDDEN) -> Tensor:
    """Generate activations: bfloat16 [T, H], rms about 1, with outlier channels of gain 6."""
    generator = _generator(seed, _TOKENS)
    return _heavy_tailed(generator, num_tokens, hidden, _TOKEN_OUTLIER)


def route(
    num_tokens: int,
    seed: int = 0,
    *,
    kind: Routing = "softmax",
    tokens: Tensor | None = None,
    num_experts: int = EXPERTS,
    top_k: int = TOP_K,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weights for every token.

    Parameters
    ----------
    num_tokens : int
        T.
    seed : int
        Seed of the router's projection and of the random choices.
    kind : str
        ``softmax``: the top k of a softmax over a random projection of ``tokens``, renormalized.
        ``uniform``: ``(t k + s) mod E``.  ``random``: k distinct experts, all equally likely.
        ``zipf``: k distinct experts, popularity 1/rank over a random ranking.  ``grouped``: token t
        takes the group ``t mod 4`` of four disjoint groups of k.  ``same``: experts 0 .. k-1 for
        all.  ``one_expert``: expert E-1 in every slot.  ``duplicates``: like ``uniform``, every
        expert in two neighbouring slots.  The weights of all but ``softmax`` are a softmax of
        normal numbers.
    tokens : Tensor, optional
        [T, H]; used, and required, by ``softmax`` alone.
    num_experts, top_k : int
        E and k.

    Returns
    -------
    topk_ids : Tensor
        int32 [T, k].
    topk_weights : Tensor
        bfloat16 [T, k], every row adds to about 1.

    Raises
    ------
    ValueError
        If ``kind`` is unknown, ``softmax`` has no tokens, or E is too small for the kind.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"kind must be one of {', '.join(ROUTINGS)}, got {kind!r}")
    if num_experts < (4 * top_k if kind == "grouped" else top_k):
        raise ValueError(f"{num_experts} experts are too few for kind {kind!r} with top_k {top_k}")
    if kind == "softmax":
        if tokens is None or tokens.shape[0] != num_tokens:
            raise ValueError(f"kind 'softmax' needs tokens of {num_tokens} rows")
        return _softmax_router(tokens, seed, num_experts, top_k)
    generator = _generator(seed, _ROUTES)
    weights = (
        torch.randn(num_tokens, top_k, generator=generator, dtype=torch.float32)
        .softmax(-1)
        .bfloat16()
    )
    token = torch.arange(num_tokens).unsqueeze(1)
    slot = torch.arange(top_k).unsqueeze(0)
    if kind in ("random", "zipf"):
        ids = _distinct_choices(generator, num_tokens, num_experts, top_k, zipf=kind == "zipf")
    elif kind == "uniform":
        ids = (token * top_k + slot) % num_experts
    elif kind == "grouped":
        ids = (token % 4) * (num_experts // 4) + slot
    elif kind == "same":
        ids = slot.expand(num_tokens, top_k)
    elif kind == "one_expert":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    else:
        ids = (token * top_k + slot // 2) % num_experts
    return ids.int().contiguous(), weights


def make_layer(
    seed: int,
    num_experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    *,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> tuple[PreparedWeights, list[Tensor]]:
    """Generate and prepare the experts of a layer one by one.

    Weight scales are the ``amax / 2688`` of every expert.

    Parameters
    ----------
    seed : int
        Seed of the layer; :func:`make_expert` of the same seed gives its weights before
        quantization, :func:`make_tokens` of the same seed tokens that suit its input scale.
    num_experts, hidden, intermediate : int
        E, H (a multiple of 128) and I (a multiple of 64).
    device : torch.device or str, optional
        Where the result lives and the weights are quantized; default: the CPU.
    progress : bool
        Show a progress bar, see :func:`cake.weights.expert_range`.

    Returns
    -------
    prepared : PreparedWeights
        The weights; 2.3 MB an expert at full geometry.
    quant_scales : list of Tensor
        The six scales of the operation, none of them 1.
    """
    prepared = PreparedWeights.empty(num_experts, hidden, intermediate, device)
    for expert in expert_range(num_experts, progress):
        w13, w2 = make_expert(expert, seed, hidden, intermediate)
        prepare_expert(
            prepared, expert, w13, w2, w13_order="up_gate", w13_scale="amax", w2_scale="amax"
        )
    return prepared, _quant_scales(prepared, seed)


def fill_random_prepared(
    seed: int,
    num_experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    *,
    device: torch.device | str | None = None,
) -> tuple[PreparedWeights, list[Tensor]]:
    """Make a layer of random codes and random block scales, for tests that need no real weights.

    It takes seconds for 896 experts, for nothing is quantized.  Codes are uniform, block scales are
    0.5 .. 1.875, and the decode scales, distinct for neighbouring experts, give outputs of the same
    size as :func:`make_layer`.  Parameters and results are those of :func:`make_layer`.
    """
    prepared = PreparedWeights.empty(num_experts, hidden, intermediate, device)
    for expert in range(num_experts):
        generator = _generator(seed, expert)
        for codes in (prepared.w13[expert], prepared.w2[expert]):
            codes.copy_(_random_bytes(generator, codes.numel()).view(codes.shape))
        for scales in (prepared.w13_sf[expert], prepared.w2_sf[expert]):
            words = _random_bytes(generator, scales.numel())
            words.bitwise_and_(_SCALE_MASK).bitwise_or_(_SCALE_BASE)
            scales.view(torch.uint8).copy_(words.view(scales.shape))
    spread = _per_expert_spread(num_experts)
    prepared.w13_scale.copy_(spread * (_FC1_RMS / math.sqrt(hidden) / _RANDOM_RMS))
    prepared.w2_scale.copy_(spread.flip(0) * (_FC2_RMS / math.sqrt(intermediate) / _RANDOM_RMS))
    return prepared, _quant_scales(prepared, seed)


def _quant_scales(prepared: PreparedWeights, seed: int) -> list[Tensor]:
    """Join the weights' scales with activation scales that saturate nowhere.

    The input's comes from sample tokens with a factor of two to spare, which an E4M3 block scale
    has; the intermediate's from the bound 4 * 25 of the activation.
    """
    sample = make_tokens(256, seed, prepared.hidden)
    dx = 2.0 * float(sample.abs().max()) / (E2M1_MAX * E4M3_MAX)
    da = DEFAULT_BETA * DEFAULT_LINEAR_BETA / (E2M1_MAX * E4M3_MAX)
    return prepared.quant_scales(dx, da * _per_expert_spread(prepared.num_experts))


def _per_expert_spread(num_experts: int) -> Tensor:
    """Factors 1 .. 1.375 that differ between neighbouring experts, so that mixed-up ones show."""
    return 1.0 + (torch.arange(num_experts) % 7) / 16.0


def _generator(seed: int, stream: int) -> torch.Generator:
    """One generator per (seed, stream).

    Torch's Mersenne twister takes 32 bits of its seed, so that seeds count modulo 2^20.
    """
    return torch.Generator().manual_seed((seed * _STREAMS + stream) % 2**32)


@cache
def _quantiles() -> Tensor:
    """Tukey h quantiles at the midpoints of 65536 equal parts of (0, 1): bfloat16, variance 1."""
    normal: Tensor = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    values = normal * torch.exp(0.5 * _TUKEY_H * normal.square())
    return (values / values.std()).bfloat16()


def _random_bytes(generator: torch.Generator, count: int) -> Tensor:
    """Uniform random uint8 [count], eight a draw."""
    words = torch.empty((count + 7) // 8, dtype=torch.int64)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:count]


def _heavy_tailed(
    generator: torch.Generator, rows: int, columns: int, outlier_gain: float
) -> Tensor:
    """bfloat16 [rows, columns] of rms about 1 with row gains and outlier columns."""
    # Columns first: the same channels are outliers for any number of rows.
    column_gain = torch.ones(columns, dtype=torch.float32)
    outliers = -(-columns // _OUTLIER_STRIDE)
    column_gain[torch.randperm(columns, generator=generator)[:outliers]] = outlier_gain
    row_gain = (
        torch.randn(rows, 1, generator=generator, dtype=torch.float32).mul_(_ROW_SIGMA).exp_()
    )
    # E[row_gain^2] is exp(2 sigma^2).
    rms = math.exp(_ROW_SIGMA**2) * column_gain.square().mean().sqrt()
    # Random 16-bit words choose quantiles: much faster than any sampling by arithmetic.
    words = _random_bytes(generator, 2 * rows * columns).view(torch.int16)
    values = _quantiles().index_select(0, words.int().add_(32768)).view(rows, columns)
    return values.mul_(row_gain.bfloat16()).mul_((column_gain / rms).bfloat16())


def _softmax_router(
    tokens: Tensor, seed: int, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Top k of softmax(tokens @ projection), whose weights are made to add to 1."""
    hidden = tokens.shape[1]
    projection = torch.randn(
        hidden, num_experts, generator=_generator(seed, _ROUTER), dtype=torch.float32
    )
    logits = tokens.cpu().float() @ projection.div_(math.sqrt(hidden))
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return ids.int(), (weights / weights.sum(-1, keepdim=True)).bfloat16()


def _distinct_choices(
    generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int, *, zipf: bool
) -> Tensor:
    """Draw k distinct experts a token, without replacement by Gumbel top-k; int64 [T, k]."""
    scores = (
        torch.empty(num_tokens, num_experts, dtype=torch.float32)
        .exponential_(generator=generator)
        .log_()
        .neg_()
    )
    if zipf:
        rank = torch.randperm(num_experts, generator=generator) + 1
        scores -= rank.log()
    return scores.topk(top_k, dim=-1).indices
