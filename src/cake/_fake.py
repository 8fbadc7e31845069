"""Fake kernels: the shape rules of the operators, for tracing (torch.compile, export).

The real kernels check more (devices, strides, overlap); these check what tracing knows, and never
guard on the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cake import log
from cake.options import DTYPES
from cake.support import GROUP_SIZE, KIMI_K3, MAX_TOKENS

_SF_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def _check_dim(name: str, tensor: Tensor, dim: int) -> None:
    torch._check(
        tensor.dim() == dim,
        lambda: f"{name}: expected {dim} dimensions, got shape {list(tensor.shape)}",
    )


def _check(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    device: torch.device,
) -> None:
    torch._check(
        tensor.device == device,
        lambda: f"{name}: expected a tensor on {device}, got one on {tensor.device}",
    )
    torch._check_type(
        tensor.dtype in dtypes,
        lambda: f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}",
    )
    _check_dim(name, tensor, len(sizes))
    for actual, expected in zip(tensor.shape, sizes, strict=True):
        torch._check(
            actual == expected,
            lambda: f"{name}: expected shape {list(sizes)}, got {list(tensor.shape)}",
        )


def _check_one_scale(name: str, scale: Tensor, device: torch.device) -> None:
    torch._check(
        scale.numel() == 1,
        lambda: f"{name}: expected 1 element, got shape {list(scale.shape)}",
    )
    _check(name, scale, (torch.float32,), tuple(scale.shape), device)


def _check_workspace(workspace: Tensor, device: torch.device) -> None:
    _check_dim("workspace_buffer", workspace, 1)
    shape = tuple(workspace.shape)
    _check("workspace_buffer", workspace, DTYPES["workspace_buffer"], shape, device)


def check_fused_moe(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    input_scale: Tensor,
    w13_sf: Tensor,
    fc1_alpha: Tensor,
    fc2_input_scale: Tensor,
    w2_sf: Tensor,
    fc2_alpha: Tensor,
    situ_beta: Tensor | None,
    situ_linear_beta: Tensor | None,
    output: Tensor,
    workspace: Tensor,
    batch_invariant: bool = False,
) -> None:
    """Raise for operands of `torch.ops.cake.fused_moe` with a wrong shape, dtype or device."""
    h, i, e, k = KIMI_K3.hidden, KIMI_K3.intermediate, KIMI_K3.num_experts, KIMI_K3.top_k
    device = input.device
    _check_dim("input", input, 2)
    tokens = input.shape[0]
    if isinstance(tokens, int):  # not a symbol
        torch._check(
            tokens <= MAX_TOKENS,
            lambda: f"input: expected at most {MAX_TOKENS} tokens, got {tokens}",
        )

    def check(name: str, tensor: Tensor, *sizes: int) -> None:
        _check(name, tensor, DTYPES[name], sizes, device)

    check("input", input, tokens, h)
    check("token_selected_experts", topk_ids, tokens, k)
    check("token_final_scales", topk_weights, tokens, k)
    check("fc1_expert_weights", w13, e, 2 * i, h // 2)
    check("fc2_expert_weights", w2, e, h, i // 2)
    _check_one_scale("quant_scales[0]", input_scale, device)
    check("quant_scales[1]", w13_sf, e, 2 * i, h // GROUP_SIZE)
    check("quant_scales[4]", w2_sf, e, h, i // GROUP_SIZE)
    per_expert = {
        "quant_scales[2]": fc1_alpha,
        "quant_scales[3]": fc2_input_scale,
        "quant_scales[5]": fc2_alpha,
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
    }
    for name, tensor in per_expert.items():
        if tensor is not None:
            check(name, tensor, e)
    check("output", output, tokens, h)
    _check_workspace(workspace, device)


@torch.library.register_fake("cake::fused_moe")
def _fused_moe(*arguments: Any, **options: Any) -> None:
    log.warn_not_dumped("a traced call")
    check_fused_moe(*arguments, **options)


@torch.library.register_fake("cake::quantize_nvfp4")
def _quantize_nvfp4(input: Tensor, input_scale: Tensor, packed: Tensor, sf: Tensor) -> None:
    _check_dim("input", input, 2)
    rows, columns = input.shape
    torch._check(
        columns % GROUP_SIZE == 0,
        lambda: f"input: expected columns a multiple of {GROUP_SIZE}, got {columns}",
    )
    _check("input", input, (torch.bfloat16,), (rows, columns), input.device)
    _check_one_scale("input_scale", input_scale, input.device)
    _check("packed", packed, (torch.uint8,), (rows, columns // 2), input.device)
    _check("sf", sf, _SF_DTYPES, (rows, columns // GROUP_SIZE), input.device)


@torch.library.register_fake("cake::prepare_workspace")
def _prepare_workspace(workspace: Tensor, num_tokens: list[int]) -> None:
    _check_workspace(workspace, workspace.device)


@torch.library.register_fake("cake::selftest")
def _selftest(out: Tensor) -> None:
    torch._check_type(
        out.dtype == torch.int32, lambda: f"out: expected torch.int32, got {out.dtype}"
    )


@torch.library.register_fake("cake::read_stream")
def _read_stream(data: Tensor) -> None:
    torch._check(data.is_contiguous(), lambda: "data: expected a contiguous tensor")
