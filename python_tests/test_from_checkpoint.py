"""examples/from_checkpoint.py: its own reading of NVFP4, which judges the conversion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load_script

from cake.testing import checkpoints

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "from_checkpoint.py"


@pytest.fixture
def example() -> Any:
    return load_script(EXAMPLE)


def test_values_are_those_of_the_format(example: Any) -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    sf = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = example.dequantize(codes, sf, torch.tensor(0.25))
    assert values.tolist() == [[v / 2 for v in expected]]


def test_make_writes_the_whole_layer(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(checkpoints, "write_checkpoint", lambda _, **options: asked.update(options))
    arguments = [str(EXAMPLE), str(tmp_path / "c"), str(tmp_path / "p"), "--make", "--layer", "7"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert example.main() == 0
    sizes = (asked["layers"], asked["num_experts"], asked["hidden"], asked["intermediate_full"])
    assert sizes == ([7], 896, 3584, 3072)
