"""Sizes of workspaces, and which buffers count as prepared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from layer_calls import (
    Call,
    Layer,
    assert_refused,
    assert_same_bits,
    betas,
    new_workspace,
    run,
    workspace_size,
)
from torch import Tensor

import cake

prepare = cake.cake_fused_moe_prepare_workspace
T = 2


def unprepared(tokens: int = T) -> Tensor:
    return torch.full((workspace_size(tokens),), 0xFF, dtype=torch.uint8)


def assert_not_prepared(call: Call, workspace: Tensor) -> None:
    assert_refused({**call, "workspace_buffer": workspace}, "workspace_buffer", "prepare")


# ---- Size ---------------------------------------------------------------------------------------


def test_sizes_of_every_token_count() -> None:
    sizes = [workspace_size(tokens) for tokens in range(16385)]
    assert sizes == sorted(sizes)
    assert sizes == [workspace_size(tokens) for tokens in range(16385)]
    assert sizes[1] > 0 and sizes[-1] < 300e6


def test_size_touches_no_device() -> None:
    # A process of its own: on a machine with a GPU, this one has touched it to see what may run.
    script = f"""
import cake, torch
for device in ("cpu", "cuda:7", 3, torch.device("cuda"), None):
    size = cake.cutlass_fused_moe_workspace_size(
        {T}, 3584, 384, 896, 16,
        x_dtype=torch.bfloat16, weight_dtype=torch.uint8,
        activation_type=cake.ActivationType.Situ, tp_size=8, device=device,
    )
    assert size == {workspace_size(T)}, (device, size)
    assert not torch.cuda.is_initialized(), device
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_exact_size_is_enough_and_one_less_is_not(layer: Layer, tokens: int) -> None:
    size = workspace_size(tokens)
    call = layer.call(tokens, workspace=prepare(torch.empty(size, dtype=torch.uint8), tokens))
    expected = run(call)
    larger = prepare(torch.empty(size + 4096, dtype=torch.uint8), tokens)
    assert_same_bits(run(call, workspace_buffer=larger), expected)
    small = torch.zeros(size - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"workspace_buffer.*\b{size}\b"):
        prepare(small, tokens)
    assert_refused({**call, "workspace_buffer": small}, "workspace_buffer", str(size))
    assert_refused({**call, "workspace_buffer": call["workspace_buffer"][:-1]}, "workspace_buffer")


def test_preparation_returns_the_buffer_and_is_idempotent(layer: Layer) -> None:
    buffer = unprepared()
    assert prepare(buffer, T) is buffer
    call = layer.call(T, workspace=buffer)
    first = run(call)
    assert prepare(buffer, T) is buffer
    assert_same_bits(run(call), first)


def test_int8_buffer(layer: Layer) -> None:
    call = layer.call(T)
    signed = prepare(torch.empty(workspace_size(T), dtype=torch.int8), T)
    assert_same_bits(run(call, workspace_buffer=signed), run(call))


def test_one_buffer_for_several_token_counts(layer: Layer) -> None:
    counts = [1, 3, 8]
    buffer = new_workspace(*counts)
    calls = [layer.call(tokens) for tokens in counts]
    expected = [run(call) for call in calls]
    for _ in range(2):
        for call, output in zip(reversed(calls), reversed(expected), strict=True):
            assert_same_bits(run(call, workspace_buffer=buffer), output)
    assert_not_prepared(layer.call(2), buffer)
    prepare(buffer, 2)
    assert_same_bits(run(layer.call(2), workspace_buffer=buffer), run(layer.call(2)))
    assert_same_bits(run(calls[0], workspace_buffer=buffer), expected[0])


@pytest.mark.parametrize(
    "counts",
    [range(1, 9), [1, 8], {1, 8}, (8,), iter([1, 8]), np.array([1, 8])],
    ids=lambda c: type(c).__name__,
)
def test_an_iterable_prepares_each_count(layer: Layer, counts: object) -> None:
    buffer = unprepared(8)
    prepare(buffer, counts)  # type: ignore[arg-type]
    run(layer.call(8), workspace_buffer=buffer)


# ---- Prepared or not ----------------------------------------------------------------------------


def test_another_token_count_is_not_prepared(layer: Layer) -> None:
    buffer = prepare(unprepared(8), 8)
    for tokens in (1, 7):
        assert_not_prepared(layer.call(tokens), buffer)


