"""cake.module: the experts as a module, and workspaces that modules share."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_calls import E, H, Layer, assert_same_bits, betas, run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from cake.modelopt import ModelOptLayer
from cake.module import SharedWorkspace, SiTUExperts
from cake.testing.synthetic import fill_random_prepared
from cake.weights import PreparedWeights

COUNTS = (1, 3, 4)
BUFFERS = {
    *("w13", "w13_sf", "w2", "w2_sf", "w13_scale", "w2_scale"),
    *("input_scale", "fc1_alpha", "fc2_input_scale", "fc2_alpha", "layout_version"),
}


def experts(layer: Layer, *counts: int, **options: Any) -> SiTUExperts:
    return SiTUExperts.from_prepared(layer.weights, layer.scales, token_counts=counts, **options)


def operands(layer: Layer, tokens: int, **options: Any) -> tuple[Tensor, ...]:
    call = layer.call(tokens, **options)
    return call["input"], call["token_selected_experts"], call["token_final_scales"]


def small(seed: int = 1, count: int = 6) -> tuple[PreparedWeights, list[Tensor]]:
    """A layer that no kernel takes, for what does not run it."""
    return fill_random_prepared(seed, count, 128, 64)


def small_experts(seed: int = 1, **options: Any) -> SiTUExperts:
    return SiTUExperts(*small(seed), **{"token_counts": [1], **options})


def one_expert(module: SiTUExperts, expert: int) -> tuple[PreparedWeights, list[Tensor]]:
    """An expert of a module as a layer of its own, copied."""
    part = slice(expert, expert + 1)
    weights = PreparedWeights(*(t[part].clone() for t in module.weights.tensors().values()))
    scales = [t[part].clone() if len(t) > 1 else t.clone() for t in module.quant_scales]
    scales[1], scales[4] = weights.w13_sf, weights.w2_sf
    return weights, scales


def as_bytes(module: nn.Module) -> dict[str, bytes]:
    state = module.state_dict()
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


@contextmanager
def refused(module: nn.Module, message: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Require an error with this message, and that no byte of the state was written."""
    before = as_bytes(module)
    with pytest.raises(error, match=message):
        yield
    assert as_bytes(module) == before


@pytest.fixture(scope="module")
def module(layer: Layer) -> SiTUExperts:
    return experts(layer, *COUNTS)


@pytest.mark.parametrize("tokens", [0, *COUNTS])
def test_the_bits_of_the_function(layer: Layer, module: SiTUExperts, tokens: int) -> None:
    expected = run(layer.call(tokens))
    output = module(*operands(layer, tokens))
    assert output.dtype == torch.bfloat16 and output.shape == (tokens, H)
    assert_same_bits(output, expected)
    out = torch.full_like(output, 777.0)
    assert module(*operands(layer, tokens), out=out) is out
    assert_same_bits(out, expected)


def test_given_constants_are_used_and_need_no_byte_of_the_workspace(layer: Layer) -> None:
    given = experts(layer, 3, **betas(2.0, 10.0))
    given.workspace.buffer.fill_(0xFF)
    assert_same_bits(given(*operands(layer, 3)), run(layer.call(3), **betas(2.0, 10.0)))
    assert set(given.state_dict()) == BUFFERS | {"situ_beta", "situ_linear_beta"}


