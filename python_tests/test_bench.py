from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from layer_calls import NEEDS_GPU
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cake import bench, info, plot, roofline, timing
from cake.check import Call, make_batch
from cake.cli import main

ROOT = Path(__file__).parent.parent
CEILINGS = bench.Ceilings(read_bytes_per_s=4e12, matrix_flop_per_s=700e12, graph_node_us=0.5)


def test_floor_is_the_larger_of_memory_and_matrix_time() -> None:
    assert CEILINGS.floor_us(16, 1) == pytest.approx(16 * 2_322_432 / 4e12 * 1e6)
    assert CEILINGS.floor_us(896, 16384) == pytest.approx(16384 * 16 * 8_257_536 / 700e12 * 1e6)


@pytest.mark.parametrize(
    ("l2_bytes", "tokens", "batches"),
    [(60 << 20, 1, 8), (126 << 20, 1, 15), (126 << 20, 64, 4), (126 << 20, 16384, 2)],
)
def test_batches_do_not_stay_in_l2(
    l2_bytes: int, tokens: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(L2_cache_size=l2_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    rotation = timing.Rotation.of(tokens, torch.device("cuda"))
    assert rotation.batches == batches
    assert batches * roofline.expected_experts(tokens) * roofline.EXPERT_BYTES >= 4 * l2_bytes


# ---- Blackwell, by the capability that torch is made to report --------------------------------


@pytest.fixture(params=[(10, 0), (10, 3)])
def blackwell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    capability: tuple[int, int] = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    properties = SimpleNamespace(multi_processor_count=148, L2_cache_size=126 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return capability


def test_prediction_of_measured_routings(blackwell: tuple[int, int]) -> None:
    device = torch.device("cuda")
    calls = [SimpleNamespace(batch=make_batch(8, "random", seed)) for seed in range(3)]
    predicted = bench._predicted_us(cast("list[Call]", calls), CEILINGS, device)
    gpu = roofline.Gpu(148, CEILINGS.read_bytes_per_s, CEILINGS.graph_node_us, 126 << 20)
    plan = roofline.plan_of(8, gpu)
    expected = roofline.predict(roofline.expected_load(8, plan), plan, gpu).us
    assert predicted == pytest.approx(expected, rel=0.05)


def test_no_prediction_for_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert bench._predicted_us([], CEILINGS, torch.device("cuda")) is None


def test_a_line_has_the_prediction_only_where_there_is_one() -> None:
    result = bench.Result(8, "random", 120.0, 90.0, 89.0, 91.0, 62.0, 0.69, 3000.0, 1.0)
    assert bench._line(result).split()[5:7] == ["62.0", "0.69"]
    predicted = dataclasses.replace(result, predicted_us=59.5)
    assert bench._line(predicted).split()[5:8] == ["62.0", "59.5", "0.69"]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the products that are timed, 1000 us each."""
    names: list[str] = []

    def product(name: str) -> Callable[[torch.device], Callable[[], object]]:
        return lambda _: lambda: names.append(name)

    def replay_us(run: Callable[[], object]) -> float:
        run()
        return 1000.0

    monkeypatch.setattr(bench, "_bf16_product", product("bf16"))
    monkeypatch.setattr(bench, "_nvfp4_product", product("nvfp4"))
    monkeypatch.setattr(timing, "replay_us", replay_us)
    return names


def test_matrix_ceiling_of_blackwell(blackwell: tuple[int, int], products: list[str]) -> None:
    rate, name = bench._matrix_ceiling(torch.device("cuda"))
    assert (rate, name, products) == (2 * 8192**3 * 1e3, "NVFP4", ["nvfp4"])


def test_matrix_ceiling_without_nvfp4_says_so(
    blackwell: tuple[int, int], products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: torch.device) -> Callable[[], object]:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(bench, "_nvfp4_product", refuses)
    rate, name = bench._matrix_ceiling(torch.device("cuda"))
    factor = {(10, 0): 4, (10, 3): 6}[blackwell]
    assert rate == factor * 2 * 8192**3 * 1e3
    assert name == f"{factor} x BF16, for want of NVFP4 in torch"


def test_matrix_ceiling_elsewhere(products: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert bench._matrix_ceiling(torch.device("cuda"))[1] == "BF16"
    assert products == ["bf16"]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="needs shape rules of the scaled product in torch",
)
def test_torch_takes_the_nvfp4_product() -> None:
    """By torch's own checks of the arguments, on tensors that are not there."""
    with FakeTensorMode():
        out = cast("Tensor", bench._nvfp4_product(torch.device("cuda"))())
    assert (out.shape, out.dtype) == ((8192, 8192), torch.bfloat16)


# ---- The command ------------------------------------------------------------------------------


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
        predicts = roofline.predicts(torch.cuda.get_device_capability())
        assert (result["predicted_us"] is not None) == predicts
        plan = info.device_plan(torch.device("cuda"), result["tokens"])
        assert plan is not None
        assert "cake_route_quantize" in result["stages_us"]
        assert ("cake_finalize" in result["stages_us"]) == (not plan["fc2_finalizes"])


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
