"""`cake bench` tells how fast the operation is on this machine's GPU, beside what the GPU can do.

In one process: the ceilings (read bandwidth of bulk copies, rate of a matrix product on random data
in the format that the kernels multiply: BF16, on Blackwell NVFP4; cost of a node in a CUDA graph),
then the complete call by graph replay. The batches of a graph rotate, so that weights come from
memory and not from L2. The floor of a call is the larger of its distinct experts' bytes over the
bandwidth and its floating point operations over the matrix rate. On Blackwell the time that
cake.roofline predicts stands beside the measured one. Peers (`--peer`) are timed when all of cake's
times are known and written: whatever becomes of a peer, they stay.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cake import peers, roofline, support, timing
from cake.bench_report import Ceilings, Report, Result, environment
from cake.check import Call, Layer
from cake.peers.measure import add_peer
from cake.testing import synthetic

if TYPE_CHECKING:
    from cake.info import Subparsers

TOKENS = tuple(2**i for i in range(15))
_STREAM_BYTES = 2 << 30
_MATRIX_SIZE = 8192
# Dense operations that the vendor states for NVFP4, over those for BF16: a bound for a torch that
# does not multiply NVFP4.
_NVFP4_PER_BF16 = {(10, 0): 4, (10, 3): 6}


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
        return 2 * _MATRIX_SIZE**3 / timing.replay_us(product) * 1e6

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
    read = timing.replay_us(partial(torch.ops.cake.read_stream, data))
    del data
    matrix_flop_per_s, matrix = _matrix_ceiling(device)
    small = torch.empty(1, dtype=torch.int32, device=device)

    def nodes(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                torch.ops.cake.selftest(small)

        return run

    few, many = (timing.replay_us(nodes(n)) for n in (10, 210))
    return Ceilings(
        read_bytes_per_s=_STREAM_BYTES / read * 1e6,
        matrix_flop_per_s=matrix_flop_per_s,
        graph_node_us=(many - few) / 200,
        matrix=matrix,
    )


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
    plan = roofline.plan_of(calls[0].batch.tokens.shape[0], gpu)
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
    rotation = timing.Rotation.of(num_tokens, device)
    calls = [Call(layer, batch) for batch in rotation.make_batches(routing, device)]

    def run_all() -> None:
        for _ in range(rotation.rounds):
            for call in calls:
                call.run(batch_invariant=batch_invariant)

    spread = rotation.spread(timing.elapsed_us(timing.capture(run_all).replay))
    experts = statistics.mean(len(support.touched_experts(c.batch.topk_ids)) for c in calls)
    floor = ceilings.floor_us(experts, num_tokens)
    return Result(
        tokens=num_tokens,
        routing=routing,
        experts=experts,
        us=spread.us,
        us_low=spread.us_low,
        us_high=spread.us_high,
        floor_us=floor,
        fraction=floor / spread.us,
        gb_per_s=experts * roofline.EXPERT_BYTES / spread.us / 1e3,
        tflop_per_s=num_tokens * support.KIMI_K3.top_k * roofline.PAIR_FLOP / spread.us / 1e6,
        predicted_us=_predicted_us(calls, ceilings, device),
        stages_us=_stages(lambda: calls[0].run(batch_invariant=batch_invariant)) if stages else {},
    )


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
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help=f"time another implementation as well, on the same weights and batches: "
        f"{', '.join(peers.NAMES)}; may be repeated",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `cake bench`; 1 if a peer failed."""
    for tokens in arguments.tokens:
        if not 1 <= tokens <= support.MAX_TOKENS:
            raise ValueError(f"--tokens: expected 1 to {support.MAX_TOKENS}, got {tokens}")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"--json: expected a file in an existing folder, got {arguments.json}")
    for name in arguments.peer:
        peers.require(name)
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
        report = Report(
            ceilings, arguments.batch_invariant, environment(device), path=arguments.json
        )
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
                report.results.append(result)
                report.write()
                print(_line(result), flush=True)
        outcomes = [add_peer(report, name, layer) for name in dict.fromkeys(arguments.peer)]
    return 0 if all(outcomes) else 1
