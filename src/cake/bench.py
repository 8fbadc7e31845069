"""`cake bench` tells how fast the operation is on this machine's GPU, beside what the GPU can do.

In one process: the ceilings (read bandwidth of bulk copies, rate of a BF16 matrix product on
random data, cost of a node in a CUDA graph), then the complete call by graph replay. The batches of
a graph rotate, so that weights come from memory and not from L2. The floor of a call is the larger
of its distinct experts' bytes over the bandwidth and its floating point operations over the matrix
rate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from cake import info, support
from cake.check import Call, Layer, make_batch
from cake.testing import synthetic

if TYPE_CHECKING:
    from cake.info import Subparsers

TOKENS = tuple(2**i for i in range(15))
EXPERT_BYTES = 2_322_432  # packed codes and block scales of FC1 and FC2
PAIR_FLOP = 8_257_536  # of one (token, expert) pair
_STREAM_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_SAMPLES = 15


@dataclass(frozen=True)
class Ceilings:
    """What this GPU can do, measured."""

    read_bytes_per_s: float
    matrix_flop_per_s: float
    graph_node_us: float

    def floor_us(self, experts: float, num_tokens: int) -> float:
        """Return the floor of a call that touches so many distinct experts."""
        memory = experts * EXPERT_BYTES / self.read_bytes_per_s
        matrix = num_tokens * support.KIMI_K3.top_k * PAIR_FLOP / self.matrix_flop_per_s
        return max(memory, matrix) * 1e6


@dataclass(frozen=True)
class Result:
    """Times of one token count and routing, microseconds per call."""

    tokens: int
    routing: str
    experts: float  # distinct, mean over the batches
    us: float  # median
    us_low: float  # 10th percentile
    us_high: float  # 90th percentile
    floor_us: float
    fraction: float  # floor / median
    gb_per_s: float  # distinct experts' bytes over the time
    tflop_per_s: float
    stages_us: dict[str, float] = field(default_factory=dict)  # they overlap


def _elapsed_us(run: Callable[[], object], samples: int = _SAMPLES) -> list[float]:
    """Times of `run` between two events, microseconds."""
    times = []
    run()
    for _ in range(samples):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def _graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()  # what is loaded or allocated at first must not be in the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure read bandwidth, matrix rate and graph node cost of `device`, a CUDA device."""
    data = torch.randint(0, 255, (_STREAM_BYTES,), dtype=torch.uint8, device=device)
    read_stream = partial(torch.ops.cake.read_stream, data)
    read = statistics.median(_elapsed_us(_graph(read_stream).replay))
    del data, read_stream
    a, b = (
        torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    c = torch.empty_like(a)
    matrix = statistics.median(_elapsed_us(_graph(partial(torch.mm, a, b, out=c)).replay))
    small = torch.empty(1, dtype=torch.int32, device=device)

    def nodes(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                torch.ops.cake.selftest(small)

        return run

    few, many = (statistics.median(_elapsed_us(_graph(nodes(n)).replay)) for n in (10, 210))
    return Ceilings(
        read_bytes_per_s=_STREAM_BYTES / read * 1e6,
        matrix_flop_per_s=2 * _MATRIX_SIZE**3 / matrix * 1e6,
        graph_node_us=(many - few) / 200,
    )


def _stages(call: Callable[[], object]) -> dict[str, float]:
    """Time of each kernel by the profiler, microseconds per call."""
    repeats = 4
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if "cake_" in event.key:
            name = "cake_" + event.key.split("cake_", 1)[1].split("(")[0].split("<")[0]
            times[name] = times.get(name, 0.0) + event.device_time_total / repeats
    return times


def measure(
    layer: Layer,
    num_tokens: int,
    routing: synthetic.Routing,
    ceilings: Ceilings,
    *,
    stages: bool = True,
    batch_invariant: bool = False,
) -> Result:
    """Time the complete call by graph replay; see the module's docstring."""
    device = layer.weights.device
    batches = 8 if num_tokens <= 16 else 4 if num_tokens <= 512 else 2
    calls = [
        Call(layer, make_batch(num_tokens, routing, seed).to(device)) for seed in range(batches)
    ]
    rounds = max(1, (48 if num_tokens <= 64 else 8) // batches)

    def run_all() -> None:
        for _ in range(rounds):
            for call in calls:
                call.run(batch_invariant=batch_invariant)

    times = sorted(t / (rounds * batches) for t in _elapsed_us(_graph(run_all).replay))
    experts = statistics.mean(
        int(
            ((i := call.batch.topk_ids)[(i >= 0) & (i < support.KIMI_K3.num_experts)])
            .unique()
            .numel()
        )
        for call in calls
    )
    median = statistics.median(times)
    floor = ceilings.floor_us(experts, num_tokens)
    return Result(
        tokens=num_tokens,
        routing=routing,
        experts=experts,
        us=median,
        us_low=times[len(times) // 10],
        us_high=times[-1 - len(times) // 10],
        floor_us=floor,
        fraction=floor / median,
        gb_per_s=experts * EXPERT_BYTES / median / 1e3,
        tflop_per_s=num_tokens * support.KIMI_K3.top_k * PAIR_FLOP / median / 1e6,
        stages_us=_stages(lambda: calls[0].run(batch_invariant=batch_invariant)) if stages else {},
    )


def report(
    device: torch.device, ceilings: Ceilings, results: Sequence[Result], batch_invariant: bool
) -> dict[str, Any]:
    """Return what `--json` writes: environment, ceilings, results."""
    facts = info.collect()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device),
        "cake": facts["cake"],
        "torch": facts["torch"],
        "driver": facts["driver"],
        "python": facts["python"],
        "batch_invariant": batch_invariant,
        "ceilings": asdict(ceilings),
        "results": [asdict(result) for result in results],
    }


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake bench`."""
    parser = commands.add_parser("bench", help="time the operation on this machine's GPU")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=TOKENS,
        metavar="T",
        help="default: the powers of two from 1 to 16384",
    )
    parser.add_argument(
        "--routing", nargs="+", default=("random",), choices=synthetic.ROUTINGS, metavar="KIND"
    )
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--no-stages", action="store_true", help="leave out the times of kernels")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="one arithmetic at every token count"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `cake bench`."""
    for tokens in arguments.tokens:
        if not 1 <= tokens <= support.MAX_TOKENS:
            raise ValueError(f"--tokens: expected 1 to {support.MAX_TOKENS}, got {tokens}")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"--json: expected a file in an existing folder, got {arguments.json}")
    device = support.require_gpu("--device", arguments.device)
    with torch.cuda.device(device):
        ceilings = measure_ceilings(device)
        print(
            f"{torch.cuda.get_device_name(device)}: reads {ceilings.read_bytes_per_s / 1e12:.3f} "
            f"TB/s, multiplies {ceilings.matrix_flop_per_s / 1e12:.0f} TFLOP/s (BF16), a graph "
            f"node takes {ceilings.graph_node_us:.2f} us"
        )
        layer = Layer(*synthetic.fill_random_prepared(0)).to(device)
        print(f"{'tokens':>6} {'routing':<10}{'experts':>8}{'us':>10}{'spread':>8}{'floor':>9}")
        results = []
        for routing in arguments.routing:
            for tokens in arguments.tokens:
                result = measure(
                    layer,
                    tokens,
                    routing,
                    ceilings,
                    stages=not arguments.no_stages,
                    batch_invariant=arguments.batch_invariant,
                )
                results.append(result)
                spread = (result.us_high - result.us_low) / result.us
                print(
                    f"{tokens:>6} {routing:<10}{result.experts:>8.1f}{result.us:>10.1f}"
                    f"{spread:>8.1%}{result.floor_us:>9.1f}  {result.fraction:.2f} of the floor, "
                    f"{result.gb_per_s:.0f} GB/s, {result.tflop_per_s:.0f} TFLOP/s",
                    flush=True,
                )
    if arguments.json is not None:
        text = json.dumps(report(device, ceilings, results, arguments.batch_invariant), indent=1)
        arguments.json.write_text(text + "\n")
    return 0
