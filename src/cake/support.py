"""What cake supports: the geometry, the token counts, the devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cake import _library  # noqa: F401  (loads torch.ops.cake)

GROUP_SIZE = 16
"""Elements that share one NVFP4 block scale."""

MAX_TOKENS = 16384
TP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the routed experts on one tensor-parallel rank."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


KIMI_K3 = Geometry(hidden=3584, intermediate=384, num_experts=896, top_k=16)


def touched_experts(topk_ids: Tensor) -> Tensor:
    """Return the experts that a call touches, int32 ascending; other ids are empty slots."""
    real = (topk_ids >= 0) & (topk_ids < KIMI_K3.num_experts)
    experts: Tensor = topk_ids[real].unique()
    return experts.int()


def is_supported(device: torch.device | str | int | None = None) -> tuple[bool, str]:
    """Tell whether `cutlass_fused_moe` runs on a device.

    Parameters
    ----------
    device : torch.device, str, int or None
        None: the current CUDA device when there is one, else the CPU. An int is a CUDA index.

    Returns
    -------
    (bool, str)
        Whether it runs, and a sentence that says why or why not. Never raises; starts no CUDA
        context for a CPU device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, int):
        device = f"cuda:{int(device)}"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        return False, f"device: expected cpu, cuda or cuda:N, got {device!r}"
    if device.type == "cpu":
        return True, "exact multi-threaded path"
    if device.type != "cuda":
        return False, f"device: expected cpu or cuda, got {device}"
    if not torch.cuda.is_available():
        return False, f"device: torch {torch.__version__} finds no CUDA GPU"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return False, f"device: expected an index below {torch.cuda.device_count()}, got {device}"
    capability = torch.cuda.get_device_capability(device)
    reason = str(torch.ops.cake.cuda_support(*capability))
    kernels = "native kernels"
    if capability[0] == 10:
        kernels += ", compiled and checked by the model, never run on the chip"
    return not reason, reason or f"{torch.cuda.get_device_name(device)}: {kernels}"


def require_gpu(option: str, name: str) -> torch.device:
    """Return the CUDA device of this name, which runs the fused operation.

    Raises
    ------
    ValueError
        It does not; the message begins with `option` and says why.
    """
    supported, reason = is_supported(name)
    if supported and torch.device(name).type != "cuda":
        supported, reason = False, f"device: {name} is none"
    if not supported:
        raise ValueError(f"{option} {name}: expected a supported GPU: {reason}")
    return torch.device(name)
