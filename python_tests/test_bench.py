from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_calls import NEEDS_GPU

from cake import bench, plot
from cake.cli import main

ROOT = Path(__file__).parent.parent
CEILINGS = bench.Ceilings(read_bytes_per_s=4e12, matrix_flop_per_s=700e12, graph_node_us=0.5)


def test_floor_is_the_larger_of_memory_and_matrix_time() -> None:
    assert CEILINGS.floor_us(16, 1) == pytest.approx(16 * 2_322_432 / 4e12 * 1e6)
    assert CEILINGS.floor_us(896, 16384) == pytest.approx(16384 * 16 * 8_257_536 / 700e12 * 1e6)


def test_sizes_are_those_of_the_geometry() -> None:
    hidden, rank = 3584, 384
    weights = 2 * rank * hidden + hidden * rank
    assert weights // 2 + weights // 16 == bench.EXPERT_BYTES
    assert 2 * weights == bench.PAIR_FLOP


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_without_a_gpu_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 1
    assert "--device cuda: expected a supported GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens: expected 1 to 16384, got 0"),
        (["--json", "no/such/folder/file"], "--json: expected a file in an existing folder"),
    ],
)
def test_bench_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 1
    assert message in capsys.readouterr().err


def some_report() -> dict[str, Any]:
    results = [
        {"tokens": t, "routing": r, "us": 20.0 + t, "floor_us": 10.0 + t}
        for r in ("random", "zipf")
        for t in (1, 8, 64)
    ]
    return {"device": "a GPU", "cake": {"version": "0"}, "results": results}


def test_plot_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, image = tmp_path / "a.json", tmp_path / "a.png"
    source.write_text(json.dumps(some_report()))
    assert main(["plot", str(source), "--output", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    assert str(image) in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"results": []}',
        '{"results": [{"tokens": 1}]}',
        '{"results": [{"tokens": 1, "us": 1, "floor_us": 1, "routing": "random"}]}',
        json.dumps(some_report() | {"results": [{"tokens": 1, "us": 0, "floor_us": 1}]}),
        json.dumps(some_report() | {"results": [{"tokens": "x", "us": 1, "floor_us": 1}]}),
    ],
)
def test_plot_refuses_other_files(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.json"
    source.write_text(content)
    assert main(["plot", str(source), "--output", str(tmp_path / "a.png")]) == 1
    assert "cake bench --json" in capsys.readouterr().err


@NEEDS_GPU
def test_bench_measures(tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    assert main(["bench", "--tokens", "1", "400", "--json", str(output)]) == 0
    report = plot.load(output)
    for result in report["results"]:
        assert 0 < result["fraction"] < 1.1
        assert set(result["stages_us"]) >= {"cake_route_quantize", "cake_finalize"}


def readme_table(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "readme_table.py"
    return subprocess.run(
        [sys.executable, script, "--root", root, *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_readme_has_the_newest_results() -> None:
    result = readme_table(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_table_is_written_and_compared(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    report = some_report() | {
        "cake": {"version": "0", "commit": "abc"},
        "torch": "2",
        "driver": "5",
        "date": "2026-01-01",
        "ceilings": {"read_bytes_per_s": 4e12, "matrix_flop_per_s": 7e14},
    }
    for result in report["results"]:
        result["fraction"] = result["floor_us"] / result["us"]
    (results / "2026-01-01-all.json").write_text(json.dumps(report))
    readme = tmp_path / "README.md"
    readme.write_text("# a\n")
    assert readme_table(tmp_path, "--check").returncode == 1  # results, but no place for them
    begin, end = "<!-- times: benchmarks/readme_table.py -->\n", "<!-- end of times -->\n"
    readme.write_text(f"# a\n{begin}{end}b\n")
    assert readme_table(tmp_path, "--check").returncode == 1
    assert readme_table(tmp_path).returncode == 0
    assert "| 8 | 28.0 | 18.0 | 0.64 |\n" in readme.read_text()
    assert readme.read_text().endswith(f"{end}b\n")
    assert readme_table(tmp_path, "--check").returncode == 0
    report["peers"] = {"humming": {"version": "humming-kernels 1", "numerics": "W4A16: weights"}}
    for result, outcome in zip(
        report["results"], ({"us": 42.0, "ratio": 2.0}, {"failure": "x"}), strict=False
    ):
        result["peers"] = {"humming": outcome}
    (results / "2026-01-01-all.json").write_text(json.dumps(report))
    assert readme_table(tmp_path).returncode == 0
    text = readme.read_text()
    assert "humming-kernels 1, timed in the same process, is W4A16: weights.\n" in text
    assert "| fraction of the floor | humming-kernels 1, us | its time over cake's |\n" in text
    assert "| 1 | 21.0 | 11.0 | 0.52 | 42.0 | 2.00 |\n" in text
    assert "| 8 | 28.0 | 18.0 | 0.64 | none | |\n" in text
    assert "| 64 | 84.0 | 74.0 | 0.88 | none | |\n" in text
