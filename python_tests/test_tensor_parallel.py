"""examples/tensor_parallel.py: shards on several ranks add up to the unsharded layer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import load_script

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tensor_parallel.py"

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_add_up_to_the_unsharded_layer(world: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, f"--nproc-per-node={world}", EXAMPLE, "--device=cpu", "--experts=16"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "THP_MEM_ALLOC_ENABLE": "1",  # halves the time of the float64 reference
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert len(lines) == world
    for rank, line in enumerate(lines):
        shards = ", ".join(map(str, range(rank, 8, world)))
        assert line.startswith(f"rank {rank} of {world} on cpu, shards {shards}: right, ")
        # What eight roundings to bfloat16 and more give; another slice gives 0.3 or more.
        assert re.search(r"relative rms [1-4]\.\de-03", line), line


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module of this process, which is the only rank."""
    module = load_script(EXAMPLE)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--device=cpu"])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):  # port 0: a free one
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return module


@pytest.mark.parametrize("gain, status", [(1.0, 0), (7 / 8, 1)])
def test_a_wrong_sum_gives_exit_status_1(
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gain: float,
    status: int,
) -> None:
    expected = torch.full((4, 3584), 3.0)
    nothing = SimpleNamespace(w13=None, w2=None)
    monkeypatch.setattr(example.synthetic, "fill_random_prepared", lambda *_: (nothing, []))
    monkeypatch.setattr(example.reference, "fused_moe_reference", lambda *_: expected)
    monkeypatch.setattr(example, "sum_of_shards", lambda *_: gain * expected)
    assert example.main() == status
    assert ("failed: relative rms" in capsys.readouterr().out) == bool(status)
    assert not dist.is_initialized()


@pytest.mark.parametrize("world, message", [("3", "1, 2, 4 or 8 ranks, got 3"), (None, "torchrun")])
def test_other_worlds_are_refused(
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    world: str | None,
    message: str,
) -> None:
    if world is None:
        monkeypatch.delenv("RANK")
    else:
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit):
        example.main()
    assert message in capsys.readouterr().err
