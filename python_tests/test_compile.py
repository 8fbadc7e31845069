"""The operators under opcheck, torch.compile and fake tensors."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layer_calls import (
    Call,
    H,
    Layer,
    assert_same_bits,
    betas,
    new_workspace,
    on_meta,
    run,
    workspace_size,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import cake

ops = torch.ops.cake
COMPILER = os.environ.get("CXX", "g++")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"inductor needs a C++ compiler, and {COMPILER} is none"
)
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# Not aot_eager: it passes clones of what is written, and a clone of a workspace is not prepared.
BACKENDS = ["eager", pytest.param("inductor", marks=NEEDS_COMPILER)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def op_arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of the operator, in its order."""
    return (
        call["input"],
        call["token_selected_experts"],
        call["token_final_scales"],
        call["fc1_expert_weights"],
        call["fc2_expert_weights"],
        *call["quant_scales"],
        call.get("situ_beta"),
        call.get("situ_linear_beta"),
        call["output"],
        call["workspace_buffer"],
    )


def step(call: Call) -> Callable[..., Tensor]:
    """The facade as a model calls it: the layer's tensors are constants."""
    names = ("input", "token_selected_experts", "token_final_scales", "workspace_buffer", "output")
    constants = {name: value for name, value in call.items() if name not in names}

    def forward(
        x: Tensor, ids: Tensor, weights: Tensor, workspace: Tensor, output: Tensor | None
    ) -> Tensor:
        return cake.cutlass_fused_moe(
            x, ids, weights, workspace_buffer=workspace, output=output, **constants
        )

    return forward


def step_arguments(call: Call, *, output: bool) -> tuple[Any, ...]:
    return (
        call["input"],
        call["token_selected_experts"],
        call["token_final_scales"],
        call["workspace_buffer"],
        call["output"] if output else None,
    )


# ---- opcheck ------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [{}, betas()], ids=["prepared", "given"])
@pytest.mark.parametrize("check", OPCHECKS[1:])
def test_opcheck_fused_moe(layer: Layer, check: str, smoothing: Call) -> None:
    """Without tokens: opcheck clones its arguments, and a clone of a workspace is not prepared.

    Its test_schema would need tens of gigabytes for weights of this size; the test of version
    counters and contents below takes its place.
    """
    call = {**layer.call(0, workspace=torch.zeros(64, dtype=torch.uint8)), **smoothing}
    opcheck(ops.fused_moe.default, op_arguments(call), test_utils=check)


