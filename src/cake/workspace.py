"""Caller-owned workspaces: how large, and which buffers count as prepared.

The library keeps a table of prepared buffers by address and size. An address says nothing once its
memory was freed, so this module ties each entry to the torch storage that owns the memory: the
entry goes when the storage dies, and a buffer counts as prepared only while it has the very storage
that was prepared.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import SupportsIndex, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cake import errors, log, options, support

# (device index or -1, address) -> the storage that was prepared there
_owners: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}


def _place(workspace: Tensor) -> tuple[int, int]:
    return workspace.get_device(), workspace.data_ptr()


def _forget(place: tuple[int, int], owner: weakref.ref[torch.UntypedStorage]) -> None:
    if _owners.get(place) is owner:
        del _owners[place]
        torch.ops.cake.release_workspace(place[1], place[0])


def _own(workspace: Tensor) -> None:
    """Tie the workspace's table entries to the life of its storage."""
    place = _place(workspace)
    if place not in _owners:
        storage = workspace.untyped_storage()
        _owners[place] = weakref.ref(storage, lambda owner: _forget(place, owner))


def _has_memory(workspace: Tensor) -> bool:
    return not workspace.is_meta and not isinstance(workspace, FakeTensor)


def _other_owner(workspace: Tensor) -> weakref.ref[torch.UntypedStorage] | None:
    """Return the owner of the entry at this address, if it is not the storage of `workspace`.

    A buffer prepared by the operator itself has no entry here: its user keeps track of its life.
    """
    owner = _owners.get(_place(workspace)) if _has_memory(workspace) else None
    return owner if owner is not None and owner() is not workspace.untyped_storage() else None


def check_owner(workspace: Tensor) -> None:
    """Refuse a tensor over the memory of another one's prepared storage, which keeps its entry.

    Where that storage has moved away from this address, the entry is dropped.

    Raises
    ------
    ValueError
        The other tensor is alive and still there.
    """
    other = _other_owner(workspace)
    if other is None:
        return
    storage = other()
    if storage is not None and 0 <= workspace.data_ptr() - storage.data_ptr() < storage.nbytes():
        raise ValueError(
            "workspace_buffer: expected the prepared buffer or a view of it, got another tensor "
            "over its memory; pass the one given to cake_fused_moe_prepare_workspace, or prepare "
            "this one"
        )
    _forget(_place(workspace), other)


def token_count(name: str, value: object) -> int:
    """Return a token count as an int in 0..16384.

    Raises
    ------
    DTypeError
        Not an integer; a bool and a tensor are none.
    ValueError
        Outside 0..16384.
    """
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
        raise errors.DTypeError(f"{name}: expected an integer, got {value!r}")
    count = operator.index(value)
    if not 0 <= count <= support.MAX_TOKENS:
        raise ValueError(f"{name}: expected 0 to {support.MAX_TOKENS}, got {count}")
    return count


def token_counts(name: str, value: object) -> list[int]:
    """Return one token count or several, see `token_count`."""
    if isinstance(value, (str, bytes, Mapping)):
        raise errors.DTypeError(f"{name}: expected integers, got {value!r}")
    # An array of several is one of them; Tensor and an array without dimensions are none.
    several = isinstance(value, Iterable) and getattr(value, "ndim", 1) == 1
    values = cast("Iterable[int]", value) if several and not isinstance(value, Tensor) else [value]
    return [token_count(name, v) for v in values]


def prepare(workspace: Tensor, num_tokens: int | Iterable[int]) -> None:
    """Prepare a workspace for the token count or counts and tie that to its storage."""
    counts = token_counts("num_tokens", num_tokens)
    if not counts:
        raise ValueError("num_tokens: expected at least one, got none")
    counts.sort(reverse=True)  # what is too small for one count is refused before any is prepared
    if _has_memory(workspace):
        end = workspace.storage_offset() + workspace.numel()
        available = workspace.untyped_storage().nbytes()
        if workspace.element_size() == 1 and end > available:
            raise ValueError(
                f"workspace_buffer: expected {end} bytes in its storage, got {available}: the "
                "storage was resized under the tensor"
            )
    other = _other_owner(workspace)
    if other is not None:
        _forget(_place(workspace), other)
    try:
        torch.ops.cake.prepare_workspace(workspace, counts)
    except RuntimeError as error:
        options.check_dtype("workspace_buffer", workspace)
        raise errors.translate(error) from None
    torch.autograd.graph.increment_version(workspace)
    if any(counts) and _has_memory(workspace):
        _own(workspace)
        log.prepared(workspace, counts)
