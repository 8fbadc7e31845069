from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from cake.testing.numeric import bitwise_difference, compare_outputs
from cake.testing.reference import Stages, fused_moe_reference, unquantized_reference
from cake.testing.synthetic import (
    ROUTINGS,
    Routing,
    fill_random_prepared,
    make_expert,
    make_layer,
    make_tokens,
    route,
)
from cake.weights import PreparedWeights, unprepare

H, I = 1024, 128  # noqa: E741
Layer = tuple[PreparedWeights, list[Tensor]]


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def kurtosis(values: Tensor) -> float:
    values = values.double()
    return float(values.pow(4).mean() / values.square().mean().square())


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(7, 32, H, I)


@pytest.fixture(scope="module")
def random_layer() -> Layer:
    return fill_random_prepared(7, 32, H, I)


def test_experts_at_full_geometry_are_heavy_tailed() -> None:
    w13, w2 = make_expert(0, 1)
    assert w13.shape == (768, 3584) and w2.shape == (3584, 384)
    assert w13.dtype == w2.dtype == torch.bfloat16
    assert rms(w13) == pytest.approx(2 / 3584**0.5, rel=0.1)
    assert rms(w2) == pytest.approx(5 / 384**0.5, rel=0.1)
    for w in (w13, w2):  # 3 for a normal distribution
        assert 8 < kurtosis(w) < 14
        assert abs(float(w.double().mean())) < 0.01 * rms(w)


def test_tokens_are_heavy_tailed_with_the_same_outlier_channels() -> None:
    few, many = make_tokens(100, 1), make_tokens(1000, 1)
    assert few.shape == (100, 3584) and few.dtype == torch.bfloat16
    assert rms(many) == pytest.approx(1.0, rel=0.05)
    assert kurtosis(many) > 15
    channels = [set(x.float().square().mean(0).topk(7).indices.tolist()) for x in (few, many)]
    assert channels[0] == channels[1]
    row_rms = many.double().square().mean(1).sqrt()
    assert float(row_rms.max() / row_rms.min()) > 3


def test_an_expert_depends_on_its_seed_and_id_alone() -> None:
    first = make_expert(5, 3, H, I)
    make_expert(1, 3, H, I)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = make_expert(5, 3, H, I)
    finally:
        torch.set_num_threads(threads)
    with ThreadPoolExecutor(2) as pool:
        parallel = list(pool.map(lambda e: make_expert(e, 3, H, I), [4, 5, 6, 5]))
    for w13, w2 in (again, parallel[1], parallel[3]):
        assert bitwise_difference(w13, first[0]) is None
        assert bitwise_difference(w2, first[1]) is None
    for other in (parallel[0], parallel[2], make_expert(5, 4, H, I)):
        assert float((other[0] == first[0]).double().mean()) < 0.05


def test_streams_of_neighbouring_seeds_do_not_meet() -> None:
    """The last expert of one seed, its tokens and the first expert of the next all differ."""
    tokens = make_tokens(2 * I, 1, H)
    for a, b in (
        (make_expert(4092, 1, H, I)[0], make_expert(0, 2, H, I)[0]),
        (tokens, tokens.neg()),
    ):
        assert float((a == b).double().mean()) < 0.05
    assert float((tokens == make_expert(4092, 1, H, I)[0]).double().mean()) < 0.05


@pytest.mark.parametrize("expert", [-1, 4093])
def test_expert_ids_have_a_range(expert: int) -> None:
    with pytest.raises(ValueError, match="expert must be in"):
        make_expert(expert, 0, H, I)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_routing(kind: Routing) -> None:
    tokens = make_tokens(200, 2, H)
    ids, weights = route(200, 2, kind=kind, tokens=tokens)
    assert ids.dtype == torch.int32 and weights.dtype == torch.bfloat16
    assert ids.shape == weights.shape == (200, 16)
    assert ids.is_contiguous() and weights.is_contiguous()
    assert int(ids.min()) >= 0 and int(ids.max()) < 896
    torch.testing.assert_close(weights.float().sum(1), torch.ones(200), atol=0.02, rtol=0)
    assert bool((weights > 0).all())
    again = route(200, 2, kind=kind, tokens=tokens)
    assert torch.equal(ids, again[0]) and torch.equal(weights, again[1])
    distinct = {"one_expert": 1, "duplicates": 8}.get(kind, 16)
    assert all(row.unique().numel() == distinct for row in ids)


