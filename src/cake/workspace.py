"""Caller-owned workspaces: how large, and which buffers count as prepared.

The library keeps a table of prepared buffers by address and size. An address says nothing once its
memory was freed, so this module ties each entry to the torch storage that owns the memory: the
entry goes when the storage dies, and a buffer counts as prepared only while it has the very storage
that was prepared.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from typing import SupportsIndex, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cake import errors, log, support

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


def forget_if_moved(workspace: Tensor) -> None:
    """Drop the entry at this address unless `workspace` has the storage that was prepared.

    A buffer prepared by the operator itself has no entry here: its user keeps track of its life.
    """
    if _has_memory(workspace):
        place = _place(workspace)
        owner = _owners.get(place)
        if owner is not None and owner() is not workspace.untyped_storage():
            _forget(place, owner)


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


def prepare(workspace: Tensor, num_tokens: int | Iterable[int]) -> None:
    """Prepare a workspace for the token count or counts and tie that to its storage."""
    several = isinstance(num_tokens, Iterable) and not hasattr(num_tokens, "ndim")  # no array
    counts = [
        token_count("num_tokens", value)
        for value in (cast("Iterable[int]", num_tokens) if several else [num_tokens])
    ]
    counts.sort(reverse=True)  # what is too small for one count is refused before any is prepared
    if _has_memory(workspace):
        end = workspace.storage_offset() + workspace.numel()
        available = workspace.untyped_storage().nbytes()
        if workspace.element_size() == 1 and end > available:
            raise ValueError(
                f"workspace_buffer: expected {end} bytes in its storage, got {available}: the "
                "storage was resized under the tensor"
            )
    forget_if_moved(workspace)
    try:
        torch.ops.cake.prepare_workspace(workspace, counts)
    except RuntimeError as error:
        raise errors.translate(error) from None
    torch.autograd.graph.increment_version(workspace)
    if any(counts) and _has_memory(workspace):
        _own(workspace)
        log.prepared(workspace, counts)
