"""Two GPUs of one process: whichever is current, a call runs where its tensors are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import layer_calls
import pytest
import torch
from layer_calls import E, assert_refused, assert_same_bits, gpus_that_run, operand, with_operand

import cake
from cake.check import Call, Layer, make_batch

pytestmark = pytest.mark.skipif(
    gpus_that_run() < 2,
    reason="needs two GPUs that run the fused operation",
)

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
ORDER = (1, 0, 1, 1, 0, 0, 1)
TOKENS = (5, 129, 400)


@pytest.fixture(scope="module")
def layers(cpu_layer: Layer) -> Iterator[tuple[Layer, Layer]]:
    """The same layer on both devices."""
    yield cpu_layer.to(DEVICES[0]), cpu_layer.to(DEVICES[1])
    torch.cuda.empty_cache()


@pytest.fixture(params=[0, 1], ids=["current-0", "current-1"])
def current(request: pytest.FixtureRequest) -> Iterator[int]:
    """The device that is current all through a test."""
    index: int = request.param
    with torch.cuda.device(index):
        yield index


def calls_on_both(layers: tuple[Layer, Layer], tokens: int, current: int) -> list[Call]:
    """The same call on both devices, prepared with `current` as the current device."""
    batch = make_batch(tokens, "random", 31)
    calls = []
    for layer, device in zip(layers, DEVICES, strict=True):
        calls.append(Call(layer, batch.to(device)))
        assert torch.cuda.current_device() == current
    return calls


@pytest.mark.parametrize("tokens", TOKENS)
def test_alternating_devices_give_the_same_bits(
    layers: tuple[Layer, Layer], current: int, tokens: int
) -> None:
    calls = calls_on_both(layers, tokens, current)
    expected = calls[0].run().clone()
    assert expected.isfinite().all()
    for index in ORDER:
        call = calls[index]
        call.output.fill_(float("nan"))
        call.run()
        assert torch.cuda.current_device() == current
        assert_same_bits(call.output, expected)


@pytest.mark.parametrize("tokens", TOKENS)
def test_graphs_of_both_devices_give_the_same_bits(
    layers: tuple[Layer, Layer], current: int, tokens: int
) -> None:
    calls = calls_on_both(layers, tokens, current)
    expected = calls[0].run().clone()
    graphs = []
    for call, device in zip(calls, DEVICES, strict=True):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # The capturing stream has made its device current; the call is made with `current` again.
        with (
            torch.cuda.graph(graph, stream=torch.cuda.Stream(device)),
            torch.cuda.device(current),
        ):
            call.run()
            assert torch.cuda.current_device() == current
        graphs.append(graph)
    for index in ORDER:
        call = calls[index]
        call.output.fill_(float("nan"))
        graphs[index].replay()
        assert torch.cuda.current_device() == current
        assert_same_bits(call.output, expected)


def keyword_arguments(layer: Layer) -> layer_calls.Call:
    """A prepared call on the layer's device, with every optional tensor."""
    device = layer.weights.device
    call = Call(layer, make_batch(2, "random", 32).to(device))
    return {
        "input": call.batch.tokens,
        "token_selected_experts": call.batch.topk_ids,
        "token_final_scales": call.batch.topk_weights,
        "fc1_expert_weights": layer.weights.w13,
        "fc2_expert_weights": layer.weights.w2,
        "output_dtype": torch.bfloat16,
        "quant_scales": list(layer.quant_scales),
        "activation_type": cake.ActivationType.Situ,
        "tp_size": 8,
        "situ_beta": torch.full((E,), 4.0, device=device),
        "situ_linear_beta": torch.full((E,), 25.0, device=device),
        "output": call.output,
        "workspace_buffer": call.workspace,
    }


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("name", [*layer_calls.OPERANDS, "output", "workspace_buffer"])
def test_an_argument_on_the_other_device_is_refused_by_name(
    layers: tuple[Layer, Layer], current: int, name: str, home: int
) -> None:
    here, there = keyword_arguments(layers[home]), keyword_arguments(layers[1 - home])
    mixed = with_operand(here, name, operand(there, name))
    # The input says which device is meant, so that the next argument is the one elsewhere.
    named = "token_selected_experts" if name == "input" else name
    message = assert_refused(mixed, "cuda:0", "cuda:1")
    assert message.startswith(f"{named}: expected a tensor on {mixed['input'].device}")
    assert torch.cuda.current_device() == current


@pytest.mark.parametrize("tokens", TOKENS)
def test_two_devices_at_once_give_the_bits_of_one_alone(
    layers: tuple[Layer, Layer], tokens: int
) -> None:
    calls = [
        Call(layer, make_batch(tokens, "random", 33 + device.index).to(device))
        for layer, device in zip(layers, DEVICES, strict=True)
    ]
    expected = []
    for call, device in zip(calls, DEVICES, strict=True):
        expected.append(call.run().clone().view(torch.int16))
        torch.cuda.synchronize(device)
    different = [torch.zeros((), dtype=torch.int64, device=device) for device in DEVICES]
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    for device in DEVICES:
        torch.cuda.synchronize(device)
    for _ in range(100):
        for call, wanted, count, stream in zip(calls, expected, different, streams, strict=True):
            with torch.cuda.stream(stream):
                call.output.fill_(float("nan"))
                count += (call.run().view(torch.int16) != wanted).sum()
    for device in DEVICES:
        torch.cuda.synchronize(device)
    assert [int(count) for count in different] == [0, 0]


@pytest.mark.parametrize("options", [[], ["--graph"]], ids=["eager", "graph"])
def test_ranks_add_up_over_nccl(options: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = Path(__file__).resolve().parents[1] / "examples" / "tensor_parallel.py"
    result = subprocess.run(
        [*torchrun, "--nproc-per-node=2", example, "--device=cuda", "--experts=16", *options],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    assert result.stdout.count(": right, ") == 2
