"""What preparation refuses, by the name of the argument."""

from __future__ import annotations

import pytest
import torch

from cake.config import TrtllmFp4Config
from cake.weights import PreparedWeights, prepare_expert, prepare_weights, unprepare

E, H, INTER = 3, 256, 64


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    w13 = torch.randn(E, 2 * INTER, H, generator=rng).bfloat16()
    w2 = torch.randn(E, H, INTER, generator=rng).bfloat16()
    return w13, w2


def test_prepare_refusals(layer):
    w13, w2 = layer
    out = PreparedWeights.empty(E, H, INTER)
    with pytest.raises(TypeError, match="w13_order"):
        prepare_weights(w13, w2)
    for arguments, changes, message in [
        ((w13, w2), {"w13_order": "gate"}, "w13_order: .*got 'gate'"),
        ((w13[0], w2), {}, r"w13: expected shape \[E, 2I, H\]"),
        ((w13, w2[:, :, :32]), {}, r"w2: expected shape \(3, 256, 64\), got \(3, 256, 32\)"),
        ((w13.float(), w2), {}, r"w13: expected torch\.bfloat16, got torch\.float32"),
        ((w13[:, :, :192], w2[:, :192]), {}, "hidden: .*128, got 192"),
        ((w13[:, :96], w2[:, :, :48]), {}, "intermediate: .*64, got 48"),
        ((w13[:2], w2[:2]), {"out": out}, "out: expected 2 experts, got 3"),
        ((w13, w2), {"out": out, "device": "meta"}, "device: .*cpu, got meta"),
        ((w13, w2), {"w13_scale": 0.0}, r"w13_scale: .*got 0\.0"),
        ((w13, w2), {"w2_scale": torch.ones(2)}, "w2_scale: expected one value or 3"),
        ((w13, w2), {"w2_scale": "max"}, "w2_scale: .*got 'max'"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare_weights(*arguments, **{"w13_order": "up_gate", **changes})
    for bad in (float("nan"), float("inf")):
        broken = w2.clone()
        broken[1, 5, 6] = bad
        with pytest.raises(ValueError, match="w2 of expert 1: expected finite"):
            prepare_weights(w13, broken, w13_order="up_gate")
    with pytest.raises(ValueError, match=r"expert: expected 0 \.\. 2, got 3"):
        prepare_expert(out, 3, w13[0], w2[0], w13_order="up_gate")
    with pytest.raises(ValueError, match=r"expert: expected 0 \.\. 2, got -1"):
        unprepare(out, -1)


def test_prepare_refuses_other_types_by_name(layer):
    w13, w2 = layer
    out = PreparedWeights.empty(E, H, INTER)
    sizes = {"num_local_experts": E, "hidden_size": H, "intermediate_size": INTER}
    for call, message in [
        (lambda: prepare_weights(None, w2, w13_order="up_gate"), r"w13: expected a torch\.Tensor"),
        (lambda: prepare_weights(w13, None, w13_order="up_gate"), r"w2: expected a torch\.Tensor"),
        (lambda: prepare_weights(w13, w2, w13_order="up_gate", out=5), "out: expected Prepared"),
        (lambda: unprepare({}), "prepared: expected PreparedWeights, got dict"),
        (lambda: unprepare(out, 1.0), r"expert: expected an integer, got 1\.0"),
        (lambda: unprepare(out, True), "expert: expected an integer, got True"),
        (lambda: TrtllmFp4Config.prepare_weights(None, w2, **sizes), "w1_bf16: expected a torch"),
        (
            lambda: TrtllmFp4Config.prepare_weights(w13, w2, **{**sizes, "hidden_size": "x"}),
            "hidden_size: expected an integer, got 'x'",
        ),
        (lambda: TrtllmFp4Config.prepare_activations(None), "hidden_states_bf16: expected a torch"),
        (lambda: TrtllmFp4Config.prepare_activations(w2[0], quant=None), "quant: expected Quant"),
    ]:
        with pytest.raises(TypeError, match=message):
            call()
