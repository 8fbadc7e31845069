"""What cake says of its work: the logger "cake", silent unless the application or CAKE_LOG asks.

`CAKE_LOG=info` logs preparation (library, device, workspace, plan), `debug` each eager call as well
(shapes, never values), `dump` writes bundles of calls on top, see `cake.bundle`. It is read once,
at import. Compiled code logs nothing, so that it stays one graph.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cake import _library, info, options

LOGGER: Final = logging.getLogger("cake")
OPERANDS: Final = (*options.TENSORS, *options.OPTIONAL, "batch_invariant")
"""Names of the arguments of `torch.ops.cake.fused_moe`, in its order."""

_LEVELS: Final = {"info": logging.INFO, "debug": logging.DEBUG, "dump": logging.DEBUG}


def _configure(value: str) -> bool:
    """Set the logger up as CAKE_LOG says; returns whether calls are dumped."""
    if not value:
        LOGGER.addHandler(logging.NullHandler())
    elif value not in _LEVELS:
        LOGGER.addHandler(logging.NullHandler())
        warnings.warn(
            f"CAKE_LOG: expected info, debug or dump, got {value!r}; nothing is logged",
            stacklevel=2,
        )
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s cake %(levelname)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(_LEVELS[value])
        LOGGER.propagate = False  # or the application's handlers would say it again
    return value == "dump"


DUMPS: Final = _configure(os.environ.get("CAKE_LOG", ""))


def is_watched() -> bool:
    """Whether an eager call goes through `fused_moe` of this module."""
    return DUMPS or LOGGER.isEnabledFor(logging.DEBUG)


def fused_moe(*arguments: Any) -> None:
    """Run `torch.ops.cake.fused_moe` with what was asked for around it; raises what it raises."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("fused_moe: %s", _call_text(arguments))
    if DUMPS:
        from cake import bundle

        bundle.record(arguments)
    else:
        torch.ops.cake.fused_moe(*arguments)


def prepared(workspace: Tensor, token_counts: Sequence[int]) -> None:
    """Log that a workspace was prepared for these token counts."""
    if torch.compiler.is_compiling() or not LOGGER.isEnabledFor(logging.INFO):
        return
    _introduce()
    device = workspace.device
    name = "exact path" if device.type == "cpu" else torch.cuda.get_device_name(device)
    LOGGER.info(
        "prepared a workspace of %s bytes at 0x%x on %s (%s) for T = %s",
        f"{workspace.numel():,}",
        workspace.data_ptr(),
        device,
        name,
        _counts_text(token_counts),
    )
    counts_of: dict[str, list[int]] = {}
    for count in token_counts:
        plan = info.device_plan(device, count)
        if plan is not None:
            counts_of.setdefault(_plan_text(plan, count), []).append(count)
    for text, counts in counts_of.items():
        LOGGER.info(
            "plan for T = %s: %s (unless a call asks for batch_invariant)",
            _counts_text(counts),
            text,
        )


@functools.cache
def warn_not_dumped(what: str) -> None:
    """Say, once for each `what`, that CAKE_LOG=dump does not apply to it."""
    if DUMPS:
        LOGGER.warning(
            "CAKE_LOG=dump: no bundle of %s; run the call eagerly, outside of it, to get one", what
        )


@functools.cache
def _introduce() -> None:
    build = _library.build_info()
    LOGGER.info(
        "cake %s (commit %s%s), library %s, torch %s",
        build["version"],
        build["commit"],
        " with local changes" if build["dirty"] else "",
        _library.library_path(),
        torch.__version__,
    )


def _plan_text(plan: Mapping[str, Any], num_tokens: int) -> str:
    text = f"{plan['kernels']} kernels, up to {plan['tile_pairs']} pairs a tile, "
    text += f"FC2 in {plan['fc2_parts']} part(s)"
    if plan["fc2_finalizes"]:
        text += " with finalize"
    if plan["tokens_per_chunk"] < num_tokens:
        text += ", in chunks of tokens"
    if plan["fc2_pool_part"] > 0:
        text += f", one block in {plan['fc2_pool_part']} from the pool"
    return text


def _counts_text(counts: Sequence[int]) -> str:
    """Write token counts in ascending order, neighbours as a range: "1-4, 8"."""
    ranges: list[list[int]] = []
    for count in sorted(set(counts)):
        if ranges and ranges[-1][1] == count - 1:
            ranges[-1][1] = count
        else:
            ranges.append([count, count])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges) or "none"


def _call_text(arguments: Sequence[Any]) -> str:
    call = dict(zip(OPERANDS, arguments, strict=True))
    parts = []
    for name in (*OPERANDS[:3], *options.OPTIONAL):
        tensor = call[name]
        if tensor is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts.append(f"{name} {dtype} {list(tensor.shape)}")
    input = call["input"]
    captured = input.is_cuda and torch.cuda.is_current_stream_capturing()
    parts.append(f"on {input.device}" + (", captured in a CUDA graph" if captured else ""))
    if call["batch_invariant"]:
        parts.append("batch_invariant")
    return ", ".join(parts)
