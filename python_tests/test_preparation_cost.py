"""What preparing weights of real shape costs: memory beyond the result, and time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Literal

import pytest
import torch
from layer_calls import EXACT_PEAK, GPU, NEEDS_GPU, NEEDS_PEAK, E, H
from layer_calls import I as INTER

from cake.testing.synthetic import make_expert
from cake.weights import PreparedWeights, prepare_expert, prepare_quantized_expert, unprepare

Source = Literal["bf16", "nvfp4"]
SOURCES = pytest.mark.parametrize("source", ["bf16", "nvfp4"])

BF16_EXPERT = 3 * INTER * H * 2  # bytes
NVFP4_EXPERT = 3 * INTER * H * 9 // 16
# Beyond the result and the source: a few times one expert.
EXTRA = {"bf16": 3 * BF16_EXPERT, "nvfp4": 4 * NVFP4_EXPERT}
# What `fill` holds: the source, as it was, as NVFP4, and prepared.
HELD = 2 * BF16_EXPERT + 2 * NVFP4_EXPERT

SCRIPT = """if True:
    import sys, time
    from pathlib import Path
    import torch
    from cake.convert import peak_memory
    from test_preparation_cost import fill
    source, count = sys.argv[1], int(sys.argv[2])
    fill(1, source, "cpu")  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    seconds = fill(count, source, "cpu")
    print(peak_memory() - before, seconds)
"""


def fill(count: int, source: Source, device: torch.device | str) -> float:
    """Prepare one expert of real shape again and again, as all of a layer; seconds."""
    w13, w2 = (w.to(device) for w in make_expert(0, 3))
    first = PreparedWeights.empty(1, H, INTER, device)
    prepare_expert(first, 0, w13, w2, w13_order="up_gate")
    logical = unprepare(first, 0)
    before = w13.clone(), w2.clone()
    out = PreparedWeights.empty(count, H, INTER, device)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for e in range(count):
        if source == "bf16":
            prepare_expert(out, e, w13, w2, w13_order="up_gate")
        else:
            prepare_quantized_expert(
                out,
                e,
                logical.w13_codes,
                logical.w13_sf,
                logical.w2_codes,
                logical.w2_sf,
                w13_order="up_gate",
                w13_scale=1.0,
                w2_scale=1.0,
            )
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert w13.equal(before[0]) and w2.equal(before[1])
    for name, tensor in out.tensors().items():
        expected = first.tensors()[name].view(torch.uint8)
        assert tensor[:1].view(torch.uint8).equal(expected)
        assert tensor[-1:].view(torch.uint8).equal(expected)
    return seconds


@SOURCES
@NEEDS_PEAK
def test_memory_on_the_cpu_does_not_grow_with_the_experts(source: Source) -> None:
    count = 32
    result = subprocess.run(
        ["env", *EXACT_PEAK, sys.executable, "-c", SCRIPT, source, str(count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    peak, seconds = map(float, result.stdout.split())
    one_expert = {"bf16": BF16_EXPERT, "nvfp4": NVFP4_EXPERT}[source]
    assert peak < count * NVFP4_EXPERT + HELD + one_expert  # 0.3 and 0.1 of it
    assert seconds < 0.2 * count  # 0.01 s on one core of an AMD EPYC


@NEEDS_GPU
@SOURCES
def test_a_whole_layer_on_the_gpu(source: Source) -> None:
    fill(1, source, GPU)
    allocated = torch.cuda.memory_allocated()
    seconds = fill(E, source, GPU)
    extra = torch.cuda.max_memory_allocated() - allocated - E * NVFP4_EXPERT - HELD
    assert extra < EXTRA[source]
    assert seconds < 60
