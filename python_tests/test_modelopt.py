from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch

from cake import quantize as qz
from cake.modelopt import prepare_modelopt_layer, unify_gate_up
from cake.weights import PreparedWeights, prepare_quantized_expert, unprepare

E, H, FULL, PART = 4, 128, 512, 64  # PART is one of eight ranks
FAMILIES = {
    "proj": ("model.layers.3.mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    "w": ("layers.3.block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "bare": ("", {"gate": "w1", "up": "up_proj", "down": "w2"}),
}
UP = "model.layers.3.mlp.experts.2.up_proj."


def make_layer(family: str = "proj", ratio: float = 1.0) -> dict[str, torch.Tensor]:
    """A full layer; weight_scale_2 of gate is `ratio` times that of up."""
    rng = torch.Generator().manual_seed(11)
    prefix, projections = FAMILIES[family]
    tensors = {}
    for e in range(E):
        w13_scale = 1e-3 * (1 + e)
        for projection, name in projections.items():
            rows, cols = (H, FULL) if projection == "down" else (FULL, H)
            scale = {"up": w13_scale, "gate": w13_scale * ratio, "down": 2e-3 * (1 + e)}
            codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=rng)
            sf = torch.randint(0x28, 0x7F, (rows, cols // 16), dtype=torch.uint8, generator=rng)
            base = f"{prefix}experts.{e}.{name}."
            tensors[base + "weight"] = codes
            tensors[base + "weight_scale"] = sf.view(torch.float8_e4m3fn)
            shape = () if e % 2 else (1,)
            tensors[base + "weight_scale_2"] = torch.full(shape, scale[projection])
            dx = {"up": 0.01 + e, "gate": 0.02 + e, "down": 0.5 / (1 + e)}
            tensors[base + "input_scale"] = torch.full(shape, dx[projection])
    tensors["model.layers.3.mlp.shared_experts.up_proj.weight"] = torch.zeros(1)
    return tensors


def weight(tensors: Mapping[str, torch.Tensor], expert: int, projection: str) -> torch.Tensor:
    """The full weight, decoded without cake.modelopt."""
    base = next(
        name.removesuffix("weight")
        for name in tensors
        if re.search(rf"experts\.{expert}\.({projection})\.weight$", name)
    )
    return qz.dequantize(*(tensors[base + k] for k in ("weight", "weight_scale", "weight_scale_2")))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", range(8))
def test_each_rank_holds_its_slice(family, rank):
    tensors = make_layer(family)
    layer = prepare_modelopt_layer(tensors, tp_rank=rank, num_experts=E)
    features = slice(rank * PART, (rank + 1) * PART)
    for e in range(E):
        w13, w2 = unprepare(layer.weights, e).dequantize()
        assert w13[:PART].equal(weight(tensors, e, "up_proj|w3")[features])
        assert w13[PART:].equal(weight(tensors, e, "gate_proj|w1")[features])
        assert w2.equal(weight(tensors, e, "down_proj|w2")[:, features])


def test_scales_of_the_op():
    tensors = make_layer()
    layer = prepare_modelopt_layer(tensors, tp_rank=0)
    f32 = torch.float32
    dx = torch.tensor(0.02 + 3, dtype=f32)
    assert layer.input_scale == dx.item()
    assert layer.intermediate_scale.tolist() == [0.5] * E
    dw13 = torch.tensor([1e-3 * (1 + e) for e in range(E)], dtype=f32)
    dw2 = torch.tensor([2e-3 * (1 + e) for e in range(E)], dtype=f32)
    qx, _, dec1, qa, _, dec2 = layer.quant_scales
    assert qx.tolist() == [(1 / dx).item()] and dec1.equal(dx * dw13)
    assert qa.tolist() == [2] * E and dec2.equal(0.5 * dw2)

    own = prepare_modelopt_layer(tensors, tp_rank=0, per_expert_input_scale=True)
    da = torch.tensor([0.5 / (1 + e) for e in range(E)], dtype=f32)
    assert own.input_scale == layer.input_scale
    assert own.intermediate_scale.equal(da)
    assert own.quant_scales[3].equal(1 / da) and own.quant_scales[5].equal(da * dw2)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.99, 1.7, 3.0, 10.0])
