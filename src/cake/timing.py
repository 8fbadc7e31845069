"""Times of work on a GPU: CUDA graphs of rotating batches, between two events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cake import roofline
from cake.check import Batch, make_batch
from cake.testing import synthetic

_SAMPLES = 15


@dataclass(frozen=True)
class Spread:
    """Microseconds of one call."""

    us: float  # median
    us_low: float  # 10th percentile
    us_high: float  # 90th percentile


@dataclass(frozen=True)
class Rotation:
    """How a graph repeats its batches, so that weights come from memory and not from L2."""

    num_tokens: int
    batches: int
    rounds: int

    @classmethod
    def of(cls, num_tokens: int, device: torch.device) -> Rotation:
        """Choose for a token count: the batches' experts are at least four times what L2 holds."""
        few = 8 if num_tokens <= 16 else 4 if num_tokens <= 512 else 2
        batch_bytes = roofline.expected_experts(num_tokens) * roofline.EXPERT_BYTES
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        batches = max(few, math.ceil(4 * l2_bytes / batch_bytes))
        return cls(num_tokens, batches, max(1, (48 if num_tokens <= 64 else 8) // batches))

    def make_batches(self, routing: synthetic.Routing, device: torch.device) -> list[Batch]:
        """Make the batches, each time the same."""
        seeds = range(self.batches)
        return [make_batch(self.num_tokens, routing, seed).to(device) for seed in seeds]

    def spread(self, times: list[float]) -> Spread:
        """Summarize the times of a graph of these repetitions."""
        calls = sorted(t / (self.rounds * self.batches) for t in times)
        tail = len(calls) // 10
        return Spread(statistics.median(calls), calls[tail], calls[-1 - tail])


def elapsed_us(run: Callable[[], object]) -> list[float]:
    """Times of `run` between two events, microseconds."""
    times = []
    run()
    for _ in range(_SAMPLES):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `run` after one call of it: what loads or allocates at first is not in the graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(run: Callable[[], object]) -> float:
    """Return the median time of a graph of `run`, microseconds."""
    return statistics.median(elapsed_us(capture(run).replay))
