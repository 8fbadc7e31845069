"""Options that the public functions share with FlashInfer's: what is refused, what is passed on."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cake import errors, support
from cake.config import ActivationType


def call_flashinfer(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call FlashInfer's function of the same name with the arguments that differ from defaults."""
    backend = arguments["backend"]
    try:
        module = importlib.import_module("flashinfer.fused_moe")
        enums = importlib.import_module("flashinfer.tllm_enums")
        target = getattr(module, function.__name__)
    except (ImportError, AttributeError) as error:
        raise errors.UnsupportedError(
            f"backend: unsupported fused MoE backend {backend!r}: this package runs "
            f"backend='cake'; others are FlashInfer's, and flashinfer.fused_moe."
            f"{function.__name__} is not to be had here ({error}): pip install flashinfer-python"
        ) from None
    accepted = inspect.signature(target).parameters.values()
    if not any(p.name == "backend" or p.kind is p.VAR_KEYWORD for p in accepted):
        raise errors.UnsupportedError(
            f"backend: unsupported fused MoE backend {backend!r}: the FlashInfer installed here "
            "has no choice of backends: pip install --upgrade flashinfer-python"
        )
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    given = {
        name: value
        for name, value in arguments.items()
        if value is not defaults[name] or name == "backend"
    }
    if "activation_type" in given:
        given["activation_type"] = enums.ActivationType(int(given["activation_type"]))
    return target(**given)


def refuse_unsupported(
    *,
    activation_type: int,
    output_dtype: torch.dtype,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
    use_fused_finalize: bool | None,
    absent: tuple[tuple[str, object], ...],
    switches: tuple[tuple[str, bool | None], ...],
) -> None:
    """Raise for an option that this operation does not have; the message names it.

    `absent` are inputs that must be None, `switches` those that must be off.
    """
    if activation_type != ActivationType.Situ:
        raise errors.UnsupportedError(
            f"activation_type: expected ActivationType.Situ, got {activation_type!r}"
        )
    if output_dtype is not torch.bfloat16:
        raise errors.DTypeError(f"output_dtype: expected torch.bfloat16, got {output_dtype!r}")
    if tp_size != support.TP_SIZE:
        raise errors.UnsupportedError(f"tp_size: expected tp_size=8, got {tp_size!r}")
    if tp_rank not in range(support.TP_SIZE):
        raise ValueError(f"tp_rank: expected 0 to 7, got {tp_rank!r}")
    if ep_size != 1 or ep_rank != 0:
        raise errors.UnsupportedError(
            f"ep_size: expected ep_size=1 and ep_rank=0 (all 896 experts are local), got "
            f"ep_size={ep_size!r}, ep_rank={ep_rank!r}"
        )
    if use_fused_finalize is not None and not use_fused_finalize:
        raise errors.UnsupportedError(
            "use_fused_finalize: expected None or True (the weighted sum is part of the "
            "operation), got False"
        )
    for name, value in absent:
        if value is not None:
            raise errors.UnsupportedError(
                f"{name}: expected None (the operation has no such input), got "
                f"{type(value).__name__}"
            )
    for name, switch in switches:
        if switch:
            raise errors.UnsupportedError(f"{name}: expected False, got {switch!r}")


def check_tensor(name: str, value: object, device: torch.device | None = None) -> None:
    """Raise unless `value` is a strided tensor, on `device` or, when None, where cake can run."""
    if not isinstance(value, Tensor):
        raise errors.DTypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        got = "a nested one" if value.is_nested else value.layout
        raise errors.UnsupportedError(f"{name}: expected a strided tensor, got {got}")
    if device is not None:
        if value.device != device:
            raise ValueError(
                f"{name}: expected a tensor on {device} like input, got one on {value.device}"
            )
    elif value.device.type not in ("cpu", "cuda", "meta"):
        raise errors.UnsupportedError(
            f"{name}: expected a tensor on cpu or cuda, got one on {value.device}"
        )


TENSORS = (
    "input",
    "token_selected_experts",
    "token_final_scales",
    "fc1_expert_weights",
    "fc2_expert_weights",
    *(f"quant_scales[{i}]" for i in range(6)),
)
OPTIONAL = ("situ_beta", "situ_linear_beta", "output", "workspace_buffer")


def check_scales(quant_scales: Sequence[Tensor]) -> None:
    """Raise unless these are six; that they are tensors is for `check_tensors`."""
    several = isinstance(quant_scales, (list, tuple))
    if not several or len(quant_scales) != 6:
        got = len(quant_scales) if several else type(quant_scales).__name__
        raise ValueError(
            "quant_scales: expected a list of six tensors (qX, FC1 block scales, dX*dW13, qA, "
            f"FC2 block scales, dA*dW2), got {got}"
        )


_FLOAT, _BYTES = (torch.float32,), (torch.uint8,)
_SCALES = (torch.uint8, torch.float8_e4m3fn)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "input": (torch.bfloat16,),
    "token_selected_experts": (torch.int32, torch.int64),
    "token_final_scales": (torch.bfloat16, torch.float32),
    "fc1_expert_weights": _BYTES,
    "fc2_expert_weights": _BYTES,
    **{f"quant_scales[{i}]": _SCALES if i in (1, 4) else _FLOAT for i in range(6)},
    "situ_beta": _FLOAT,
    "situ_linear_beta": _FLOAT,
    "output": (torch.bfloat16,),
    "workspace_buffer": (torch.uint8, torch.int8),
}


def check_dtype(name: str, value: Tensor) -> None:
    """Raise for an argument of another dtype.

    The operator does as well, but of some dtypes (float4_e2m1fn_x2, float8_e8m0fnu) torch's stable
    interface cannot tell it the name.
    """
    if value.dtype not in DTYPES[name]:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[name])
        got = str(value.dtype).removeprefix("torch.")
        raise errors.DTypeError(f"{name}: expected {expected}, got {got}")


def check_dtypes(tensors: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]) -> None:
    """Raise for the first argument of another dtype; the arguments of `check_tensors`."""
    for name, value in zip((*TENSORS, *OPTIONAL), (*tensors, *optional), strict=True):
        if value is not None:
            check_dtype(name, value)


def are_plain_tensors(tensors: tuple[Any, ...], optional: tuple[Any, ...]) -> bool:
    """Whether all are tensors with memory, or None where that is allowed; quick, says no more."""
    try:
        for tensor in tensors:
            if tensor.is_meta:
                return False
        for tensor in optional:
            if tensor is not None and tensor.is_meta:
                return False
    except AttributeError:
        return False
    return True


def check_tensors(tensors: tuple[Any, ...], optional: tuple[Any, ...]) -> None:
    """Raise for the first argument of `cutlass_fused_moe` that is no strided tensor beside `input`.

    `tensors` are the five operands and the six scales; `optional` are situ_beta, situ_linear_beta,
    output and workspace_buffer.
    """
    check_tensor("input", tensors[0])
    device = tensors[0].device
    for name, value in zip(TENSORS[1:], tensors[1:], strict=True):
        check_tensor(name, value, device)
    for name, value in zip(OPTIONAL, optional, strict=True):
        if value is not None:
            check_tensor(name, value, device)
