"""Bundles: one call of the operation in a file, for a bug report and for `cake check --replay`.

`CAKE_LOG=dump` writes the first `CAKE_DUMP_LIMIT` eager calls of a process (default 1) to
`CAKE_DUMP_DIR` (default `cake-dump` in the current directory). A bundle is a safetensors file:

* `input` bfloat16 [T, H], `token_selected_experts` and `token_final_scales` [T, k] as they came;
* `experts` int32 [n]: the experts that the call touches, ascending, and their rows of the prepared
  weights, `fc1_expert_weights`, `fc2_expert_weights`, `quant_scales[1]` and `quant_scales[4]`
  [n, ...], 2.3 MB each: row j is of expert `experts[j]`;
* the other scales whole, `situ_beta` and `situ_linear_beta` if they were given;
* `output` bfloat16 [T, H], unless the call failed;
* metadata: `call` (token count, stride, plan, device), `environment` (what `cake info --json`
  prints, the time, the variables CAKE_*), `error` if the call failed, versions and a SHA-256.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from cake import checkpoint, errors, info, log, options, support
from cake._fake import check_fused_moe
from cake.prepared_weights import PreparedWeights

FORMAT: Final = "cake-bundle"
VERSION: Final = "1"
PER_EXPERT: Final = (
    "fc1_expert_weights",
    "fc2_expert_weights",
    "quant_scales[1]",
    "quant_scales[4]",
)
"""Tensors of which a bundle holds the rows of the touched experts."""
SMOOTHING: Final = ("situ_beta", "situ_linear_beta")
FOLDER: Final = Path(os.environ.get("CAKE_DUMP_DIR") or "cake-dump")


def _limit(text: str) -> int:
    if text.isdecimal():
        return int(text)
    log.LOGGER.warning("CAKE_DUMP_LIMIT: expected a number, got %r; 1 bundle is written", text)
    return 1


class _Slots:
    """How many bundles this process may still write."""

    def __init__(self, count: int) -> None:
        self._lock, self._free, self._taken = threading.Lock(), count, 0

    def are_left(self) -> bool:
        return self._free > 0

    def take(self) -> int | None:
        """Return the number of the bundle to write, or None."""
        with self._lock:
            if self._free == 0:
                return None
            self._free, self._taken = self._free - 1, self._taken + 1
            return self._taken

    def give_back(self) -> None:
        with self._lock:
            self._free += 1


_slots = _Slots(_limit(os.environ.get("CAKE_DUMP_LIMIT") or "1"))


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read.

    Attributes
    ----------
    tensors : dict of str to Tensor
        On the CPU, by the names above.
    call : dict
        `num_tokens`, `input_stride` (elements), `batch_invariant`, `device`, `workspace_bytes` and
        `plan`, how the GPU ran it, or None.
    origin : str
        Where it was recorded: versions, driver, device, time.
    error : str or None
        The message, if the call failed.
    """

    tensors: dict[str, Tensor]
    call: dict[str, Any]
    origin: str
    error: str | None

    @property
    def experts(self) -> Tensor:
        """Int32 [n]: the experts whose weights are in the bundle."""
        return self.tensors["experts"]

    @property
    def output(self) -> Tensor | None:
        """Bfloat16 [T, H], or None if the call failed."""
        return self.tensors.get("output")

    def all_experts(self, name: str) -> Tensor:
        """Return one of PER_EXPERT with rows for all experts, [E, ...]; zeros where none were."""
        rows = self.tensors[name]
        whole = torch.zeros((support.KIMI_K3.num_experts, *rows.shape[1:]), dtype=rows.dtype)
        whole.view(torch.uint8)[self.experts.long()] = rows.view(torch.uint8)
        return whole


def record(arguments: Sequence[Any]) -> None:
    """Run `torch.ops.cake.fused_moe`, and write a bundle of the call if it may be recorded.

    A call that is refused gives no bundle, for its message says it all; one that fails gives one
    without output. Waits for the device. Trouble with the bundle itself is logged, never raised.
    """
    call = dict(zip(log.OPERANDS, arguments, strict=True))
    number = _slots.take() if _slots.are_left() and _may_record(call) else None
    before = None if number is None else _before(call)
    if number is None or before is None:
        torch.ops.cake.fused_moe(*arguments)
        return
    tensors, metadata = before
    try:
        torch.ops.cake.fused_moe(*arguments)
        tensors["output"] = call["output"].detach().cpu()
    except RuntimeError as error:
        if isinstance(errors.translate(error), ValueError):
            _slots.give_back()
        else:
            _write(number, tensors, {**metadata, "error": str(error)})
        raise
    _write(number, tensors, metadata)


def _may_record(call: Mapping[str, Any]) -> bool:
    """Whether this is an eager call with tokens, and of shapes that are not refused."""
    tensors = [value for value in call.values() if isinstance(value, Tensor)]
    traced = torch._C._len_torch_dispatch_stack() > 0 or any(
        type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta for tensor in tensors
    )
    if traced:
        log.warn_not_dumped("a call that is traced or has tensors of a subclass")
        return False
    if call["input"].is_cuda and torch.cuda.is_current_stream_capturing():
        log.warn_not_dumped("a call that is captured in a CUDA graph")
        return False
    try:
        check_fused_moe(*call.values())
    except (RuntimeError, TypeError):
        return False
    return bool(call["input"].shape[0] > 0)


