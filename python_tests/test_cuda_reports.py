"""What a server relies on, call by call: every token count, graphs, old memory, repeats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import layer_calls
import pytest
import torch
from layer_calls import GPU, NEEDS_GPU, E, H, K, assert_same_bits
from test_compile import BACKENDS
from torch import Tensor

import cake
from cake.check import Batch, Call, Layer, make_batch
from cake.testing import synthetic
from cake.testing.numeric import check_outputs

SWEEP = 160
MANY = (2047, 2048, 3000, 4095, 4096, 4097, 8191, 8192, 8193, 12289, 16383, 16384)
# Of the elements; the bound of a row's error is what finds a wrong row (check_outputs).
MAX_OUTLIERS = 1e-3


def rows_of(batch: Batch, rows: slice | Tensor) -> Batch:
    return Batch(batch.tokens[rows], batch.topk_ids[rows], batch.topk_weights[rows])


def assert_complete(output: Tensor) -> None:
    assert output.isfinite().all()
    assert output.any(dim=1).all()


# ---- Token counts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(cpu_layer: Layer) -> tuple[Batch, Tensor]:
    """Tokens, and their output on the CPU path, where a row is the same in every batch."""
    batch = make_batch(SWEEP, "random", 21)
    return batch, Call(cpu_layer, batch).run()


@NEEDS_GPU
@pytest.mark.parametrize("tokens", range(1, SWEEP + 1))
def test_every_small_token_count(
    gpu_layer: Layer, sweep: tuple[Batch, Tensor], tokens: int
) -> None:
    batch, expected = sweep
    output = Call(gpu_layer, rows_of(batch, slice(tokens)).to(GPU)).run()
    assert_complete(output)
    check_outputs(output.cpu(), expected[:tokens], context=f"T={tokens}", max_outliers=MAX_OUTLIERS)


@NEEDS_GPU
@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize("tokens", MANY)
def test_many_tokens(
    cpu_layer: Layer, gpu_layer: Layer, tokens: int, routing: synthetic.Routing
) -> None:
    batch = make_batch(tokens, routing, tokens)
    output = Call(gpu_layer, batch.to(GPU)).run()
    assert_complete(output)
    rows = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))[:24]
    check_outputs(
        output[rows.to(GPU)].cpu(),
        Call(cpu_layer, rows_of(batch, rows)).run(),
        context=f"T={tokens} {routing}, rows {rows.tolist()}",
        max_outliers=MAX_OUTLIERS,
    )


# Among them counts that fit once they are cut to 32 bits.
@pytest.mark.parametrize("count", [16385, -1, 2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_operators_refuse_other_token_counts(device: str, count: int) -> None:
    workspace = torch.full((layer_calls.workspace_size(1),), 0xFF, dtype=torch.uint8, device=device)
    operators: tuple[Callable[[], Any], ...] = (
        lambda: torch.ops.cake.workspace_size(count),
        lambda: torch.ops.cake.workspace_table(count),
        lambda: torch.ops.cake.plan(count),
        lambda: torch.ops.cake.prepare_workspace(workspace, [count]),
    )
    for operator in operators:
        with pytest.raises(RuntimeError, match=rf"num_tokens: expected [01] to 16384, got {count}"):
            operator()
    assert (workspace == 0xFF).all()


@pytest.mark.parametrize("name", ["cpu_layer", pytest.param("gpu_layer", marks=NEEDS_GPU)])
def test_a_call_of_16385_tokens_is_refused(request: pytest.FixtureRequest, name: str) -> None:
    layer: Layer = request.getfixturevalue(name)
    call = Call(layer, make_batch(1, "random", 22).to(layer.weights.device))
    one = call.batch
    # Everything but the workspace suits 16385 tokens; the workspace is of the largest size.
    call.batch = Batch(
        one.tokens.expand(16385, H),
        one.topk_ids.expand(16385, K).contiguous(),
        one.topk_weights.expand(16385, K).contiguous(),
    )
    call.output = one.tokens.new_full((16385, H), 777.0)
    call.workspace = call.workspace.new_empty(layer_calls.workspace_size(16384))
    cake.cake_fused_moe_prepare_workspace(call.workspace, 16384)
    with pytest.raises(ValueError, match=r"input: .* T from 0 to 16384, got \[16385, 3584\]"):
        call.run()
    assert (call.output == 777.0).all()


# ---- Graphs and compilation ---------------------------------------------------------------------

FIRST_SUBMISSION_IN_A_CAPTURE = """
import sys

import torch

from cake.check import Call, Layer, make_batch
from cake.testing import synthetic


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


tokens, gpu = int(sys.argv[1]), torch.device("cuda")
layer = Layer(*synthetic.fill_random_prepared(0)).to(gpu)
captured = Call(layer, make_batch(tokens, "random", 0).to(gpu))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    before = allocations()
    captured.run()
    assert allocations() == before, "the capture allocated"
