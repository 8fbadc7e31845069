"""The routed experts by `humming-kernels`, as vLLM submits them on an NVIDIA sm_90 GPU.

The chain is that of vLLM's `HummingIndexedExperts`: pairs sorted by expert and padded to the row
block of the kernel, FC1, SiTU, FC2, weighted sum over the pairs of a token. humming has weight
layouts, tuning, the indexed matrix products and the activation; it has neither the sorting nor the
weighted sum, for which vLLM brings kernels of its own: here they are `moe_kernels`, in as many
launches as vLLM's. humming needs Triton itself, so that nothing more has to be installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cake.prepared_weights import unprepare
from cake.testing.reference import DEFAULT_BETA, DEFAULT_LINEAR_BETA

if TYPE_CHECKING:
    from cake.check import Batch
    from cake.prepared_weights import PreparedWeights

# C++ of SiTU in float32; a is the gate and b the linear half.
SITU = (
    f"{DEFAULT_BETA!r}f * tanhf(a * {1 / DEFAULT_BETA!r}f) / (1.0f + expf(-a)) * "
    f"{DEFAULT_LINEAR_BETA!r}f * tanhf(b * {1 / DEFAULT_LINEAR_BETA!r}f)"
)
_COMPUTE = json.dumps(
    {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
)
_LOCKS = 2048  # int32, of products split along K; humming checks that they are enough
_COUNTED, _PLACED, _COLUMNS = 256, 16, 512  # pairs, pairs and columns of a Triton program


@dataclass(frozen=True)
class _Product:
    """One matrix product of all experts in humming's layout."""

    config: Any  # humming.config.LayerConfig
    tensors: dict[str, Tensor]
    tiles: list[tuple[int, int, dict[str, Any]]]  # for pairs above, up to: humming's tuning

    def tile(self, pairs: int) -> tuple[int, int, dict[str, Any]]:
        return next(tile for tile in self.tiles if tile[0] < pairs <= tile[1])


@dataclass(frozen=True)
class _Order:
    """Pairs by expert, each expert padded to whole row blocks."""

    block: int
    sorted_ids: Tensor  # int32: pairs; the number of pairs where padded
    expert_ids: Tensor  # int32, of each block
    num_padded: Tensor  # int32 [1]


@dataclass(frozen=True)
class _Plan:
    """What depends on the number of tokens: tuning as JSON and an order, for FC1 and FC2."""

    fc1: tuple[str, _Order]
    fc2: tuple[str, _Order]

    def orders(self) -> list[_Order]:
        return [self.fc1[1]] if self.fc1[1] is self.fc2[1] else [self.fc1[1], self.fc2[1]]


