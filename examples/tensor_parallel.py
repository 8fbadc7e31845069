"""Tensor parallelism: the eight shards of a layer on 1, 2, 4 or 8 ranks, and the sum over them.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

Rank r of n runs the shards r, r + n, ... of eight one after the other; with --graph shard r in a
CUDA graph with the all-reduce, the others before it. The all-reduce is the caller's: cake computes
one shard and knows of no other. NCCL where every rank has a supported GPU, else gloo on CPUs. The
sum is compared with the reference of the unsharded layer; exit status 1 if it differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import cake
from cake.testing import numeric, reference, synthetic
from cake.weights import PreparedWeights, prepare_quantized_expert, unprepare

SHARDS, HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 3584, 384, 896, 16
FULL_WIDTH = SHARDS * WIDTH  # of the unsharded layer


@dataclass(frozen=True)
class Layer:
    """An unsharded layer that has only the experts which the batch is routed to."""

    experts: Tensor  # int64 [n], their ids among the 896
    weights: PreparedWeights  # of these n, at the full width
    scales: list[Tensor]  # the six of the operation, for these n

    def take_shard(self, shard: int, out: PreparedWeights) -> list[Tensor]:
        """Write one shard's experts into `out` and give the six scales that go with it.

        A shard has the same rows of up and of gate, and the columns of down that meet them. The
        scales are the layer's: all shards quantize as the unsharded layer does.
        """
        begin, end = shard * WIDTH, (shard + 1) * WIDTH
        for place, expert in enumerate(self.experts.tolist()):
            whole = unprepare(self.weights, place)
            codes, sf = (
                t.unflatten(0, (2, FULL_WIDTH))[:, begin:end].flatten(0, 1)
                for t in (whole.w13_codes, whole.w13_sf)
            )
            prepare_quantized_expert(
                out,
                expert,
                codes,
                sf,
                whole.w2_codes[:, begin // 2 : end // 2],  # two codes a byte
                whole.w2_sf[:, begin // 16 : end // 16],  # 16 codes a block
                w13_order="up_gate",
                w13_scale=whole.w13_scale,
                w2_scale=whole.w2_scale,
            )
        scales = [t.to(out.device) for t in self.scales]
        scales[1], scales[4] = out.w13_sf, out.w2_sf
        for i in (2, 3, 5):
            of_all = torch.ones(EXPERTS, device=out.device)
            of_all[self.experts.to(out.device)] = scales[i]
            scales[i] = of_all
        return scales


class ShardRunner:
    """One rank's buffers, and the weights of the shard that it runs at the time."""

    def __init__(self, layer: Layer, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        self.layer = layer
        self.tokens, self.topk_ids, self.topk_weights = batch
        num_tokens, device = self.tokens.shape[0], self.tokens.device
        nbytes = cake.cutlass_fused_moe_workspace_size(
            num_tokens,
            HIDDEN,
            WIDTH,
            EXPERTS,
            TOP_K,
            x_dtype=torch.bfloat16,
            weight_dtype=torch.uint8,
            activation_type=cake.ActivationType.Situ,
            tp_size=SHARDS,
        )
        self.workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
        cake.cake_fused_moe_prepare_workspace(self.workspace, num_tokens)
        # 2.1 GB, used for one shard after the other. The experts without tokens stay unwritten:
        # nothing reads them, and on a CPU they take no memory.
        self.weights = PreparedWeights.empty(EXPERTS, HIDDEN, WIDTH, device)
        self.output = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)

    def load(self, shard: int) -> None:
        """Make `shard` the one that `run` computes."""
        self.shard = shard
        self.scales = self.layer.take_shard(shard, self.weights)

    def run(self) -> Tensor:
        """Compute the loaded shard's output; bf16 [T, H], overwritten by the next run."""
        return cake.cutlass_fused_moe(
            self.tokens,
            self.topk_ids,
            self.topk_weights,
            self.weights.w13,
            self.weights.w2,
            torch.bfloat16,
            self.scales,
            activation_type=cake.ActivationType.Situ,
            tp_size=SHARDS,
            tp_rank=self.shard,
            workspace_buffer=self.workspace,
            output=self.output,
        )


