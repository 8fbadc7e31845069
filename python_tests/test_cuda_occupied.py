"""Calls on a GPU that other work occupies: CTAs that wait for each other must not wait for ever."""

from __future__ import annotations

import json
import time

import pytest
import torch
from layer_calls import GPU, NEEDS_GPU, assert_same_bits

from cake.check import Call, Layer, make_batch

pytestmark = NEEDS_GPU

# Keeps the SMs that its blocks are on, so that no CTA of the decode kernel fits there, until
# `ranges` are done or the time is over.
OCCUPY = """
extern "C" __global__ void __launch_bounds__(1024)
occupy(int* started, const volatile int* done, int ranges, int* given_up) {
  if (threadIdx.x == 0) {
    atomicAdd_system(started, 1);
    const long long begin = clock64();
    while (*done < ranges) {
      if (clock64() - begin > 2000000000) {  // about a second
        atomicAdd_system(given_up, 1);
        break;
      }
    }
  }
  __syncthreads();
}
"""


def decode_ranges(tokens: int) -> int:
    """FC1's ranges of work: the CTAs of the decode kernel. Skips where there is no such kernel."""
    gpu = torch.cuda.get_device_properties(GPU)
    plan = json.loads(
        torch.ops.cake.plan(tokens, major=gpu.major, num_sms=gpu.multi_processor_count)
    )
    if plan["kernels"] != "decode":
        pytest.skip("CTAs wait for each other in the decode kernel alone")
    return gpu.multi_processor_count


@pytest.mark.parametrize("tokens", [1, 40])
def test_ctas_that_run_do_the_work_of_those_that_do_not_fit(gpu_layer: Layer, tokens: int) -> None:
    ranges = decode_ranges(tokens)
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("needs torch's compiler of kernels")
    occupy = torch.cuda._compile_kernel(OCCUPY, "occupy")
    call = Call(gpu_layer, make_batch(tokens, "random", 23).to(GPU))
    expected = call.run().clone()
    counters = call.region_view("range_counters").view(torch.int32)
    counters.zero_()
    call.output.fill_(float("nan"))
    started, given_up = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    occupied = ranges // 2
    occupy(
        grid=(occupied, 1, 1),
        block=(1024, 1, 1),
        args=[started, counters[1:], ranges, given_up],
        stream=side,
    )
    deadline = time.monotonic() + 10
    while int(started) < occupied:
        assert time.monotonic() < deadline, "the other kernel did not start"
    call.run()
    torch.cuda.synchronize()
    assert int(given_up) == 0
    # Each CTA finds no range once.
    assert counters.tolist() == [2 * ranges, ranges]
    assert_same_bits(call.output, expected)


def test_calls_on_two_streams_share_the_gpu(gpu_layer: Layer) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [Call(gpu_layer, make_batch(t, "zipf", 29 + t).to(GPU)) for t in (3, 64)]
    expected = [call.run().clone().view(torch.int16) for call in calls]
    different = [torch.zeros((), dtype=torch.int64, device=GPU) for _ in calls]
    torch.cuda.synchronize()
    for _ in range(300):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                calls[i].output.fill_(float("nan"))
                calls[i].run()
                different[i] += (calls[i].output.view(torch.int16) != expected[i]).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in different] == [0, 0]