class HummingPeer:
    """The chain on buffers made once, 160 kB a token; one call at a time."""

    numerics = "W4A16: NVFP4 weights, bfloat16 activations, neither of cake's two quantizations"
    tolerance = 1e-2  # rounding of activations to bfloat16 gives 5e-3

    def __init__(self, weights: PreparedWeights, top_k: int, token_counts: Sequence[int]) -> None:
        self._device, self._top_k, self._experts = weights.device, top_k, weights.num_experts
        inner, hidden, pairs = weights.intermediate, weights.hidden, max(token_counts) * top_k
        logical = unprepare(weights)

        def gate_first(tensor: Tensor) -> Tensor:  # rows [up; gate] to [gate; up]
            return tensor.view(torch.uint8).roll(inner, dims=1).view(tensor.dtype)

        self._fc1 = self._prepare(
            gate_first(logical.w13_codes),
            gate_first(logical.w13_sf),
            logical.w13_scale,
            [inner, inner],
        )
        self._fc2 = self._prepare(logical.w2_codes, logical.w2_sf, logical.w2_scale, [hidden])
        empty = partial(torch.empty, dtype=torch.bfloat16, device=self._device)
        self._gate_up = empty((pairs, 2 * inner))
        self._activated = empty((pairs, inner))
        self._rows = empty((pairs, hidden))
        self._output = empty((max(token_counts), hidden))
        self._locks, self._ranks = self._integers(_LOCKS), self._integers(pairs)
        self._counts = self._integers(self._experts)  # zero before and after each call
        self._plans = {tokens: self._plan(tokens) for tokens in token_counts}
        self._compile()

    def call(self, batch: Batch) -> Tensor:
        """Submit the chain; see `cake.peers.Peer`."""
        from humming.forward import may_process_input

        tokens, pairs = batch.tokens.shape[0], batch.topk_ids.numel()
        if tokens not in self._plans:
            raise ValueError(f"batch: expected {list(self._plans)} tokens, got {tokens}")
        plan = self._plans[tokens]
        gate_up, activated = self._gate_up[:pairs], self._activated[:pairs]
        rows, output = self._rows[:pairs], self._output[:tokens]
        try:
            self._sort(batch.topk_ids, plan.orders())
            self._multiply(self._fc1, batch.tokens, gate_up, *plan.fc1, self._top_k)
            may_process_input(
                self._fc2.config,
                gate_up,
                outputs=activated,
                activation_type="binary_split",
                activation_impl=SITU,
            )
            self._multiply(self._fc2, activated, rows, *plan.fc2, 1)
            self._combine(batch, rows, output)
        except Exception:
            self._counts.zero_()
            raise
        return output

    def _integers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _prepare(
        self, codes: Tensor, scales: Tensor, global_scales: Tensor, parts: list[int]
    ) -> _Product:
        """Bring matrices into humming's layout; `parts` are the rows of gate and up, or all."""
        from humming.schema.modelopt import ModeloptNvfp4WeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config

        k = 2 * codes.shape[2]
        schema, tensors = ModeloptNvfp4WeightSchema().convert_humming(
            {"weight": codes, "weight_scale": scales, "weight_scale_2": global_scales},
            shape_n_stacks=parts,
            shape_k_stacks=[k],
            param_dtype=torch.bfloat16,
            num_experts=self._experts,
            device=self._device,
        )
        config, tensors = prepare_and_transform_humming_tensors(
            tensors,
            shape_n=codes.shape[1],
            shape_k=k,
            weight_schema=schema,
            num_experts=self._experts,
            torch_dtype=torch.bfloat16,
            device=self._device,
        )
        tiles = get_heuristics_config(config, gemm_type="indexed", device=self._device)
        return _Product(config, tensors, tiles)

    def _plan(self, tokens: int) -> _Plan:
        pairs = tokens * self._top_k
        fc1, fc2 = (product.tile(pairs)[2] for product in (self._fc1, self._fc2))
        orders = {
            block: self._order(block, pairs)
            for block in (fc1["block_shape"][0], fc2["block_shape"][0])
        }
        return _Plan(
            fc1=(json.dumps(fc1), orders[fc1["block_shape"][0]]),
            fc2=(json.dumps(fc2), orders[fc2["block_shape"][0]]),
        )

    def _order(self, block: int, pairs: int) -> _Order:
        blocks = min(pairs, self._experts) + pairs // block  # at most
        return _Order(
            block, self._integers(blocks * block), self._integers(blocks), self._integers(1)
        )

    def _compile(self) -> None:
        """Compile the matrix products of all plans, in parallel."""
        from humming.kernel.humming import HummingKernel

        for product in (self._fc1, self._fc2):
            tiles = {tokens: product.tile(tokens * self._top_k) for tokens in self._plans}
            used = sorted(tiles.values(), key=lambda tile: tile[0])
            HummingKernel.prepare_kernels(
                product.config.to_str(), _COMPUTE, json.dumps(used), self._device
            )

    def _sort(self, topk_ids: Tensor, orders: list[_Order]) -> None:
        import triton

        from cake.peers.moe_kernels import count_pairs, place_pairs

        pairs, experts = topk_ids.numel(), self._experts
        count_pairs[(triton.cdiv(pairs, _COUNTED),)](
            topk_ids, self._counts, self._ranks, pairs, experts, PAIRS=_COUNTED
        )
        for order in orders:
            place_pairs[(max(experts, triton.cdiv(pairs, _PLACED)),)](
                topk_ids,
                self._counts,
                self._ranks,
                order.sorted_ids,
                order.expert_ids,
                order.num_padded,
                pairs,
                experts,
                BLOCK=order.block,
                TAIL=triton.next_power_of_2(order.block),
                EXPERTS=triton.next_power_of_2(experts),
                PAIRS=_PLACED,
                num_warps=8,
            )

    def _multiply(
        self, product: _Product, rows: Tensor, outputs: Tensor, tile: str, order: _Order, top_k: int
    ) -> None:
        """Multiply row ``id // top_k`` of each pair by its expert's matrix."""
        from humming.forward import humming_forward

        humming_forward(
            product.config,
            inputs=rows,
            weight=product.tensors["weight"],
            weight_scale=product.tensors["weight_scale"],
            weight_scale_2=product.tensors["weight_scale_2"],
            outputs=outputs,
            sorted_ids=order.sorted_ids,
            expert_ids=order.expert_ids,
            num_tokens_padded=order.num_padded,
            locks=self._locks,
            top_k=top_k,
            valid_shape_m=outputs.shape[0],
            compute_config=_COMPUTE,
            tuning_config=tile,
        )

    def _combine(self, batch: Batch, rows: Tensor, output: Tensor) -> None:
        import triton

        from cake.peers.moe_kernels import combine_pairs

        tokens, hidden = output.shape
        combine_pairs[(tokens, triton.cdiv(hidden, _COLUMNS))](
            rows,
            batch.topk_ids,
            batch.topk_weights,
            output,
            self._counts,
            hidden,
            self._experts,
            TOP_K=self._top_k,
            COLUMNS=_COLUMNS,
            EXPERTS=triton.next_power_of_2(self._experts),
            num_warps=2,
        )


def create(weights: PreparedWeights, top_k: int, token_counts: Sequence[int]) -> HummingPeer:
    """Make the peer; see `cake.peers.create`."""
    return HummingPeer(weights, top_k, token_counts)
