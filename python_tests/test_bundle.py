"""Bundles of CAKE_LOG=dump: what is in them, when there is none, and their replay."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_calls import (
    GPU,
    NEEDS_GPU,
    H,
    Layer,
    assert_refused,
    assert_same_bits,
    betas,
    on_meta,
    operand,
    run,
    workspace_size,
)
from torch import Tensor

import cake
from cake import bundle, check, log, replay
from cake.checkpoint import open_safetensors, write_tensors
from cake.cli import main

Read = tuple[dict[str, Tensor], dict[str, str]]


@pytest.fixture
def dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """The folder that this process dumps to, as with CAKE_LOG=dump and CAKE_DUMP_LIMIT=2."""
    folder = tmp_path / "not" / "there yet"
    monkeypatch.setattr(log, "DUMPS", True)
    monkeypatch.setattr(bundle, "FOLDER", folder)
    monkeypatch.setattr(bundle, "_slots", bundle._Slots(2))
    log.warn_not_dumped.cache_clear()
    caplog.set_level(logging.INFO, "cake")
    return folder


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def read(path: Path) -> Read:
    file = open_safetensors(path)
    return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def replayed(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and what was printed."""
    status = main(["check", "--replay", str(path), "--device", "cpu"])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.fixture(scope="module")
def a_bundle(layer: Layer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a call with two tokens."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "DUMPS", True)
        patch.setattr(bundle, "FOLDER", folder)
        patch.setattr(bundle, "_slots", bundle._Slots(1))
        run(layer.call(2))
    return the_file(folder)


def changed(path: Path, folder: Path, change: Callable[[dict[str, Tensor], Any], None]) -> Path:
    """A copy of a bundle that someone changed, with a hash that fits."""
    tensors, metadata = read(path)
    change(tensors, metadata)
    metadata.pop("sha256")
    copy = folder / "changed.safetensors"
    write_tensors(copy, tensors, metadata)
    return copy


# ---- what is written ----------------------------------------------------------------------------


def test_a_bundle_holds_the_call_and_no_other_expert(dumps: Path, layer: Layer) -> None:
    call = {**layer.call(3), **betas(3.0, 20.0)}
    call["token_selected_experts"][0, :4] = torch.tensor([-1, 896, 5, 5])
    output = run(call)
    tensors, metadata = read(the_file(dumps))

    ids = call["token_selected_experts"]
    experts = tensors.pop("experts")
    assert experts.tolist() == sorted({int(e) for e in ids.flatten() if 0 <= e < 896})
    assert_same_bits(tensors.pop("output"), output)
    for name in bundle.PER_EXPERT:
        assert_same_bits(tensors.pop(name), operand(call, name)[experts.long()])
    for name, tensor in tensors.items():
        assert_same_bits(tensor, operand(call, name))
    assert len(tensors) == 9  # the three inputs, the four other scales, both betas

    recorded = json.loads(metadata["call"])
    assert recorded == {
        "num_tokens": 3,
        "input_stride": H,
        "batch_invariant": False,
        "device": "cpu",
        "workspace_bytes": workspace_size(3),
        "plan": None,
    }
    environment = json.loads(metadata["environment"])
    assert environment["cake"] == cake.build_info()
    assert environment["variables"] == {k: v for k, v in os.environ.items() if k[:5] == "CAKE_"}
    assert "error" not in metadata


def test_only_so_many_calls_are_dumped(
    dumps: Path, layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    call = layer.call(1)
    for _ in range(3):
        run(call)
    assert len(list(dumps.iterdir())) == 2
    assert caplog.text.count("wrote ") == 2


def test_no_tokens_give_no_bundle(dumps: Path, layer: Layer) -> None:
    run(layer.call(0, workspace=torch.zeros(64, dtype=torch.uint8)))
    assert not dumps.exists()


def test_a_refused_call_gives_no_bundle_and_counts_not(dumps: Path, layer: Layer) -> None:
    unprepared = layer.call(2, workspace=torch.zeros(workspace_size(2), dtype=torch.uint8))
    wrong = {**layer.call(2), "token_selected_experts": torch.zeros(2, 8, dtype=torch.int32)}
    for _ in range(3):
        assert_refused(unprepared, "prepare")
        assert_refused(wrong, "token_selected_experts")
    assert not dumps.exists()
    run(layer.call(1))
    assert the_file(dumps)


def test_a_failed_call_gives_a_bundle_without_output(
    dumps: Path,
    layer: Layer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("[cake:RuntimeError] cake_fc1: cudaErrorLaunchFailure")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"^cake_fc1: "):
        patch.setattr(torch.ops.cake, "fused_moe", fail)
        run(layer.call(2))
    tensors, metadata = read(the_file(dumps))
    assert "output" not in tensors
    assert "cudaErrorLaunchFailure" in metadata["error"]
    monkeypatch.setattr(log, "DUMPS", False)
    status, text = replayed(the_file(dumps), capsys)
    assert status == 1
    assert "the recorded call failed: " in text


def test_trouble_with_the_file_does_not_stop_the_call(
    dumps: Path, layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    dumps.parent.mkdir()
    dumps.write_text("not a folder")
    assert run(layer.call(1)).isfinite().all()
    assert "no bundle of this call: " in caplog.text
    assert dumps.read_text() == "not a folder"


def test_fake_and_meta_tensors_give_a_warning(
    dumps: Path, layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    call = on_meta(layer.call(3))
    for _ in range(2):
        cake.cutlass_fused_moe(**call)
    assert not dumps.exists()
    assert caplog.text.count("traced or has tensors of a subclass") == 1


def test_environment_sets_folder_and_limit() -> None:
    script = "from cake import bundle; print(bundle.FOLDER, bundle._slots._free)"
    for folder, limit, expected in (
        ("", "", "cake-dump 1"),
        ("/some/where", "3", "/some/where 3"),
        ("", "0", "cake-dump 0"),
        ("", "many", "cake-dump 1"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                "CAKE_LOG": "dump",
                "CAKE_DUMP_DIR": folder,
                "CAKE_DUMP_LIMIT": limit,
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == expected
        assert ("expected a number, got 'many'" in result.stderr) == (limit == "many")


# ---- replay -------------------------------------------------------------------------------------


def test_replay_repeats_every_kind_of_call(
    dumps: Path, layer: Layer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {**layer.call(5), **betas(3.0, 20.0)}
    call["input"] = torch.cat([call["input"]] * 2, dim=1)[:, :H]
    call["token_selected_experts"] = call["token_selected_experts"].long()
    call["token_selected_experts"][1, 2] = 1 << 40
    call["token_final_scales"] = call["token_final_scales"].float()
    call["quant_scales"][1] = call["quant_scales"][1].view(torch.uint8)
    run(call, batch_invariant=True)
    monkeypatch.setattr(log, "DUMPS", False)

    recorded = bundle.load(the_file(dumps))
    again = replay.make_call(recorded, torch.device("cpu"))
    assert again.batch.tokens.stride() == (2 * H, 1)
    assert again.batch.topk_ids.dtype == torch.int64
    assert again.layer.quant_scales[1].dtype == torch.uint8
    assert recorded.call["batch_invariant"] is True
    status, text = replayed(the_file(dumps), capsys)
    assert status == 0
    assert "5 tokens" in text and f"cake {cake.__version__}" in text
    assert "recorded output    0.0e+00    0.0e+00  same bits\nequal" in text


@pytest.mark.parametrize(
    "factor, status, verdict",
    [(1.002, 0, "within rounding"), (1.2, 1, "DIFFERENT"), (float("nan"), 1, "DIFFERENT")],
)
def test_replay_tells_rounding_from_errors(
    a_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    status: int,
    verdict: str,
) -> None:
    def scale(tensors: dict[str, Tensor], metadata: Any) -> None:
        tensors["output"] = (tensors["output"].float() * factor).bfloat16()

    got, text = replayed(changed(a_bundle, tmp_path, scale), capsys)
    assert got == status
    assert verdict in text
    assert text.rstrip().endswith("different" if status else "equal")


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_comparison_suits_outputs_of_any_size(size: float) -> None:
    expected = torch.randn(4, H, generator=torch.Generator().manual_seed(0)) * size
    lost = expected.clone()
    lost[3] *= 0.75
    assert replay.compare("", expected * 1.001, expected).result == "within rounding"
    assert replay.compare("", lost, expected).result == "DIFFERENT"
    assert replay.compare("", torch.zeros_like(expected), expected).result == "DIFFERENT"
    broken = torch.full_like(expected, float("nan"))
    assert replay.compare("", broken, broken).result == "same bits"


def _version(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["version"] = "2"


def _layout(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["layout_version"] = "0"


def _format(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["format"] = "cake-demo-1"


def _no_call(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["call"] = "{}"


def _missing(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["quant_scales[3]"]


def _other_experts(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["experts"] = tensors["experts"] + 1


def _rows(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["fc2_expert_weights"] = tensors["fc2_expert_weights"][1:]


def _shape(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["fc1_expert_weights"] = tensors["fc1_expert_weights"][:, 2:].contiguous()


@pytest.mark.parametrize(
    "change, message",
    [
        (_version, "expected a bundle of version 1, got 2; replay it with the cake that wrote it"),
        (_layout, "expected a bundle of layout_version 1, got 0"),
        (_format, "expected a bundle of CAKE_LOG=dump"),
        (_no_call, "expected metadata of this version"),
        (_missing, "expected tensors ["),
        (_other_experts, "experts: expected those of token_selected_experts"),
        (_rows, "fc2_expert_weights: expected "),
        (_shape, "intermediate: expected a positive multiple of 64, got 383"),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else "",
)
def test_other_files_are_named(
    a_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Tensor], Any], None],
    message: str,
) -> None:
    status, text = replayed(changed(a_bundle, tmp_path, change), capsys)
    assert status == 2
    assert message in text


def test_damaged_files_are_named(
    a_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = a_bundle.read_bytes()
    file = tmp_path / "file"
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for content, message in (
        (bytes(flipped), "damaged: not the bytes that were written"),
        (data[:-1000], "expected a whole safetensors file"),
        (data[:5], "expected a whole safetensors file"),
        (b"", "expected a whole safetensors file"),
    ):
        file.write_bytes(content)
        status, text = replayed(file, capsys)
        assert status == 2
        assert message in text
    file.unlink()
    status, text = replayed(file, capsys)
    assert status == 2 and "found none" in text


def test_options_that_the_file_decides_are_refused(
    a_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--tokens", "1"], ["--routing", "zipf"], ["--seed", "0"]):
        assert main(["check", "--replay", str(a_bundle), *option]) == 2
        assert f"{option[0]}: comes from the file" in capsys.readouterr().err
    assert main(["check", "--replay", str(a_bundle), "--device", "cuda:99"]) == 2
    assert "--device cuda:99" in capsys.readouterr().err


@NEEDS_GPU
def test_replay_on_a_gpu(a_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--replay", str(a_bundle)]) == 0
    text = capsys.readouterr().out
    assert "CPU path" in text and "10 repeats" in text and "equal" in text


@NEEDS_GPU
def test_captures_are_not_dumped_and_gpu_calls_are(
    dumps: Path, gpu_layer: check.Layer, caplog: pytest.LogCaptureFixture
) -> None:
    call = check.Call(gpu_layer, check.make_batch(3, "random", 0).to(GPU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    assert not dumps.exists()
    assert "captured in a CUDA graph" in caplog.text
    output = call.run()
    recorded = bundle.load(the_file(dumps))
    assert recorded.call["device"] == "cuda:0"
    assert recorded.call["plan"]["kernels"] in ("decode", "sm100")
    assert recorded.output is not None
    assert_same_bits(recorded.output, output.cpu())
