"""Times of a peer as `cake bench` takes cake's, after a look at what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cake import peers, support, timing
from cake.bench_report import PeerFailure, PeerResult, Report
from cake.check import Batch, Layer
from cake.prepared_weights import PreparedWeights, unprepare
from cake.testing.reference import unquantized_reference

_CHECKED_ROWS = 4


def output_error(output: Tensor, batch: Batch, weights: PreparedWeights) -> float:
    """Relative rms error of up to four rows of an output, evenly spaced.

    Parameters
    ----------
    output : Tensor
        bfloat16 [T, H] on any device.
    batch : Batch
        What it was computed from.
    weights : PreparedWeights
        The layer.

    Returns
    -------
    float
        Against float64 on the decoded weights, no activation quantized; NaN if a row has one.
    """
    num_tokens = batch.tokens.shape[0]
    rows = torch.linspace(0, num_tokens - 1, min(num_tokens, _CHECKED_ROWS)).long()
    rows = rows.to(batch.tokens.device)
    expected = unquantized_reference(
        batch.tokens[rows],
        batch.topk_ids[rows],
        batch.topk_weights[rows],
        lambda expert: unprepare(weights, expert).dequantize(),
        num_experts=weights.num_experts,
    )
    difference = output[rows].cpu().double() - expected
    return float(difference.norm() / expected.norm())


def measure_peer(
    peer: peers.Peer, weights: PreparedWeights, batches: Sequence[Batch], cake_us: float
) -> PeerResult:
    """Capture calls with the batches, check what a replay gives, and time replays.

    Parameters
    ----------
    peer : Peer
        Made with `weights`.
    weights : PreparedWeights
        The layer.
    batches : sequence of Batch
        Those that cake was timed with, on the peer's device.
    cake_us : float
        cake's median time of a call, microseconds.

    Raises
    ------
    ValueError
        The output is further from the layer without activation quantization than the peer's
        tolerance.
    """
    rotation = timing.Rotation.of(batches[0].tokens.shape[0], weights.device)
    outputs: list[Tensor] = []

    def run_all() -> None:
        for _ in range(rotation.rounds):
            for batch in batches:
                outputs[:] = [peer.call(batch)]

    graph = timing.capture(run_all)
    outputs[0].fill_(float("nan"))  # stays there if the graph does not hold the whole call
    graph.replay()
    error = output_error(outputs[0], batches[-1], weights)
    if not error <= peer.tolerance:
        raise ValueError(
            f"output: expected a relative rms error up to {peer.tolerance}, got {error:.2g}: "
            "this is not the layer, and is not timed"
        )
    spread = rotation.spread(timing.elapsed_us(graph.replay))
    return PeerResult(spread.us, spread.us_low, spread.us_high, spread.us / cake_us, error)


def add_peer(report: Report, name: str, layer: Layer) -> bool:
    """Time a peer with the batches of every result, and write the report after each.

    Parameters
    ----------
    report : Report
        Gets the peer's times, or why there are none.
    name : str
        One of `cake.peers.NAMES`.
    layer : Layer
        What cake was timed with.

    Returns
    -------
    bool
        Whether all went well. A failure of the peer is printed and reported, never raised.
    """
    facts = report.peers[name] = {"version": peers.require(name)}
    token_counts = sorted({result.tokens for result in report.results})
    try:
        peer = peers.create(name, layer.weights, support.KIMI_K3.top_k, token_counts)
    except Exception as error:  # foreign code: whatever it raises
        facts["failure"] = f"{type(error).__name__}: {error}"
        print(f"\n{facts['version']}: {facts['failure']}", flush=True)
        report.write()
        return False
    facts["numerics"] = peer.numerics
    print(
        f"\n{facts['version']}, {peer.numerics}\n{'tokens':>6} {'routing':<10}{'cake us':>10}"
        f"{name + ' us':>12}{'spread':>8}{'ratio':>7}{'error':>9}"
    )
    failures = 0
    for index, result in enumerate(report.results):
        row = f"{result.tokens:>6} {result.routing:<10}{result.us:>10.1f}"
        outcome: PeerResult | PeerFailure
        try:
            device = layer.weights.device
            batches = timing.Rotation.of(result.tokens, device).make_batches(result.routing, device)
            outcome = measure_peer(peer, layer.weights, batches, result.us)
            spread = (outcome.us_high - outcome.us_low) / outcome.us
            row += f"{outcome.us:>12.1f}{spread:>8.1%}{outcome.ratio:>7.2f}{outcome.error:>9.1e}"
        except Exception as error:
            outcome = PeerFailure(f"{type(error).__name__}: {error}")
            row += f"  {outcome.failure}"
            failures += 1
        print(row, flush=True)
        report.results[index] = replace(result, peers={**result.peers, name: outcome})
        report.write()
    return failures == 0
