"""cake.module on a GPU: captured graphs, refits that they see, moves, shared workspaces."""

from __future__ import annotations

from collections.abc import Callable

import layer_calls
import pytest
import torch
from layer_calls import GPU, NEEDS_GPU, assert_same_bits
from torch import Tensor

from cake.check import Batch, Call, Layer, make_batch
from cake.module import SharedWorkspace, SiTUExperts
from cake.weights import PreparedWeights

pytestmark = NEEDS_GPU

COUNTS = (1, 8, 40, 700)


@pytest.fixture
def module(gpu_layer: Layer) -> SiTUExperts:
    return SiTUExperts(gpu_layer.weights, gpu_layer.quant_scales, token_counts=COUNTS)


def operands(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.tokens, batch.topk_ids, batch.topk_weights


def capture(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph, output


def replay(graph: torch.cuda.CUDAGraph, output: Tensor) -> Tensor:
    output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return output


def rolled(layer: Layer, shift: int) -> tuple[PreparedWeights, list[Tensor]]:
    """The same experts under other ids, in new tensors."""
    weights = PreparedWeights(
        *(
            t.view(torch.uint8).roll(shift, 0).view(t.dtype)
            for t in layer.weights.tensors().values()
            if t.dim() == 3
        ),
        *(t.roll(shift) for t in layer.weights.tensors().values() if t.dim() == 1),
    )
    scales = [t.roll(shift) if t.dim() == 1 else t for t in layer.quant_scales]
    scales[1], scales[4] = weights.w13_sf, weights.w2_sf
    return weights, scales


@pytest.mark.parametrize("tokens", COUNTS)
def test_the_bits_of_the_function(gpu_layer: Layer, module: SiTUExperts, tokens: int) -> None:
    batch = make_batch(tokens, "random", 1).to(GPU)
    expected = Call(gpu_layer, batch).run()
    assert_same_bits(module(*operands(batch)), expected)
    graph, output = capture(lambda: module(*operands(batch)))
    assert_same_bits(replay(graph, output), expected)
    module.batch_invariant = True
    assert_same_bits(module(*operands(batch)), Call(gpu_layer, batch).run(batch_invariant=True))


@pytest.mark.parametrize("tokens", [40, 700])
def test_a_captured_graph_sees_a_refit(gpu_layer: Layer, tokens: int) -> None:
    module = SiTUExperts(*rolled(gpu_layer, 0), token_counts=[tokens])
    batch = make_batch(tokens, "random", 2).to(GPU)
    graph, output = capture(lambda: module(*operands(batch)))
    before = replay(graph, output).clone()
    assert_same_bits(before, Call(gpu_layer, batch).run())

    module.refit(*rolled(gpu_layer, 1))
    moved = Batch(batch.tokens, (batch.topk_ids + 895) % 896, batch.topk_weights)
    assert_same_bits(replay(graph, output), Call(gpu_layer, moved).run())
    module.refit(gpu_layer.weights, gpu_layer.quant_scales)
    assert_same_bits(replay(graph, output), before)

    expert, donor = int(batch.topk_ids[1, 5]), slice(500, 501)
    weights = PreparedWeights(*(t[donor] for t in gpu_layer.weights.tensors().values()))
    scales = [t[donor] if t.shape[0] > 1 else t for t in gpu_layer.quant_scales]
    scales[1], scales[4] = weights.w13_sf, weights.w2_sf
    module.refit(weights, scales, expert)
    ids = torch.where(batch.topk_ids == expert, 500, batch.topk_ids)
    other = Batch(batch.tokens, ids, batch.topk_weights)
    assert_same_bits(replay(graph, output), Call(gpu_layer, other).run())


@pytest.mark.parametrize("tokens", [8, 700])
def test_three_layers_share_a_workspace_in_one_graph(gpu_layer: Layer, tokens: int) -> None:
    workspace = SharedWorkspace([tokens], GPU)
    scales = [list(gpu_layer.quant_scales) for _ in range(3)]
    for i, own in enumerate(scales):
        own[2] = own[2].roll(i)
    shared = [SiTUExperts(gpu_layer.weights, own, workspace=workspace) for own in scales]
    alone = [SiTUExperts(gpu_layer.weights, own, token_counts=[tokens]) for own in scales]
    batch = make_batch(tokens, "zipf", 3).to(GPU)

    def run(layers: list[SiTUExperts]) -> Tensor:
        x, ids, weights = operands(batch)
        for experts in layers:
            x = experts(x, ids, weights) * 0.125 + x
        return x

    expected = run(alone)
    assert_same_bits(run(shared), expected)
    graph, output = capture(lambda: run(shared))
    for _ in range(3):
        assert_same_bits(replay(graph, output), expected)


def test_a_moved_module_may_be_captured_at_once(layer: layer_calls.Layer, gpu_layer: Layer) -> None:
    module = SiTUExperts(layer.weights, layer.scales, token_counts=[8]).to(GPU, torch.float16)
    assert module.workspace.buffer.device == gpu_layer.weights.device
    batch = make_batch(8, "random", 4).to(GPU)
    graph, output = capture(lambda: module(*operands(batch)))
    assert_same_bits(replay(graph, output), Call(gpu_layer, batch).run())


def test_a_workspace_elsewhere_is_refused(layer: layer_calls.Layer, gpu_layer: Layer) -> None:
    cpu = SharedWorkspace([8])
    with pytest.raises(ValueError, match=r"workspace: .* on cuda:0, got .*device='cpu'"):
        SiTUExperts(gpu_layer.weights, gpu_layer.quant_scales, workspace=cpu)
    module = SiTUExperts(layer.weights, layer.scales, workspace=cpu).to(GPU)
    batch = make_batch(8, "random", 5).to(GPU)
    with pytest.raises(ValueError, match=r"workspace: .* on cuda:0, got .*device='cpu'"):
        module(*operands(batch))
    module.use_workspace(SharedWorkspace([8], GPU))
    assert_same_bits(module(*operands(batch)), Call(gpu_layer, batch).run())


def test_a_new_count_in_a_capture_is_refused(module: SiTUExperts) -> None:
    batch, new = (make_batch(tokens, "random", 6).to(GPU) for tokens in (8, 9))
    expected = module(*operands(batch))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="prepared token count"):
            module(*operands(new))
        module.on_new_count = "prepare"
        with pytest.raises(RuntimeError, match="capturing"):
            module(*operands(new))
        output = module(*operands(batch))
    assert_same_bits(replay(graph, output), expected)
    assert 9 not in module.workspace.token_counts
    module(*operands(new))
    assert 9 in module.workspace.token_counts


def test_a_call_allocates_its_output_alone_and_does_not_synchronize(module: SiTUExperts) -> None:
    batch = make_batch(40, "random", 7).to(GPU)
    out = module(*operands(batch))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(*operands(batch), out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        module(*operands(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1


def test_graphs_of_the_compiler_write_the_workspace_in_place(
    gpu_layer: Layer, module: SiTUExperts
) -> None:
    pytest.importorskip("triton", reason="inductor needs Triton on a GPU")
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    batch = make_batch(8, "random", 8).to(GPU)
    expected = Call(gpu_layer, batch).run()
    for _ in range(2):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(compiled(*operands(batch)), expected)
        module.use_workspace(SharedWorkspace(COUNTS, GPU))
    assert counters["inductor"]["cudagraph_skips"] == 0
