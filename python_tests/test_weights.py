from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from cake import layout
from cake import quantize as qz
from cake.config import ActivationType, QuantConfig, QuantFormat, SiTU, TrtllmFp4Config
from cake.weights import (
    PreparedWeights,
    prepare_expert,
    prepare_quantized_expert,
    prepare_weights,
    unprepare,
)

E, H, INTER = 3, 256, 64

cuda = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
)


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [up; gate] and w2, experts of different magnitude."""
    rng = torch.Generator().manual_seed(7)
    size = torch.tensor([0.004, 0.125, 3.0])[:, None, None]
    w13 = (torch.randn(E, 2 * INTER, H, generator=rng) * size).bfloat16()
    w2 = (torch.randn(E, H, INTER, generator=rng) * size).bfloat16()
    return w13, w2


def swap(w13: torch.Tensor) -> torch.Tensor:
    return torch.cat((w13[..., INTER:, :], w13[..., :INTER, :]), dim=-2)


def equal(a: PreparedWeights, b: PreparedWeights) -> bool:
    return all(
        x.view(torch.uint8).cpu().equal(y.view(torch.uint8).cpu())
        for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


def expected(w13, w2, d13, d2):
    """Bytes of one expert by quantizing in logical order and placing every row and scale."""
    result = []
    for w, d, order in ((w13, d13, layout.fc1_row_order(INTER)), (w2, d2, layout.fc2_row_order(H))):
        packed, sf = qz.quantize_precise(w, 1.0 / torch.tensor(d))
        placed = torch.empty(sf.numel(), dtype=torch.uint8)
        placed[layout.scale_offset(*sf.shape).flatten()] = sf[order].flatten()
        result += [packed[order], placed.reshape(sf.shape)]
    return result


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_bytes_follow_the_layout(layer, device):
    w13, w2 = layer
    before = w13.clone(), w2.clone()
    d13, d2 = torch.tensor([0.25, 1e-3, 2.0]), torch.tensor([3e-4, 1.0, 0.5])
    got = prepare_weights(
        w13, w2, w13_order="up_gate", w13_scale=d13, w2_scale=d2.to(device), device=device
    )
    assert got.device.type == device
    for e in range(E):
        want = expected(w13[e], w2[e], d13[e].item(), d2[e].item())
        for name, tensor in zip(("w13", "w13_sf", "w2", "w2_sf"), want, strict=True):
            assert got.tensors()[name][e].view(torch.uint8).cpu().equal(tensor), (name, e)
    assert got.w13_scale.cpu().equal(d13) and got.w2_scale.cpu().equal(d2)
    assert w13.equal(before[0]) and w2.equal(before[1])


def test_matches_the_tiny_model(golden):
    data = golden("tiny_op_model")
    w13, w2 = (
        torch.from_numpy(data[name]).view(torch.bfloat16) for name in ("w13_bf16", "w2_bf16")
    )
    got = prepare_weights(w13, w2, w13_order="up_gate", w13_scale="amax", w2_scale="amax")
    for name, key in (("w13", "w1"), ("w13_sf", "s1"), ("w2", "w2p"), ("w2_sf", "s2")):
        assert (got.tensors()[name].view(torch.uint8).numpy() == data[key]).all(), name
    scales = got.quant_scales(1 / data["qx"].item(), 1 / torch.from_numpy(data["qa"]))
    for index, key in ((0, "qx"), (2, "dec1"), (3, "qa"), (5, "dec2")):
        torch.testing.assert_close(scales[index], torch.from_numpy(data[key]), rtol=3e-7, atol=0)


def test_gate_up_order_gives_the_same_bytes(layer):
    w13, w2 = layer
    up_gate = prepare_weights(w13, w2, w13_order="up_gate")
    gate_up = prepare_weights(swap(w13), w2, w13_order="gate_up")
    assert equal(up_gate, gate_up)
    assert not equal(up_gate, prepare_weights(w13, w2, w13_order="gate_up"))


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_one_expert_equals_the_whole_and_refits_in_place(layer, device):
    w13, w2 = (w.to(device) for w in layer)
    whole = prepare_weights(w13, w2, w13_order="gate_up", w13_scale="amax", w2_scale=0.5)
    out = PreparedWeights.empty(E, H, INTER, device)
    for e in (2, 0, 1):
        # Strided and host tensors are accepted.
        strided = w13[e].t().contiguous().t()
        prepare_expert(
            out, e, strided, layer[1][e], w13_order="gate_up", w13_scale="amax", w2_scale=0.5
        )
    assert equal(whole, out)
    addresses = [t.data_ptr() for t in out.tensors().values()]
    again = prepare_weights(-w13, w2, w13_order="gate_up", w13_scale="amax", w2_scale=0.5, out=out)
    assert again is out and not equal(whole, out)
    prepare_weights(w13, w2, w13_order="gate_up", w13_scale="amax", w2_scale=0.5, out=out)
    assert equal(whole, out)
    assert addresses == [t.data_ptr() for t in out.tensors().values()]


def test_amax_scale_uses_the_range_of_each_expert(layer):
    w13, w2 = layer
    w13[1] = 0
    got = prepare_weights(w13, w2, w13_order="up_gate", w13_scale="amax", w2_scale="amax")
    amax = w2.float().abs().amax((1, 2))
    assert got.w2_scale.equal(amax / 2688)
    assert got.w13_scale[1] == 1 and not unprepare(got, 1).dequantize()[0].any()
    assert (got.w2_sf.float().amax((1, 2)) == 448).all()
    # Half of the widest code gap, 1, at the block scale, itself rounded by 1/16 at most.
    values = unprepare(got).dequantize()[1]
    blocks = w2.float().reshape(E, H, INTER // 16, 16)
    bound = blocks.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16)
    assert ((values.reshape(blocks.shape) - blocks).abs() <= bound).all()
    # With scale 1 the first expert's small blocks lose their scale's precision.
    plain = unprepare(prepare_weights(w13, w2, w13_order="up_gate")).dequantize()[1]
    assert (plain - w2.float())[0].norm() > 1.2 * (values - w2.float())[0].norm()


def test_unprepare_gives_logical_order(layer):
    w13, w2 = layer
    got = prepare_weights(w13, w2, w13_order="up_gate", w13_scale=1e-3, w2_scale=2e-3)
    q13, q2 = 1 / torch.tensor(1e-3), 1 / torch.tensor(2e-3)
    codes13, sf13 = qz.quantize_precise(w13, q13)
    codes2, sf2 = qz.quantize_precise(w2, q2)
    logical = unprepare(got)
    assert logical.w13_codes.equal(codes13) and logical.w2_codes.equal(codes2)
    assert logical.w13_sf.view(torch.uint8).equal(sf13)
    assert logical.w2_sf.view(torch.uint8).equal(sf2)
    one = unprepare(got, 1)
    assert one.w13_codes.equal(codes13[1]) and one.w2_sf.view(torch.uint8).equal(sf2[1])
    up_gate, down = one.dequantize(torch.bfloat16)
    assert up_gate.equal(qz.dequantize(codes13[1], sf13[1], 1e-3, dtype=torch.bfloat16))
    assert down.equal(qz.dequantize(codes2[1], sf2[1], 2e-3, dtype=torch.bfloat16))


@pytest.mark.parametrize("order", ["up_gate", "gate_up"])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_expert_returns_unchanged(order, scale_dtype):
    rng = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2 * INTER, H // 2), dtype=torch.uint8, generator=rng)
    sf = torch.randint(0, 0x7F, (2 * INTER, H // 16), dtype=torch.uint8, generator=rng)
    codes2 = torch.randint(0, 256, (H, INTER // 2), dtype=torch.uint8, generator=rng)
    sf2 = torch.randint(0, 0x7F, (H, INTER // 16), dtype=torch.uint8, generator=rng)
    out = PreparedWeights.empty(2, H, INTER)
    prepare_quantized_expert(
        out,
        1,
        codes,
        sf.view(scale_dtype),
        codes2,
        sf2.view(scale_dtype),
        w13_order=order,
        w13_scale=0.125,
        w2_scale=torch.tensor([3.0]),
    )
    got = unprepare(out, 1)
    arrange = swap if order == "gate_up" else torch.Tensor.clone
    assert got.w13_codes.equal(arrange(codes)) and got.w2_codes.equal(codes2)
    assert got.w13_sf.view(torch.uint8).equal(arrange(sf))
    assert got.w2_sf.view(torch.uint8).equal(sf2)
    assert out.w13_scale.tolist() == [1, 0.125] and out.w2_scale.tolist() == [1, 3]


def test_quant_scales_combine_decode_factors():
    out = PreparedWeights.empty(E, H, INTER)
    out.w13_scale.copy_(torch.tensor([1.0, 2.0, 4.0]))
    out.w2_scale.copy_(torch.tensor([8.0, 16.0, 0.5]))
    qx, w13_sf, dec1, qa, w2_sf, dec2 = out.quant_scales(0.5, torch.tensor([0.25, 0.5, 4.0]))
    assert qx.tolist() == [2] and qx.dtype == torch.float32
    assert w13_sf is out.w13_sf and w2_sf is out.w2_sf
    assert dec1.tolist() == [0.5, 1, 2]
    assert qa.tolist() == [4, 2, 0.25]
    assert dec2.tolist() == [2, 8, 2]
    shared = out.quant_scales(torch.tensor([0.5]), 0.25)[3]
    assert shared.tolist() == [4, 4, 4] and shared.is_contiguous()
    for dx, da, message in [
        (0.0, 1.0, r"input_scale: .*got 0\.0"),
        (1.0, float("nan"), "intermediate_scale: .*got nan"),
        (1.0, torch.tensor([1.0, -1.0, 1.0]), r"intermediate_scale: .*got -1\.0 at index 1"),
        (1.0, torch.ones(2), r"intermediate_scale: expected one value or 3, got \(2,\)"),
        (torch.ones(3), 1.0, "input_scale: expected one value"),
        (1e-40, 1.0, "input_scale: "),  # its reciprocal is infinite
    ]:
        with pytest.raises(ValueError, match=message):
            out.quant_scales(dx, da)


def test_refused_expert_is_not_written(layer):
    w13, w2 = layer
    out = prepare_weights(w13, w2, w13_order="up_gate")
    before = {name: tensor.clone() for name, tensor in out.tensors().items()}
    broken = w2[0].clone()
    broken[0, 0] = float("nan")
    with pytest.raises(ValueError, match="w2"):
        prepare_expert(out, 0, -w13[0], broken, w13_order="up_gate", w13_scale=2.0)
    assert equal(out, PreparedWeights(**before))


@pytest.mark.parametrize(("byte", "nan", "sign"), [(0x7F, 1, 0), (0x80, 0, 1), (0xFF, 1, 1)])
def test_quantized_expert_refuses_bad_block_scales(byte, nan, sign):
    out = PreparedWeights.empty(2, H, INTER)
    codes, sf = torch.zeros(2 * INTER, H // 2).byte(), torch.zeros(2 * INTER, H // 16).byte()
    codes2, sf2 = torch.zeros(H, INTER // 2).byte(), torch.zeros(H, INTER // 16).byte()
    sf2[3, 2] = byte
    options = {"w13_order": "up_gate", "w13_scale": 1.0, "w2_scale": 1.0}
    message = f"w2_sf of expert 1: .* got {nan} NaN and {sign} with the sign bit"
    with pytest.raises(ValueError, match=message):
        prepare_quantized_expert(out, 1, codes, sf, codes2, sf2, **options)
    sf2[3, 2] = 0x7E
    prepare_quantized_expert(out, 1, codes, sf, codes2, sf2, **options)
    with pytest.raises(TypeError, match=r"w13_sf of expert 1: expected torch\.float8_e4m3fn"):
        prepare_quantized_expert(out, 1, codes, sf.float(), codes2, sf2, **options)
    with pytest.raises(ValueError, match=r"w13_codes: expected shape \(128, 128\)"):
        prepare_quantized_expert(out, 1, codes[:, :3], sf, codes2, sf2, **options)
    with pytest.raises(ValueError, match=r"w2_scale of expert 1: .*got -2\.0"):
        prepare_quantized_expert(out, 1, codes, sf, codes2, sf2, **{**options, "w2_scale": -2.0})


def test_prepared_weights_check_themselves():
    fields = PreparedWeights.empty(E, H, INTER).tensors()
    for name, value, message in [
        ("w13_sf", fields["w13_sf"].view(torch.uint8), "w13_sf: expected torch.float8_e4m3fn"),
        ("w2_scale", torch.ones(E + 1), r"w2_scale: expected shape \(3,\), got \(4,\)"),
        ("w13", fields["w13"].transpose(1, 2).contiguous().transpose(1, 2), "w13: .*contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            PreparedWeights(**{**fields, name: value})
    with pytest.raises(ValueError, match="num_experts: expected a positive number, got 0"):
        PreparedWeights.empty(0, H, INTER)
    assert PreparedWeights.LAYOUT_VERSION == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        PreparedWeights(**fields).w13 = fields["w13"]


def test_trtllm_config_returns_upstream_keys(layer):
    w1, w2 = layer
    sizes = {"num_local_experts": E, "hidden_size": H, "intermediate_size": INTER}
    got = TrtllmFp4Config.prepare_weights(w1, w2, **sizes, permute_cache={})
    plain = prepare_weights(w1, w2, w13_order="up_gate")
    assert list(got) == [
        "gemm1_weights",
        "gemm1_weights_scale",
        "gemm2_weights",
        "gemm2_weights_scale",
        "output1_scale_scalar",
        "output1_scale_gate_scalar",
        "output2_scale_scalar",
        "gemm1_alpha",
        "gemm1_beta",
    ]
    for key, name in [("gemm1_weights", "w13"), ("gemm1_weights_scale", "w13_sf")]:
        assert got[key].view(torch.uint8).equal(plain.tensors()[name].view(torch.uint8))
        assert got[key].dtype == plain.tensors()[name].dtype
    for key, name in [("gemm2_weights", "w2"), ("gemm2_weights_scale", "w2_sf")]:
        assert got[key].view(torch.uint8).equal(plain.tensors()[name].view(torch.uint8))
        assert got[key].dtype == plain.tensors()[name].dtype
    ones = got["output1_scale_scalar"]
    assert ones.tolist() == [1] * E
    assert ones is got["output1_scale_gate_scalar"] and ones is got["output2_scale_scalar"]
    assert got["gemm1_alpha"].tolist() == [4] * E and got["gemm1_beta"].tolist() == [25] * E
    other = TrtllmFp4Config.prepare_weights(w1, w2, **sizes, activation=SiTU(2.0, 9.0))
    assert other["gemm1_alpha"].tolist() == [2] * E and other["gemm1_beta"].tolist() == [9] * E

    nvfp4 = QuantFormat.NVFP4
    for changes, error, message in [
        ({"quant": QuantConfig()}, NotImplementedError, "quant.weight: .*NVFP4, got .*BF16"),
        ({"quant": QuantConfig(nvfp4, QuantFormat.MXFP8)}, NotImplementedError, "quant.activation"),
        ({"quant": QuantConfig(nvfp4, nvfp4, QuantFormat.FP16)}, ValueError, "quant.output"),
        ({"activation": ActivationType.Swiglu}, NotImplementedError, "activation: expected SiTU"),
        ({"activation": SiTU(clamp_limit=7.0)}, NotImplementedError, "clamp_limit: .*got 7.0"),
        ({"num_local_experts": 4}, ValueError, r"w1_bf16: expected shape \(4, 128, 256\)"),
        ({"hidden_size": 192}, ValueError, "hidden_size: .*got 192"),
    ]:
        with pytest.raises(error, match=message):
            TrtllmFp4Config.prepare_weights(w1, w2, **{**sizes, **changes})


def test_trtllm_activations():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed, scales = TrtllmFp4Config.prepare_activations(x)
    want = qz.quantize_precise(x)
    assert packed.equal(want[0]) and scales.view(torch.uint8).equal(want[1])
    assert scales.dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"got \(5, 8\)"):
        TrtllmFp4Config.prepare_activations(x[:, :8])
    with pytest.raises(TypeError, match=r"torch\.float16"):
        TrtllmFp4Config.prepare_activations(x.half())


def test_config_values():
    names = "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ"
    assert " ".join(a.name for a in ActivationType) == names + " InvalidType"
    assert [int(a) for a in ActivationType] == list(range(12))
    assert {f.name: f.value for f in QuantFormat} == {
        "BF16": 0,
        "FP16": 1,
        "FP8PerTensor": 2,
        "DeepSeekFp8": 3,
        "MXFP8": 4,
        "NVFP4": 5,
        "MXFP4": 6,
        "MXINT4": 7,
        "INT4": 8,
    }
    assert SiTU() == SiTU(4.0, 25.0, None)
    for name, value in [("gate_scale", 0), ("linear_scale", float("inf")), ("clamp_limit", -1.0)]:
        with pytest.raises(ValueError, match=f"{name}: expected a finite positive number"):
            SiTU(**{name: value})
    with pytest.raises(ValueError, match="weight: expected a QuantFormat, got 'NVFP4'"):
        QuantConfig(weight="NVFP4")


def test_import_needs_neither_rich_nor_numpy():
    code = (
        "import sys; sys.modules['rich'] = sys.modules['numpy'] = None;"
        "import cake, cake.weights, cake.modelopt"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_preparation_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    """Servers load models under torch.set_default_dtype(bfloat16)."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(2, 128, 128, generator=generator).bfloat16()
    w2 = torch.randn(2, 128, 64, generator=generator).bfloat16()

    def prepare() -> list[torch.Tensor]:
        weights = prepare_weights(w13, w2, w13_order="up_gate", w13_scale="amax", w2_scale=0.1)
        return [*weights.tensors().values(), *weights.quant_scales(0.3, 0.7)]

    expected = prepare()
    torch.set_default_dtype(dtype)
    try:
        actual = prepare()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))
