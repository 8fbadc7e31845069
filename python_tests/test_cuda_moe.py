"""The whole operation on a GPU: against the exact CPU path, and what it promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from layer_calls import GPU, NEEDS_GPU, assert_same_bits
from torch import Tensor

import cake
from cake.check import Batch, Call, Layer, check_case, make_batch
from cake.testing import synthetic
from cake.testing.numeric import check_outputs, compare_outputs

pytestmark = NEEDS_GPU

# Where FC2 claims its last work.
POOLED = (8, 16, 32, 64, 128, 256, 512, 1024)
# Around every change of kernels, and counts that no tile size divides.
TOKENS = (1, 2, 5, 7, 9, 31, 63, 65, 127, 129, 255, 257, 300, 511, 513, 641, 1023)
EMPTY = (-1, 896, 2**31 - 1, -(2**31), 2**32 + 5)  # ids of empty slots
LARGE = (1025, 2047, 2048, 2049, 3000, 4097, 5504, 5505)


def run(layer: Layer, batch: Batch) -> Tensor:
    return Call(layer, batch).run()


@pytest.mark.parametrize("tokens", TOKENS + POOLED + LARGE)
def test_stages_output_repeat_and_replay(cpu_layer: Layer, gpu_layer: Layer, tokens: int) -> None:
    check_case(cpu_layer, gpu_layer, tokens, "random", seed=tokens)


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("routing", synthetic.ROUTINGS)
def test_routings(
    cpu_layer: Layer, gpu_layer: Layer, routing: synthetic.Routing, tokens: int
) -> None:
    check_case(cpu_layer, gpu_layer, tokens, routing, seed=3)


@pytest.mark.parametrize("tokens", [2100, 5505])
@pytest.mark.parametrize("routing", ["zipf", "same"])
def test_routings_of_larger_tiles(
    cpu_layer: Layer, gpu_layer: Layer, routing: synthetic.Routing, tokens: int
) -> None:
    check_case(cpu_layer, gpu_layer, tokens, routing, seed=3)


def test_more_tiles_than_fc2_cuts_into_ranges(cpu_layer: Layer, gpu_layer: Layer) -> None:
    # As many tiles as there can be: each expert has one pair more than 0 or 1 tiles of 64.
    sizes = 1 + 64 * (torch.arange(896) < (2048 * 16 - 896) // 64).long()
    batch = make_batch(2048, "random", 4)
    batch.topk_ids.copy_(torch.repeat_interleave(sizes).view(16, 2048).t())
    call = Call(gpu_layer, batch.to(GPU))
    actual = call.run().cpu()
    assert int(call.region("num_tiles").view(torch.int32)) > 1344  # kMostTilesCut
    check_outputs(actual, run(cpu_layer, batch), context="many tiles", max_outliers=1e-3)


@pytest.mark.parametrize("tokens", [8, 40, 700])
def test_a_row_depends_on_its_own_token_alone(gpu_layer: Layer, tokens: int) -> None:
    batch = make_batch(tokens, "zipf", 5).to(GPU)
    expected = run(gpu_layer, batch)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(GPU)
    permuted = Batch(
        batch.tokens[order].contiguous(),
        batch.topk_ids[order].contiguous(),
        batch.topk_weights[order].contiguous(),
    )
    assert_same_bits(run(gpu_layer, permuted), expected[order])


def prefix(batch: Batch, tokens: int) -> Batch:
    return Batch(batch.tokens[:tokens], batch.topk_ids[:tokens], batch.topk_weights[:tokens])


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (128, (1, 3, 8, 64, 97, 127)),
        (8193, (129, 305, 512, 700, 1024, 1500, 2048, 2049, 4097, 8192)),
        (16384, (8192, 12289)),
    ],
)
def test_a_plan_gives_a_row_the_same_bits_at_every_token_count(
    gpu_layer: Layer, most: int, counts: tuple[int, ...]
) -> None:
    batch = make_batch(most, "random", 6).to(GPU)
    expected = run(gpu_layer, batch)
    for tokens in counts:
        assert_same_bits(run(gpu_layer, prefix(batch, tokens)), expected[:tokens])


def test_batch_invariance_gives_a_row_the_same_bits_in_every_call(
    cpu_layer: Layer, gpu_layer: Layer
) -> None:
    batch = make_batch(9000, "zipf", 15)
    on_gpu = batch.to(GPU)
    expected = Call(gpu_layer, on_gpu).run(batch_invariant=True)
    for tokens in (1, 2, 7, 8, 9, 64, 128, 129, 304, 2000):
        actual = Call(gpu_layer, prefix(on_gpu, tokens)).run(batch_invariant=True)
        assert_same_bits(actual, expected[:tokens])
    check_outputs(expected[:32].cpu(), run(cpu_layer, prefix(batch, 32)), context="32 rows")
    # Without it the two plans may round differently, by little.
    other = run(gpu_layer, prefix(on_gpu, 128))
    assert compare_outputs(other.cpu(), expected[:128].cpu()).relative_rms < 2e-3


@pytest.mark.parametrize("tokens", [1, 6, 700])
def test_int64_ids_and_float32_weights_give_the_converted_result(
    gpu_layer: Layer, tokens: int
) -> None:
    batch = make_batch(tokens, "random", 7).to(GPU)
    weights = torch.rand(tokens, 16, device=GPU)
    expected = run(gpu_layer, Batch(batch.tokens, batch.topk_ids, weights.bfloat16()))
    actual = run(gpu_layer, Batch(batch.tokens, batch.topk_ids.long(), weights))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("tokens", [1, 6, 700])
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_slots_add_nothing(gpu_layer: Layer, tokens: int, empty: int) -> None:
    batch = make_batch(tokens, "random", 8).to(GPU)
    expected = run(gpu_layer, batch)
    ids, weights = batch.topk_ids.long(), batch.topk_weights.clone()
    ids[-1] = empty
    weights[-1] = float("nan")
    actual = run(gpu_layer, Batch(batch.tokens, ids, weights))
    assert not actual[-1].any()
    assert_same_bits(actual[:-1], expected[:-1])
    ids[:] = empty
    assert not run(gpu_layer, Batch(batch.tokens, ids, weights)).any()


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("empty", EMPTY)
def test_some_empty_slots_of_a_token(
    cpu_layer: Layer, gpu_layer: Layer, tokens: int, empty: int
) -> None:
    batch = make_batch(tokens, "duplicates", 20)
    ids, weights = batch.topk_ids.long(), batch.topk_weights.clone()
    ids[:, 3:9] = empty
    weights[:, 3:9] = float("inf")
    batch = Batch(batch.tokens, ids, weights)
    check_outputs(run(gpu_layer, batch.to(GPU)).cpu(), run(cpu_layer, batch), context="empty slots")


@pytest.mark.parametrize("tokens", [1, 6, 700])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_stays_alone(
    cpu_layer: Layer, gpu_layer: Layer, tokens: int, value: float
) -> None:
    batch = make_batch(tokens, "same", 9)
    bad = tokens // 2
    batch.tokens[bad, 64:96] = value
    expected = run(cpu_layer, batch)
    actual = run(gpu_layer, batch.to(GPU)).cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    clean = make_batch(tokens, "same", 9)
    keep = torch.arange(tokens) != bad
    assert_same_bits(actual[keep], run(gpu_layer, clean.to(GPU)).cpu()[keep])


@pytest.mark.parametrize("tokens", [1, 6, 700])
def test_explicit_constants_need_no_byte_of_the_workspace(gpu_layer: Layer, tokens: int) -> None:
    batch = make_batch(tokens, "random", 10).to(GPU)
    expected = run(gpu_layer, batch)
    call = Call(gpu_layer, batch)
    beta, linear = (torch.full((896,), v, device=GPU) for v in (4.0, 25.0))
    for poison in (0x00, 0x7F, 0xFF, 0x80):
        call.workspace.fill_(poison)
        output = call.run(situ_beta=beta, situ_linear_beta=linear)
        assert_same_bits(output, expected)


# "same" and "one_expert" read the weights from L2: copies into a stage of shared memory then follow
# its release fastest, which once showed that a release had overtaken the reads before it.
@pytest.mark.parametrize("tokens", [1, 6, 40, 300, 700, 2100, 5505])
@pytest.mark.parametrize("routing", ["zipf", "same", "one_expert"])
def test_many_repeats_under_side_load_give_the_same_bits(
    gpu_layer: Layer, tokens: int, routing: synthetic.Routing
) -> None:
    call = Call(gpu_layer, make_batch(tokens, routing, 11).to(GPU))
    expected = call.run().clone().view(torch.int16)
    different = torch.zeros((), dtype=torch.int64, device=GPU)
    load = torch.randn(2048, 2048, device=GPU)
    side = torch.cuda.Stream()
    for _ in range(400):
        with torch.cuda.stream(side):
            load @ load
        call.output.fill_(float("nan"))
        different += (call.run().view(torch.int16) != expected).sum()
    assert int(different) == 0


# "same" reads the weights from L2: the CTAs then drift apart the most.
@pytest.mark.parametrize("tokens", POOLED)
@pytest.mark.parametrize("routing", ["random", "same", "one_expert"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_claims_cover_the_pool_and_change_no_bit(
    gpu_layer: Layer, tokens: int, routing: synthetic.Routing, batch_invariant: bool
) -> None:
    call = Call(gpu_layer, make_batch(tokens, routing, 19).to(GPU))
    expected = call.run(batch_invariant=batch_invariant).clone().view(torch.int16)
    different = torch.zeros((), dtype=torch.int64, device=GPU)
    for _ in range(200):
        call.output.fill_(float("nan"))
        call.run(batch_invariant=batch_invariant)
        different += (call.output.view(torch.int16) != expected).sum()
    assert int(different) == 0
    gpu = torch.cuda.get_device_properties(GPU)
    sms = gpu.multi_processor_count
    plan = json.loads(torch.ops.cake.plan(tokens, batch_invariant, major=gpu.major, num_sms=sms))
    blocks = int(call.region("num_tiles").view(torch.int32)) * 28
    pool = blocks // plan["fc2_pool_part"] * 128  # rows
    claims = -(-pool // plan["fc2_pool_rows"])
    # Every CTA ends with a claim that finds nothing.
    assert int(call.region("work_counter").view(torch.int32)) == claims + sms


def test_submission_allocates_nothing_and_does_not_synchronize(gpu_layer: Layer) -> None:
    call = Call(gpu_layer, make_batch(64, "random", 12).to(GPU))
    call.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_preparation_during_capture_is_refused(gpu_layer: Layer) -> None:
    call = Call(gpu_layer, make_batch(4, "random", 13).to(GPU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capturing"):
            cake.cake_fused_moe_prepare_workspace(call.workspace, 3)
        call.run()


def test_a_graph_follows_its_inputs(gpu_layer: Layer) -> None:
    call = Call(gpu_layer, make_batch(32, "random", 14).to(GPU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    kinds: tuple[synthetic.Routing, ...] = ("random", "same", "one_expert", "random")
    for seed, kind in enumerate(kinds):
        batch = make_batch(32, kind, seed).to(GPU)
        call.batch.tokens.copy_(batch.tokens)
        call.batch.topk_ids.copy_(batch.topk_ids)
        call.batch.topk_weights.copy_(batch.topk_weights)
        call.output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(call.output, run(gpu_layer, batch))


@pytest.mark.parametrize("tokens", [5, 700])
def test_the_first_ever_submission_may_be_captured(tokens: int) -> None:
    script = f"""
