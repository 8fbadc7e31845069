"""`backend="cake"` of FlashInfer after install(), with a small package in FlashInfer's place."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from layer_calls import SIZE_ARGUMENTS, Call, Layer, assert_same_bits, run
from torch import Tensor

import cake
from cake.integrations.flashinfer import install, uninstall

NAMES = (
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "cake_fused_moe_prepare_workspace",
)
POSITIONAL = [
    name
    for name, p in inspect.signature(cake.cutlass_fused_moe).parameters.items()
    if p.kind is p.POSITIONAL_OR_KEYWORD
]

FAKE = {
    "__init__.py": """
        from .fused_moe import cutlass_fused_moe
        from .tllm_enums import ActivationType
        __version__ = "9.9"
    """,
    "tllm_enums.py": """
        from enum import IntEnum
        class ActivationType(IntEnum):
            Swiglu = 3
            Situ = 10
    """,
    "fused_moe/__init__.py": """
        from ..tllm_enums import ActivationType
        from .core import *
    """,
    "fused_moe/core.py": """
        import functools
        from ..tllm_enums import ActivationType
        _UNSET = object()
        calls = []
        __all__ = [
            "cutlass_fused_moe",
            "cutlass_fused_moe_workspace_size",
            "cake_fused_moe_prepare_workspace",
        ]

        def recorded(function):
            @functools.wraps(function)
            def record(*args, **kwargs):
                function(*args, **kwargs)
                calls.append((function.__name__, args, kwargs))
                return ("FlashInfer", function.__name__)
            record.trace = "kept"
            return record

        @recorded
        def cutlass_fused_moe(
            input, token_selected_experts, token_final_scales, fc1_expert_weights,
            fc2_expert_weights, output_dtype, quant_scales, fc1_expert_biases=None,
            fc2_expert_biases=None, input_sf=None, swiglu_alpha=None, swiglu_beta=None,
            swiglu_limit=None, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1,
            cluster_rank=0, output=None, enable_alltoall=False,
            use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False,
            use_mxfp8_act_scaling=False, min_latency_mode=False, use_packed_weights=False,
            use_wfp4afp8_humming=False, tune_max_num_tokens=8192, enable_pdl=None,
            activation_type=ActivationType.Swiglu, swizzled_input_sf=True,
            use_fused_finalize=None, profile_ids=None, workspace_buffer=None, *,
            clamped_relu2_limit=None, situ_beta=None, situ_linear_beta=None,
            backend="cutlass", nvfp4_4over6=_UNSET,
        ): pass

        @recorded
        def cutlass_fused_moe_workspace_size(
            max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *,
            x_dtype, weight_dtype, activation_type=ActivationType.Swiglu, tp_size=1,
            device=None, backend="cutlass",
        ): pass

        @recorded
        def cake_fused_moe_prepare_workspace(
            workspace_buffer, num_tokens, *, backend="cake",
            weight_layout="trtllm_shuffled_nvfp4_group16",
        ): pass
    """,
    "late.py": "from .fused_moe.core import cutlass_fused_moe",
}
CORE = "fused_moe/core.py"

MakeFake = Callable[..., Any]


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFake]:
    """Writer of a package `flashinfer`, whose files may differ from FAKE; gives its fused_moe."""
    real = _take_out()

    def make(file: str = CORE, old: str = "", new: str = "") -> Any:
        for name, text in FAKE.items():
            assert name != file or old in text
            path = tmp_path / "flashinfer" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(inspect.cleandoc(text.replace(old, new) if name == file else text))
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("flashinfer.fused_moe")

    yield make
    uninstall()
    _take_out()
    sys.modules.update(real)


@pytest.fixture
def fake(make_fake: MakeFake) -> Any:
    return make_fake()


def positional(call: Call) -> tuple[list[Any], Call]:
    """The call with the seven operands by place, as FlashInfer's documentation shows it."""
    return [call[name] for name in POSITIONAL[:7]], {
        name: value for name, value in call.items() if name not in POSITIONAL[:7]
    }


def test_cake_backend_runs_cake(fake: Any, layer: Layer) -> None:
    call = layer.call(3)
    expected = run(call)
    install()
    size = {**SIZE_ARGUMENTS, "max_num_tokens": 3, "activation_type": fake.ActivationType.Situ}
    nbytes = fake.cutlass_fused_moe_workspace_size(**size, backend="cake")
    assert nbytes == cake.cutlass_fused_moe_workspace_size(**size)
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    assert fake.cake_fused_moe_prepare_workspace(workspace, 3) is workspace
    call |= {"activation_type": fake.ActivationType.Situ, "workspace_buffer": workspace}
    operands, options = positional(call)
    assert fake.cutlass_fused_moe(*operands, **options, backend="cake") is call["output"]
    assert_same_bits(call["output"], expected)
    every = [call.get(name, cake_default(name)) for name in POSITIONAL]
    every[POSITIONAL.index("activation_type")] = 10
    assert_same_bits(fake.cutlass_fused_moe(*every, backend="cake"), expected)
    unset = {"nvfp4_4over6": fake.core._UNSET, "batch_invariant": False}
    assert_same_bits(fake.cutlass_fused_moe(**call, **unset, backend="cake"), expected)
    assert fake.core.calls == []


