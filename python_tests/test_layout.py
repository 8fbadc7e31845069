from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cake import layout

intermediates = st.integers(1, 24).map(lambda n: 64 * n)
hiddens = st.integers(1, 40).map(lambda n: 128 * n)


def test_row_orders_match_upstream(golden):
    perm = golden("perm")
    for name in ("fc1_src_768", "fc1_sf_src_768"):
        assert layout.fc1_row_order(384).tolist() == perm[name].tolist()
    for name in ("fc2_src_3584", "fc2_sf_src_3584"):
        assert layout.fc2_row_order(3584).tolist() == perm[name].tolist()


@pytest.mark.parametrize(
    ("physical", "logical"),
    list(
        zip(
            (0, 1, 7, 8, 9, 16, 24, 31, 32, 40, 127, 128, 200, 767),
            (0, 2, 14, 384, 386, 1, 385, 399, 16, 400, 447, 64, 480, 767),
            strict=True,
        )
    ),
)
def test_fc1_examples(physical, logical):
    assert layout.fc1_row_order(384)[physical] == logical


@pytest.mark.parametrize(
    ("logical", "physical"), [(5, 18), (389, 26), (484, 202), (383, 759), (767, 767)]
)
def test_fc1_inverse_examples(logical, physical):
    assert layout.invert_order(layout.fc1_row_order(384))[logical] == physical


def test_fc2_examples():
    order = layout.fc2_row_order(3584)
    inverse = layout.invert_order(order)
    for physical, logical in [(0, 0), (1, 4), (8, 1), (16, 2), (24, 3), (31, 31), (33, 36)]:
        assert order[physical] == logical
    assert order[100] == 112
    for logical, physical in [(1, 8), (2, 16), (4, 1), (1000, 994)]:
        assert inverse[logical] == physical


@given(intermediates)
def test_fc1_order_keeps_a_feature_group_in_its_block(intermediate):
    order = layout.fc1_row_order(intermediate)
    assert order.sort().values.equal(torch.arange(2 * intermediate))
    block = torch.arange(2 * intermediate) // 32
    assert (order % intermediate // 16).equal(block)
    # Groups of eight rows alternate between up and gate.
    assert (order // intermediate).equal(torch.arange(2 * intermediate) // 8 % 2)


@given(hiddens)
def test_fc2_order_is_a_permutation_inside_blocks_of_32(hidden):
    order = layout.fc2_row_order(hidden)
    assert order.sort().values.equal(torch.arange(hidden))
    assert (order // 32).equal(torch.arange(hidden) // 32)
    inverse = layout.invert_order(order)
    assert inverse[order].equal(torch.arange(hidden))
    assert order[inverse].equal(torch.arange(hidden))
    assert not inverse.equal(order)


@pytest.mark.parametrize(("rows", "cols"), [(128, 8), (768, 224), (3584, 24)])
def test_scale_offsets_match_upstream(golden, rows, cols):
    expected = golden("sf_offset")[f"off_{rows}x{cols}"]
    assert (layout.scale_offset(rows, cols).numpy() == expected).all()


def test_scale_offset_examples():
    fc1, fc2 = layout.scale_offset(768, 224), layout.scale_offset(3584, 24)
    for n, c, offset in [(0, 3, 3), (0, 4, 512), (1, 0, 16), (32, 0, 4), (127, 7, 1023)]:
        assert fc1[n, c] == offset
    for n, c, offset in [(128, 0, 28672), (300, 100, 70340), (767, 223, 172031)]:
        assert fc1[n, c] == offset
    for n, c, offset in [(5, 6, 594), (200, 9, 4233), (3583, 23, 86015)]:
        assert fc2[n, c] == offset


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_interleave_follows_scale_offset(row_tiles, col_tiles, experts):
    rows, cols = 128 * row_tiles, 4 * col_tiles
    linear = torch.randint(0, 256, (experts, rows, cols), dtype=torch.uint8)
    stored = layout.interleave_scales(linear)
    offset = layout.scale_offset(rows, cols)
    assert offset.flatten().sort().values.equal(torch.arange(rows * cols))
    assert stored.shape == linear.shape
    assert stored.flatten(1)[:, offset.flatten()].equal(linear.flatten(1))
    assert layout.deinterleave_scales(stored).equal(linear)


def test_interleave_writes_into_out_and_reads_strided():
    linear = torch.arange(128 * 8).remainder(251).to(torch.uint8).reshape(8, 128).t()
    out = torch.zeros(3, 128, 8, dtype=torch.uint8)
    result = layout.interleave_scales(linear, out=out[1])
    assert result.data_ptr() == out[1].data_ptr()
    assert out[1].equal(layout.interleave_scales(linear.contiguous()))
    assert not out[0].any() and not out[2].any()


def test_combined_examples():
    # Gate feature 5, h = 100: row 26, scale offset 930. Output 1000, j = 200: row 994, 23084.
    row = layout.invert_order(layout.fc1_row_order(384))[384 + 5]
    assert (row, layout.scale_offset(768, 224)[row, 100 // 16]) == (26, 930)
    row = layout.invert_order(layout.fc2_row_order(3584))[1000]
    assert (row, layout.scale_offset(3584, 24)[row, 200 // 16]) == (994, 23084)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layout.fc1_row_order(96), "intermediate: .*64, got 96"),
        (lambda: layout.fc2_row_order(0), "hidden: .*128, got 0"),
        (lambda: layout.scale_offset(64, 4), "rows: .*128, got 64"),
        (lambda: layout.scale_offset(128, 6), "cols: .*4, got 6"),
        (lambda: layout.interleave_scales(torch.zeros(96, 4)), "rows: .*128, got 96"),
        (lambda: layout.deinterleave_scales(torch.zeros(128, 2)), "columns: .*4, got 2"),
        (lambda: layout.check_geometry(192, 64), "hidden: .*128, got 192"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
