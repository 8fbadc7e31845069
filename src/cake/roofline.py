"""What a call must move and multiply, the floor that follows, and a prediction for Blackwell.

The prediction is arithmetic, never a measurement: bytes and cycles of each stage as its kernel on
sm_100a and sm_103a moves and spends them, over rates that are measured on the GPU at hand (reads
of memory, a node of a CUDA graph) or assumed. docs/blackwell.md derives every constant below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cake import info, support

FC1_EXPERT_BYTES = 1_548_288  # packed codes and block scales
FC2_EXPERT_BYTES = 774_144
EXPERT_BYTES = FC1_EXPERT_BYTES + FC2_EXPERT_BYTES
PAIR_FLOP = 8_257_536  # of one (token, expert) pair

_EXPERTS, _TOP_K = support.KIMI_K3.num_experts, support.KIMI_K3.top_k
_INPUT_BYTES = 7168  # a token in BF16; also a pair's row of FC2's result
_TOKEN_BYTES = 2016  # quantized: codes and scales
_FEATURE_BYTES = 216  # a pair's intermediate, quantized
_FC1_ITEMS, _FC1_STAGES = 6, 14  # items of a tile (128 rows each), stages of an item
_FC2_BLOCKS = 28  # blocks of an expert (128 rows each)

# Assumed, or measured with other kernels on an H200.
_CLOCK_HZ = 1.9e9
_SM_BYTES_PER_S = 64 * _CLOCK_HZ  # one SM alone, from L2 or memory
_L2_BYTES_PER_S_SM = 70e9  # when all SMs read: an H200's 64 GB/s, by the clock
_SHARED_BYTES_PER_CYCLE = 128
_FC1_READ, _FC2_READ, _FINALIZE_READ = 0.85, 0.90, 0.70  # of the bandwidth of whole rows
_ROUTE_US, _ROUTE_TOKEN_US = 8.0, 40 / 8192
_MATRIX_US, _FINALIZE_US = 2.0, 1.0  # from a launch to full speed, and from there to the end


def floor_us(
    experts: float, num_tokens: int, read_bytes_per_s: float, matrix_flop_per_s: float
) -> float:
    """Return the floor of a call that touches so many distinct experts."""
    memory = experts * EXPERT_BYTES / read_bytes_per_s
    matrix = num_tokens * _TOP_K * PAIR_FLOP / matrix_flop_per_s
    return max(memory, matrix) * 1e6


def expected_experts(num_tokens: int) -> float:
    """Return the mean number of distinct experts of uniform random routing."""
    return float(_EXPERTS * (1 - (1 - _TOP_K / _EXPERTS) ** num_tokens))


def predicts(capability: tuple[int, int]) -> bool:
    """Tell whether `predict` knows GPUs of this compute capability."""
    return capability in ((10, 0), (10, 3))


def plan_of(num_tokens: int, gpu: Gpu) -> dict[str, Any]:
    """Return how such a GPU runs a call of at least one token, as `cake.info.gpu_plan`."""
    plan = info.gpu_plan(num_tokens, 10, gpu.num_sms)
    assert plan is not None, num_tokens
    return plan


@dataclass(frozen=True, slots=True)
class Load:
    """What a call has to do; the sizes are those of one chunk, means over the chunks."""

    chunks: int
    tokens: float
    experts: float  # distinct
    tiles: float  # runs of up to plan["tile_pairs"] pairs of one expert

    @property
    def pairs(self) -> float:
        """(token, slot) pairs."""
        return self.tokens * _TOP_K


def expected_load(num_tokens: int, plan: Mapping[str, Any]) -> Load:
    """Return the mean load of uniform random routing; `plan` comes from `plan_of`."""
    chunks = math.ceil(num_tokens / plan["tokens_per_chunk"])
    tokens = min(num_tokens, plan["tokens_per_chunk"])
    p = _TOP_K / _EXPERTS
    probability = (1 - p) ** tokens  # that an expert has `count` pairs
    tiles = 0.0
    for count in range(1, tokens + 1):
        probability *= (tokens - count + 1) / count * p / (1 - p)
        tiles += probability * math.ceil(count / plan["tile_pairs"])
    return Load(chunks, num_tokens / chunks, expected_experts(tokens), _EXPERTS * tiles)


def load_of(topk_ids: Tensor, plan: Mapping[str, Any]) -> Load:
    """Return the load of a routing, int [T, k]."""
    chunks = topk_ids.cpu().long().split(plan["tokens_per_chunk"])
    experts = tiles = 0
    for ids in chunks:
        counts = ids[(ids >= 0) & (ids < _EXPERTS)].bincount(minlength=_EXPERTS)
        experts += int((counts > 0).sum())
        tiles += int(((counts + plan["tile_pairs"] - 1) // plan["tile_pairs"]).sum())
    n = len(chunks)
    return Load(n, topk_ids.shape[0] / n, experts / n, tiles / n)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the prediction needs to know of a GPU of compute capability 10.0 or 10.3."""

    num_sms: int
    read_bytes_per_s: float  # of memory, whole rows
    graph_node_us: float
    l2_bytes: float = 126e6


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a stage moves."""

    memory: float
    l2: float  # between SMs and L2, both ways
    shared: float = 0.0  # through the ports of shared memory


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of one chunk; of FC2 and finalize all their parts together."""

    us: float
    limiter: str
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds of a call, predicted."""

    chunks: int
    route: Stage
    fc1: Stage
    fc2: Stage
    finalize: Stage

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order in which they run."""
        return self.route, self.fc1, self.fc2, self.finalize

    @property
    def us(self) -> float:
        """Of the complete call."""
        return self.chunks * sum(stage.us for stage in self.stages)


