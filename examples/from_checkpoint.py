"""From a checkpoint on disk to an output that is compared with two references.

    cake convert CHECKPOINT PREPARED --layer 1 --tp-rank 3
    python examples/from_checkpoint.py CHECKPOINT PREPARED --layer 1 --tp-rank 3

Loads the prepared layer as a module, runs random tokens through it and compares with two
references: the operation's own, exact on the prepared bytes, and the layer in float64 from the
checkpoint's tensors, read and dequantized here, without quantization of the activations. Exit
status 1 if the output is wrong. Without a checkpoint, `--make` writes one of 17 GB with random
values, the full size of one layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import cake
from cake.checkpoint import Checkpoint, open_safetensors
from cake.testing import checkpoints, numeric, reference, synthetic

SHARDS, HIDDEN, WIDTH, EXPERTS = 8, 3584, 384, 896
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def dequantize(codes: Tensor, sf: Tensor, scale: Tensor) -> Tensor:
    """Return the values of packed codes: float64 [rows, columns]."""
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    return values.double() * sf.double().repeat_interleave(16, dim=-1) * scale.double()


def main() -> int:
    """Read the options, load, run and compare."""
    parser = argparse.ArgumentParser(description="a converted layer beside its checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4, metavar="T")
    parser.add_argument("--make", action="store_true", help="write such a checkpoint first and end")
    arguments = parser.parse_args()
    if arguments.make:
        checkpoints.write_checkpoint(
            arguments.checkpoint,
            layers=[arguments.layer],
            num_experts=EXPERTS,
            hidden=HIDDEN,
            intermediate_full=SHARDS * WIDTH,
            shards=32,
        )
        print(f"wrote {arguments.checkpoint}; now: cake convert (see --help)")
        return 0

    rank, device = arguments.tp_rank, "cuda" if cake.is_supported("cuda")[0] else "cpu"
    file = arguments.prepared / f"layer-{arguments.layer:04d}-tp-{rank}-of-{SHARDS}.safetensors"
    experts = cake.SiTUExperts.from_checkpoint(
        file,
        device=device,
        expected_tp_rank=rank,
        workspace=cake.SharedWorkspace([arguments.tokens], device=device),
    )
    tokens = synthetic.make_tokens(arguments.tokens, seed=0)
    topk_ids, topk_weights = synthetic.route(arguments.tokens, kind="random")
    output = experts(tokens.to(device), topk_ids.to(device), topk_weights.to(device)).cpu()

    exact = reference.fused_moe_reference(
        tokens,
        topk_ids,
        topk_weights,
        experts.w13.cpu(),
        experts.w2.cpu(),
        [scale.cpu() for scale in experts.quant_scales],
    )
    figures = numeric.compare_outputs(output, exact)
    right = figures.relative_rms < 0.01 and figures.worst_row_error < 0.1
    print(
        f"{file.name} on {device}: {'right' if right else 'WRONG'}, relative rms "
        f"{figures.relative_rms:.1e}, worst row {figures.worst_row_error:.1e}"
    )

    files = Checkpoint(arguments.checkpoint).shards(arguments.layer)
    rows = slice(rank * WIDTH, (rank + 1) * WIDTH)

    def read(ending: str) -> Tensor:
        name, file = next(item for item in files.items() if item[0].endswith(ending))
        with open_safetensors(arguments.checkpoint / file) as tensors:
            return tensors.get_tensor(name)

    def weights(expert: int) -> tuple[Tensor, Tensor]:
        def part(name: str, columns: bool = False) -> Tensor:
            codes, sf, scale = (
                read(f".{expert}.{name}.{kind}")
                for kind in ("weight", "weight_scale", "weight_scale_2")
            )
            values = dequantize(codes, sf, scale)
            return values[:, rows] if columns else values[rows]

        return torch.cat((part("w3"), part("w1"))), part("w2", columns=True)

    whole = reference.unquantized_reference(
        tokens, topk_ids, topk_weights, weights, num_experts=EXPERTS
    )
    error = float((output.double() - whole).norm() / whole.norm())
    print(f"beside the checkpoint's own weights, activations in float64: {error:.3f} of the norm")
    return 0 if right and error < 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