def test_unequal_gate_and_up_scales_keep_both_halves(ratio):
    tensors = make_layer(ratio=ratio)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = prepare_modelopt_layer(tensors, tp_rank=5)
    features = slice(5 * PART, 6 * PART)
    changed = False
    for e in range(E):
        w13 = unprepare(layer.weights, e).dequantize()[0]
        halves = {"up": w13[:PART], "gate": w13[PART:]}
        d = 1e-3 * (1 + e) * max(ratio, 1.0)
        torch.testing.assert_close(layer.weights.w13_scale[e].item(), d, rtol=1e-6, atol=0)
        larger = "gate" if ratio > 1 else "up"
        for name, half in halves.items():
            true = weight(tensors, e, f"{name}_proj")[features]
            if name == larger:
                assert half.equal(true)
            else:
                # Relative rounding of a normal E4M3 number; 6 is the largest code.
                bound = (true.abs() / 16).clamp(min=6 * 2.0**-10 * d) * (1 + 1e-5)
                assert ((half - true).abs() <= bound).all()
                changed |= not half.equal(true)
    assert changed


@pytest.mark.parametrize("ratio", [0.1, 0.7, 1.0, 2.3, 10.0])
@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 2)])
def test_scales_of_every_shape_reach_the_prepared_weights(shape, ratio):
    """Stacked scales, as fused checkpoints have them, through unify and preparation."""
    rng = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (E, 2 * PART, H // 2), dtype=torch.uint8, generator=rng)
    sf = torch.randint(0x28, 0x7F, (E, 2 * PART, H // 16), dtype=torch.uint8, generator=rng)
    codes2, sf2 = torch.zeros(H, PART // 2).byte(), torch.zeros(H, PART // 16).byte()
    up = torch.tensor([1e-3, 2e-3, 3e-4, 5e-3])
    halves = torch.stack((up, up * ratio if shape[1:] == (2,) else up), 1)
    new_sf, scale = unify_gate_up(sf, halves if shape[1:] == (2,) else up.reshape(shape))
    out = PreparedWeights.empty(E, H, PART)
    for e in range(E):
        prepare_quantized_expert(
            out,
            e,
            codes[e],
            new_sf[e],
            codes2,
            sf2,
            w13_order="up_gate",
            w13_scale=scale[e],
            w2_scale=1.0,
        )
    got = unprepare(out).dequantize()[0]
    per_row = halves.repeat_interleave(PART, 1)[..., None]
    true = qz.dequantize(codes, sf, per_row)
    # Relative rounding of a normal E4M3 number, or of a subnormal one with the largest code.
    bound = torch.maximum(true.abs() / 16, 6 * 2.0**-10 * scale[:, None, None]) * (1 + 1e-5)
    assert ((got - true).abs() <= bound).all()
    kept = halves == scale[:, None]
    assert got[kept.repeat_interleave(PART, 1)].equal(true[kept.repeat_interleave(PART, 1)])


@pytest.mark.filterwarnings("ignore:expert 2. .* block scales became zero")
def test_divisors_in_place_of_multipliers_are_flagged():
    """The reciprocal of amax / 2688 decodes to weights thousands of times too large."""
    tensors = make_layer()
    tensors[UP + "weight_scale_2"] = 1 / tensors[UP + "weight_scale_2"]
    with pytest.warns(UserWarning, match=re.escape(f"{UP}weight_scale_2: ") + ".*divisor"):
        prepare_modelopt_layer(tensors, tp_rank=0)


def test_power_of_two_ratio_is_exact():
    tensors = make_layer(ratio=0.25)
    layer = prepare_modelopt_layer(tensors, tp_rank=1)
    gate = unprepare(layer.weights, 2).dequantize()[0][PART:]
    assert gate.equal(weight(tensors, 2, "gate_proj")[PART : 2 * PART])


def test_lost_block_scales_are_reported():
    tensors = make_layer(ratio=2.0)
    scale = tensors[UP + "weight_scale"].view(torch.uint8)
    scale[3, 1] = 1  # 2^-9; half of it is a tie, to zero
    scale[4, 0] = 3  # 1.5 * 2^-9 is a tie, to 2 * 2^-9
    scale[5, 0] = 0  # zero before: not lost
    with pytest.warns(UserWarning, match="expert 2: 1 nonzero block scales became zero"):
        layer = prepare_modelopt_layer(tensors, tp_rank=0)
    sf = unprepare(layer.weights, 2).w13_sf.view(torch.uint8)
    assert (sf[3, 1], sf[4, 0], sf[5, 0]) == (0, 2, 0)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_unify_with_one_scale_changes_nothing(shape):
    sf = torch.randint(0, 0x7F, (3, 4, 5), dtype=torch.uint8)
    scale = torch.full(shape, 0.5)
    if scale.numel() == 3:
        scale = torch.tensor([0.5, 2.0, 1.0]).reshape(shape)
    got, common = unify_gate_up(sf.view(torch.float8_e4m3fn), scale)
    assert got.equal(sf)
    assert common.tolist() == (scale.flatten().tolist() if scale.numel() == 3 else [0.5] * 3)


def test_unify_pairs():
    sf = torch.full((3, 4, 2), 0x38, dtype=torch.uint8)  # 1.0
    pair = torch.tensor([[1.0, 4.0], [2.0, 2.0], [3.0, 1.0]])
    got, common = unify_gate_up(sf, pair)
    assert common.tolist() == [4, 2, 3]
    values = qz.e4m3_decode(got)
    assert (values[0, :2] == 0.25).all() and (values[0, 2:] == 1).all()
    assert (values[1] == 1).all()
    assert (values[2, :2] == 1).all() and (values[2, 2:] == 0.34375).all()  # 1/3, rounded
    for bad, message in [
        (torch.ones(2), r"w13_scale_2: .* got \(2,\)"),
        (torch.ones(3, 3), r"w13_scale_2: .* got \(3, 3\)"),
        (torch.tensor([1.0, 0.0, 1.0]), r"w13_scale_2: .* got 0\.0 at index 1"),
        (torch.ones(3).double(), r"w13_scale_2: expected torch\.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            unify_gate_up(sf, bad)
    with pytest.raises(ValueError, match=r"w13_sf: expected shape \[E, 2I, C\]"):
        unify_gate_up(sf[0], torch.ones(1))


class Lazy(Mapping[str, torch.Tensor]):
    """Counts look-ups, and how many weights are alive at most."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.reads: dict[str, int] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] = self.reads.get(name, 0) + 1
        return self.tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_mapping_is_read_once_expert_by_expert():
    lazy = Lazy(make_layer())
    prepare_modelopt_layer(lazy, tp_rank=2)
    assert set(lazy.reads.values()) == {1}
    weights = [name for name in lazy.reads if name.endswith((".weight", ".weight_scale"))]
    experts = [int(re.search(r"experts\.(\d)", name)[1]) for name in weights]
    assert experts == sorted(experts) and len(weights) == 6 * E


def test_missing_input_scale():
    tensors = make_layer()
    for name in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"model.layers.3.mlp.experts.3.{name}.input_scale"]
    message = (
        r"missing for 3 of 12 .*experts\.3\.gate_proj\.input_scale;.*missing_input_scale='max'"
    )
    with pytest.raises(ValueError, match=message):
        prepare_modelopt_layer(tensors, tp_rank=0)
    options = {"missing_input_scale": "max", "per_expert_input_scale": True}
    layer = prepare_modelopt_layer(tensors, tp_rank=0, **options)
    assert layer.input_scale == torch.tensor(2.02).item()
    assert layer.intermediate_scale.equal(torch.tensor([0.5, 0.25, 0.5 / 3, 0.5]))
    for e in range(3):
        del tensors[f"model.layers.3.mlp.experts.{e}.down_proj.input_scale"]
    with pytest.raises(ValueError, match="input_scale: expected at least one for down, got none"):
        prepare_modelopt_layer(tensors, tp_rank=0, **options)


@pytest.mark.parametrize("kind", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0, float("inf")])
def test_bad_decode_scales_are_refused_by_name(kind, value):
    tensors = make_layer()
    tensors[UP + kind] = torch.tensor(value)
    with pytest.raises(ValueError, match=re.escape(f"{UP}{kind}: ") + f".*got {value}"):
        prepare_modelopt_layer(tensors, tp_rank=0)


def test_bad_block_scales_are_refused_by_name():
    for byte, counts in [(0x7F, "1 NaN and 0 with"), (0x81, "0 NaN and 1 with")]:
        tensors = make_layer()
        tensors[UP + "weight_scale"].view(torch.uint8)[PART + 1, 3] = byte
        with pytest.raises(ValueError, match=re.escape(f"{UP}weight_scale: ") + f".*{counts}"):
            prepare_modelopt_layer(tensors, tp_rank=1)
        prepare_modelopt_layer(tensors, tp_rank=0)  # not in this rank's slice


@pytest.mark.parametrize(
    ("kind", "value", "error", "message"),
    [
        ("weight", torch.zeros(FULL, H // 2), TypeError, r"expected torch\.uint8, got .*float32"),
        ("weight", torch.zeros(FULL, H).byte(), ValueError, r"expected shape \(512, 64\), got"),
        ("weight_scale", torch.zeros(FULL, 8).byte(), TypeError, r"float8_e4m3fn, got .*uint8"),
        ("weight_scale", torch.zeros(8, 8).to(torch.float8_e4m3fn), ValueError, r"\(512, 8\)"),
        ("weight_scale_2", torch.ones(2), ValueError, r"expected shape \[\] or \[1\], got \(2,\)"),
        ("input_scale", torch.ones(1).half(), TypeError, r"torch\.float32, got torch\.float16"),
    ],
)
def test_wrong_shape_or_dtype_is_refused_by_name(kind, value, error, message):
    tensors = make_layer()
    tensors[UP + kind] = value
    with pytest.raises(error, match=re.escape(f"{UP}{kind}: ") + f".*{message}"):
        prepare_modelopt_layer(tensors, tp_rank=0)


def test_other_refusals():
    good = make_layer()

    def check(message, tensors=good, error=ValueError, **options):
        with pytest.raises(error, match=message):
            prepare_modelopt_layer(tensors, **{"tp_rank": 0, **options})

    check(r"tp_rank: expected 0 \.\. 7, got 8", tp_rank=8)
    check("missing_input_scale: .*got 'mean'", missing_input_scale="mean")
    check(r"experts 0 \.\. 4, got 4 experts without 4", num_experts=5)
    check(r"experts 0 \.\. 2, got 4 experts up to 3", num_experts=3)
    check(r"gate_proj\.weight: .*multiple of tp_size=3", tp_size=3)
    check("intermediate: expected a positive multiple of 64, got 32", tp_size=16)
    gap = {name: t for name, t in good.items() if "experts.1." not in name}
    check(r"experts 0 \.\. 3, got 3 experts without 1", gap)
    lacking = {name: t for name, t in good.items() if name != UP + "weight_scale_2"}
    check("expected weight_scale_2 of the up projection of expert 2, got none", lacking)
    check("expected names like", {"a.weight": torch.ones(1)})
    two = {**good, "model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(1)}
    check(r"one layer, got .*layers\.3.*layers\.4", two)
    twice = {**good, "model.layers.3.mlp.experts.0.w3.weight": torch.ones(1)}
    check(r"experts\.0\.w3\.weight: expected one name", twice)
    other = {**good, UP + "weight_packed": torch.ones(1)}
    check(r"up_proj\.weight_packed: .*compressed-tensors", other, NotImplementedError)