def _stage(fixed_us: float, seconds: Mapping[str, float], traffic: Traffic) -> Stage:
    """What takes longest, after the fixed part; limiter "latency" when that is the larger."""
    limiter = max(seconds, key=lambda name: seconds[name])
    us = seconds[limiter] * 1e6
    return Stage(fixed_us + us, limiter if us > fixed_us else "latency", traffic)


def _route(load: Load, gpu: Gpu) -> Stage:
    traffic = Traffic(load.tokens * _INPUT_BYTES, load.tokens * (_INPUT_BYTES + _TOKEN_BYTES))
    seconds = {"instructions": load.tokens * _ROUTE_TOKEN_US * 1e-6}
    return _stage(gpu.graph_node_us + _ROUTE_US, seconds, traffic)


def _fc1(load: Load, gpu: Gpu) -> Stage:
    items = load.tiles * _FC1_ITEMS
    columns = max(8.0, load.pairs / load.tiles + 3.5)  # rounded up to 8
    traffic = Traffic(
        memory=load.experts * FC1_EXPERT_BYTES,
        l2=load.tiles * FC1_EXPERT_BYTES
        + load.pairs * (_FC1_ITEMS * _TOKEN_BYTES + _FEATURE_BYTES),
        # In: 128 rows and their scales, scales of tokens; read once each. And the token rows.
        shared=items * _FC1_STAGES * (2 * (16384 + 2048 + 2048) + 2 * 128 * columns),
    )
    read = _FC1_READ * gpu.read_bytes_per_s
    # The last round has fewer items than SMs: each then has more of the bandwidth, up to a limit.
    rounds, rest = divmod(items, gpu.num_sms)
    item_bytes = FC1_EXPERT_BYTES / _FC1_ITEMS
    last = item_bytes / min(_SM_BYTES_PER_S, read / rest) if rest > 0 else 0.0
    whole_rounds = rounds * gpu.num_sms / items * traffic.memory / read
    seconds = {"memory": whole_rounds + last, **_on_chip(traffic, gpu)}
    return _stage(gpu.graph_node_us + _MATRIX_US, seconds, traffic)


def _on_chip(traffic: Traffic, gpu: Gpu) -> dict[str, float]:
    shared = gpu.num_sms * _SHARED_BYTES_PER_CYCLE * _CLOCK_HZ
    return {
        "L2": traffic.l2 / (gpu.num_sms * _L2_BYTES_PER_S_SM),
        "shared memory": traffic.shared / shared,
    }


def _spilled(part_bytes: float, l2_bytes: float) -> float:
    """Fraction of FC2's rows that goes to memory: none up to half of L2, all beyond L2."""
    return min(1.0, max(0.0, 2 * part_bytes / l2_bytes - 1))


def _fc2(load: Load, parts: int, spilled: float, gpu: Gpu) -> Stage:
    rows = load.pairs * _INPUT_BYTES
    columns = max(8.0, load.pairs / load.tiles + 7.5)  # rounded up to 16 where tiles are large
    traffic = Traffic(
        memory=load.experts * FC2_EXPERT_BYTES + spilled * rows,
        l2=load.tiles * FC2_EXPERT_BYTES + load.pairs * _FEATURE_BYTES * parts + rows,
        # In: 128 rows of 256 bytes, half of the second 128 zeros, and scales; read: 192 of those
        # bytes, both scales, the tokens once an instruction.
        shared=load.tiles * _FC2_BLOCKS * (32768 + 3072 + 24576 + 2 * 3072 + 6 * 32 * columns),
    )
    seconds = {
        "memory": traffic.memory / (_FC2_READ * gpu.read_bytes_per_s),
        **_on_chip(traffic, gpu),
    }
    return _stage(parts * (gpu.graph_node_us + _MATRIX_US), seconds, traffic)


def _finalize(load: Load, parts: int, spilled: float, gpu: Gpu) -> Stage:
    rows = load.pairs * _INPUT_BYTES
    traffic = Traffic(spilled * rows, rows + load.tokens * _INPUT_BYTES)
    seconds = {
        "memory": traffic.memory / (_FINALIZE_READ * gpu.read_bytes_per_s),
        "L2": traffic.l2 / (_FINALIZE_READ * gpu.num_sms * _L2_BYTES_PER_S_SM),
    }
    return _stage(parts * (gpu.graph_node_us + _FINALIZE_US), seconds, traffic)


def predict(load: Load, plan: Mapping[str, Any], gpu: Gpu) -> Prediction:
    """Predict a call on sm_100a or sm_103a."""
    parts = plan["fc2_parts"]
    spilled = _spilled(load.pairs * _INPUT_BYTES / parts, gpu.l2_bytes)
    return Prediction(
        load.chunks,
        _route(load, gpu),
        _fc1(load, gpu),
        _fc2(load, parts, spilled, gpu),
        _finalize(load, parts, spilled, gpu),
    )
