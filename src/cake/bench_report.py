"""What `cake bench --json` writes, and `cake plot` reads."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cake import info, roofline
from cake.testing import synthetic


@dataclass(frozen=True)
class Ceilings:
    """What this GPU can do, measured."""

    read_bytes_per_s: float
    matrix_flop_per_s: float
    graph_node_us: float
    matrix: str = "BF16"  # what was multiplied for the matrix rate

    def floor_us(self, experts: float, num_tokens: int) -> float:
        """Return the floor of a call that touches so many distinct experts."""
        return roofline.floor_us(experts, num_tokens, self.read_bytes_per_s, self.matrix_flop_per_s)


@dataclass(frozen=True)
class PeerResult:
    """Times of a peer with the batches of a result, microseconds per call."""

    us: float  # median
    us_low: float  # 10th percentile
    us_high: float  # 90th percentile
    ratio: float  # median over cake's: above 1 cake is faster
    error: float  # relative rms of some rows against the layer without activation quantization


@dataclass(frozen=True)
class PeerFailure:
    """Why a peer has no times."""

    failure: str


@dataclass(frozen=True)
class Result:
    """Times of one token count and routing, microseconds per call."""

    tokens: int
    routing: synthetic.Routing
    experts: float  # distinct, mean over the batches
    us: float  # median
    us_low: float  # 10th percentile
    us_high: float  # 90th percentile
    floor_us: float
    fraction: float  # floor / median
    gb_per_s: float  # distinct experts' bytes over the time
    tflop_per_s: float
    predicted_us: float | None = None  # by cake.roofline, where it knows the GPU
    stages_us: dict[str, float] = field(default_factory=dict)  # they overlap
    peers: dict[str, PeerResult | PeerFailure] = field(default_factory=dict)


@dataclass
class Report:
    """A report that grows, and is written after each step."""

    ceilings: Ceilings
    batch_invariant: bool
    environment: dict[str, Any]
    path: Path | None  # nothing is written if None
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def write(self) -> None:
        """Write the file anew."""
        if self.path is None:
            return
        content = {
            **self.environment,
            "batch_invariant": self.batch_invariant,
            "ceilings": asdict(self.ceilings),
            "peers": self.peers,
            "results": [asdict(result) for result in self.results],
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def environment(device: torch.device) -> dict[str, Any]:
    """Return date, GPU and versions."""
    facts = info.collect()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device),
        **{name: facts[name] for name in ("cake", "torch", "driver", "python")},
    }