def _before(call: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Collect what is known before the call, when the device still answers; None on trouble."""
    try:
        import numpy  # noqa: F401  (the writer needs it)

        return _copy_inputs(call), _metadata(call)
    except ImportError as error:
        log.LOGGER.warning("no bundle: %s; install the extra: pip install 'cake-moe[cli]'", error)
        return None
    except Exception as error:
        log.LOGGER.warning("no bundle of this call: %s", error)
        return None


def _copy_inputs(call: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy what the call reads to the CPU; of the weights, the rows of the touched experts."""
    experts = support.touched_experts(call["token_selected_experts"].detach().cpu())
    copies = {"experts": experts}
    for name in (*options.TENSORS, *SMOOTHING):
        tensor = call[name]
        if tensor is None:
            continue
        tensor = tensor.detach()
        if name in PER_EXPERT:
            # Row by row, which takes no memory of the GPU.
            rows = torch.empty((len(experts), *tensor.shape[1:]), dtype=tensor.dtype)
            for row, expert in zip(rows, experts.tolist(), strict=True):
                row.copy_(tensor[expert])
            copies[name] = rows
        else:
            copy = tensor.to("cpu", copy=True).contiguous()
            copies[name] = copy.reshape(1) if copy.dim() == 0 else copy
    return copies


def _metadata(call: Mapping[str, Any]) -> dict[str, str]:
    input: Tensor = call["input"]
    facts = {
        "num_tokens": input.shape[0],
        "input_stride": input.stride(0),
        "batch_invariant": bool(call["batch_invariant"]),
        "device": str(input.device),
        "workspace_bytes": call["workspace_buffer"].numel(),
        "plan": info.device_plan(input.device, input.shape[0], call["batch_invariant"]),
    }
    environment = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("CAKE_")},
        **info.collect(),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout_version": str(PreparedWeights.LAYOUT_VERSION),
        "call": json.dumps(facts),
        "environment": json.dumps(environment),
    }


def _write(number: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a bundle; trouble is logged."""
    now = datetime.now(timezone.utc)
    path = FOLDER / f"cake-{now:%Y%m%dT%H%M%SZ}-{os.getpid()}-{number}.safetensors"
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        checkpoint.write_tensors(path, tensors, metadata)
        log.LOGGER.info("wrote %s (%s bytes)", path.resolve(), f"{path.stat().st_size:,}")
    except Exception as error:
        log.LOGGER.warning("no bundle of this call: %s", error)


def load(path: Path) -> Bundle:
    """Read a bundle.

    Raises
    ------
    ValueError
        Not a bundle, of another version or layout, truncated, damaged or incomplete; also a
        FileNotFoundError if there is no file, an ImportError without safetensors.
    """
    file = checkpoint.open_safetensors(path)
    metadata: dict[str, str] = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a bundle of CAKE_LOG=dump, got metadata {metadata}")
    for name, expected in (
        ("version", VERSION),
        ("layout_version", str(PreparedWeights.LAYOUT_VERSION)),
    ):
        if metadata.get(name) != expected:
            raise ValueError(
                f"{path}: expected a bundle of {name} {expected}, got {metadata.get(name)}; replay "
                "it with the cake that wrote it"
            )
    tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not checkpoint.is_whole(metadata, tensors):
        raise ValueError(f"{path}: damaged: not the bytes that were written; copy it again")
    required = {"experts", *options.TENSORS}
    optional = {*SMOOTHING, "output"}
    if not required <= tensors.keys() <= required | optional:
        raise ValueError(
            f"{path}: expected tensors {sorted(required)} and perhaps {sorted(optional)}, got "
            f"{sorted(tensors)}"
        )
    experts = tensors["experts"]
    if not torch.equal(experts, support.touched_experts(tensors["token_selected_experts"])):
        raise ValueError(
            f"{path}: experts: expected those of token_selected_experts, got {experts.tolist()}"
        )
    for name in PER_EXPERT:
        if tensors[name].shape[:1] != experts.shape:
            raise ValueError(
                f"{path}: {name}: expected {len(experts)} rows, got {list(tensors[name].shape)}"
            )
    try:
        call: dict[str, Any] = json.loads(metadata["call"])
        origin = _origin(call["device"], json.loads(metadata["environment"]))
        if not (type(call["input_stride"]) is int and type(call["batch_invariant"]) is bool):
            raise ValueError(f"call {call}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected metadata of this version, got {error!r}") from None
    return Bundle(tensors, call, origin, metadata.get("error"))


def _origin(device: str, environment: dict[str, Any]) -> str:
    build = environment["cake"]
    names = {entry["device"]: entry["name"] for entry in environment["devices"]}
    return (
        f"cake {build['version']} (commit {build['commit']}), torch {environment['torch']}, NVIDIA "
        f"driver {environment['driver'] or 'none'}, on {device} ({names[device]}), "
        f"{environment['time']}"
    )