import torch
from cake.check import Call, Layer, make_batch
from cake.testing import synthetic
layer = Layer(*synthetic.fill_random_prepared(0)).to(torch.device("cuda"))
call = Call(layer, make_batch({tokens}, "random", 1).to(torch.device("cuda")))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    call.run()
graph.replay()
torch.cuda.synchronize()
captured = call.output.clone()
call.output.fill_(float("nan"))
assert torch.equal(call.run(), captured)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_compiled_calls_give_the_same_bits(gpu_layer: Layer) -> None:
    def step(tokens: Tensor, ids: Tensor, weights: Tensor, workspace: Tensor) -> Tensor:
        return cake.cutlass_fused_moe(
            tokens,
            ids,
            weights,
            gpu_layer.weights.w13,
            gpu_layer.weights.w2,
            torch.bfloat16,
            gpu_layer.quant_scales,
            activation_type=cake.ActivationType.Situ,
            tp_size=8,
            workspace_buffer=workspace,
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (5, 9, 700):
        call = Call(gpu_layer, make_batch(tokens, "random", 15).to(GPU))
        batch = call.batch
        actual = compiled(batch.tokens, batch.topk_ids, batch.topk_weights, call.workspace)
        assert_same_bits(actual, call.run())


def test_mixed_devices_are_refused_by_name(cpu_layer: Layer, gpu_layer: Layer) -> None:
    call = Call(gpu_layer, make_batch(4, "random", 16).to(GPU))
    call.batch = Batch(call.batch.tokens, call.batch.topk_ids.cpu(), call.batch.topk_weights)
    with pytest.raises(ValueError, match="token_selected_experts: expected a tensor on cuda"):
        call.run()
    call = Call(gpu_layer, make_batch(4, "random", 16).to(GPU))
    call.layer = Layer(cpu_layer.weights, call.layer.quant_scales)
    with pytest.raises(ValueError, match="fc1_expert_weights: expected a tensor on cuda"):
        call.run()


@pytest.mark.parametrize("argument", ["output", "fc1_expert_weights"])
def test_addresses_that_wide_accesses_cannot_use_are_refused(
    gpu_layer: Layer, argument: str
) -> None:
    call = Call(gpu_layer, make_batch(4, "random", 17).to(GPU))
    if argument == "output":
        call.output = torch.zeros(4 * 3584 + 1, dtype=torch.bfloat16, device=GPU)[1:].view(4, 3584)
    else:
        w13 = gpu_layer.weights.w13
        moved = torch.zeros(w13.numel() + 1, dtype=torch.uint8, device=GPU)[1:].view(w13.shape)
        weights = {**gpu_layer.weights.tensors(), "w13": moved}
        call.layer = Layer(type(gpu_layer.weights)(**weights), gpu_layer.quant_scales)
    with pytest.raises(ValueError, match=rf"{argument}.*aligned to 16 bytes"):
        call.run()
    torch.cuda.synchronize()


def test_most_tokens_and_one_expert(cpu_layer: Layer, gpu_layer: Layer) -> None:
    """The largest call, in parts of the output columns; a few rows compared with the CPU path."""
    kinds: tuple[synthetic.Routing, ...] = ("random", "one_expert")
    for kind in kinds:
        batch = make_batch(16384, kind, 18)
        output = run(gpu_layer, batch.to(GPU)).cpu()
        rows = torch.tensor([0, 1, 4095, 9999, 16383])
        part = Batch(batch.tokens[rows], batch.topk_ids[rows], batch.topk_weights[rows])
        check_outputs(output[rows], run(cpu_layer, part), context=kind)
        assert output.isfinite().all()
        assert output.any(dim=1).all()