eager = Call(layer, captured.batch)
many_few_many = (896, 700, 448, 300, 200, 128, 64, 32, 16, 3, 1, 2, 16, 48, 112, 256, 400, 600, 800)
for seed, experts in enumerate((*many_few_many, 896), start=1):
    batch = make_batch(tokens, "random", seed)
    captured.batch.tokens.copy_(batch.tokens)
    captured.batch.topk_ids.copy_(batch.topk_ids % experts)
    captured.batch.topk_weights.copy_(batch.topk_weights)
    captured.output.fill_(float("nan"))
    eager.output.fill_(777.0)
    before = allocations()
    graph.replay()
    eager.run()
    assert allocations() == before, f"submission {seed} allocated"
    same = torch.equal(captured.output.view(torch.int16), eager.output.view(torch.int16))
    assert same, f"replay {seed} of at most {experts} experts differs from an eager call"
"""


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [40, 400])
def test_first_submission_in_a_capture_then_replays(tokens: int) -> None:
    script = FIRST_SUBMISSION_IN_A_CAPTURE
    subprocess.run([sys.executable, "-c", script, str(tokens)], check=True, timeout=300)


@NEEDS_GPU
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_compiled_operator_gives_the_eager_bits(gpu_layer: Layer, backend: str) -> None:
    weights = gpu_layer.weights

    def forward(x: Tensor, ids: Tensor, scales: Tensor, output: Tensor, workspace: Tensor) -> None:
        torch.ops.cake.fused_moe(
            x,
            ids,
            scales,
            weights.w13,
            weights.w2,
            *gpu_layer.quant_scales,
            None,
            None,
            output,
            workspace,
        )

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for tokens in (3, 400):
        call = Call(gpu_layer, make_batch(tokens, "random", 23).to(GPU))
        batch = call.batch
        expected = call.run().clone()
        call.output.fill_(float("nan"))
        compiled(batch.tokens, batch.topk_ids, batch.topk_weights, call.output, call.workspace)
        assert_same_bits(call.output, expected)


# ---- Memory -------------------------------------------------------------------------------------

GUARD = 4096  # bytes; what lies behind it is as aligned as the operation wants it
FILLS = (0x00, 0x7F, 0xFF, 0x80, None)  # None: random bytes


class Guarded:
    """Device memory between two guard bands."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=GPU)
        self.inside = self.memory[GUARD:-GUARD]
        self._bands = (self.memory[:GUARD], self.memory[-GUARD:])
        self._before: list[Tensor] = []

    def poison(self, fill: int | None) -> None:
        if fill is None:
            self.memory.random_(0, 256)
        else:
            self.memory.fill_(fill)
        self._before = [band.clone() for band in self._bands]

    def assert_guards_intact(self) -> None:
        for band, before in zip(self._bands, self._before, strict=True):
            assert_same_bits(band, before)


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [5, 200, 400, 1025, 8193])
def test_old_contents_do_not_matter_and_guards_stay(gpu_layer: Layer, tokens: int) -> None:
    call = Call(gpu_layer, make_batch(tokens, "random", 24).to(GPU))
    batch = call.batch
    expected = call.run().clone()
    # The same bits after five fills leave no place for old contents; this one began as NaN.
    assert_complete(expected)
    output, workspace = Guarded(2 * tokens * H), Guarded(call.workspace.numel())
    cake.cake_fused_moe_prepare_workspace(workspace.inside, tokens)
    call.workspace = workspace.inside
    call.output = output.inside.view(torch.bfloat16).view(tokens, H)
    beta, linear_beta = (torch.full((E,), value, device=GPU) for value in (4.0, 25.0))
    for tail in (64, 1):  # rows at a multiple of 16 bytes, and not
        memory = torch.full((tokens + 2, H + tail), float("nan"), dtype=torch.bfloat16, device=GPU)
        rows = memory[1:-1, :H]
        rows.copy_(batch.tokens)
        call.batch = Batch(rows, batch.topk_ids, batch.topk_weights)
        for fill in FILLS:
            output.poison(fill)
            workspace.poison(fill)
            assert_same_bits(call.run(situ_beta=beta, situ_linear_beta=linear_beta), expected)
            output.assert_guards_intact()
            workspace.assert_guards_intact()


# ---- Repeats ------------------------------------------------------------------------------------


def count_differences(call: Call, submit: Callable[[], Any], expected: Tensor, runs: int) -> int:
    """Elements that differ in any of the runs, next to a load on another stream.

    They are counted on the device: a synchronization would keep one run from following the next.
    """
    different = torch.zeros((), dtype=torch.int64, device=GPU)
    load = torch.randn(2048, 2048, device=GPU)
    product = torch.empty_like(load)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(runs):
        with torch.cuda.stream(side):
            torch.mm(load, load, out=product)
        call.output.fill_(float("nan"))
        submit()
        different += (call.output.view(torch.int16) != expected.view(torch.int16)).sum()
    torch.cuda.synchronize()
    return int(different)


@NEEDS_GPU
@pytest.mark.parametrize("routing", ["random", "same"])
@pytest.mark.parametrize("tokens", [1, 64, 300, 400, 2048])
def test_eager_runs_and_replays_under_side_load_give_the_same_bits(
    gpu_layer: Layer, tokens: int, routing: synthetic.Routing
) -> None:
    call = Call(gpu_layer, make_batch(tokens, routing, 25).to(GPU))
    expected = call.run().clone()
    assert_complete(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    assert count_differences(call, call.run, expected, runs=200) == 0
    assert count_differences(call, graph.replay, expected, runs=200) == 0