def test_batch_invariant_is_passed_on(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cake.api.cutlass_fused_moe", lambda *_, **options: options)
    for flag in (False, True):
        called = experts(layer, 1, batch_invariant=flag)(*operands(layer, 1))
        assert called["batch_invariant"] is flag


def test_wrong_operands_are_refused_by_the_function(layer: Layer, module: SiTUExperts) -> None:
    x, ids, weights = operands(layer, 3)
    for bad in ((x.float(), ids), (x[0], ids), (None, ids), (x, ids[:2])):
        with pytest.raises(ValueError, match=r"(input|topk_ids\)): expected"):
            module(*bad, weights)


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(layer: Layer, inside: bool) -> None:
    with torch.inference_mode(inside):
        made, fitted = experts(layer, 3), small_experts()
    for mode in (False, True):
        with torch.inference_mode(mode):
            assert_same_bits(made(*operands(layer, 3)), run(layer.call(3)))
            made.prepare([2])
            fitted.refit(*small(2))
    assert as_bytes(fitted) == as_bytes(small_experts(2))


def test_a_new_count_is_refused_or_prepared_in_the_same_buffer(layer: Layer) -> None:
    module = experts(layer, 4, 1)
    buffer = module.workspace.buffer
    with pytest.raises(ValueError, match=r"x: .*\[1, 4\], got 3; .*module\.prepare\(\[3\]\)"):
        module(*operands(layer, 3))
    module.prepare([3])
    assert_same_bits(module(*operands(layer, 3)), run(layer.call(3)))
    module.on_new_count = "prepare"
    assert_same_bits(module(*operands(layer, 2)), run(layer.call(2)))
    with pytest.raises(ValueError, match=r"token_counts: expected at most 4.*got 5"):
        module(*operands(layer, 5))
    for counts in ([-1], [2.0], [True], [0, 9]):
        with pytest.raises(ValueError, match="token_counts: expected"):
            module.prepare(counts)
    assert module.workspace.token_counts == {1, 2, 3, 4} and module.workspace.buffer is buffer


def test_layers_share_a_workspace(layer: Layer) -> None:
    other = Layer(layer.weights, list(layer.scales))
    other.scales[2] = layer.scales[2].flip(0)
    workspace = SharedWorkspace([3])
    shared = [experts(part, 1, workspace=workspace) for part in (layer, other)]
    alone = [experts(part, 1, 3) for part in (layer, other)]
    assert workspace.token_counts == {1, 3}
    assert shared[0].workspace is shared[1].workspace is workspace
    for tokens in (3, 1):
        expected = [module(*operands(layer, tokens)) for module in alone]
        assert not torch.equal(*expected)
        for module, output in zip(shared, expected, strict=True):
            assert_same_bits(module(*operands(layer, tokens)), output)


def test_workspaces_are_no_state_and_copied_as_new_ones(layer: Layer) -> None:
    workspace = SharedWorkspace(COUNTS)
    model = nn.ModuleList([small_experts(workspace=workspace) for _ in range(2)])
    assert not list(model.parameters()) and set(model[0].state_dict()) == BUFFERS
    with pytest.raises(TypeError, match=r"SharedWorkspace.*state_dict"):
        pickle.dumps(model)
    first, second = copy.deepcopy(model)
    assert isinstance(first, SiTUExperts) and first.workspace is not workspace
    assert first.workspace is second.workspace and first.w13 is not model[0].w13
    call = layer.call(3)
    assert_same_bits(run(call, workspace_buffer=first.workspace.buffer), run(call))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double", "share_memory"])
def test_casts_change_nothing(cast: str) -> None:
    module = small_experts()
    before, buffers, workspace = as_bytes(module), list(module.buffers()), module.workspace
    assert getattr(module, cast)().to("cpu", torch.bfloat16) is module
    assert as_bytes(module) == before
    assert all(new is old for new, old in zip(module.buffers(), buffers, strict=True))
    assert module.workspace is workspace
    for dtype in (torch.float16, torch.uint8, torch.float32):  # these would convert codes too
        with refused(module, "dtype"):
            module.type(dtype)


def test_a_move_makes_a_prepared_workspace(layer: Layer) -> None:
    module = small_experts(token_counts=COUNTS)
    buffer, dtypes = module.workspace.buffer, [b.dtype for b in module.buffers()]
    module.to("meta")
    module.prepare([2])
    module.to_empty(device="cpu")
    assert [b.dtype for b in module.buffers()] == dtypes
    assert module.workspace.buffer is not buffer
    for tokens in (2, 3):
        call = layer.call(tokens)
        assert_same_bits(run(call, workspace_buffer=module.workspace.buffer), run(call))


def test_a_given_workspace_stays_until_it_is_replaced(layer: Layer) -> None:
    workspace = SharedWorkspace([3])
    module = small_experts(workspace=workspace).to("meta")
    assert module.workspace is workspace
    with pytest.raises(ValueError, match=r"workspace: .*on meta, got .*device='cpu'"):
        module(*operands(layer, 3))
    module = experts(layer, 1)
    module.use_workspace(workspace)
    assert_same_bits(module(*operands(layer, 3)), run(layer.call(3)))


def test_the_state_goes_through_a_file() -> None:
    source = small_experts(1, situ_beta=torch.full((6,), 3.0))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target = small_experts(2, situ_beta=torch.ones(6))
    addresses = [buffer.data_ptr() for buffer in target.buffers()]
    target.load_state_dict(torch.load(file, weights_only=True))
    assert as_bytes(target) == as_bytes(source)
    assert [buffer.data_ptr() for buffer in target.buffers()] == addresses


def test_a_module_on_meta_is_loaded_by_assignment(layer: Layer, module: SiTUExperts) -> None:
    weights = PreparedWeights.empty(E, H, layer.weights.intermediate, "meta")
    loaded = SiTUExperts(weights, weights.quant_scales(1.0, 1.0), token_counts=[3])
    loaded.load_state_dict(module.state_dict(), assign=True)
    assert loaded.w13.data_ptr() == layer.weights.w13.data_ptr()
    assert_same_bits(loaded(*operands(layer, 3)), run(layer.call(3)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc2_alpha", None, "missing"),
        ("layout_version", None, "missing"),
        ("layout_version", lambda version: version + 1, "expected 1, got 2"),
        ("w13_sf", lambda sf: sf.view(torch.uint8), r"expected torch\.float8.*got torch\.uint8"),
        ("w2", lambda w2: w2[1:], r"expected .*\[6, 128, 32\], got .*\[5, 128, 32\]"),
    ],
)
def test_a_wrong_state_is_refused_whole(
    name: str, change: Callable[[Tensor], Tensor] | None, message: str, assign: bool
) -> None:
    model = nn.ModuleDict({"experts": small_experts(1)})
    state = {f"experts.{n}": t for n, t in small_experts(2).state_dict().items()}
    value = state.pop(f"experts.{name}")
    if change is not None:
        state[f"experts.{name}"] = change(value)
    for strict in (False, True):
        with refused(model, rf"experts\.{name}: {message}", RuntimeError):
            model.load_state_dict(state, strict=strict, assign=assign)
    assert len(model.load_state_dict({}, strict=False).missing_keys) == len(BUFFERS)


def test_refit_of_all_experts_keeps_the_storages() -> None:
    weights, scales = small(1)
    ones = torch.ones(6)  # one tensor for several scales, which become several
    module = SiTUExperts(weights, [*scales[:2], ones, ones, scales[4], ones], token_counts=[1])
    buffers = [(buffer, buffer.data_ptr()) for buffer in module.buffers()]
    module.refit(*small(2))
    assert as_bytes(module) == as_bytes(small_experts(2))
    for new, (old, address) in zip(module.buffers(), buffers, strict=True):
        assert new is old and new.data_ptr() == address


def test_refit_of_one_expert_writes_no_other() -> None:
    module, donor = small_experts(1), small_experts(2)
    expected = as_bytes(module)
    for name, value in as_bytes(donor).items():
        if name not in ("input_scale", "layout_version"):
            start, end = 4 * len(value) // 6, 5 * len(value) // 6
            expected[name] = expected[name][:start] + value[start:end] + expected[name][end:]
    weights, scales = one_expert(donor, 4)
    module.refit(weights, [module.quant_scales[0], *scales[1:]], expert=4)
    assert as_bytes(module) == expected


def test_refit_of_one_expert_changes_its_tokens(layer: Layer, module: SiTUExperts) -> None:
    x, ids, weights = operands(layer, 4, routing="grouped")
    expert = int(ids[1, 5])
    routed, donor = (ids == expert).any(1), (expert + 100) % E
    before = module(x, ids, weights)
    old = one_expert(module, expert)
    module.refit(*one_expert(module, donor), expert=expert)  # in the layer of the whole session
    try:
        after = module(x, ids, weights)
    finally:
        module.refit(*old, expert=expert)
    assert routed.tolist() == [False, True, False, False]
    assert_same_bits(after[~routed], before[~routed])
    assert not torch.equal(after[routed], before[routed])
    assert_same_bits(after, module(x, torch.where(ids == expert, donor, ids), weights))
    assert_same_bits(module(x, ids, weights), before)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(2), r"expected shape \(1,\)"),
        (1, torch.zeros(6, 128, 8), r"expected weights\.w13_sf"),
        (2, torch.ones(7), r"expected shape \(6,\)"),
        (3, torch.ones(6, dtype=torch.float64), r"expected torch\.float32"),
        (4, torch.zeros(6, 128, 4), r"expected weights\.w2_sf"),
        (5, torch.ones(6, device="meta"), "expected a tensor on cpu"),
        (5, 1.0, r"expected a torch\.Tensor"),
    ],
)
def test_wrong_scales_are_refused(index: int, value: Any, message: str) -> None:
    module = small_experts(1)
    weights, scales = small(2)
    scales[index] = value
    for use in (SiTUExperts, module.refit):
        with refused(module, rf"quant_scales\[{index}\]: {message}"):
            use(weights, scales)
    with refused(module, "quant_scales: expected a list of six .*, got 5"):
        module.refit(weights, scales[:5])
    with refused(module, "weights: expected PreparedWeights"):
        module.refit(scales, scales)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "hidden", "expert", "message"),
    [
        (7, 128, None, r"w13: expected shape \(6, 128, 64\)"),
        (6, 256, None, "w13: expected shape"),
        (6, 128, 2, r"w13: expected shape \(1, 128, 64\)"),
        (1, 128, 6, "expert: expected 0 .. 5, got 6"),
        (1, 128, -1, "expert: expected 0 .. 5, got -1"),
    ],
)
def test_a_wrong_refit_writes_nothing(count: int, hidden: int, expert: Any, message: str) -> None:
    module = small_experts(1)
    weights, scales = fill_random_prepared(2, count, hidden, 64)
    with refused(module, message):
        module.refit(weights, [module.quant_scales[0], *scales[1:]], expert)
    with refused(module, r"quant_scales\[0\]: expected .*the experts share"):
        module.refit(*small(2, count=1), expert=2)


