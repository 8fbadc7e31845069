"""`cake check --replay FILE`: a recorded call, run again on this machine and compared."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cake import bundle, check, demo
from cake.prepared_weights import PreparedWeights
from cake.testing import numeric

_REPEATS = 10
_ATOL = 1.0 / 13.0  # of the output's rms: `cake check` allows 1 at an rms of 13
_MAX_OUTLIERS = 1e-3  # fraction of the elements, as in `cake check`


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table: an output against another one."""

    name: str
    result: str  # same bits, within rounding, DIFFERENT
    figures: numeric.OutputComparison | None = None
    detail: str = ""

    def __str__(self) -> str:
        """The line."""
        numbers = " " * 21
        if self.figures is not None:
            numbers = f"{self.figures.relative_rms:>10.1e}{self.figures.worst_row_error:>11.1e}"
        return f"{self.name:<16}{numbers}  {self.result}"


def run(arguments: argparse.Namespace) -> int:
    """Run `cake check --replay`.

    Returns
    -------
    int
        0: equal, 1: different, 2: nothing that can be replayed here.

    Raises
    ------
    RuntimeError
        The call fails here.
    """
    path: Path = arguments.replay
    try:
        for option in ("tokens", "routing", "seed"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option}: comes from the file with --replay; leave it out")
        recorded = bundle.load(path)
        device, reason = demo.choose_device(arguments.device)
        call = make_call(recorded, device)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"cake check: {error}", file=sys.stderr)
        return 2
    num_tokens = recorded.tensors["input"].shape[0]
    print(f"bundle    {path}: {num_tokens} tokens, {len(recorded.experts)} of 896 experts")
    print(f"recorded  {recorded.origin}")
    print(f"here      {device}: {reason}\n")
    output = _run(call, recorded).clone()
    lines = [_against_record(output, recorded)]
    if device.type != "cpu":
        expected = _run(make_call(recorded, torch.device("cpu")), recorded)
        lines += [compare("CPU path", output, expected), _repeat(call, recorded, output)]
    print(f"{'compared with':<16}{'rel. rms':>10}{'worst row':>11}  result")
    print(*lines, sep="\n")
    different = [line for line in lines if line.result == "DIFFERENT"]
    for line in different:
        print(f"\n{line.name}: {line.detail}")
    print("different" if different else "equal")
    return 1 if different else 0


def make_call(recorded: bundle.Bundle, device: torch.device) -> check.Call:
    """Make the recorded call on a device: weights of the touched experts, zeros for all others.

    Raises
    ------
    ValueError
        The tensors do not fit together; also a TypeError for a wrong dtype.
    """
    tensors = {
        name: (recorded.all_experts(name) if name in bundle.PER_EXPERT else tensor).to(device)
        for name, tensor in recorded.tensors.items()
        if name != "output"
    }
    scales = [tensors[f"quant_scales[{i}]"] for i in range(6)]
    ones = torch.ones_like(scales[2])
    weights = PreparedWeights(
        w13=tensors["fc1_expert_weights"],
        w13_sf=scales[1].view(torch.float8_e4m3fn),
        w2=tensors["fc2_expert_weights"],
        w2_sf=scales[4].view(torch.float8_e4m3fn),
        w13_scale=ones,
        w2_scale=ones,
    )
    tokens, stride = tensors["input"], recorded.call["input_stride"]
    if stride > tokens.shape[1]:
        tokens = tokens.new_empty_strided(tokens.shape, (stride, 1)).copy_(tokens)
    batch = check.Batch(tokens, tensors["token_selected_experts"], tensors["token_final_scales"])
    return check.Call(check.Layer(weights, scales), batch)


def compare(name: str, actual: Tensor, expected: Tensor) -> Comparison:
    """Compare two outputs [T, H]: bits first, then by the gates of `cake check`.

    The elementwise gate follows the size of the output, which is unknown before.
    """
    figures = numeric.compare_outputs(actual, expected)
    if numeric.bitwise_difference(actual, expected) is None:
        return Comparison(name, "same bits", figures)
    try:
        numeric.check_outputs(
            actual,
            expected,
            atol=figures.expected_rms * _ATOL,
            max_outliers=_MAX_OUTLIERS,
            min_peak=0.0,
        )
    except AssertionError as error:
        return Comparison(name, "DIFFERENT", figures, str(error))
    return Comparison(name, "within rounding", figures)


def _against_record(output: Tensor, recorded: bundle.Bundle) -> Comparison:
    if recorded.output is None:
        return Comparison(
            "recorded output", "DIFFERENT", detail=f"the recorded call failed: {recorded.error}"
        )
    return compare("recorded output", output, recorded.output)


def _run(call: check.Call, recorded: bundle.Bundle) -> Tensor:
    smoothing = {
        name: recorded.tensors[name].to(call.output.device)
        for name in bundle.SMOOTHING
        if name in recorded.tensors
    }
    return call.run(batch_invariant=recorded.call["batch_invariant"], **smoothing)


def _repeat(call: check.Call, recorded: bundle.Bundle, first: Tensor) -> Comparison:
    name = f"{_REPEATS} repeats"
    for _ in range(_REPEATS):
        call.output.fill_(float("nan"))
        difference = numeric.bitwise_difference(_run(call, recorded), first)
        if difference is not None:
            return Comparison(name, "DIFFERENT", detail=difference)
    return Comparison(name, "same bits")
