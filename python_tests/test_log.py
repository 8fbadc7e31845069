"""The logger, what it says and when, and that every environment variable is documented."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from layer_calls import GPU, NEEDS_GPU, Layer, assert_same_bits, new_workspace, run

import cake
from cake import check, info, log

ROOT = Path(__file__).resolve().parents[1]
PREPARE = """
import logging, torch, cake
buffer = torch.empty(torch.ops.cake.workspace_size(9), dtype=torch.uint8)
cake.cake_fused_moe_prepare_workspace(buffer, [9, 1, 2, 3])
print(logging.getLogger("cake").level)
"""


def run_with(variables: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k == "CAKE_LIBRARY" or k[:5] != "CAKE_"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


def test_silent_by_default() -> None:
    result = run_with({}, PREPARE)
    assert result.stderr == ""
    assert result.stdout == f"{logging.NOTSET}\n"


@pytest.mark.parametrize("value, level", [("info", logging.INFO), ("debug", logging.DEBUG)])
def test_environment_turns_the_log_on(value: str, level: int) -> None:
    result = run_with({"CAKE_LOG": value}, PREPARE)
    assert result.stdout == f"{level}\n"
    for said in (
        f"cake {cake.__version__}",
        cake.build_info()["commit"],
        str(log._library.library_path()),
        torch.__version__,
        f"workspace of {torch.ops.cake.workspace_size(9):,} bytes",
        "on cpu",
        "for T = 1-3, 9\n",
    ):
        assert said in result.stderr


def test_another_value_is_named_and_harmless() -> None:
    result = run_with({"CAKE_LOG": "loud"}, PREPARE)
    assert "CAKE_LOG: expected info, debug or dump, got 'loud'" in result.stderr
    assert "workspace" not in result.stderr


@pytest.mark.parametrize(
    "counts, text",
    [([], "none"), ([7], "7"), ([3, 2, 1, 1], "1-3"), ([9, 4, 5, 7, 256], "4-5, 7, 9, 256")],
)
def test_token_counts_are_short(counts: list[int], text: str) -> None:
    assert log._counts_text(counts) == text


def test_plans_are_told() -> None:
    def text(num_tokens: int, major: int) -> str:
        plan = info.gpu_plan(num_tokens, major, 132)
        assert plan is not None
        return log._plan_text(plan, num_tokens)

    assert text(1, 9) == "decode kernels, up to 8 pairs a tile, FC2 in 1 part(s) with finalize"
    assert text(2, 9) == "decode kernels, up to 8 pairs a tile, FC2 in 1 part(s)"
    assert text(16384, 9).endswith(", in chunks of tokens")
    assert text(64, 9).endswith(" from the pool")
    assert text(1, 10).startswith("sm100 kernels, ")
    assert info.device_plan(torch.device("cpu"), 1) is None


def test_debug_tells_shapes_of_each_eager_call(
    layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    call = layer.call(3)
    run(call)
    assert caplog.text == ""
    with caplog.at_level(logging.DEBUG, "cake"):
        run(call, batch_invariant=True)
    (entry,) = caplog.messages
    for said in (
        "input bfloat16 [3, 3584]",
        "token_selected_experts int32 [3, 16]",
        "on cpu",
        "batch_invariant",
    ):
        assert said in entry
    assert "situ_beta" not in entry


def test_a_refused_call_is_told_and_refused(layer: Layer, caplog: pytest.LogCaptureFixture) -> None:
    call = layer.call(2, workspace=torch.zeros_like(new_workspace(2)))
    with caplog.at_level(logging.DEBUG, "cake"), pytest.raises(ValueError, match="prepare"):
        run(call)
    assert "fused_moe: " in caplog.text


@pytest.mark.parametrize("dumps", [False, True])
def test_compiled_calls_stay_one_graph(
    layer: Layer,
    dumps: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = layer.call(2)
    expected = run(call)
    monkeypatch.setattr(log, "DUMPS", dumps)
    log.warn_not_dumped.cache_clear()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda **arguments: cake.cutlass_fused_moe(**arguments), fullgraph=True, backend="eager"
    )
    with caplog.at_level(logging.DEBUG, "cake"):
        actual = compiled(**call)
        compiled(**call)
    torch.compiler.reset()
    log.warn_not_dumped.cache_clear()
    assert_same_bits(actual, expected)
    warned = [entry for entry in caplog.messages if "no bundle of a traced call" in entry]
    assert len(warned) == dumps
    assert "fused_moe: " not in caplog.text


def test_preparation_in_compiled_code_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda buffer: cake.cake_fused_moe_prepare_workspace(buffer, 2), backend="eager"
    )
    with caplog.at_level(logging.INFO, "cake"), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.empty_like(new_workspace(2)))
    torch.compiler.reset()
    assert "for T = 2" in caplog.text  # of new_workspace
    assert caplog.text.count("prepared a workspace") == 1


@NEEDS_GPU
def test_debug_waits_for_nothing_and_may_be_captured(
    gpu_layer: check.Layer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "cake"):
        call = check.Call(gpu_layer, check.make_batch(3, "random", 0).to(GPU))
        expected = call.run().clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call.run()
            with torch.cuda.graph(graph):
                call.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    call.output.zero_()
    graph.replay()
    assert_same_bits(call.output, expected)
    assert "plan for T = 3: " in caplog.text
    assert "captured in a CUDA graph" in caplog.text


# ---- docs ---------------------------------------------------------------------------------------

READERS = {
    "src/**/*.py": r'environ(?:\.get\(|\[)"(\w+)"',
    "build_support/*.py": r'environ(?:\.get\(|\[)"(\w+)"',
    "cpp/kernels/**/*.*": r'(?:getenv|is_switched_on)\("(\w+)"',
    "ci/*.sh": r"\$\{?(CAKE_\w+|COMPUTE_\w+)",
}


def variables_read() -> set[str]:
    """What the package and its build read, and the scripts' settings of our own."""
    return {
        name
        for files, reader in READERS.items()
        for file in ROOT.glob(files)
        for name in re.findall(reader, file.read_text("utf-8"))
    }


def test_every_environment_variable_is_in_the_table() -> None:
    text = (ROOT / "docs/observability.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("## Environment variables")[2], re.M)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) == len(set(names))
    assert variables_read() == set(names)
    for file in (*ROOT.glob("src/**/*.py"), *ROOT.glob("build_support/*.py")):
        # By name, or variables_read() would miss it.
        assert not re.search(r'environ(?:\.get\(|\[)[^"]', file.read_text("utf-8")), file
