from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cake
from cake import info
from cake.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cake {cake.__version__}\n"


def test_info_prints_build_devices_and_support(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    for expected in (
        cake.__version__,
        torch.__version__,
        "cpu",
        "supported",
        "fc2_rows",
        "decode kernels",
    ):
        assert expected in text
    assert f"{torch.ops.cake.workspace_size(64):,}" in text


def test_info_names_the_oldest_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    compiler = cake.build_info()["cuda_compiler"]
    assert facts["oldest_driver"] == ("580" if compiler else None)
    assert info.oldest_driver("nvcc 13.0.88") == "580" and info.oldest_driver("") is None
    assert main(["info"]) == 0
    assert ("a GPU needs 580 or newer" in capsys.readouterr().out) == bool(compiler)


def test_info_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--tokens", "8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cake"] == cake.build_info()
    assert facts["devices"][0]["supported"] is True
    end = 0
    for region in facts["workspace"]["regions"]:
        assert region["offset"] >= end
        end = region["offset"] + region["bytes"]
    assert end <= torch.ops.cake.workspace_size(8)
    assert facts["plan"]["kernels"] == "decode"
    assert facts["plan"]["fc2_pool_rows"] == 128


def test_info_shows_where_one_launch_does_two_stages(capsys: pytest.CaptureFixture[str]) -> None:
    for tokens, end in (("1", " columns, one launch\n"), ("2", " columns\n")):
        assert main(["info", "--tokens", tokens]) == 0
        text = capsys.readouterr().out
        assert f"FC1 and FC2 in one launch\nFC2 and finalize in 1 part(s) of 3584{end}" in text
    assert main(["info", "--tokens", "129"]) == 0
    assert "one launch" not in capsys.readouterr().out


def test_info_shows_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--tokens", "16384"]) == 0
    assert "in chunks of up to 8192 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256, 512, 1024])
def test_info_shows_the_pool(capsys: pytest.CaptureFixture[str], tokens: int) -> None:
    assert main(["info", "--tokens", str(tokens)]) == 0
    rows = 128 if tokens == 8 else 256  # on all GPUs of 75 to 149 SMs
    assert f"from the work counter, {rows} rows at a time" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [7, 24, 2048])
def test_info_shows_no_pool(capsys: pytest.CaptureFixture[str], tokens: int) -> None:
    assert main(["info", "--tokens", str(tokens)]) == 0
    assert "pooled" not in capsys.readouterr().out


@pytest.mark.parametrize(("value", "kernels"), [("1", "prefill"), ("0", "decode")])
def test_environment_turns_batch_invariance_on(value: str, kernels: str) -> None:
    script = "import cake, torch; print(torch.ops.cake.plan(1))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CAKE_BATCH_INVARIANT": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["kernels"] == kernels
    assert json.loads(torch.ops.cake.plan(1, True))["kernels"] == "prefill"


def test_plan_depends_on_the_gpu() -> None:
    plans = [json.loads(torch.ops.cake.plan(40, major=major)) for major in (9, 10)]
    assert [plan["kernels"] for plan in plans] == ["decode", "sm100"]
    assert [plan["tile_pairs"] for plan in plans] == [8, 64]


def test_plan_resolves_the_pool_from_the_sms_at_few_tokens() -> None:
    def rows(tokens: int, num_sms: int) -> int:
        plan = json.loads(torch.ops.cake.plan(tokens, major=10, num_sms=num_sms))
        return int(plan["fc2_pool_rows"])

    assert [rows(16, num_sms) for num_sms in (148, 160)] == [256, 128]
    assert [rows(32, num_sms) for num_sms in (148, 160)] == [256, 256]
    with pytest.raises(RuntimeError, match="num_sms: expected a number of multiprocessors, got 0"):
        rows(16, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["info", "--tokens", "16385"], "--tokens: expected 0 to 16384, got 16385"),
        (["demo", "--tokens", "0"], "--tokens: expected 1 to 16384, got 0"),
        (["demo", "--device", "tpu9"], "--device: expected cpu, cuda"),
        (["demo", "--device", "cuda:99"], "--device cuda:99: device:"),
        (["demo", "--save", "no/such/folder/file"], "--save: expected an existing folder"),
        (["demo", "--load", "no-such-file"], "--load: expected a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    assert message in capsys.readouterr().err


def test_demo_refuses_what_the_file_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert main(["demo", "--load", str(file), "--seed", "1"]) == 1
    assert "--seed: comes from the file" in capsys.readouterr().err
    assert main(["demo", "--load", str(file)]) == 1
    assert "expected a safetensors file" in capsys.readouterr().err


def test_demo_saves_loads_and_repeats_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layer.safetensors"
    options = ["--device", "cpu"]
    assert main(["demo", "--tokens", "2", "--seed", "3", "--save", str(file), *options]) == 0
    first = capsys.readouterr().out
    for expected in ("2 tokens", "error per row, worst", "cost of NVFP4"):
        assert expected in first
    assert main(["demo", "--load", str(file), *options]) == 0
    assert "equals the saved one bit for bit" in capsys.readouterr().out

    with file.open("r+b") as damaged:
        damaged.truncate(file.stat().st_size - 1000)
    assert main(["demo", "--load", str(file), *options]) == 1
    assert "expected a safetensors file" in capsys.readouterr().err
