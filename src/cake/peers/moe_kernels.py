"""Triton kernels around an indexed matrix product: pairs by expert before it, weighted sum after.

A pair is a token and one of its k slots, numbered ``token * k + slot``. Experts outside [0, E) are
empty slots.
"""

# No `from __future__ import annotations`: Triton reads them.

import triton
import triton.language as tl


@triton.jit
def count_pairs(
    ids: tl.tensor,  # int32 [pairs]
    counts: tl.tensor,  # int32 [E], zero before
    ranks: tl.tensor,  # int32 [pairs]
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Count each expert's pairs; the rank of a pair is what the count was before it."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    used = (expert >= 0) & (expert < num_experts)
    rank = tl.atomic_add(counts + expert, 1, mask=used, sem="relaxed")
    tl.store(ranks + pair, rank, mask=used)


@triton.jit
def place_pairs(
    ids: tl.tensor,  # int32 [pairs]
    counts: tl.tensor,  # int32 [E]
    ranks: tl.tensor,  # int32 [pairs]
    sorted_ids: tl.tensor,  # int32: pairs; num_pairs where padded
    expert_ids: tl.tensor,  # int32, of each block
    num_padded: tl.tensor,  # int32 [1]
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,  # BLOCK, rounded up to a power of two
    EXPERTS: tl.constexpr,  # E, rounded up to a power of two
    PAIRS: tl.constexpr,
) -> None:
    """Sort pairs by expert, each expert padded to whole blocks; program p does expert p as well."""
    program = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    count = tl.load(counts + lane, mask=lane < num_experts, other=0)
    blocks = (count + (BLOCK - 1)) // BLOCK

    pair = program * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    used = (expert >= 0) & (expert < num_experts)
    before = tl.sum(tl.where(lane[None, :] < expert[:, None], blocks[None, :], 0), 1)
    rank = tl.load(ranks + pair, mask=used, other=0)
    tl.store(sorted_ids + before * BLOCK + rank, pair, mask=used)

    if program < num_experts:
        first = tl.sum(tl.where(lane < program, blocks, 0))
        end = first + tl.sum(tl.where(lane == program, blocks, 0))
        begin = first
        while begin < end:
            block = begin + tl.arange(0, TAIL)
            tl.store(expert_ids + block, program, mask=block < end)
            begin += TAIL
        filled = first * BLOCK + tl.sum(tl.where(lane == program, count, 0))
        position = filled + tl.arange(0, TAIL)
        tl.store(sorted_ids + position, num_pairs, mask=position < end * BLOCK)
        if program == num_experts - 1:
            tl.store(num_padded, end * BLOCK)


@triton.jit
def combine_pairs(
    rows: tl.tensor,  # bfloat16 [pairs, hidden]
    ids: tl.tensor,  # int32 [T, k]
    weights: tl.tensor,  # bfloat16 [T, k]
    output: tl.tensor,  # bfloat16 [T, hidden]
    counts: tl.tensor,  # int32 [E]
    hidden: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Add up a token's weighted rows in float32; the first program clears the counts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair)
        used = (expert >= 0) & (expert < num_experts)
        row = tl.load(rows + pair * hidden + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair).to(tl.float32)
        total += tl.where(used, weight * row, 0.0)  # the row of an empty slot is undefined
    tl.store(output + token * hidden + column, total.to(tl.bfloat16), mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        lane = tl.arange(0, EXPERTS)
        tl.store(counts + lane, 0, mask=lane < num_experts)
