"""The floor, and the prediction for Blackwell: arithmetic that needs no GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cake import roofline
from cake.testing.synthetic import route

B200 = roofline.Gpu(num_sms=148, read_bytes_per_s=7.6e12, graph_node_us=1.0)
TOKENS = tuple(2**i for i in range(15))


def predict(tokens: int, gpu: roofline.Gpu = B200) -> roofline.Prediction:
    plan = roofline.plan_of(tokens, gpu)
    return roofline.predict(roofline.expected_load(tokens, plan), plan, gpu)


def limiter(tokens: int) -> str:
    """Of the stage that takes longest."""
    return max(predict(tokens).stages, key=lambda stage: stage.us).limiter


def test_sizes_are_those_of_the_geometry() -> None:
    hidden, rank = 3584, 384
    fc1, fc2 = 2 * rank * hidden, hidden * rank
    assert fc1 // 2 + fc1 // 16 == roofline.FC1_EXPERT_BYTES
    assert fc2 // 2 + fc2 // 16 == roofline.FC2_EXPERT_BYTES
    assert 2 * (fc1 + fc2) == roofline.PAIR_FLOP


@pytest.mark.parametrize("tokens", [1, 16, 100, 512, 3000, 8192, 12289, 16384])
def test_expected_load_is_that_of_random_routing(tokens: int) -> None:
    plan = roofline.plan_of(tokens, B200)
    expected = roofline.expected_load(tokens, plan)
    load = roofline.load_of(route(tokens, 5, kind="random")[0], plan)
    assert (load.chunks, load.tokens) == (expected.chunks, expected.tokens)
    assert load.experts == pytest.approx(expected.experts, rel=0.05)
    assert load.tiles == pytest.approx(expected.tiles, rel=0.05)


def test_load_counts_experts_and_tiles_of_used_slots() -> None:
    ids = torch.full((10, 16), -1, dtype=torch.int32)
    ids[:, 0], ids[:9, 1], ids[:, 2] = 7, 895, 896  # 896: no expert
    load = roofline.load_of(ids, {"tokens_per_chunk": 10, "tile_pairs": 8})
    assert (load.experts, load.tiles, load.pairs) == (2, 4, 160)


def test_only_blackwell_is_predicted() -> None:
    known = [c for c in ((9, 0), (10, 0), (10, 1), (10, 3), (12, 0)) if roofline.predicts(c)]
    assert known == [(10, 0), (10, 3)]


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_prediction_is_above_the_floor_and_adds_up(tokens: int) -> None:
    prediction = predict(tokens)
    experts = roofline.expected_experts(tokens)
    assert prediction.us > roofline.floor_us(experts, tokens, B200.read_bytes_per_s, 10e15)
    assert prediction.us == prediction.chunks * sum(stage.us for stage in prediction.stages)
    weights = prediction.fc1.traffic.memory + prediction.fc2.traffic.memory
    assert weights >= 0.999 * roofline.EXPERT_BYTES * experts


def test_predictions_grow_with_tokens_and_shrink_with_bandwidth() -> None:
    times = [predict(tokens).us for tokens in TOKENS]
    assert times == sorted(times)
    faster = dataclasses.replace(B200, read_bytes_per_s=2 * B200.read_bytes_per_s)
    slower_nodes = dataclasses.replace(B200, graph_node_us=2.0)
    for tokens, us in zip(TOKENS, times, strict=True):
        assert predict(tokens, faster).us < us or limiter(tokens) == "L2"
        assert predict(tokens, slower_nodes).us - us > 3.9  # four launches or more
    assert predict(64).fc1.limiter == "memory"
    assert limiter(1) == "latency"


def test_rows_that_leave_l2_cost_memory_traffic() -> None:
    rows = 2048 * 16 * 7168
    parts = roofline.plan_of(2048, B200)["fc2_parts"]
    assert parts > 1
    all_in_l2 = dataclasses.replace(B200, l2_bytes=2 * rows / parts)
    none_in_l2 = dataclasses.replace(B200, l2_bytes=rows / parts)
    weights = 896 * roofline.FC2_EXPERT_BYTES
    assert predict(2048, none_in_l2).fc2.traffic.memory == pytest.approx(weights + rows)
    assert predict(2048, all_in_l2).fc2.traffic.memory == pytest.approx(weights)
    assert predict(2048, all_in_l2).finalize.traffic.memory == 0


def test_the_tables_of_the_documentation_are_current() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "blackwell_table.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
