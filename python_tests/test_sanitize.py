"""ci/sanitize.sh on each generation of GPUs, with stand-ins for the GPU and the sanitizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cake  # noqa: F401  (loads torch.ops.cake)

SCRIPT = Path(__file__).resolve().parents[1] / "ci" / "sanitize.sh"
PYTHON = """#!/bin/sh
case "$2" in *get_device_capability*) echo {major} ;; esac
"""
SANITIZER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[sys.argv.index("-c") + 1 :]) + "\\n")
print("========= ERROR SUMMARY: 0 errors")
"""


def sanitize(
    folder: Path, major: int, *words: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    log = folder / "log"
    for name, text in (
        ("python3", PYTHON.format(major=major)),
        ("sanitizer", SANITIZER.format(python=sys.executable, log=str(log))),
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


@pytest.mark.parametrize(
    ("major", "plans"),
    [
        (9, {("decode", 8), ("prefill", 88), ("prefill", 176)}),
        (10, {("sm100", size) for size in (8, 16, 32, 64, 128)}),
    ],
)
def test_every_kernel_and_plan_of_a_gpu_is_run(
    tmp_path: Path, major: int, plans: set[tuple[str, int]]
) -> None:
    result, log = sanitize(tmp_path, major, "memcheck")
    assert result.returncode == 0, result.stdout + result.stderr
    found, parts = set(), set()
    for line in log.read_text().splitlines():
        code, tokens, kernels, tile_pairs, fc2_parts, _ = json.loads(line)
        compile(code, "ONE_CALL", "exec")
        plan = json.loads(torch.ops.cake.plan(int(tokens), major=major))
        assert (kernels, int(tile_pairs)) == (plan["kernels"], plan["tile_pairs"])
        assert int(fc2_parts) == plan["fc2_parts"]
        found.add((plan["kernels"], plan["tile_pairs"]))
        parts.add(plan["fc2_parts"])
    assert found == plans
    assert len(parts) > 1


@pytest.mark.parametrize(("major", "count"), [(9, "16"), (10, "360")])
def test_a_count_of_the_other_generation_is_refused(tmp_path: Path, major: int, count: str) -> None:
    result, log = sanitize(tmp_path, major, "memcheck", count)
    assert result.returncode == 2
    assert f"got {count}" in result.stderr
    assert not log.exists()
