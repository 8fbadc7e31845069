"""The public signatures, every option that is refused, and other backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_calls import (
    SIZE_ARGUMENTS,
    Layer,
    assert_refused,
    assert_same_bits,
    new_workspace,
    run,
    workspace_size,
)
from torch import Tensor

import cake
from cake import ActivationType

REQUIRED = inspect.Parameter.empty
UNSET = object()

MOE_POSITIONAL: list[tuple[str, object]] = [
    ("input", REQUIRED),
    ("token_selected_experts", REQUIRED),
    ("token_final_scales", REQUIRED),
    ("fc1_expert_weights", REQUIRED),
    ("fc2_expert_weights", REQUIRED),
    ("output_dtype", REQUIRED),
    ("quant_scales", REQUIRED),
    ("fc1_expert_biases", None),
    ("fc2_expert_biases", None),
    ("input_sf", None),
    ("swiglu_alpha", None),
    ("swiglu_beta", None),
    ("swiglu_limit", None),
    ("tp_size", 1),
    ("tp_rank", 0),
    ("ep_size", 1),
    ("ep_rank", 0),
    ("cluster_size", 1),
    ("cluster_rank", 0),
    ("output", None),
    ("enable_alltoall", False),
    ("use_deepseek_fp8_block_scale", False),
    ("use_w4_group_scaling", False),
    ("use_mxfp8_act_scaling", False),
    ("min_latency_mode", False),
    ("use_packed_weights", False),
    ("use_wfp4afp8_humming", False),
    ("tune_max_num_tokens", 8192),
    ("enable_pdl", None),
    ("activation_type", ActivationType.Swiglu),
    ("swizzled_input_sf", True),
    ("use_fused_finalize", None),
    ("profile_ids", None),
    ("workspace_buffer", None),
]
MOE_KEYWORD: list[tuple[str, object]] = [
    ("clamped_relu2_limit", None),
    ("situ_beta", None),
    ("situ_linear_beta", None),
    ("backend", "cake"),
    ("nvfp4_4over6", UNSET),
    ("batch_invariant", False),  # cake's own
]
SIZE_POSITIONAL: list[tuple[str, object]] = [
    ("max_num_tokens", REQUIRED),
    ("hidden_size", REQUIRED),
    ("intermediate_size", REQUIRED),
    ("num_experts_total", REQUIRED),
    ("top_k", REQUIRED),
]
SIZE_KEYWORD: list[tuple[str, object]] = [
    ("x_dtype", REQUIRED),
    ("weight_dtype", REQUIRED),
    ("output_dtype", torch.bfloat16),
    ("activation_type", ActivationType.Swiglu),
    ("tp_size", 1),
    ("tp_rank", 0),
    ("ep_size", 1),
    ("ep_rank", 0),
    ("min_latency_mode", False),
    ("use_deepseek_fp8_block_scale", False),
    ("use_w4_group_scaling", False),
    ("use_mxfp8_act_scaling", False),
    ("use_fused_finalize", None),
    ("use_packed_weights", False),
    ("use_wfp4afp8_humming", False),
    ("device", None),
    ("backend", "cake"),
]
PREPARE_POSITIONAL: list[tuple[str, object]] = [
    ("workspace_buffer", REQUIRED),
    ("num_tokens", REQUIRED),
]
PREPARE_KEYWORD: list[tuple[str, object]] = [
    ("backend", "cake"),
    ("weight_layout", "trtllm_shuffled_nvfp4_group16"),
]


@pytest.mark.parametrize(
    "function, positional, keyword",
    [
        (cake.cutlass_fused_moe, MOE_POSITIONAL, MOE_KEYWORD),
        (cake.cutlass_fused_moe_workspace_size, SIZE_POSITIONAL, SIZE_KEYWORD),
        (cake.cake_fused_moe_prepare_workspace, PREPARE_POSITIONAL, PREPARE_KEYWORD),
    ],
    ids=["moe", "size", "prepare"],
)
def test_signature_is_flashinfers(
    function: Callable[..., Any],
    positional: list[tuple[str, object]],
    keyword: list[tuple[str, object]],
) -> None:
    parameters = inspect.signature(function).parameters.values()
    for kind, expected in (
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, positional),
        (inspect.Parameter.KEYWORD_ONLY, keyword),
    ):
        actual = [(p.name, p.default) for p in parameters if p.kind == kind]
        assert [name for name, _ in actual] == [name for name, _ in expected]
        for (name, default), (_, wanted) in zip(actual, expected, strict=True):
            assert wanted is UNSET or (default, type(default)) == (wanted, type(wanted)), name
    assert len(parameters) == len(positional) + len(keyword)


def test_aliases_and_activation_numbers() -> None:
    assert cake.cutlass_fused_moe_prepare_workspace is cake.cake_fused_moe_prepare_workspace
    names = "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ"
    expected = {name: number for number, name in enumerate([*names.split(), "InvalidType"])}
    assert {member.name: int(member) for member in ActivationType} == expected


# ---- Options that the operation does not have ---------------------------------------------------

_SHARED_REFUSALS: list[tuple[str, Any]] = [
    *(("activation_type", kind) for kind in ActivationType if kind != ActivationType.Situ),
    *(("output_dtype", dtype) for dtype in (torch.float16, torch.float32, "bfloat16", None)),
    *(("tp_size", size) for size in (1, 4, 16, None)),
    *(("tp_rank", rank) for rank in (-1, 8, None, "0")),
    ("ep_size", 2),
    ("ep_rank", 1),
    ("min_latency_mode", True),
    ("use_deepseek_fp8_block_scale", True),
    ("use_w4_group_scaling", True),
    ("use_mxfp8_act_scaling", True),
    ("use_packed_weights", True),
    ("use_wfp4afp8_humming", True),
    ("use_fused_finalize", False),
]
_MOE_REFUSALS: list[tuple[str, Any]] = [
    *_SHARED_REFUSALS,
    *(
        (name, torch.ones(896))
        for name in (
            "fc1_expert_biases",
            "fc2_expert_biases",
            "input_sf",
            "swiglu_alpha",
            "swiglu_beta",
            "swiglu_limit",
            "clamped_relu2_limit",
        )
    ),
    ("profile_ids", [0, 1]),
    ("cluster_size", 2),
    ("cluster_rank", 1),
    ("enable_alltoall", True),
    ("enable_pdl", False),
    ("nvfp4_4over6", True),
]
_SIZE_REFUSALS: list[tuple[str, Any]] = [
    *_SHARED_REFUSALS,
    ("hidden_size", 7168),
    ("intermediate_size", 3072),
    ("num_experts_total", 384),
    ("top_k", 8),
    *(("x_dtype", dtype) for dtype in (torch.float16, torch.uint8, "bfloat16")),
    *(("weight_dtype", dtype) for dtype in (torch.int64, torch.bfloat16)),
    *(("max_num_tokens", n) for n in (-1, 16385, 1.5, True, "8", None, [1, 2], [], 2**70)),
]


def _id(case: tuple[str, Any]) -> str:
    name, value = case
    return f"{name}-tensor" if isinstance(value, Tensor) else f"{name}-{value!r}"


@pytest.mark.parametrize("case", _MOE_REFUSALS, ids=_id)
def test_moe_refuses_option(layer: Layer, case: tuple[str, Any]) -> None:
    name, value = case
    assert_refused({**layer.call(1), name: value}, name)


def test_moe_accepts_options_without_effect(layer: Layer) -> None:
    call = layer.call(1)
    expected = run(call)
    for options in (
        {"enable_pdl": True, "use_fused_finalize": True, "tp_rank": 7},
        {"tune_max_num_tokens": 1, "swizzled_input_sf": False, "activation_type": 10},
        {"nvfp4_4over6": None, "backend": "cake"},
        {"nvfp4_4over6": False, "quant_scales": tuple(call["quant_scales"]), "output": None},
    ):
        assert_same_bits(run(call, **options), expected)


@pytest.mark.parametrize("tokens", [1, 3])
def test_moe_returns_the_output_it_was_given(layer: Layer, tokens: int) -> None:
    call = layer.call(tokens)
    assert cake.cutlass_fused_moe(**call) is call["output"]
    allocated = cake.cutlass_fused_moe(**{**call, "output": None})
    assert allocated.is_contiguous() and allocated.dtype == torch.bfloat16
    assert_same_bits(allocated, call["output"])


@pytest.mark.parametrize("state", ["missing", "unprepared"])
def test_moe_without_a_prepared_workspace_says_prepare(layer: Layer, state: str) -> None:
    call = layer.call(2)
    unprepared = torch.zeros(workspace_size(2), dtype=torch.uint8)
    call["workspace_buffer"] = None if state == "missing" else unprepared
    assert_refused(call, "workspace_buffer", "prepare", "cake_fused_moe_prepare_workspace")


@pytest.mark.parametrize("case", _SIZE_REFUSALS, ids=_id)
def test_size_refuses(case: tuple[str, Any]) -> None:
    name, value = case
    with pytest.raises(ValueError, match=name):
        cake.cutlass_fused_moe_workspace_size(**{**SIZE_ARGUMENTS, name: value})


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("top_k", 8, "top_k=16"),
        ("hidden_size", 1, "hidden_size=3584"),
        ("intermediate_size", 1, "intermediate_size=384"),
        ("num_experts_total", 1, "num_experts_total=896"),
        ("max_num_tokens", 16385, "16384"),
        ("tp_size", 1, "tp_size=8"),
        ("activation_type", ActivationType.Swiglu, "ActivationType.Situ"),
        ("x_dtype", torch.float32, "torch.bfloat16"),
        ("weight_dtype", torch.float32, "torch.uint8"),
    ],
)
def test_size_names_the_allowed_value(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        cake.cutlass_fused_moe_workspace_size(**{**SIZE_ARGUMENTS, name: value})
    assert allowed in str(caught.value)


def _prepare_refusals() -> dict[str, tuple[str, Any, Any]]:
    needed = workspace_size(2)
    buffer = torch.zeros(needed + 256, dtype=torch.uint8)
    small = torch.zeros(needed - 1, dtype=torch.uint8)
    return {
        "none": ("workspace_buffer", None, 2),
        "list": ("workspace_buffer", [0] * needed, 2),
        "float32": ("workspace_buffer", torch.zeros(needed), 2),
        "two-dimensional": ("workspace_buffer", buffer.view(2, -1), 2),
        "strided": ("workspace_buffer", torch.zeros(2 * needed, dtype=torch.uint8)[::2], 2),
        "misaligned": ("128|64", buffer[1:], 2),
        "small": (rf"workspace_buffer.*\b{needed}\b", small, 2),
        "empty": (rf"workspace_buffer.*\b{needed}\b", small[:0], 2),
        **{
            f"count-{count}": ("num_tokens", buffer, count)
            for count in (-1, 16385, 1.5, True, "8", b"\2", None, 2**70)
        },
        "count-in-list": ("num_tokens", buffer, [1, -1]),
        "counts-none": ("num_tokens: expected at least one", buffer, []),
        "counts-mapping": ("num_tokens", buffer, {2: 3}),
        "count-tensor": ("num_tokens", buffer, torch.tensor(2.5)),
        "second-count-too-large": ("workspace_buffer", buffer, [1, 512]),
    }


@pytest.mark.parametrize("case", _prepare_refusals())
def test_prepare_refuses_and_writes_nothing(case: str) -> None:
    pattern, buffer, count = _prepare_refusals()[case]
    before = buffer.clone() if isinstance(buffer, Tensor) else None
    with pytest.raises(ValueError, match=pattern):
        cake.cake_fused_moe_prepare_workspace(buffer, count)
    if before is not None:
        assert_same_bits(buffer, before)


@pytest.mark.parametrize(
    "option, pattern",
    [
        ({"backend": "cutlass"}, "unsupported.*backend"),
        ({"weight_layout": "cutlass_nvfp4"}, "weight_layout.*trtllm_shuffled_nvfp4_group16"),
    ],
)
def test_prepare_refuses_option(option: dict[str, str], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        cake.cake_fused_moe_prepare_workspace(new_workspace(1), 1, **option)
