"""ci/sanitize.sh on each generation of GPUs, with stand-ins for the GPU and the sanitizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cake.support import MAX_TOKENS

SCRIPT = Path(__file__).resolve().parents[1] / "ci" / "sanitize.sh"
PYTHON = """#!/bin/sh
case "$2" in
  *get_device_capability*) echo {major} ;;
  *every_lane_arrives*) exit {single} ;;
esac
"""
SANITIZER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[sys.argv.index("-c") + 1 :]) + "\\n")
print({output!r})
sys.exit({code})
"""
CLEAN = "========= ERROR SUMMARY: 0 errors"


def sanitize(
    folder: Path,
    major: int,
    *words: str,
    output: str = CLEAN,
    code: int = 0,
    every_lane_arrives: bool = True,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    log = folder / "log"
    for name, text in (
        ("python3", PYTHON.format(major=major, single=int(not every_lane_arrives))),
        (
            "sanitizer",
            SANITIZER.format(python=sys.executable, log=str(log), output=output, code=code),
        ),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "COMPUTE_SANITIZER": str(folder / "sanitizer"),
        "TMPDIR": str(folder),
    }
    command = ["bash", str(SCRIPT), *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return result, log


def kernels_of(tokens: int, major: int) -> tuple[str, int, bool]:
    plan = json.loads(torch.ops.cake.plan(tokens, major=major))
    return plan["kernels"], plan["tile_pairs"], plan["fc2_finalizes"]


@pytest.mark.parametrize("major", [9, 10])
def test_every_kernel_and_plan_of_a_gpu_is_run(tmp_path: Path, major: int) -> None:
    result, log = sanitize(tmp_path, major, "memcheck")
    assert result.returncode == 0, result.stdout + result.stderr
    found, parts = set(), set()
    for line in log.read_text().splitlines():
        code, tokens, kernels, tile_pairs, fc2_parts, _, routing = json.loads(line)
        assert routing == "random"
        compile(code, "ONE_CALL", "exec")
        plan = json.loads(torch.ops.cake.plan(int(tokens), major=major))
        assert (kernels, int(tile_pairs)) == (plan["kernels"], plan["tile_pairs"])
        assert int(fc2_parts) == plan["fc2_parts"]
        found.add((plan["kernels"], plan["tile_pairs"], plan["fc2_finalizes"]))
        parts.add(plan["fc2_parts"])
    assert found == {kernels_of(t, major) for t in range(1, MAX_TOKENS + 1)}
    assert len(parts) > 1


@pytest.mark.parametrize(("major", "count"), [(9, "24"), (10, "256")])
def test_a_count_of_the_other_generation_is_refused(tmp_path: Path, major: int, count: str) -> None:
    result, log = sanitize(tmp_path, major, "memcheck", count)
    assert result.returncode == 2
    assert f"got {count}" in result.stderr
    assert not log.exists()


def test_racecheck_takes_few_experts_of_a_library_in_which_every_lane_arrives(
    tmp_path: Path,
) -> None:
    result, log = sanitize(tmp_path, 9, "racecheck", "5505")
    assert result.returncode == 0
    assert json.loads(log.read_text())[-1] == "same"
    log.unlink()
    for major, code in ((9, 2), (10, 0)):
        result, log = sanitize(tmp_path, major, "racecheck", "3", every_lane_arrives=False)
        assert result.returncode == code and log.exists() == (code == 0)
        assert ("CAKE_EVERY_LANE_ARRIVES=ON" in result.stderr) == (code == 2)
    result, _ = sanitize(tmp_path, 9, "3", every_lane_arrives=False)
    assert result.returncode == 0 and "Left out: racecheck" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [
        "memcheck",
        "synccheck",
        "initcheck",
    ]


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("ERROR SUMMARY: 3 errors", 0),
        ("RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", 0),
        ("ERROR SUMMARY: 0 errors", 1),
        ("Killed", 0),
    ],
)
def test_what_a_tool_finds_fails(tmp_path: Path, output: str, code: int) -> None:
    report = f"Error: Race reported here\n========= {output}"
    result, log = sanitize(tmp_path, 9, "racecheck", "3", output=report, code=code)
    assert result.returncode == 1 and len(log.read_text().splitlines()) == 1
    assert "FAILED" in result.stdout and "Race reported here" in result.stdout


def test_a_warning_of_racecheck_is_no_error(tmp_path: Path) -> None:
    report = "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"
    result, _ = sanitize(tmp_path, 9, "racecheck", "3", output=report)
    assert result.returncode == 0 and "FAILED" not in result.stdout