def cake_default(name: str) -> Any:
    return inspect.signature(cake.cutlass_fused_moe).parameters[name].default


@pytest.mark.parametrize("backend", [{}, {"backend": "cutlass"}, {"backend": None}], ids=str)
def test_other_backends_get_the_same_arguments(fake: Any, backend: Call) -> None:
    install()
    operands = [object() for _ in range(POSITIONAL.index("output"))]
    options = {"output": object(), "nvfp4_4over6": object(), "activation_type": object(), **backend}
    assert fake.cutlass_fused_moe(*operands, **options) == ("FlashInfer", NAMES[0])
    sizes = {"x_dtype": object(), "weight_dtype": object(), **backend}
    assert fake.cutlass_fused_moe_workspace_size(1, 2, 3, 4, 5, **sizes) == ("FlashInfer", NAMES[1])
    (_, args, kwargs), (_, size_args, size_kwargs) = fake.core.calls
    assert len(args) == len(operands) and all(a is b for a, b in zip(args, operands, strict=True))
    assert kwargs == options and all(kwargs[name] is options[name] for name in options)
    assert size_args == (1, 2, 3, 4, 5) and size_kwargs == sizes


def test_other_activations_of_the_cake_backend_are_flashinfers(fake: Any, layer: Layer) -> None:
    install()
    call = {**layer.call(1), "backend": "cake"}
    for activation in (fake.ActivationType.Swiglu, 3, "Situ", None):
        assert fake.cutlass_fused_moe(**{**call, "activation_type": activation})[0] == "FlashInfer"
    del call["activation_type"]  # FlashInfer's default is Swiglu
    assert fake.cutlass_fused_moe(**call)[0] == "FlashInfer"
    assert fake.core.calls[-1] == (NAMES[0], (), call)


def test_cakes_refusals_come_through(fake: Any, layer: Layer) -> None:
    install()
    call = {**layer.call(1), "backend": "cake"}
    with pytest.raises(ValueError, match="tp_size: expected tp_size=8, got 4"):
        fake.cutlass_fused_moe(**{**call, "tp_size": 4})
    with pytest.raises(ValueError, match="prepare"):
        fake.cutlass_fused_moe(**{**call, "workspace_buffer": None})
    with pytest.raises(ValueError, match="top_k=16"):
        fake.cutlass_fused_moe_workspace_size(**{**SIZE_ARGUMENTS, "top_k": 8, "backend": "cake"})
    with pytest.raises(TypeError, match="input"):
        fake.cutlass_fused_moe(call["input"], **call)
    with pytest.raises(TypeError, match="unheard_of"):
        fake.cutlass_fused_moe(**call, unheard_of=1)
    assert fake.core.calls == []


def test_every_name_inside_flashinfer_is_replaced(fake: Any) -> None:
    package = sys.modules["flashinfer"]
    taken_before = original = fake.cutlass_fused_moe
    install()
    late = importlib.import_module("flashinfer.late")
    for module in (package, fake, fake.core, late):
        assert module.cutlass_fused_moe is fake.cutlass_fused_moe is not original
    assert taken_before is original
    assert fake.cutlass_fused_moe.trace == "kept"
    assert inspect.signature(fake.cutlass_fused_moe) == inspect.signature(original)
    uninstall()
    for module in (package, fake, fake.core, late):
        assert module.cutlass_fused_moe is original


def test_install_and_uninstall_may_be_repeated(fake: Any) -> None:
    uninstall()
    originals = [getattr(fake, name) for name in NAMES]
    install()
    replacements = [getattr(fake, name) for name in NAMES]
    install()
    assert [getattr(fake, name) for name in NAMES] == replacements
    uninstall()
    uninstall()
    assert [getattr(fake, name) for name in NAMES] == originals
    size = {**SIZE_ARGUMENTS, "device": None, "backend": "cake"}
    assert replacements[1](**size)[0] == "FlashInfer"  # under a name that somebody has kept
    install()
    assert [getattr(fake, name) for name in NAMES] == replacements
    assert replacements[1](**size) == cake.cutlass_fused_moe_workspace_size(**SIZE_ARGUMENTS)


def test_reloaded_functions_are_replaced_by_the_next_install(fake: Any) -> None:
    install()
    importlib.reload(fake.core)
    importlib.reload(fake)
    size = {**SIZE_ARGUMENTS, "backend": "cake"}
    assert fake.cutlass_fused_moe_workspace_size(**size)[0] == "FlashInfer"
    install()
    assert fake.cutlass_fused_moe_workspace_size(**size) > 0


