"""Layers of a checkpoint as the loaders of vLLM and SGLang fill them."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from layer_calls import assert_same_bits
from torch import Tensor, nn

import cake
from cake.modelopt import prepare_modelopt_layer
from cake.support import KIMI_K3, Geometry
from cake.testing.checkpoints import make_expert_tensors
from cake.testing.synthetic import make_tokens, route

SMALL = Geometry(hidden=128, intermediate=64, num_experts=6, top_k=2)
FOUR = Geometry(KIMI_K3.hidden, KIMI_K3.intermediate, 4, KIMI_K3.top_k)
RANK, TP = 3, 8
NAME = "model.layers.1.mlp.experts"


def checkpoint(geometry: Geometry, seed: int = 0, missing: int | None = None) -> dict[str, Tensor]:
    """A layer's tensors before tensor parallelism, under a checkpoint's names."""
    full, tensors = TP * geometry.intermediate, {}
    for expert in range(geometry.num_experts):
        values = make_expert_tensors(expert, 1, seed, geometry.hidden, full)
        for projection, (codes, sf, weight, x) in zip(("w1", "w3", "w2"), values, strict=True):
            prefix = f"{NAME}.{expert}.{projection}"
            tensors |= {f"{prefix}.weight": codes, f"{prefix}.weight_scale": sf}
            tensors[f"{prefix}.weight_scale_2"] = torch.tensor(1 / weight)
            if expert != missing:
                tensors[f"{prefix}.input_scale"] = torch.tensor(1 / x)
    return tensors


def load(module: nn.Module, tensors: dict[str, Tensor], geometry: Geometry) -> None:
    """Write them where a framework's loader does: gate first, this rank's share."""
    part = geometry.intermediate
    for name, tensor in tensors.items():
        expert, projection, kind = re.fullmatch(rf"{NAME}\.(\d+)\.(w.)\.(\w+)", name).groups()
        target = getattr(module, f"{'w2' if projection == 'w2' else 'w13'}_{kind}")[int(expert)]
        if tensor.ndim == 0:
            target[...] = tensor if projection == "w2" else target
            if projection != "w2":
                target[("w1", "w3").index(projection)] = tensor
        elif projection == "w2":
            width = target.shape[1]
            target.copy_(tensor[:, RANK * width : (RANK + 1) * width])
        else:
            half = target[part:] if projection == "w3" else target[:part]
            half.copy_(tensor[RANK * part : (RANK + 1) * part])


def fill(module: nn.Module, load_one: Callable[..., object]) -> dict[str, Tensor]:
    """Load four experts by a framework's loader and make the other 892 like them.

    `load_one` gets a parameter, a tensor of the checkpoint, the parameter's name, the projection
    and the expert. Expert 2 has no input scales.
    """
    tensors = checkpoint(FOUR, missing=2)
    for name, tensor in tensors.items():
        expert, projection, kind = name.removeprefix(f"{NAME}.").split(".")
        name = f"{'w2' if projection == 'w2' else 'w13'}_{kind}"
        load_one(getattr(module, name), tensor, f"{NAME}.{name}", projection, int(expert))
    for parameter in module.parameters():
        data = parameter.data.view(KIMI_K3.num_experts // 4, 4, -1)
        data[1:] = data[:1]
    return tensors


def check_filled(
    experts: cake.SiTUExperts,
    tensors: dict[str, Tensor],
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Require what `fill` loaded, prepared, and the operation's result from the framework's call.

    The last of its six tokens has no experts, as a padded one.
    """
    expected = prepare_modelopt_layer(tensors, tp_rank=RANK, tp_size=TP, missing_input_scale="max")
    for expert in (0, 1, 2, 3, 893):
        for name, tensor in expected.weights.tensors().items():
            ours, theirs = (
                t[i : i + 1].view(torch.uint8)
                for t, i in ((getattr(experts, name), expert), (tensor, expert % 4))
            )
            assert ours.equal(theirs), (name, expert)
    x = make_tokens(6, 0)
    ids, weights = route(6, kind="random")
    ids, weights = ids.clone(), weights.float()
    ids[5] = -1
    output = call(x, ids, weights)
    module = cake.SiTUExperts(experts.weights, experts.quant_scales, token_counts=[6])
    assert_same_bits(output, module(x, ids, weights))
    assert output.float().abs().max() > 1 and not output[5].any()
