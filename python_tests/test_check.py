"""`cake check` compares the stages in the order in which each GPU's kernels leave them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from cake import check
from cake.check import Call, Layer, make_batch

TOKENS = 3


@pytest.fixture(scope="module")
def expected(cpu_layer: Layer) -> Call:
    call = Call(cpu_layer, make_batch(TOKENS, "random", 0))
    call.batch.topk_ids[0, 3] = -1  # an empty slot
    call.run()
    return call


def on_gpu(expected: Call, *, by_position: bool) -> Call:
    """The same call as a GPU would leave it."""
    pairs = expected.region("expert_pairs").view(torch.int32)[: TOKENS * 16 - 1].long()

    def region(name: str) -> Tensor:
        data = expected.region(name).clone()
        if by_position and name in ("fc1_packed", "fc1_sf"):
            rows = data.view(TOKENS * 16, -1)
            rows[: pairs.numel()] = rows[pairs]
        return data

    # Only the device of the tokens is asked for.
    batch = SimpleNamespace(
        tokens=SimpleNamespace(device=torch.device("cuda"), shape=expected.batch.tokens.shape),
        topk_ids=expected.batch.topk_ids,
    )
    return cast("Call", SimpleNamespace(region=region, batch=batch))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_stages_are_compared_in_the_order_of_the_gpu(
    expected: Call, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=capability[0], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    blackwell = capability[0] == 10
    check.compare_stages(on_gpu(expected, by_position=blackwell), expected)
    with pytest.raises(AssertionError, match="T=3: CodeComparison"):
        check.compare_stages(on_gpu(expected, by_position=not blackwell), expected)