def test_cakes_facade_reaches_flashinfer_once(fake: Any, layer: Layer) -> None:
    """The facade looks for its name in FlashInfer, which now has the replacement there."""
    install()
    operands = [torch.zeros(1) for _ in range(5)]
    result = cake.cutlass_fused_moe(*operands, torch.bfloat16, [], tp_size=2, backend="cutlass")
    assert result == ("FlashInfer", NAMES[0])
    size = {**SIZE_ARGUMENTS, "activation_type": 3, "backend": "cutlass"}
    with pytest.raises((TypeError, ValueError)):
        cake.cutlass_fused_moe_workspace_size(**size)  # the fake gives no number
    assert [name for name, _, _ in fake.core.calls] == list(NAMES[:2])
    assert fake.core.calls[0][2]["backend"] == "cutlass"
    call = layer.call(1)
    assert_same_bits(run(call, backend="cake"), run(call))
    assert len(fake.core.calls) == 2


def test_arguments_go_by_name(make_fake: MakeFake, layer: Layer) -> None:
    fake = make_fake(
        CORE, "swiglu_limit=None, tp_size=1", "swiglu_limit=None, novel=2.5, tp_size=1"
    )
    install()
    call = layer.call(1)
    expected = run(call)
    operands, options = positional(call)
    operands += [None] * 6 + [float("2.5"), options.pop("tp_size")]
    assert_same_bits(fake.cutlass_fused_moe(*operands, **options, backend="cake"), expected)
    with pytest.raises(cake.UnsupportedError, match="novel: expected its default, got 3"):
        fake.cutlass_fused_moe(**call, novel=3, backend="cake")


def test_companions_may_be_missing_or_have_their_first_name(make_fake: MakeFake) -> None:
    fake = make_fake(CORE, "cake_fused_moe_prepare", "cutlass_fused_moe_prepare")  # as in 0.7.1
    install()
    workspace = torch.empty(torch.ops.cake.workspace_size(1), dtype=torch.uint8)
    assert fake.cutlass_fused_moe_prepare_workspace(workspace, 1) is workspace
    assert not hasattr(fake, "cake_fused_moe_prepare_workspace")


def test_one_function_may_have_two_names(fake: Any) -> None:
    fake.cutlass_fused_moe_prepare_workspace = fake.cake_fused_moe_prepare_workspace
    install()
    workspace = torch.empty(torch.ops.cake.workspace_size(1), dtype=torch.uint8)
    assert fake.cake_fused_moe_prepare_workspace(workspace, 1) is workspace
    assert fake.cutlass_fused_moe_prepare_workspace(workspace, 1) is workspace


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        (CORE, 'backend="cutlass", nvfp4', "nvfp4", r"backend=.*no such parameter.*FlashInfer 9.9"),
        (CORE, 'None, *,\n            clamped_relu2_limit', "None, clamped_relu2_limit", "backend"),
        (CORE, "num_tokens, *, backend", "num_tokens, stream, *, backend", "num_tokens, stream"),
        (CORE, "fc1_expert_weights,", "w13,", "fc1_expert_weights.*w13"),
        ("tllm_enums.py", "Situ = 10", "Situ = 11", r"Situ = 10, got .*11"),
        ("tllm_enums.py", "Situ = 10", "Situ = 10 / 0", "imported, got ZeroDivisionError"),
        ("fused_moe/__init__.py", "from .core import *", "cutlass_fused_moe = 1", "function"),
    ],
)  # fmt: skip
def test_a_different_flashinfer_is_refused_whole(
    make_fake: MakeFake, file: str, old: str, new: str, message: str
) -> None:
    try:
        fake = make_fake(file, old, new)
    except ZeroDivisionError:
        fake = ModuleType("none")
    before = dict(vars(fake))
    with pytest.raises(cake.UnsupportedError, match=f"(?s)flashinfer.*{message}.*pip install"):
        install()
    assert vars(fake) == before


def test_without_flashinfer_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(cake.UnsupportedError, match="pip install flashinfer-python"):
        install()
    uninstall()


def test_threads_may_install_and_call(fake: Any) -> None:
    size = {**SIZE_ARGUMENTS, "backend": "cake"}
    expected = cake.cutlass_fused_moe_workspace_size(**SIZE_ARGUMENTS)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                if (number + turn) % 5 == 0:
                    uninstall()
                install()
                got = fake.cutlass_fused_moe_workspace_size(**size)
                assert got in (expected, ("FlashInfer", NAMES[1]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    install()
    assert fake.cutlass_fused_moe_workspace_size(**size) == expected


def test_compiles_as_one_graph(fake: Any, layer: Layer) -> None:
    install()
    call = layer.call(2)
    expected = run(call)
    constants = {k: v for k, v in call.items() if k not in ("input", "output")}

    def step(input: Tensor, output: Tensor) -> Tensor:
        result: Tensor = fake.cutlass_fused_moe(
            input=input, output=output, backend="cake", **constants
        )
        return result * 1

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_same_bits(compiled(call["input"], call["output"]), expected)
    torch.compiler.reset()