def test_a_clone_is_not_prepared(layer: Layer) -> None:
    call = layer.call(T)
    assert_not_prepared(call, call["workspace_buffer"].clone())


def test_a_view_of_the_whole_buffer_is_the_buffer(layer: Layer) -> None:
    call = layer.call(T)
    buffer = unprepared()
    prepare(buffer.view(2, -1).view(-1), T)
    for same in (
        buffer,
        buffer[:],
        buffer.detach(),
        buffer.view(torch.int8),
        buffer.view_as(buffer),
    ):
        assert_same_bits(run(call, workspace_buffer=same), run(call))


@pytest.mark.parametrize("offset", [64, 128, 4096])
def test_a_view_at_another_offset_is_not_prepared(layer: Layer, offset: int) -> None:
    call = layer.call(T)
    size = workspace_size(T)
    memory = torch.zeros(size + 4096, dtype=torch.uint8)
    prepare(memory[:size], T)
    assert_not_prepared(call, memory[offset : offset + size])
    prepare(memory[offset : offset + size], T)
    assert_same_bits(run(call, workspace_buffer=memory[offset : offset + size]), run(call))


def _set_data(buffer: Tensor, other: Tensor) -> None:
    buffer.data = other


def _set(buffer: Tensor, other: Tensor) -> None:
    buffer.set_(other)


def _swap(buffer: Tensor, other: Tensor) -> None:
    torch.utils.swap_tensors(buffer, other)


@pytest.mark.parametrize("move", [_set_data, _set, _swap])
def test_a_moved_buffer_is_not_prepared(
    layer: Layer, move: Callable[[Tensor, Tensor], None]
) -> None:
    call = layer.call(T)
    run(call)
    move(call["workspace_buffer"], unprepared())
    assert_not_prepared(call, call["workspace_buffer"])


def test_a_resized_tensor_is_another_workspace(layer: Layer) -> None:
    call = layer.call(T)
    buffer = call["workspace_buffer"]
    buffer.resize_(8 * len(buffer))
    assert_not_prepared(call, buffer)
    buffer.resize_(10)
    assert_refused(call, "workspace_buffer")


def test_a_freed_and_regrown_storage_is_not_prepared(layer: Layer) -> None:
    """Freed in place, as sharded training and sleeping servers do, and given new memory."""
    buffer = prepare(torch.empty(64 << 20, dtype=torch.uint8), T)  # so large that malloc maps it
    storage, address = buffer.untyped_storage(), buffer.data_ptr()
    for _ in range(50):
        storage.resize_(0)
        storage.resize_(64 << 20)
        if buffer.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator never gave the old address back")
    buffer[: workspace_size(T)] = 0xFF
    assert_not_prepared(layer.call(T), buffer)


def test_a_buffer_beyond_its_storage_is_refused() -> None:
    buffer = torch.zeros(64 << 20, dtype=torch.uint8)
    buffer.untyped_storage().resize_(1 << 20)  # room for what preparation writes today
    with pytest.raises(ValueError, match="workspace_buffer"):
        prepare(buffer, T)


def test_an_emptied_storage_is_refused(layer: Layer) -> None:
    call = layer.call(T)
    storage = call["workspace_buffer"].untyped_storage()
    storage.resize_(0)
    with pytest.raises(ValueError, match="workspace_buffer"):
        run(call)
    with pytest.raises(ValueError, match="workspace_buffer"):
        prepare(call["workspace_buffer"], T)


class Memory:
    """Memory in which one storage after another can live, always at the same address."""

    def __init__(self) -> None:
        self._bytes = torch.zeros(workspace_size(T) + 64, dtype=torch.uint8).numpy()
        self._offset = -self._bytes.ctypes.data % 64

    def tensor(self) -> Tensor:
        return torch.frombuffer(
            self._bytes, dtype=torch.uint8, count=workspace_size(T), offset=self._offset
        )


def _free(buffer: Tensor) -> Tensor | None:
    del buffer
    return None


def _set_to_other_memory(buffer: Tensor) -> Tensor | None:
    return buffer.set_(torch.empty(10, dtype=torch.uint8))


