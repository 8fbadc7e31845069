"""Calls of the public functions at real geometry, as keyword arguments that a test can change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cake
from cake.testing.numeric import bitwise_difference
from cake.testing.reference import fused_moe_reference
from cake.testing.synthetic import Routing, make_tokens, route
from cake.weights import PreparedWeights

H, I, E, K = 3584, 384, 896, 16  # noqa: E741

Call = dict[str, Any]

GPU = torch.device("cuda")

NEEDS_PEAK = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),  # writing 5 lets the peak begin anew
    reason="the peak of memory cannot be reset",
)
# Of a program whose peak of memory is measured: large blocks go back to the system once freed.
EXACT_PEAK = ("OMP_NUM_THREADS=1", "MALLOC_MMAP_THRESHOLD_=65536")


def on_meta(call: Call) -> Call:
    """The call with tensors that have no memory."""

    def meta(value: Any) -> Any:
        if isinstance(value, list):
            return [meta(item) for item in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    return {name: meta(value) for name, value in call.items()}


def gpus_that_run() -> int:
    """How many GPUs must run the fused operation, by what they are, whatever cake says of them."""
    if not cake.build_info()["cuda_architectures"]:
        return 0  # built without CUDA
    devices = range(torch.cuda.device_count())
    capabilities = {(9, 0), (10, 0), (10, 3)}
    return sum(torch.cuda.get_device_capability(i) in capabilities for i in devices)


NEEDS_GPU = pytest.mark.skipif(
    gpus_that_run() < 1, reason="needs a GPU that runs the fused operation"
)

SIZE_ARGUMENTS: Call = {
    "max_num_tokens": 2,
    "hidden_size": H,
    "intermediate_size": I,
    "num_experts_total": E,
    "top_k": K,
    "x_dtype": torch.bfloat16,
    "weight_dtype": torch.uint8,
    "activation_type": cake.ActivationType.Situ,
    "tp_size": 8,
}

SCALE_NAMES = tuple(f"quant_scales[{i}]" for i in range(6))
OPERANDS = (
    "input",
    "token_selected_experts",
    "token_final_scales",
    "fc1_expert_weights",
    "fc2_expert_weights",
    *SCALE_NAMES,
    "situ_beta",
    "situ_linear_beta",
)


@dataclass(frozen=True)
class Layer:
    weights: PreparedWeights
    scales: list[Tensor]

    def call(
        self,
        tokens: int,
        *,
        routing: Routing = "random",
        seed: int = 0,
        workspace: Tensor | None = None,
    ) -> Call:
        """Keyword arguments of cutlass_fused_moe, with a prepared workspace and a marked output."""
        input = make_tokens(tokens, seed)
        ids, weights = route(tokens, seed, kind=routing)
        return {
            "input": input,
            "token_selected_experts": ids,
            "token_final_scales": weights,
            "fc1_expert_weights": self.weights.w13,
            "fc2_expert_weights": self.weights.w2,
            "output_dtype": torch.bfloat16,
            "quant_scales": list(self.scales),
            "activation_type": cake.ActivationType.Situ,
            "tp_size": 8,
            "output": torch.full_like(input, 777.0),
            "workspace_buffer": new_workspace(tokens) if workspace is None else workspace,
        }


def workspace_size(tokens: int) -> int:
    return cake.cutlass_fused_moe_workspace_size(**{**SIZE_ARGUMENTS, "max_num_tokens": tokens})


def new_workspace(*tokens: int) -> Tensor:
    """A workspace that is prepared for each of the token counts."""
    buffer = torch.empty(workspace_size(max(tokens)), dtype=torch.uint8)
    return cake.cake_fused_moe_prepare_workspace(buffer, tokens)


def run(call: Call, **changes: Any) -> Tensor:
    """Run with some arguments changed and give a copy of the output."""
    return cake.cutlass_fused_moe(**{**call, **changes}).clone()


def reference(call: Call) -> Tensor:
    return fused_moe_reference(
        call["input"],
        call["token_selected_experts"],
        call["token_final_scales"],
        call["fc1_expert_weights"],
        call["fc2_expert_weights"],
        call["quant_scales"],
        situ_beta=call.get("situ_beta"),
        situ_linear_beta=call.get("situ_linear_beta"),
    )


def betas(gate: float = 4.0, linear: float = 25.0) -> Call:
    return {
        "situ_beta": torch.full((E,), gate),
        "situ_linear_beta": torch.full((E,), linear),
    }


def operand(call: Call, name: str) -> Any:
    """The argument of this name; quant_scales[i] counts as one."""
    if name in SCALE_NAMES:
        return call["quant_scales"][SCALE_NAMES.index(name)]
    return call[name]


def with_operand(call: Call, name: str, value: Any) -> Call:
    """The same call with another value for one argument."""
    if name not in SCALE_NAMES:
        return {**call, name: value}
    scales = list(call["quant_scales"])
    scales[SCALE_NAMES.index(name)] = value
    return {**call, "quant_scales": scales}


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    difference = bitwise_difference(actual, expected)
    assert difference is None, difference


def assert_refused(
    call: Call, *mentions: str, raises: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> str:
    """Require an exception whose message has every mention, and that nothing was written."""
    written = {
        name: value.clone()
        for name in ("output", "workspace_buffer")
        if isinstance(value := call.get(name), Tensor) and not value.is_meta
    }
    with pytest.raises(raises) as caught:
        cake.cutlass_fused_moe(**call)
    message = str(caught.value)
    for mention in mentions:
        assert mention in message
    for name, before in written.items():
        assert_same_bits(call[name], before)
    return message