def test_from_modelopt_and_from_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ModelOptLayer(*small(), 1.0, torch.ones(6))
    want = {"device": "cpu", "expected_tp_rank": 3}
    loader = SimpleNamespace(load_layer=lambda path, **o: {"f": layer}[path] if o == want else None)
    monkeypatch.setitem(sys.modules, "cake.checkpoint", loader)
    options: Any = {"token_counts": [2], "batch_invariant": True}
    for module in (
        SiTUExperts.from_modelopt(layer, **options),
        SiTUExperts.from_checkpoint("f", device="cpu", expected_tp_rank=3, **options),
    ):
        assert module.w13 is layer.weights.w13 and module.quant_scales[4] is layer.weights.w2_sf
        assert module.workspace.token_counts == {2} and module.batch_invariant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_new_count": "grow"}, "on_new_count: expected 'refuse' or 'prepare', got 'grow'"),
        ({"situ_beta": torch.ones(5)}, r"situ_beta: expected shape \(6,\)"),
        ({"situ_linear_beta": 25.0}, r"situ_linear_beta: expected a torch\.Tensor"),
        ({"workspace": torch.empty(5)}, "workspace: expected a SharedWorkspace on cpu"),
        ({"workspace": SharedWorkspace([1], "meta")}, "workspace: .*on cpu, got .*'meta'"),
        ({"token_counts": []}, "token_counts: expected at least one"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_experts(**options)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_listed_counts_share_one_compiled_graph(layer: Layer, module: SiTUExperts) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (3, 4, 3):
        assert_same_bits(compiled(*operands(layer, tokens)), run(layer.call(tokens)))
    with pytest.raises(RuntimeError, match="prepared for 2 tokens"):
        compiled(*operands(layer, 2))
    assert counter.frame_count == 1


def test_compiled_layers_share_a_workspace(layer: Layer) -> None:
    torch.compiler.reset()
    workspace = SharedWorkspace([3])
    layers = [experts(layer, workspace=workspace) for _ in range(2)]
    marks: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        marks.extend(n.meta["tensor_dict"] for n in inputs if n.name.endswith("workspace_buffer"))
        return graph.forward

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        assert layers[0](x, ids, weights, out=out) is out
        return layers[1](out * 0.125 + x, ids, weights)  # type: ignore[no-any-return]

    expected = model(*operands(layer, 3))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    assert_same_bits(compiled(*operands(layer, 3)), expected)
    assert marks == [{"_dynamo_static_input_type": "unguarded"}]  # as a buffer of a module
    workspace.buffer.fill_(0xFF)
    for module in layers:
        module.use_workspace(SharedWorkspace([3]))
    assert_same_bits(compiled(*operands(layer, 3)), expected)