@pytest.mark.parametrize("release", [_free, _set_to_other_memory])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_reused_address_is_not_prepared(
    layer: Layer, release: Callable[[Tensor], Tensor | None], compiled: bool
) -> None:
    memory = Memory()
    address = memory.tensor().data_ptr()
    alive = release(prepare(memory.tensor(), T))
    reused = memory.tensor()
    assert reused.data_ptr() == address
    call = {**layer.call(T), "workspace_buffer": reused}
    if compiled:
        torch.compiler.reset()
        function = torch.compile(cake.cutlass_fused_moe, backend="eager", fullgraph=True)
        with pytest.raises((ValueError, RuntimeError), match="prepare"):
            function(**call)
    else:
        assert_not_prepared(call, reused)
    assert_same_bits(run(call, workspace_buffer=prepare(reused, T)), run(layer.call(T)))
    del alive


def test_a_failed_preparation_prepares_nothing(layer: Layer) -> None:
    buffer = unprepared()
    with pytest.raises(ValueError, match="workspace_buffer"):
        prepare(buffer, [T, 512])
    assert_not_prepared(layer.call(T), buffer)


def test_preparation_of_zero_tokens_prepares_no_other(layer: Layer) -> None:
    assert_not_prepared(layer.call(T), prepare(unprepared(), 0))


# ---- Contents -----------------------------------------------------------------------------------


def test_with_smoothing_parameters_no_byte_needs_to_survive(layer: Layer) -> None:
    call = layer.call(T)
    expected = run(call)
    for fill in (0xFF, 0x7F, 0x00):
        call["workspace_buffer"].fill_(fill)
        assert_same_bits(run(call, **betas()), expected)


def test_defaults_survive_calls_with_other_parameters(layer: Layer) -> None:
    call = layer.call(T)
    expected = run(call)
    other = run(call, **betas(2.0, 10.0))
    assert not torch.equal(other, expected)
    assert_same_bits(run(call), expected)


def test_a_smaller_call_leaves_the_defaults_of_a_larger(layer: Layer) -> None:
    buffer = new_workspace(1, 8)
    large = layer.call(8, workspace=buffer)
    expected = run(large)
    run(layer.call(1, workspace=buffer))
    assert_same_bits(run(large), expected)


def test_two_threads_with_a_workspace_each(layer: Layer) -> None:
    calls = [layer.call(3, seed=seed) for seed in (1, 2)]
    expected = [run(call) for call in calls]

    def repeat(call: Call) -> list[Tensor]:
        return [run(call) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        for outputs, wanted in zip(pool.map(repeat, calls), expected, strict=True):
            for output in outputs:
                assert_same_bits(output, wanted)


def test_threads_may_prepare_and_free_workspaces_at_once(layer: Layer) -> None:
    calls = [layer.call(1, seed=seed) for seed in (1, 2)]
    expected = [run(call) for call in calls]

    def repeat(call: Call) -> list[Tensor]:
        return [run(call, workspace_buffer=new_workspace(1)) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        for outputs, wanted in zip(pool.map(repeat, calls), expected, strict=True):
            for output in outputs:
                assert_same_bits(output, wanted)


def test_a_new_buffer_at_the_address_of_a_moved_one_can_be_prepared(layer: Layer) -> None:
    """Two storages over the same memory: preparing the second must not undo itself."""
    memory = np.zeros(1 << 20, dtype=np.uint8)
    start = -memory.ctypes.data % 128
    first = torch.from_numpy(memory)[start:]
    second = torch.from_numpy(memory)[start:]
    assert first.data_ptr() == second.data_ptr()
    prepare(first, T)
    assert_not_prepared(layer.call(T, workspace=first), second)
    prepare(second, T)
    run({**layer.call(T, workspace=second), "workspace_buffer": second})


def test_another_tensor_over_the_memory_is_refused_and_changes_nothing(layer: Layer) -> None:
    call = layer.call(T)
    buffer = call["workspace_buffer"]
    expected = run(call)
    for alias in (torch.from_numpy(buffer.numpy()), torch.from_dlpack(buffer)):
        assert_refused({**call, "workspace_buffer": alias}, "workspace_buffer", "another tensor")
        assert_same_bits(run(call), expected)
    prepare(alias, T)
    assert_same_bits(run({**call, "workspace_buffer": alias}), expected)


def test_a_shared_workspace_names_an_unsupported_device() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got mps"):
        cake.SharedWorkspace(2, "mps")
