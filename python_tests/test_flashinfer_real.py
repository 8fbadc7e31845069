"""`backend="cake"` of the FlashInfer that is installed, and its preparation of weights.

Needs no GPU. Skipped where FlashInfer cannot be imported or is older than 0.7.1.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_calls import SIZE_ARGUMENTS, Call, E, H, I, Layer, assert_same_bits, run
from torch import Tensor

import cake
import cake.weights
from cake.integrations.flashinfer import install, uninstall
from cake.weights import quantize_rows

NAMES = (
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "cake_fused_moe_prepare_workspace",
    "cutlass_fused_moe_prepare_workspace",  # its name in 0.7.1
)
OPERANDS = [*inspect.signature(cake.cutlass_fused_moe).parameters][:7]
ABSENT = [*inspect.signature(cake.cutlass_fused_moe).parameters][7:13]


@pytest.fixture
def real() -> Iterator[Any]:
    module = pytest.importorskip(
        "flashinfer.fused_moe",
        reason="FlashInfer is not installed: pip install 'flashinfer-python>=0.7.1'",
        exc_type=ImportError,
    )
    if "backend" not in inspect.signature(module.cutlass_fused_moe).parameters:
        pytest.skip("FlashInfer is older than 0.7.1")
    yield module
    uninstall()


def test_signatures_are_cakes(real: Any) -> None:
    names = [name for name in NAMES if name in vars(real)]
    assert len(names) == 3
    for name in names:
        theirs = inspect.signature(getattr(real, name)).parameters
        ours = inspect.signature(getattr(cake, name)).parameters
        assert [*theirs] == [parameter for parameter in ours if parameter in theirs]
        for parameter, p in theirs.items():
            assert p.kind == ours[parameter].kind, parameter
            if parameter not in ("backend", "nvfp4_4over6", "use_fused_finalize"):  # None or True
                assert p.default == ours[parameter].default, parameter


def test_activation_numbers_are_cakes(real: Any) -> None:
    for member in cake.ActivationType:
        assert real.ActivationType[member.name] == member


def test_sizes_are_cakes_while_installed(real: Any) -> None:
    arguments = {**SIZE_ARGUMENTS, "activation_type": real.ActivationType.Situ, "backend": "cake"}
    counts = (1, 8, 300, 16384)

    def sizes() -> list[int]:
        query = real.cutlass_fused_moe_workspace_size
        return [query(**{**arguments, "max_num_tokens": count}) for count in counts]

    before = sizes()
    install()
    assert sizes() == [torch.ops.cake.workspace_size(count) for count in counts] != before
    uninstall()
    assert sizes() == before


def test_functions_run_cake(real: Any, layer: Layer) -> None:
    package: Any = sys.modules["flashinfer"]
    call = layer.call(3)
    expected = run(call)
    install()
    call["activation_type"] = package.ActivationType.Situ
    workspace = torch.empty_like(call["workspace_buffer"])
    prepare = [vars(real)[name] for name in NAMES[2:] if name in vars(real)]
    prepare[0](workspace, 3, backend="cake")
    call["workspace_buffer"] = workspace
    operands = [call.pop(name) for name in OPERANDS]
    for function in (real.cutlass_fused_moe, package.cutlass_fused_moe):
        call["output"].fill_(777.0)
        assert_same_bits(function(*operands, **call, backend="cake"), expected)


def test_other_backends_stay_flashinfers(real: Any, layer: Layer) -> None:
    install()
    call = {**layer.call(1), "backend": "no_such"}
    for function in (real.cutlass_fused_moe, cake.cutlass_fused_moe):
        with pytest.raises(ValueError, match="unsupported fused MoE backend: 'no_such'"):
            function(**call)
    size = {**SIZE_ARGUMENTS, "backend": "no_such"}
    for query in (real.cutlass_fused_moe_workspace_size, cake.cutlass_fused_moe_workspace_size):
        with pytest.raises(ValueError, match="unsupported fused MoE backend: 'no_such'"):
            query(**size)


@pytest.mark.parametrize(
    "option",
    [
        {"activation_type": 4},
        {"output_dtype": torch.float16},
        {"tp_size": 4},
        {"tp_rank": 8},
        {"ep_size": 2},
        {"ep_rank": 1},
        {"min_latency_mode": True},
        {"use_deepseek_fp8_block_scale": True},
        {"use_w4_group_scaling": True},
        {"use_mxfp8_act_scaling": True},
        {"use_packed_weights": True},
        {"use_wfp4afp8_humming": True},
        {"use_fused_finalize": False},
        {"cluster_size": 2},
        {"cluster_rank": 1},
        {"enable_alltoall": True},
        {"enable_pdl": False},
        {"profile_ids": [0, 1]},
        {"nvfp4_4over6": True},
        *({name: torch.ones(E)} for name in ABSENT),
        {"hidden_size": 7168},
        {"intermediate_size": 3072},
        {"num_experts_total": 384},
        {"top_k": 8},
        {"x_dtype": torch.float16},
        {"weight_dtype": torch.int64},
        {"max_num_tokens": 16385},
    ],
    ids=lambda option: "-".join(option),
)
def test_what_flashinfer_refuses_is_refused(real: Any, layer: Layer, option: Call) -> None:
    call = {**layer.call(1), "backend": "cake"}
    size = {**SIZE_ARGUMENTS, "backend": "cake"}
    tried = []
    for attempt in (lambda: None, install):
        attempt()
        for function, arguments in (
            (real.cutlass_fused_moe, call),
            (real.cutlass_fused_moe_workspace_size, size),
        ):
            if option.keys() <= inspect.signature(function).parameters.keys():
                tried.append(function)
                with pytest.raises(ValueError):
                    function(**{**arguments, **option})
    if not tried:
        pytest.skip(f"this FlashInfer has no {', '.join(option)}")


def _interleave(scales: Tensor, **_: Any) -> Tensor:
    """128x4 order by the formula of the byte's place, flat; FlashInfer's own needs a GPU."""
    rows, cols = scales.shape
    n, c = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    tile = n // 128 * (cols // 4) + c // 4
    out = torch.empty(rows * cols, dtype=torch.uint8)
    out[tile * 512 + n % 32 * 16 + n % 128 // 32 * 4 + c % 4] = scales
    return out


@pytest.mark.parametrize("hidden, intermediate", [(256, 64), (H, 128)])
def test_preparation_gives_cakes_bytes(
    real: Any, monkeypatch: pytest.MonkeyPatch, hidden: int, intermediate: int
) -> None:
    """FlashInfer's own code, but for its two GPU kernels: quantization and scale interleave."""

    def fp4_quantize(x: Tensor, global_scale: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, global_scale)

    theirs = "flashinfer.quantization.fp4_quantization"
    monkeypatch.setattr(f"{theirs}.block_scale_interleave", _interleave)
    monkeypatch.setattr("flashinfer.fp4_quantization.fp4_quantize", fp4_quantize)
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(2, 2 * intermediate, hidden, generator=generator).bfloat16()
    w2 = torch.randn(2, hidden, intermediate, generator=generator).bfloat16()
    geometry = {
        "num_local_experts": 2,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }
    expected = real.TrtllmFp4Config.prepare_weights(w13, w2, activation=real.SiTU(), **geometry)
    actual = cake.TrtllmFp4Config.prepare_weights(w13, w2, **geometry)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def test_row_shuffles_give_cakes_bytes(real: Any) -> None:
    package: Any = sys.modules["flashinfer"]
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(1, 2 * I, H, generator=generator).bfloat16()
    w2 = torch.randn(1, H, I, generator=generator).bfloat16()
    prepared = cake.weights.prepare_weights(w13, w2, w13_order="up_gate")
    one = torch.ones(1)
    reordered = real.reorder_rows_for_gated_act_gemm(quantize_rows(w13[0], one)[0])
    assert_same_bits(prepared.w13[0], package.shuffle_matrix_a(reordered, 128))
    assert_same_bits(prepared.w2[0], package.shuffle_matrix_a(quantize_rows(w2[0], one)[0], 128))
