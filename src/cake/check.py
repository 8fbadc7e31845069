"""`cake check` tells whether the operation is right on this machine's GPU.

Every stage and the output are compared with the exact CPU path on the same prepared weights, over
token counts and routings; repeats and graph replays must give the same bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cake import api, info, support
from cake.config import ActivationType
from cake.testing import numeric, synthetic

if TYPE_CHECKING:
    from cake.info import Subparsers
    from cake.prepared_weights import PreparedWeights

TOKENS = (1, 2, 3, 8, 16, 33, 64, 127, 128, 129, 256, 305, 512, 1024, 1025, 2049)
ROUTINGS: tuple[synthetic.Routing, ...] = synthetic.ROUTINGS
_ROUTING_TOKENS = 40
_REPEATS = 10
_CHUNK_TOKENS = 8192  # a call of more tokens goes through the workspace in chunks


@dataclass(frozen=True, slots=True)
class Layer:
    """Prepared weights and the six scales on one device."""

    weights: PreparedWeights
    quant_scales: list[Tensor]

    def to(self, device: torch.device) -> Layer:
        """Return a copy on `device`."""
        weights = type(self.weights)(**{n: t.to(device) for n, t in self.weights.tensors().items()})
        scales = [t.to(device) for t in self.quant_scales]
        scales[1], scales[4] = weights.w13_sf, weights.w2_sf
        return Layer(weights, scales)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and their routing on one device."""

    tokens: Tensor  # bf16 [T, H]
    topk_ids: Tensor  # int32 [T, k]
    topk_weights: Tensor  # bf16 [T, k]

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`."""
        return Batch(self.tokens.to(device), self.topk_ids.to(device), self.topk_weights.to(device))


class Call:
    """One prepared call: workspace and output are poisoned, then it runs as often as asked."""

    def __init__(self, layer: Layer, batch: Batch) -> None:
        self.layer, self.batch = layer, batch
        num_tokens, device = batch.tokens.shape[0], batch.tokens.device
        nbytes = torch.ops.cake.workspace_size(num_tokens)
        self.workspace = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
        self.output = torch.full_like(batch.tokens, float("nan"))
        api.cake_fused_moe_prepare_workspace(self.workspace, num_tokens)

    def run(self, **options: Any) -> Tensor:
        """Submit the call, with more options of `cutlass_fused_moe`; returns the output tensor."""
        return api.cutlass_fused_moe(
            self.batch.tokens,
            self.batch.topk_ids,
            self.batch.topk_weights,
            self.layer.weights.w13,
            self.layer.weights.w2,
            torch.bfloat16,
            self.layer.quant_scales,
            activation_type=ActivationType.Situ,
            tp_size=support.TP_SIZE,
            workspace_buffer=self.workspace,
            output=self.output,
            **options,
        )

    def region(self, name: str) -> Tensor:
        """Return a copy of the bytes of a workspace region, on the CPU."""
        return self.region_view(name).cpu()

    def region_view(self, name: str) -> Tensor:
        """Return the bytes of a workspace region where they lie."""
        table = json.loads(torch.ops.cake.workspace_table(self.batch.tokens.shape[0]))
        entry = next(row for row in table if row["region"] == name)
        return self.workspace[entry["offset"] : entry["offset"] + entry["bytes"]]


def make_batch(num_tokens: int, routing: synthetic.Routing, seed: int) -> Batch:
    """Make a batch on the CPU."""
    tokens = synthetic.make_tokens(num_tokens, seed)
    return Batch(tokens, *synthetic.route(num_tokens, seed, kind=routing, tokens=tokens))


def _intermediate(call: Call, name: str, pairs: Tensor) -> Tensor:
    """Return FC1's rows in a region, in the order of `expert_pairs`, as the kernels place them."""
    rows = call.region(name).view(call.batch.topk_ids.numel(), -1)
    plan = info.device_plan(call.batch.tokens.device, call.batch.tokens.shape[0])
    if plan is not None and plan["kernels"] == "sm100":
        return rows[: pairs.numel()]  # there already
    return rows[pairs.long()]


def compare_stages(actual: Call, expected: Call) -> None:
    """Compare the stages of a GPU call with those of the same call on the CPU.

    Raises
    ------
    AssertionError
        Names the stage and the figure that is outside its gate.
    """
    num_tokens = expected.batch.tokens.shape[0]
    if num_tokens > _CHUNK_TOKENS:
        return  # the workspace holds the last chunk alone
    context = f"T={num_tokens}"
    for name in ("input_packed", "input_sf"):
        difference = numeric.bitwise_difference(actual.region(name), expected.region(name))
        assert difference is None, f"{context}: {name}: {difference}"
    used = ((expected.batch.topk_ids >= 0) & (expected.batch.topk_ids < 896)).flatten()
    pairs = expected.region("expert_pairs").view(torch.int32)[: int(used.sum())]
    got = actual.region("expert_pairs").view(torch.int32)[: int(used.sum())]
    assert torch.equal(got, pairs), f"{context}: expert_pairs differ"

    if not bool(used.any()):
        return
    codes = numeric.compare_codes(
        _intermediate(actual, "fc1_packed", pairs),
        _intermediate(actual, "fc1_sf", pairs),
        _intermediate(expected, "fc1_packed", pairs),
        _intermediate(expected, "fc1_sf", pairs),
    )
    assert codes.scales_equal >= 0.99 and codes.max_scale_step <= 1, f"{context}: {codes}"
    assert codes.codes_equal >= 0.998, f"{context}: {codes}"


def check_case(
    cpu: Layer, gpu: Layer, num_tokens: int, routing: synthetic.Routing, seed: int
) -> numeric.OutputComparison:
    """Check one token count and routing; returns how the outputs compare.

    Raises
    ------
    AssertionError
        A stage, the output or a repeat is wrong.
    """
    device = gpu.weights.device
    batch = make_batch(num_tokens, routing, seed)
    expected = Call(cpu, batch)
    expected_output = expected.run()
    actual = Call(gpu, batch.to(device))
    first = actual.run().clone()
    torch.cuda.synchronize(device)
    compare_stages(actual, expected)
    numeric.check_outputs(
        first.cpu(),
        expected_output,
        context=f"T={num_tokens} {routing}",
        # Among millions of values a few pass atol 1, rtol 0.1 by rounding of the activation alone.
        max_outliers=0.0 if num_tokens <= 64 else 1e-3,
    )
    for _ in range(_REPEATS):
        actual.output.fill_(float("nan"))
        difference = numeric.bitwise_difference(actual.run(), first)
        assert difference is None, f"T={num_tokens} {routing}: a repeat differs: {difference}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual.run()
    actual.output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    difference = numeric.bitwise_difference(actual.output, first)
    assert difference is None, f"T={num_tokens} {routing}: a graph replay differs: {difference}"
    return numeric.compare_outputs(first.cpu(), expected_output)


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake check`."""
    parser = commands.add_parser("check", help="compare this machine's GPU with the exact CPU path")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="T",
        help="default: 16 counts up to 2048",
    )
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, help="default: all")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--device", help="default: cuda; with --replay the best that runs here")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="run a bundle of CAKE_LOG=dump, compare with its output and with the CPU path; "
        "exit status 0: equal, 1: different, 2: cannot be replayed",
    )
    parser.set_defaults(run=run)


def _cases(
    tokens: Sequence[int], routings: Sequence[synthetic.Routing]
) -> list[tuple[int, synthetic.Routing]]:
    """Every token count with random routing, and every routing with one token count."""
    return [(t, "random") for t in tokens] + [(_ROUTING_TOKENS, r) for r in routings]


def run(arguments: argparse.Namespace) -> int:
    """Run `cake check`."""
    if arguments.replay is not None:
        from cake import replay

        return replay.run(arguments)
    device = support.require_gpu("--device", arguments.device or "cuda")
    seed = arguments.seed or 0
    cpu = Layer(*synthetic.fill_random_prepared(seed))
    gpu = cpu.to(device)
    failures = 0
    print(f"{'tokens':>7} {'routing':<12}{'rel. rms':>10}{'worst row':>11}{'s':>7}")
    for num_tokens, routing in _cases(arguments.tokens or TOKENS, arguments.routing or ROUTINGS):
        start = time.perf_counter()
        try:
            result = check_case(cpu, gpu, num_tokens, routing, seed)
        except AssertionError as error:
            failures += 1
            print(f"{num_tokens:>7} {routing:<12} FAILED: {error}")
            continue
        print(
            f"{num_tokens:>7} {routing:<12}{result.relative_rms:>10.1e}"
            f"{result.worst_row_error:>11.1e}{time.perf_counter() - start:>7.1f}"
        )
    print("all right" if failures == 0 else f"{failures} cases failed")
    return 0 if failures == 0 else 1
