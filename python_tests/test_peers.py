from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_calls import NEEDS_GPU
from torch import Tensor

from cake import peers, plot, timing
from cake.bench_report import Ceilings, Report, Result
from cake.check import Batch, Layer
from cake.cli import main
from cake.peers import measure
from cake.prepared_weights import PreparedWeights, unprepare
from cake.testing.reference import unquantized_reference
from cake.testing.synthetic import fill_random_prepared

TESTS = Path(__file__).parent
E, H, I, K = 8, 128, 64, 2  # noqa: E741


@pytest.fixture
def small() -> PreparedWeights:
    return fill_random_prepared(3, E, H, I)[0]


def small_batch(tokens: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=generator).topk(K).indices.int()
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    return Batch(x, ids, torch.rand(tokens, K, generator=generator).bfloat16())


class FakePeer:
    """Right but for what a test adds; counts its calls."""

    numerics = "W4A16: as it should be"
    tolerance = 1e-2

    def __init__(self, weights: PreparedWeights, spoil: Callable[[Tensor], object] = id) -> None:
        self.weights, self.spoil, self.calls = weights, spoil, 0

    def call(self, batch: Batch) -> Tensor:
        self.calls += 1
        output = unquantized_reference(
            batch.tokens,
            batch.topk_ids,
            batch.topk_weights,
            lambda expert: unprepare(self.weights, expert).dequantize(),
            num_experts=self.weights.num_experts,
        ).bfloat16()
        self.spoil(output)
        return output