@pytest.mark.parametrize("rows, columns", [(0, 16), (1, 16), (5, 3584)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_opcheck_quantize(rows: int, columns: int, dtype: torch.dtype) -> None:
    input = torch.randn(rows, columns).bfloat16()
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    sf = torch.zeros(rows, columns // 16, dtype=torch.uint8).view(dtype)
    checks = OPCHECKS if dtype is torch.uint8 else OPCHECKS[1:]  # it cannot compare float8
    opcheck(ops.quantize_nvfp4.default, (input, torch.ones(1), packed, sf), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("counts", [[], [0], [2], [1, 2]], ids=str)
def test_opcheck_prepare_workspace(dtype: torch.dtype, counts: list[int]) -> None:
    workspace = torch.zeros(workspace_size(2), dtype=dtype)
    opcheck(ops.prepare_workspace.default, (workspace, counts))


@pytest.mark.parametrize("shape", [(0,), (3,), (4, 5)])
def test_opcheck_selftest(shape: tuple[int, ...]) -> None:
    opcheck(ops.selftest.default, (torch.zeros(shape, dtype=torch.int32),))


def test_versions_grow_for_what_is_written_alone(layer: Layer) -> None:
    call = {**layer.call(2), **betas()}
    arguments = op_arguments(call)
    before = [tensor._version for tensor in arguments]
    copies = [tensor.clone() for tensor in arguments[:3]]
    run(call)
    for tensor, copy in zip(arguments[:3], copies, strict=True):
        assert_same_bits(tensor, copy)
    grown = [tensor._version - version for tensor, version in zip(arguments, before, strict=True)]
    assert grown[:-2] == [0] * (len(arguments) - 2)
    assert grown[-2] > 0 and grown[-1] > 0

    workspace = call["workspace_buffer"]
    version = workspace._version
    cake.cake_fused_moe_prepare_workspace(workspace, 2)
    assert workspace._version > version


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", [False, True], ids=["allocated", "given"])
def test_token_counts_share_one_graph(layer: Layer, backend: str, output: bool) -> None:
    counter = CompileCounterWithBackend(backend)
    forward = step(layer.call(2))
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 2, 3, 8, 5):
        call = layer.call(tokens)
        expected = run(call)
        actual = compiled(*step_arguments(call, output=output))
        assert_same_bits(actual, expected)
        assert actual.stride() == (H, 1)
        assert not output or actual is call["output"]
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1, 3), (3, 1, 0), (1, 0, 4)], ids=str)
def test_zero_and_one_token(layer: Layer, backend: str, order: tuple[int, ...]) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step(layer.call(2)), fullgraph=True, dynamic=True, backend=counter)
    for tokens in order:
        call = layer.call(tokens)
        assert_same_bits(compiled(*step_arguments(call, output=False)), run(call))
    assert counter.frame_count <= 3  # 0 and 1 may have graphs of their own


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_need_no_workspace(layer: Layer, backend: str) -> None:
    call = {**layer.call(0), "workspace_buffer": None}
    compiled = torch.compile(step(call), fullgraph=True, dynamic=True, backend=backend)
    assert compiled(*step_arguments(call, output=False)).shape == (0, H)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_share_a_workspace(layer: Layer, backend: str) -> None:
    call = layer.call(3)
    forward = step(call)

    def twice(x: Tensor, ids: Tensor, weights: Tensor, workspace: Tensor, _: None) -> Tensor:
        first = forward(x, ids, weights, workspace, None)
        return first + forward(first * 0.125 + x, ids, weights, workspace, None)

    arguments = step_arguments(call, output=False)
    expected = twice(*arguments).clone()
    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend=backend)
    for _ in range(2):
        assert_same_bits(compiled(*arguments), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_workspace_cut_from_a_larger_buffer_inside_the_graph(layer: Layer, backend: str) -> None:
    call = layer.call(3)
    size = workspace_size(3)
    buffer = torch.zeros(2 * size, dtype=torch.uint8)
    cake.cake_fused_moe_prepare_workspace(buffer[:size], 3)
    forward = step(call)

    def cut(x: Tensor, ids: Tensor, weights: Tensor, workspace: Tensor, _: None) -> Tensor:
        return forward(x + 0, ids, weights, workspace[:size], None)

    compiled = torch.compile(cut, fullgraph=True, dynamic=True, backend=backend)
    arguments = step_arguments({**call, "workspace_buffer": buffer}, output=False)
    assert_same_bits(compiled(*arguments), run(call))


@pytest.mark.parametrize("backend", BACKENDS)
def test_smoothing_parameters(layer: Layer, backend: str) -> None:
    call = {**layer.call(2), **betas(3.0, 20.0)}
    compiled = torch.compile(step(call), fullgraph=True, dynamic=True, backend=backend)
    assert_same_bits(compiled(*step_arguments(call, output=False)), run(call))


@pytest.mark.parametrize("backend", [*BACKENDS, "aot_eager"])
def test_unprepared_workspace_says_prepare(layer: Layer, backend: str) -> None:
    call = layer.call(2, workspace=torch.zeros(workspace_size(2), dtype=torch.uint8))
    compiled = torch.compile(step(call), fullgraph=True, dynamic=True, backend=backend)
    with pytest.raises((RuntimeError, ValueError), match="prepare"):
        compiled(*step_arguments(call, output=True))
    assert (call["output"] == 777.0).all()


@pytest.mark.parametrize(
    "name, value",
    [
        ("input", torch.zeros(2, 7168, dtype=torch.bfloat16)),
        ("input", torch.zeros(2, H)),
        ("token_selected_experts", torch.zeros(2, 8, dtype=torch.int32)),
        ("token_selected_experts", torch.zeros(3, 16, dtype=torch.int32)),
        ("token_selected_experts", torch.zeros(2, 16, dtype=torch.int16)),
        ("token_final_scales", torch.zeros(2, 16, dtype=torch.float16)),
        ("token_final_scales", torch.zeros(2, 16, 1)),
        ("output", torch.zeros(2, H, dtype=torch.float16)),
        ("output", torch.zeros(3, H, dtype=torch.bfloat16)),
        ("workspace_buffer", torch.zeros(30208)),
        ("workspace_buffer", torch.zeros(2, 30208, dtype=torch.uint8)),
        ("workspace_buffer", torch.tensor(0, dtype=torch.uint8)),
        ("input", torch.tensor(0.0, dtype=torch.bfloat16)),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v.dtype}{list(v.shape)}".removeprefix("torch."),
)
def test_wrong_argument_is_named_while_tracing(layer: Layer, name: str, value: Tensor) -> None:
    def not_reached(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        raise AssertionError("the graph was compiled")

    call = {**layer.call(2), name: value}
    compiled = torch.compile(step(call), fullgraph=True, dynamic=True, backend=not_reached)
    with pytest.raises(Exception, match=name) as caught:
        compiled(*step_arguments(call, output=True))
    assert "the graph was compiled" not in str(caught.value)


@pytest.mark.parametrize("index, dtype", [(0, torch.float64), (2, torch.float64), (1, torch.int8)])
def test_wrong_scale_is_named_while_tracing(layer: Layer, index: int, dtype: torch.dtype) -> None:
    call = layer.call(2)
    scale = call["quant_scales"][index]
    call["quant_scales"][index] = scale.view(dtype) if index == 1 else scale.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) if t is not None else None for t in op_arguments(call)]
        with pytest.raises(Exception, match=rf"quant_scales\[{index}\]"):
            ops.fused_moe(*fakes)


