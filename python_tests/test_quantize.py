from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cake import quantize as qz

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def nearest_even(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest grid value; of two equally near ones, the even index."""
    above = np.searchsorted(grid, values).clip(1, len(grid) - 1)
    below = above - 1
    up, down = grid[above] - values, values - grid[below]
    even = np.where(above % 2 == 0, above, below)
    index = np.where(up < down, above, np.where(down < up, below, even))
    return np.where(values >= grid[-1], len(grid) - 1, index)


def unhex(text: str) -> list[int]:
    return list(bytes.fromhex(text.replace(" ", "")))


def test_formats_match_upstream(golden):
    data = golden("formats")
    codes = qz.e2m1_encode(torch.from_numpy(data["e2m1_in"]))
    assert codes.tolist() == data["e2m1_code"].tolist()
    codes = qz.e4m3_encode(torch.from_numpy(data["e4m3_in"]))
    assert codes.tolist() == data["e4m3_byte"].tolist()


def test_e2m1_of_every_bf16_value():
    codes = qz.e2m1_encode(ALL_BF16).numpy()
    values = ALL_BF16.double().numpy()
    nan = np.isnan(values)
    expected = nearest_even(np.abs(values[~nan]), E2M1) + 8 * np.signbit(values[~nan])
    assert (codes[~nan] == expected).all()
    assert (codes[nan] == 7).all()


def test_e4m3_of_every_bf16_value():
    codes = qz.e4m3_encode(ALL_BF16).numpy()
    values = ALL_BF16.double().numpy()
    nan = np.isnan(values)
    expected = nearest_even(np.abs(values[~nan]), E4M3) + 128 * np.signbit(values[~nan])
    assert (codes[~nan] == expected).all()
    assert (codes[nan] == 0x7F).all()


def test_codes_survive_decode_and_encode():
    codes = torch.arange(16, dtype=torch.uint8)
    values = [*E2M1.tolist(), *(-E2M1).tolist()]
    assert qz.e2m1_decode(codes).tolist() == values
    assert qz.e2m1_encode(qz.e2m1_decode(codes)).equal(codes)
    scales = torch.arange(0x7F, dtype=torch.uint8)
    assert qz.e4m3_encode(qz.e4m3_decode(scales)).equal(scales)


def test_packing_puts_even_elements_in_the_low_nibble():
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    packed = qz.pack_e2m1(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert qz.unpack_e2m1(packed).equal(codes)


@pytest.mark.parametrize("case", range(4))
def test_precise_matches_upstream(golden, case):
    data = golden("quant_edge")
    x = torch.from_numpy(data["x_bf16_bits"]).view(torch.bfloat16)
    packed, sf = qz.quantize_precise(x, float(data[f"gs_{case}"]))
    assert (sf.numpy() == data[f"sf_{case}"]).all()
    assert (packed.numpy() == data[f"packed_{case}"]).all()


@pytest.mark.parametrize("case", range(3))
def test_intermediate_matches_the_model(golden, case):
    data = golden("quant_intermediate_model")
    packed, sf = qz.quantize_intermediate(torch.from_numpy(data["act"]), float(data[f"qa_{case}"]))
    assert (sf.numpy() == data[f"sf_{case}"]).all()
    assert (packed.numpy() == data[f"packed_{case}"]).all()


PRECISE = [0.5, -1, 2, -3, 0.1, 0.2, -0.3, 0.7, 1.1, -1.3, 1.9, 2.2, -2.6, 2.9, 0.05, -0.01]


@pytest.mark.parametrize(
    ("q", "scale", "text"),
    [
        (1.0, 0x30, "c2 f6 10 39 d4 66 7f 80"),
        (896.0, 0x7E, "c2 f6 10 39 d4 66 7f 80"),
        (100.0, 0x65, "c2 f6 10 39 c4 66 7e 80"),
    ],
)
def test_precise_worked_example(q, scale, text):
    packed, sf = qz.quantize_precise(torch.tensor(PRECISE, dtype=torch.bfloat16), q)
    assert sf.tolist() == [scale]
    assert packed.tolist() == unhex(text)


@pytest.mark.parametrize(
    ("q", "scale", "codes"),
    [(1.0, 0x40, [7, 11, 1, 5, 14, 2]), (26.88, 0x66, [7, 11, 1, 5, 14, 1])],
)
def test_intermediate_worked_example(q, scale, codes):
    a = torch.tensor([12.5, -3.1, 0.7, 6.2, -9.9, 1.55] + [0.0] * 10)
    packed, sf = qz.quantize_intermediate(a, q)
    assert sf.tolist() == [scale]
    assert qz.unpack_e2m1(packed).tolist() == codes + [0] * 10


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("block", "scale", "text"),
    [
        ([0.0] * 16, 0x00, "00" * 8),
        ([-0.0] * 16, 0x00, "88" * 8),
        ([0.004, -0.002, 0.0, -1e-20] + [0.0] * 12, 0x00, "f7 f0" + "00" * 6),
        ([NAN] + [1.0] * 15, 0x23, "77" * 8),
        ([1.0, 1.0, INF] + [1.0] * 13, 0x7E, "00 07" + "00" * 6),
        ([1.0, 1.0, -INF] + [1.0] * 13, 0x7E, "00 0f" + "00" * 6),
        ([NAN] * 16, 0x7F, "77" * 8),
        ([3008.0] * 16, 0x7E, "77" * 8),
    ],
)
def test_precise_edge_cases(block, scale, text):
    packed, sf = qz.quantize_precise(torch.tensor(block, dtype=torch.bfloat16))
    assert sf.tolist() == [scale]
    assert packed.tolist() == unhex(text)


def test_precise_scale_tie_rounds_to_zero_with_codes_that_do_not_matter():
    x = torch.full((16,), 6 * 2.0**-10, dtype=torch.bfloat16)
    packed, sf = qz.quantize_precise(x)
    assert sf.tolist() == [0] and packed.all()
    assert not qz.dequantize(packed, sf).any()


def test_intermediate_flushes_subnormal_products():
    # 2^-118 / 448 is subnormal; kept, q would bring it back to 0.57 and code 1.
    a = torch.tensor([2.0**-118, 2.0**-100] + [0.0] * 14)
    packed, sf = qz.quantize_intermediate(a, 2.0**126)
    assert sf.tolist() == [0x7E]
    assert qz.unpack_e2m1(packed).tolist() == [0, 7] + [0] * 14


def test_intermediate_scale_keeps_the_order_of_the_products():
    # amax * q / 6 is next to the ties 50 and 19; (q / 6) * amax and (amax / 6) * q fall elsewhere.
    a = torch.zeros(2, 16)
    a[:, 0] = torch.tensor([float.fromhex("0x1.652494p+3"), float.fromhex("0x1.0f6db6p+2")])
    assert qz.quantize_intermediate(a, 26.88)[1].tolist() == [[100], [90]]


def test_scales_broadcast_over_leading_dimensions():
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = torch.tensor([1.0, 50.0, 613.7])
    packed, sf = qz.quantize_precise(x, q[:, None, None])
    assert packed.shape == (3, 5, 16) and sf.shape == (3, 5, 2)
    values = qz.dequantize(packed, sf, (1 / q)[:, None, None])
    for e in range(3):
        one = qz.quantize_precise(x[e], float(q[e]))
        assert one[0].equal(packed[e]) and one[1].equal(sf[e])
        assert qz.dequantize(*one, float(1 / q[e])).equal(values[e])


def test_dequantize_by_hand():
    packed = torch.tensor(unhex("c2 f6 10 39 d4 66 7f 80"), dtype=torch.uint8)
    values = qz.dequantize(packed, torch.tensor([0x30], dtype=torch.uint8), 10.0)
    expected = [5, -10, 20, -30, 0, 2.5, -2.5, 7.5, 10, -15, 20, 20, -30, 30, 0, -0.0]
    assert values.tolist() == expected


finite_blocks = hnp.arrays(
    np.float32, (2, 16), elements=st.floats(-1000, 1000, width=32, allow_subnormal=False)
)


@given(finite_blocks, st.sampled_from([1.0, 2.5, 0.5]))
def test_codes_minimise_the_error(block, q):
    x = torch.from_numpy(block).bfloat16()
    packed, sf = qz.quantize_precise(x, q)
    step = (qz.e4m3_decode(sf).double() / q).unsqueeze(-1).unsqueeze(-1).numpy()
    grid = np.concatenate([E2M1, -E2M1]) * step
    best = np.abs(x.double().numpy().reshape(2, 1, 16, 1) - grid).min(-1).reshape(2, 16)
    error = np.abs(x.double().numpy() - qz.dequantize(packed, sf, 1 / q).double().numpy())
    # A tie may fall either way by rounding of 1 / (sf / q): allow a few float32 ulps.
    assert (error <= best + 4e-6 * np.abs(x.double().numpy())).all()


@given(
    st.lists(st.integers(0, 15), min_size=16, max_size=16),
    st.integers(8, 0x7E),
    st.sampled_from([1.0, 2.0, 0.25]),
)
def test_representable_blocks_survive(codes, scale, q):
    codes[0] = 7  # the largest magnitude, so that the scale is found again
    packed = qz.pack_e2m1(torch.tensor(codes, dtype=torch.uint8))
    sf = torch.tensor([scale], dtype=torch.uint8)
    values = qz.dequantize(packed, sf, 1 / q)
    again = qz.quantize_precise(values, q)
    assert again[1].equal(sf) and again[0].equal(packed)
    again = qz.quantize_intermediate(values, q)
    assert again[1].equal(sf) and again[0].equal(packed)


def test_refusals():
    with pytest.raises(ValueError, match=r"multiple of 16, got shape \(2, 24\)"):
        qz.quantize_precise(torch.zeros(2, 24))
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int32"):
        qz.quantize_intermediate(torch.zeros(16, dtype=torch.int32))
