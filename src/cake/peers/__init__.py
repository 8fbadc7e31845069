"""Other implementations of the routed experts, which `cake bench --peer NAME` times beside cake.

A peer gets cake's own weights and batches. It is a module of this package with `create`, and needs
a distribution that the extra `peers` installs; neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from cake.check import Batch
    from cake.prepared_weights import PreparedWeights


class Peer(Protocol):
    """A peer that is ready: it holds the weights in its own layout, and all buffers."""

    @property
    def numerics(self) -> str:
        """Say what it computes: a short name, a colon, how that differs from cake."""

    @property
    def tolerance(self) -> float:
        """Largest relative rms error against the layer without activation quantization."""

    def call(self, batch: Batch) -> Tensor:
        """Submit one call on the current stream, without synchronizing.

        Parameters
        ----------
        batch : Batch
            Of one of the token counts that the peer was made for.

        Returns
        -------
        Tensor
            bfloat16 [T, H]; a later call may overwrite it.
        """


@dataclass(frozen=True)
class _Distribution:
    name: str
    oldest: tuple[int, ...]  # release that has what the peer calls


_DISTRIBUTIONS = {"humming": _Distribution("humming-kernels", (0, 1, 19))}
NAMES = tuple(_DISTRIBUTIONS)


def require(name: str) -> str:
    """Return a peer's distribution and version, such as ``humming-kernels 0.1.20``.

    Raises
    ------
    ValueError
        No peer has this name.
    ImportError
        The distribution is not installed or is too old.
    """
    if name not in NAMES:
        raise ValueError(f"--peer: expected one of {', '.join(NAMES)}, got {name!r}")
    distribution = _DISTRIBUTIONS[name]
    try:
        version = metadata.version(distribution.name)
    except metadata.PackageNotFoundError:
        version = "none"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < distribution.oldest:
        oldest = ".".join(str(number) for number in distribution.oldest)
        raise ImportError(
            f"--peer {name}: expected {distribution.name} {oldest} or newer, got {version}: "
            "pip install 'cake-moe[peers]'"
        )
    return f"{distribution.name} {version}"


def create(name: str, weights: PreparedWeights, top_k: int, token_counts: Sequence[int]) -> Peer:
    """Make a peer.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    weights : PreparedWeights
        cake's weights, on the GPU where the peer shall run; copied.
    top_k : int
        k, the slots of a token.
    token_counts : sequence of int
        What it will be called with; kernels are compiled for these alone.

    Raises
    ------
    Exception
        Whatever the peer's own code raises.
    """
    module = importlib.import_module(f"cake.peers.{name}")
    peer: Peer = module.create(weights, top_k, token_counts)
    return peer