def test_too_many_tokens_are_refused_while_tracing(layer: Layer) -> None:
    call = layer.call(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        many = {
            name: torch.empty(16385, *call[name].shape[1:], dtype=call[name].dtype)
            for name in ("input", "token_selected_experts", "token_final_scales")
        }
        output = torch.empty_like(many["input"])
        with pytest.raises(RuntimeError, match="input: expected at most 16384 tokens, got 16385"):
            ops.fused_moe(*op_arguments({**call, **many, "output": output}))


@pytest.mark.parametrize("output", [False, True], ids=["allocated", "given"])
def test_fake_tensors_have_real_shapes_and_no_warning(layer: Layer, output: bool) -> None:
    call = layer.call(3)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        None if t is None else mode.from_tensor(t) for t in step_arguments(call, output=output)
    ]
    with mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        fake = step(call)(*fakes)
    real = run(call)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_tensors_have_real_shapes(layer: Layer) -> None:
    call = on_meta(layer.call(3))
    for output in (None, call["output"]):
        result = cake.cutlass_fused_moe(**{**call, "output": output})
        assert result.is_meta and result.shape == (3, H) and result.stride() == (H, 1)


@NEEDS_COMPILER
def test_export(layer: Layer) -> None:
    call = layer.call(2)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor, workspace: Tensor) -> Tensor:
            return step(call)(x, ids, weights, workspace, None)

    tokens = torch.export.Dim("tokens", min=2, max=16384)
    arguments = step_arguments(call, output=False)[:-1]
    program = torch.export.export(
        Model(), arguments, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}, None)
    )
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert any("fused_moe" in str(target) for target in targets)


def test_prepared_once_for_many_compiled_calls(layer: Layer) -> None:
    workspace = new_workspace(2, 3)
    calls = [layer.call(tokens, workspace=workspace) for tokens in (2, 3)]
    expected = [run(call) for call in calls]
    compiled = torch.compile(step(calls[0]), fullgraph=True, dynamic=True, backend="eager")
    for _ in range(2):
        for call, wanted in zip(calls, expected, strict=True):
            assert_same_bits(compiled(*step_arguments(call, output=False)), wanted)