def sum_of_shards(runner: ShardRunner, shards: range) -> Tensor:
    """Run some shards in turn, add their outputs, all-reduce; float32 [T, H]."""
    total = torch.zeros(runner.output.shape, device=runner.output.device)
    for shard in shards:
        runner.load(shard)
        total += runner.run()
    dist.all_reduce(total)
    return total


def captured_sum(runner: ShardRunner, rank: int, world: int) -> Tensor:
    """Run one shard a rank and the all-reduce in one CUDA graph; float32 [T, H].

    The shards of the ranks that eight would have beyond `world` are added from outside.
    """
    rest = sum_of_shards(runner, range(world + rank, SHARDS, world))
    runner.load(rank)
    total = torch.empty_like(rest)

    def step() -> None:
        total.copy_(runner.run())
        dist.all_reduce(total)

    step()  # NCCL sets itself up at the first collective, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    total.fill_(float("nan"))
    graph.replay()
    return total + rest


def run(
    rank: int, world: int, device: torch.device, num_tokens: int, num_experts: int, graph: bool
) -> bool:
    """Compute this rank's part, all-reduce, compare, print; says whether the sum is right."""
    tokens = synthetic.make_tokens(num_tokens, seed=0)
    places, topk_weights = synthetic.route(num_tokens, kind="random", num_experts=num_experts)
    chosen = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0))[:num_experts]
    # The same bytes on every rank, as from a checkpoint, and never more than the chosen experts.
    layer = Layer(chosen, *synthetic.fill_random_prepared(0, num_experts, HIDDEN, FULL_WIDTH))
    runner = ShardRunner(
        layer, (tokens.to(device), chosen[places].int().to(device), topk_weights.to(device))
    )
    if graph:
        how = f"shard {rank} and the all-reduce in a CUDA graph"
        total = captured_sum(runner, rank, world)
    else:
        shards = range(rank, SHARDS, world)
        how = f"shards {', '.join(map(str, shards))}"
        total = sum_of_shards(runner, shards)

    expected = torch.empty_like(total)
    if rank == 0:
        weights = layer.weights
        expected.copy_(
            reference.fused_moe_reference(
                tokens, places, topk_weights, weights.w13, weights.w2, layer.scales
            )
        )
    dist.broadcast(expected, 0)
    try:
        figures = numeric.check_outputs(total, expected)
        right = True
        result = (
            f"right, relative rms {figures.relative_rms:.1e}, "
            f"worst row {figures.worst_row_error:.1e}"
        )
    except AssertionError as error:
        right = False
        result = str(error) if rank == 0 else str(error).splitlines()[0]  # the figures once
    line = f"rank {rank} of {world} on {device}, {how}: {result}"
    sys.stdout.write(line + "\n")  # one write, so that ranks do not print into each other's line
    sys.stdout.flush()
    return right


def main() -> int:
    """Read the options, join the other ranks and run."""
    parser = argparse.ArgumentParser(description="cake on tensor-parallel ranks; start by torchrun")
    parser.add_argument("--tokens", type=int, default=4, metavar="T")
    parser.add_argument("--experts", type=int, default=20, help="in use, 16 to 896 (default 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument(
        "--graph",
        action="store_true",
        help="one shard a rank, captured in a CUDA graph with the all-reduce; the shards of the "
        "ranks that are not there are added",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"expected a rank: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    rank, world, local_rank, local_world = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if SHARDS % world:
        parser.error(f"expected 1, 2, 4 or 8 ranks, got {world}")
    name = arguments.device
    if name is None:
        gpus = torch.cuda.device_count()
        name = "cuda" if gpus >= local_world and cake.is_supported("cuda")[0] else "cpu"
    if arguments.graph and name != "cuda":
        parser.error("--graph: expected a supported GPU for each rank, got the CPU")
    device = torch.device(name, local_rank) if name == "cuda" else torch.device(name)
    if name == "cuda":
        torch.cuda.set_device(device)
        # NVLink multicast takes resources of the NVSwitches, which every program on the host's GPUs
        # shares; a sum of a few tokens gains nothing by it. NCCL_NVLS_ENABLE=2 lets NCCL choose.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("nccl" if name == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        right = run(rank, world, device, arguments.tokens, arguments.experts, arguments.graph)
        return 0 if right else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
