"""`cake bench` tells how fast the operation is on this machine's GPU, beside what the GPU can do.

In one process: the ceilings (read bandwidth of bulk copies, rate of a matrix product on random data
in the format that the kernels multiply: BF16, on Blackwell NVFP4; cost of a node in a CUDA graph),
then the complete call by graph replay. The batches of a graph rotate, so that weights come from
memory and not from L2. The floor of a call is the larger of its distinct experts' bytes over the
bandwidth and its floating point operations over the matrix rate. On Blackwell the time that
cake.roofline predicts stands beside the measured one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cake import info, roofline, support
from cake.check import Call, Layer, make_batch
from cake.testing import synthetic

if TYPE_CHECKING:
    from cake.info import Subparsers

TOKENS = tuple(2**i for i in range(15))
_STREAM_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_SAMPLES = 15
# Dense operations that the vendor states for NVFP4, over those for BF16: a bound for a torch that
# does not multiply NVFP4.
_NVFP4_PER_BF16 = {(10, 0): 4, (10, 3): 6}


@dataclass(frozen=True)
class Ceilings:
    """What this GPU can do, measured."""

    read_bytes_per_s: float
    matrix_flop_per_s: float
    graph_node_us: float
    matrix: str = "BF16"  # what was multiplied for the matrix rate

    def floor_us(self, experts: float, num_tokens: int) -> float:
        """Return the floor of a call that touches so many distinct experts."""
        return roofline.floor_us(experts, num_tokens, self.read_bytes_per_s, self.matrix_flop_per_s)


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
    predicted_us: float | None = None  # by cake.roofline, where it knows the GPU
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


def _bf16_product(device: torch.device) -> Callable[[], object]:
    size = (_MATRIX_SIZE, _MATRIX_SIZE)
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _nvfp4_product(device: torch.device) -> Callable[[], object]:
    """Return a product of E2M1 codes with an E4M3 scale for 16 of them, BF16 result."""
    functional = torch.nn.functional
    group, order = functional.ScalingType.BlockWise1x16, functional.SwizzleType.SWIZZLE_32_4_4

    def random_bytes(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=device)

    a, b = (
        random_bytes(0, 256, _MATRIX_SIZE, _MATRIX_SIZE // 2).view(torch.float4_e2m1fn_x2)
        for _ in range(2)
    )
    sf = random_bytes(0x30, 0x40, _MATRIX_SIZE * _MATRIX_SIZE // 16).view(torch.float8_e4m3fn)
    return partial(functional.scaled_mm, a, b.t(), sf, group, sf, group, order, order)


def _matrix_ceiling(device: torch.device) -> tuple[float, str]:
    """Measure the matrix rate, flop per second; returns it and what was multiplied."""

    def rate(product: Callable[[], object]) -> float:
        elapsed = statistics.median(_elapsed_us(_graph(product).replay))
        return 2 * _MATRIX_SIZE**3 / elapsed * 1e6

    factor = _NVFP4_PER_BF16.get(torch.cuda.get_device_capability(device))
    if factor is None:
        return rate(_bf16_product(device)), "BF16"
    try:
        return rate(_nvfp4_product(device)), "NVFP4"
    except (AttributeError, RuntimeError, ValueError):  # not in this torch, or not on this GPU
        return factor * rate(_bf16_product(device)), f"{factor} x BF16, for want of NVFP4 in torch"


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure read bandwidth, matrix rate and graph node cost of `device`, a CUDA device."""
    data = torch.randint(0, 255, (_STREAM_BYTES,), dtype=torch.uint8, device=device)
    read_stream = partial(torch.ops.cake.read_stream, data)
    read = statistics.median(_elapsed_us(_graph(read_stream).replay))
    del data, read_stream
    matrix_flop_per_s, matrix = _matrix_ceiling(device)
    small = torch.empty(1, dtype=torch.int32, device=device)

    def nodes(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                torch.ops.cake.selftest(small)

        return run

    few, many = (statistics.median(_elapsed_us(_graph(nodes(n)).replay)) for n in (10, 210))
    return Ceilings(
        read_bytes_per_s=_STREAM_BYTES / read * 1e6,
        matrix_flop_per_s=matrix_flop_per_s,
        graph_node_us=(many - few) / 200,
        matrix=matrix,
    )


def _num_batches(num_tokens: int, l2_bytes: int) -> int:
    """Return how many batches rotate: their experts are at least four times what L2 holds."""
    few = 8 if num_tokens <= 16 else 4 if num_tokens <= 512 else 2
    batch_bytes = roofline.expected_experts(num_tokens) * roofline.EXPERT_BYTES
    return max(few, math.ceil(4 * l2_bytes / batch_bytes))


def _predicted_us(calls: Sequence[Call], ceilings: Ceilings, device: torch.device) -> float | None:
    """Return the predicted time of a call, mean over the batches; None where there is none."""
    if not roofline.predicts(torch.cuda.get_device_capability(device)):
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = roofline.Gpu(
        properties.multi_processor_count,
        ceilings.read_bytes_per_s,
        ceilings.graph_node_us,
        properties.L2_cache_size,
    )
    plan = roofline.plan_of(calls[0].batch.tokens.shape[0])
    loads = [roofline.load_of(call.batch.topk_ids, plan) for call in calls]
    return statistics.mean(roofline.predict(load, plan, gpu).us for load in loads)


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
    batches = _num_batches(num_tokens, torch.cuda.get_device_properties(device).L2_cache_size)
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
        gb_per_s=experts * roofline.EXPERT_BYTES / median / 1e3,
        tflop_per_s=num_tokens * support.KIMI_K3.top_k * roofline.PAIR_FLOP / median / 1e6,
        predicted_us=_predicted_us(calls, ceilings, device),
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


def _line(result: Result) -> str:
    spread = (result.us_high - result.us_low) / result.us
    predicted = "" if result.predicted_us is None else f"{result.predicted_us:>11.1f}"
    return (
        f"{result.tokens:>6} {result.routing:<10}{result.experts:>8.1f}{result.us:>10.1f}"
        f"{spread:>8.1%}{result.floor_us:>9.1f}{predicted}  {result.fraction:.2f} of the floor, "
        f"{result.gb_per_s:.0f} GB/s, {result.tflop_per_s:.0f} TFLOP/s"
    )


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
            f"TB/s, multiplies {ceilings.matrix_flop_per_s / 1e12:.0f} TFLOP/s "
            f"({ceilings.matrix}), a graph node takes {ceilings.graph_node_us:.2f} us"
        )
        layer = Layer(*synthetic.fill_random_prepared(0)).to(device)
        predicts = roofline.predicts(torch.cuda.get_device_capability(device))
        print(
            f"{'tokens':>6} {'routing':<10}{'experts':>8}{'us':>10}{'spread':>8}{'floor':>9}"
            + (f"{'predicted':>11}" if predicts else "")
        )
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
                print(_line(result), flush=True)
    if arguments.json is not None:
        text = json.dumps(report(device, ceilings, results, arguments.batch_invariant), indent=1)
        arguments.json.write_text(text + "\n")
    return 0
