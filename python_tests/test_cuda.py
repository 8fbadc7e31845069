"""What this version does on a GPU: the quantizer, streams, graphs, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from conftest import Golden
from layer_calls import NEEDS_GPU, gpus_that_run
from torch import Tensor

import cake

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def quantize(x: Tensor, q: float) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    packed = torch.full((rows, columns // 2), 0xAA, dtype=torch.uint8, device=x.device)
    sf = torch.full((rows, columns // 16), 0xAA, dtype=torch.uint8, device=x.device)
    scale = torch.full((1,), q, device=x.device)  # no host-device copy, which a capture forbids
    torch.ops.cake.quantize_nvfp4(x, scale, packed, sf)
    return packed, sf


def assert_same_on_gpu(x: Tensor, q: float) -> None:
    expected_packed, expected_sf = quantize(x, q)
    packed, sf = quantize(x.cuda(), q)
    assert torch.equal(sf.cpu(), expected_sf)
    assert torch.equal(packed.cpu(), expected_packed)


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("q", [1.0, 500.0, 613.7, 1e-3, 1e30, 1e-30])
@pytest.mark.parametrize("rows", [1, 33, 1025])
def test_quantizer_equals_the_cpu_path(rows: int, q: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3584, generator=generator)
    x *= torch.exp2(3 * torch.randn(rows, 1, generator=generator))
    assert_same_on_gpu(x.bfloat16(), q)


@pytest.mark.parametrize("q", [1.0, 500.0, 1e-30, 1e30])
def test_quantizer_equals_the_cpu_path_on_every_bf16(q: float) -> None:
    patterns = torch.arange(65536)
    shuffled = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    assert_same_on_gpu(bf16(torch.cat([patterns, shuffled])).view(64, 2048), q)


def test_quantizer_equals_the_golden_edge_cases(golden: Golden) -> None:
    data = golden("quant_edge")
    x = torch.from_numpy(data["x_bf16_bits"].view("int16")).view(torch.bfloat16).cuda()
    for i in range(4):
        packed, sf = quantize(x, float(data[f"gs_{i}"]))
        assert torch.equal(packed.cpu(), torch.from_numpy(data[f"packed_{i}"]))
        assert torch.equal(sf.cpu(), torch.from_numpy(data[f"sf_{i}"]))


@pytest.mark.parametrize("columns", [3585, 3592, 7168])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_quantizer_takes_strided_and_unaligned_rows(columns: int, start: int) -> None:
    wide = torch.full((9, columns + 8), float("nan"), dtype=torch.bfloat16)
    x = wide[:, start : start + 3584]
    x.copy_(torch.randn(9, 3584))
    expected = quantize(x.contiguous(), 100.0)
    actual = quantize(wide.cuda()[:, start : start + 3584], 100.0)
    assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))


def test_quantizer_takes_no_rows() -> None:
    packed, sf = quantize(torch.empty(0, 3584, dtype=torch.bfloat16, device="cuda"), 1.0)
    assert packed.shape == (0, 1792)
    assert sf.shape == (0, 224)


def test_quantizer_runs_on_the_current_stream() -> None:
    x = torch.zeros(64, 3584, dtype=torch.bfloat16, device="cuda")
    y = torch.randn(64, 3584, device="cuda").bfloat16()
    expected = quantize(y, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        x.copy_(y)
        actual = quantize(x, 1.0)
        finished = torch.cuda.Event()
        finished.record()
    assert not finished.query(), "the launch waited for the GPU"
    stream.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_quantizer_in_a_graph_reads_new_input_at_every_replay() -> None:
    x = torch.randn(40, 3584, device="cuda").bfloat16()
    quantize(x, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize(x, 2.0)
    for seed in range(3):
        x.copy_(torch.randn(40, 3584, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        expected = quantize(x.cpu(), 2.0)
        assert all(torch.equal(a.cpu(), e) for a, e in zip(captured, expected, strict=True))


def test_selftest_names_the_cubin_of_this_gpu() -> None:
    out = torch.zeros(3000, dtype=torch.int32, device="cuda")
    torch.ops.cake.selftest(out)
    major, minor = torch.cuda.get_device_capability()
    expected = 1000 * (10 * major + minor) + torch.arange(3000, dtype=torch.int32) % 1000
    assert torch.equal(out.cpu(), expected)


@NEEDS_GPU
def test_gpus_that_run_are_supported() -> None:
    supported, reason = cake.is_supported("cuda")
    assert supported and torch.cuda.get_device_name() in reason


def test_unsupported_device_is_refused_by_name() -> None:
    if gpus_that_run():
        pytest.skip("this build runs the fused operation on this GPU")
    supported, reason = cake.is_supported("cuda")
    assert not supported
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    assert capability in reason
    assert "9.0" in reason and "CPU" in reason
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(cake.UnsupportedError, match=capability):
        cake.cake_fused_moe_prepare_workspace(workspace, 1)
    assert not workspace.any()


def test_quantizer_refuses_mixed_devices_by_name() -> None:
    x = torch.zeros(1, 16, dtype=torch.bfloat16, device="cuda")
    packed = torch.zeros(1, 8, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="sf: expected a tensor on cuda:0"):
        torch.ops.cake.quantize_nvfp4(
            x, torch.ones(1, device="cuda"), packed, torch.zeros(1, 1, dtype=torch.uint8)
        )