def test_routings_have_their_shape() -> None:
    ids = {kind: route(200, 2, kind=kind)[0].long() for kind in ROUTINGS if kind != "softmax"}
    counts = {kind: i.flatten().bincount(minlength=896) for kind, i in ids.items()}
    assert ids["uniform"][100].tolist() == [(1600 + s) % 896 for s in range(16)]
    assert ids["duplicates"][0].tolist() == [s // 2 for s in range(16)]
    assert int(ids["one_expert"].min()) == 895
    assert torch.equal(ids["same"], torch.arange(16).expand(200, 16))
    assert int((counts["grouped"] > 0).sum()) == 64
    assert counts["grouped"].unique().tolist() == [0, 50]
    assert int((counts["random"] > 0).sum()) > 800 and int(counts["random"].max()) < 20
    assert int(counts["zipf"].max()) > 100 and int((counts["zipf"] == 0).sum()) > 100


def test_softmax_routing_follows_the_tokens() -> None:
    tokens = make_tokens(64, 2, H)
    ids, weights = route(64, 2, tokens=tokens)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    permuted = route(64, 2, tokens=tokens[order])
    assert torch.equal(permuted[0], ids[order])
    assert bool((weights.diff(dim=1) <= 0).all())  # most important expert first
    assert not torch.equal(route(64, 3, tokens=tokens)[0], ids)


def test_route_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="needs tokens of 4 rows"):
        route(4)
    with pytest.raises(ValueError, match="needs tokens of 4 rows"):
        route(4, tokens=make_tokens(5, 0, H))
    with pytest.raises(ValueError, match="kind must be one of"):
        route(4, kind="roundrobin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few"):
        route(4, kind="grouped", num_experts=63)
    assert route(4, kind="grouped", num_experts=64)[0].max() == 63


def run(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Stages]:
    prepared, scales = layer
    tokens = make_tokens(24, 7, H)
    ids, weights = route(24, 7, tokens=tokens, num_experts=32)
    stages = fused_moe_reference(
        tokens, ids, weights, prepared.w13, prepared.w2, scales, return_stages=True
    )
    return tokens, ids, weights, stages


@pytest.mark.parametrize("name", ["layer", "random_layer"])
def test_outputs_are_of_sensible_size(name: str, request: pytest.FixtureRequest) -> None:
    layer: Layer = request.getfixturevalue(name)
    *_, stages = run(layer)
    assert 1 < rms(stages.output) < 15
    assert float(stages.output.abs().max()) > 4
    assert 0.5 < rms(stages.activation) < 10
    # The block scales use the range of E4M3: well above its subnormals, never saturated.
    assert int(stages.input_scales.max()) < 0x7E and int(stages.intermediate_scales.max()) < 0x7E
    assert float(stages.input_scales.float().median()) > 0x40
    assert float(stages.intermediate_scales.float().median()) > 0x40
    assert int(layer[0].w13_sf.view(torch.uint8).max()) <= 0x7E


@pytest.mark.parametrize("name", ["layer", "random_layer"])
def test_scales_are_not_unit_and_distinct(name: str, request: pytest.FixtureRequest) -> None:
    prepared, scales = request.getfixturevalue(name)
    assert scales[0].shape == (1,) and float(scales[0]) != 1.0
    for per_expert in (scales[2], scales[3], scales[5]):
        assert per_expert.shape == (32,)
        assert per_expert.unique().numel() >= 7  # of 32; the spread of activation scales has 7
    assert bool((scales[3].diff() != 0).all())
    dx = 1 / scales[0]
    torch.testing.assert_close(scales[2], dx * prepared.w13_scale)
    torch.testing.assert_close(scales[5], prepared.w2_scale / scales[3])


def test_layer_holds_the_experts_that_make_expert_gives(layer: Layer) -> None:
    for expert in (0, 31):
        decoded = unprepare(layer[0], expert).dequantize()
        for actual, expected in zip(decoded, make_expert(expert, 7, H, I), strict=True):
            error = (actual.double() - expected.double()).norm() / expected.double().norm()
            assert error < 0.12
    wrong = unprepare(layer[0], 0).dequantize()[0].double()
    other = make_expert(1, 7, H, I)[0].double()
    assert (wrong - other).norm() > other.norm()


def test_error_of_the_format(layer: Layer) -> None:
    tokens, ids, weights, stages = run(layer)
    exact = unquantized_reference(
        tokens, ids, weights, lambda e: make_expert(e, 7, H, I), num_experts=32
    )
    figures = compare_outputs(stages.output, exact)
    assert 0.1 < figures.relative_rms < 0.35
    assert figures.norm_ratio == pytest.approx(1.0, abs=0.05)


def test_random_layer_is_reproducible_and_valid(random_layer: Layer) -> None:
    again, _ = fill_random_prepared(7, 32, H, I)
    other, _ = fill_random_prepared(8, 32, H, I)
    for name, tensor in random_layer[0].tensors().items():
        assert bitwise_difference(tensor, again.tensors()[name]) is None
    assert not torch.equal(random_layer[0].w13, other.w13)
    assert not torch.equal(random_layer[0].w13[0], random_layer[0].w13[1])
    codes = random_layer[0].w13.flatten()
    nibbles = torch.cat((codes & 15, codes >> 4)).bincount(minlength=16) / (2 * codes.numel())
    torch.testing.assert_close(
        nibbles.double(), torch.full((16,), 1 / 16).double(), rtol=0.02, atol=0
    )
    scales = random_layer[0].w13_sf.view(torch.uint8)
    assert scales.unique().tolist() == list(range(0x30, 0x40))


def test_module_needs_neither_numpy_nor_rich() -> None:
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['rich'] = None\n"
        "from cake.testing import numeric, reference, synthetic\n"
        "synthetic.make_layer(0, 1, 128, 64, progress=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