class Graph:
    """A graph whose replay runs everything again, into the output of the capture."""

    def __init__(self, run: Callable[[], object]) -> None:
        run()
        self.replay = run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and times without a GPU: 30 us a graph, and each sample one more."""
    monkeypatch.setattr(timing, "capture", Graph)
    monkeypatch.setattr(timing, "elapsed_us", lambda run: [30.0 + i for i in range(11)])
    monkeypatch.setattr(
        timing.Rotation, "of", classmethod(lambda cls, tokens, device: cls(tokens, 2, 3))
    )


def test_error_of_a_right_and_of_a_wrong_output(small: PreparedWeights) -> None:
    batch = small_batch(9, 0)
    right = FakePeer(small).call(batch)
    assert measure.output_error(right, batch, small) < 3e-3
    for row in (0, 8):
        wrong = right.clone()
        wrong[row] *= 1.1
        assert measure.output_error(wrong, batch, small) > 1e-2
    wrong = right.clone()
    wrong[0, 5] = float("nan")
    assert not measure.output_error(wrong, batch, small) < 1


@pytest.mark.usefixtures("no_gpu")
def test_a_peer_is_timed_with_cakes_repetitions(small: PreparedWeights) -> None:
    peer = FakePeer(small)
    result = measure.measure_peer(peer, small, [small_batch(5, 0), small_batch(5, 1)], 2.0)
    assert result.us == pytest.approx(35 / 6)  # 2 batches, 3 rounds
    assert (result.us_low, result.us_high) == pytest.approx((31 / 6, 39 / 6))
    assert result.ratio == pytest.approx(35 / 12)
    assert result.error < 3e-3
    assert peer.calls == 12  # all batches before the replay and in it; the times are made up


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "spoil", [lambda out: out.mul_(1.02), lambda out: out.fill_(float("nan")), torch.zero_]
)
def test_a_wrong_peer_is_not_timed(
    small: PreparedWeights, spoil: Callable[[Tensor], object]
) -> None:
    peer = FakePeer(small, spoil)
    with pytest.raises(ValueError, match=r"relative rms error up to 0\.01, got"):
        measure.measure_peer(peer, small, [small_batch(5, 0)] * 2, 2.0)


@pytest.mark.usefixtures("no_gpu")
def test_a_graph_without_the_peers_work_is_found(
    small: PreparedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture_nothing(run: Callable[[], object]) -> Any:
        run()
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(timing, "capture", capture_nothing)
    with pytest.raises(ValueError, match="got nan"):
        measure.measure_peer(FakePeer(small), small, [small_batch(5, 0)] * 2, 2.0)


def some_report(path: Path | None, tokens: tuple[int, ...] = (1, 3)) -> Report:
    environment = {"device": "a GPU", "cake": {"version": "0"}}
    results = [Result(t, "random", 9.0, 20.0, 19.0, 21.0, 10.0, 0.5, 1.0, 1.0) for t in tokens]
    ceilings = Ceilings(4e12, 7e14, 0.5)
    return Report(ceilings, False, environment, path, results=results)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, small: PreparedWeights) -> FakePeer:
    """A fake in the place of humming, on a small layer."""
    peer = FakePeer(small)

    def create(name: str, weights: Any, top_k: int, token_counts: list[int]) -> FakePeer:
        assert (name, weights, top_k, token_counts) == ("humming", small, 16, [1, 3])
        return peer

    monkeypatch.setattr(peers, "create", create)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.20")
    monkeypatch.setattr(
        timing.Rotation,
        "make_batches",
        lambda self, routing, device: [small_batch(self.num_tokens, s) for s in range(2)],
    )
    return peer


@pytest.mark.usefixtures("no_gpu")
def test_report_and_table(
    tmp_path: Path, fake: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    assert measure.add_peer(some_report(path), "humming", Layer(fake.weights, []))
    written = plot.load(path)
    assert written["peers"] == {
        "humming": {"version": "humming-kernels 0.1.20", "numerics": "W4A16: as it should be"}
    }
    for result in written["results"]:
        outcome = result["peers"]["humming"]
        assert outcome["us"] == pytest.approx(35 / 6)
        assert outcome["ratio"] == pytest.approx(35 / 120)
        assert outcome["us_low"] < outcome["us"] < outcome["us_high"]
        assert 0 < outcome["error"] < 1e-2
        assert result["us"] == 20.0
    title, header, first, _ = capsys.readouterr().out.strip().splitlines()
    assert title == "humming-kernels 0.1.20, W4A16: as it should be"
    assert " ".join(header.split()) == "tokens routing cake us humming us spread ratio error"
    assert first.split()[:6] == ["1", "random", "20.0", "5.8", "22.9%", "0.29"]


@pytest.mark.usefixtures("no_gpu")
def test_a_failing_call_keeps_the_other_times(
    tmp_path: Path, fake: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(output: Tensor) -> None:
        if output.shape[0] == 1:
            raise RuntimeError("no kernel")

    fake.spoil, path = spoil, tmp_path / "a.json"
    assert not measure.add_peer(some_report(path), "humming", Layer(fake.weights, []))
    first, second = plot.load(path)["results"]
    assert first["peers"] == {"humming": {"failure": "RuntimeError: no kernel"}}
    assert first["us"] == 20.0
    assert second["peers"]["humming"]["us"] > 0
    assert "RuntimeError: no kernel" in capsys.readouterr().out


def test_a_peer_that_cannot_be_made_is_reported(
    tmp_path: Path, small: PreparedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(peers, "create", create)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.20")
    path = tmp_path / "a.json"
    assert not measure.add_peer(some_report(path), "humming", Layer(small, []))
    written = plot.load(path)
    assert written["peers"]["humming"]["failure"] == "OSError: no compiler"
    assert [r["us"] for r in written["results"]] == [20.0, 20.0]
    assert plot.peer_names(written["results"]) == []


@pytest.mark.parametrize("version", [None, "0.1.18", "0.1"])
def test_what_to_install(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert main(["bench", "--peer", "humming"]) == 1
    message = capsys.readouterr().err
    assert f"expected humming-kernels 0.1.19 or newer, got {version or 'none'}" in message
    assert "pip install 'cake-moe[peers]'" in message


@pytest.mark.parametrize("version", ["0.1.19", "0.1.20.dev3", "0.2", "1.0.0"])
def test_versions_that_fit(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert peers.require("humming") == f"humming-kernels {version}"


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--peer", "nobody"]) == 1
    assert "--peer: expected one of humming, got 'nobody'" in capsys.readouterr().err


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import cake.cli, sys; print(sorted({'humming', 'triton'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def peer_report() -> dict[str, Any]:
    """A report with a peer that failed at 8 tokens, and with zipf routing."""
    report: dict[str, Any] = {
        "device": "a GPU",
        "cake": {"version": "0"},
        "peers": {"humming": {"version": "humming-kernels 0.1.20", "numerics": "W4A16: weights"}},
    }
    report["results"] = [
        {"tokens": t, "routing": r, "us": 20.0 + t, "floor_us": 10.0 + t, "peers": {}}
        for r in ("random", "zipf")
        for t in (64, 8, 1)
    ]
    for result in report["results"][:3]:
        result["peers"]["humming"] = {"us": 2 * result["us"], "ratio": 2.0}
    report["results"][1]["peers"]["humming"] = {"failure": "no kernel"}
    return report


def test_plot_draws_peers(tmp_path: Path) -> None:
    report = peer_report()
    cake, peer = plot.curves("a", report, "random")
    assert (cake.label, cake.tokens) == ("a, random routing", [1, 8, 64])
    assert peer.label == "humming-kernels 0.1.20 (W4A16), a, random routing"
    assert (peer.tokens, peer.us) == ([1, 64], [42.0, 168.0])
    assert peer.fractions() == [11 / 42, 74 / 168]
    assert len(plot.curves("a", report, "zipf")) == 1
    source, image = tmp_path / "a.json", tmp_path / "a.svg"
    source.write_text(json.dumps(report))
    assert main(["plot", str(source), "--output", str(image)]) == 0
    assert "humming-kernels 0.1.20 (W4A16), random routing" in image.read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"peers": {}},
        {"peers": {"humming": {"version": "1"}}},
        {"results": [peer_report()["results"][0] | {"peers": {"humming": {"us": 0}}}]},
        {"results": [peer_report()["results"][0] | {"peers": {"humming": {"us": "x"}}}]},
        {"results": [peer_report()["results"][0] | {"peers": 3}]},
    ],
)
def test_plot_refuses_broken_peers(change: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps(peer_report() | change))
    with pytest.raises(ValueError, match="cake bench --json"):
        plot.load(source)


def test_humming_peer_interpreted() -> None:
    """Sorting, padding, row order, SiTU and the weighted sum, by Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which torch brings on a machine with a GPU")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", TESTS / "interpreted_humming.py"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


@NEEDS_GPU
def test_bench_times_humming(tmp_path: Path) -> None:
    try:
        peers.require("humming")
    except ImportError as error:
        pytest.skip(str(error))
    path = tmp_path / "a.json"
    options = ["--tokens", "1", "400", "--no-stages", "--json", str(path)]
    assert main(["bench", *options, "--peer", "humming"]) == 0
    for result in plot.load(path)["results"]:
        assert result["peers"]["humming"]["ratio"] > 0.2
        assert result["peers"]["humming"]["error"] < 1e-2
