from __future__ import annotations

from pathlib import Path

import pytest

from cake.checkpoint import load_layer
from cake.cli import main
from cake.testing import checkpoints


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    checkpoints.write_checkpoint(path, layers=(1, 2), shards=1)
    return path


def test_layers_add_up_and_sizes_that_cannot_run_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--layer", "1", "--layer", "2", "--tp-rank", "5"]
    assert main(["convert", str(source), str(out), *options]) == 0
    text = capsys.readouterr().out
    assert "layer 1: " in text and "layer 2: " in text
    assert "intermediate size are (8, 256, 128); only (896, 3584, 384) runs" in text
    for layer in (1, 2):
        load_layer(out / f"layer-000{layer}-tp-5-of-8.safetensors", expected_tp_rank=5)


def test_ranks_may_be_written_beside_a_checkpoint_of_one_file(source: Path) -> None:
    for rank in ("0", "1"):
        command = ["convert", str(source), str(source), "--layer", "1", "--tp-rank", rank]
        assert main(command) == 0
