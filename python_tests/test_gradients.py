"""Preparation from tensors that require a gradient: none is kept, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cake import SiTUExperts
from cake.testing.synthetic import fill_random_prepared
from cake.weights import PreparedWeights, prepare_expert, prepare_quantized_expert, unprepare

E, H, INTER = 3, 256, 64


def parameters(seed: int) -> tuple[nn.Parameter, nn.Parameter]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((2 * INTER, H), (H, INTER))
    w13, w2 = (nn.Parameter(torch.randn(s, generator=rng).bfloat16()) for s in shapes)
    return w13, w2


def scale(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def assert_no_gradient(*tensors: Tensor) -> None:
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("kind", ["amax", None, "tensor"])
def test_prepared_weights_keep_no_parameter_alive(kind: Any) -> None:
    out = PreparedWeights.empty(E, H, INTER)
    same = PreparedWeights.empty(E, H, INTER)
    sources = []
    for e in range(E):
        w13, w2 = parameters(e)
        scales = [scale(0.5), scale(2.0)] if kind == "tensor" else [kind, kind]
        sources += [weakref.ref(s) for s in (w13, w2, *scales) if isinstance(s, Tensor)]
        for target, detached in ((out, False), (same, True)):
            a, b, c, d = (
                s.detach() if detached and isinstance(s, Tensor) else s for s in (w13, w2, *scales)
            )
            prepare_expert(target, e, a, b, w13_order="up_gate", w13_scale=c, w2_scale=d)
    assert_no_gradient(*out.tensors().values())
    del w13, w2, scales, a, b, c, d
    gc.collect()
    assert [source() for source in sources] == [None] * len(sources)
    for one, other in zip(out.tensors().values(), same.tensors().values(), strict=True):
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


def test_scales_lose_their_gradient() -> None:
    weights, _ = fill_random_prepared(2, E, H, INTER)
    assert_no_gradient(*weights.quant_scales(scale(0.5), nn.Parameter(torch.ones(E))))
    one = unprepare(weights, 1)
    prepare_quantized_expert(
        weights,
        0,
        one.w13_codes,
        one.w13_sf,
        one.w2_codes,
        one.w2_sf,
        w13_order="up_gate",
        w13_scale=scale(0.5),
        w2_scale=scale(2.0),
    )
    assert_no_gradient(*weights.tensors().values())


def test_a_module_copies_scales_without_their_gradient() -> None:
    weights, scales = fill_random_prepared(2, 6, 128, 64)
    for index in (0, 2, 3, 5):
        scales[index] = nn.Parameter(scales[index])
    module = SiTUExperts(weights, scales, token_counts=1)
    assert_no_gradient(*module.buffers())
