"""The humming peer on the CPU: its Triton kernels interpreted, humming itself replaced.

Run by test_peers.py in a process of its own, for TRITON_INTERPRET=1 counts when Triton is imported.
The stand-in reads orders, tiles and activation expression as humming does, in plain torch.
"""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cake.check import Batch
from cake.peers import humming
from cake.peers.measure import output_error
from cake.quantize import dequantize
from cake.testing.synthetic import fill_random_prepared, make_tokens

E, H, I, K = 11, 128, 64, 4  # noqa: E741
BLOCKS = {8: (8, 8), 10**6: (24, 40)}  # up to so many pairs: row blocks of FC1 and FC2


class NvfpSchema:
    def convert_humming(self, tensors: Any, shape_n_stacks: list[int], **options: Any) -> Any:
        assert sum(shape_n_stacks) == tensors["weight"].shape[1]
        assert 2 * tensors["weight"].shape[2] == options["shape_k_stacks"][0]
        assert tensors["weight_scale"].dtype is torch.float8_e4m3fn
        return "schema", tensors


def transform(tensors: Any, shape_n: int, shape_k: int, **options: Any) -> Any:
    config = SimpleNamespace(
        first=shape_k == H, to_str=lambda: json.dumps({"shape_n": shape_n, "shape_k": shape_k})
    )
    return config, tensors


def tune(config: Any, **options: Any) -> list[Any]:
    lows = [0, *BLOCKS]
    return [
        (low, high, {"block_shape": (blocks[0 if config.first else 1], 128, 64)})
        for low, (high, blocks) in zip(lows, BLOCKS.items(), strict=False)
    ]


compiled: list[Any] = []


def forward(config: Any, inputs: Tensor, outputs: Tensor, **options: Any) -> None:
    assert json.loads(options["compute_config"])["gemm_type"] == "indexed"
    tile = json.loads(options["tuning_config"])
    assert tile in [kept[2] for kept in compiled]
    block, count = tile["block_shape"][0], int(options["num_tokens_padded"])
    assert count % block == 0 and count <= options["sorted_ids"].numel()
    weight = dequantize(
        options["weight"], options["weight_scale"], options["weight_scale_2"][:, None, None]
    )
    rows = options["sorted_ids"][:count].view(-1, block).tolist()
    outputs.fill_(math.nan)  # rows of empty slots are never written
    for ids, expert in zip(rows, options["expert_ids"].tolist(), strict=False):
        pairs = [i for i in ids if i < outputs.shape[0]]
        assert pairs and all(i == outputs.shape[0] for i in ids[len(pairs) :])
        sources = torch.tensor(pairs) // options["top_k"]
        outputs[pairs] = (inputs[sources].float() @ weight[expert].T).bfloat16()


def process_input(config: Any, inputs: Tensor, outputs: Tensor, **options: Any) -> None:
    assert options["activation_type"] == "binary_split"
    functions = {"tanhf": torch.tanh, "expf": torch.exp}
    a, b = inputs.float().chunk(2, -1)
    expression = options["activation_impl"].replace("f ", " ").replace("f)", ")")
    outputs.copy_(eval(expression, {**functions, "a": a, "b": b}))


def prepare_kernels(config: str, compute: str, tiles: str, device: Any) -> None:
    compiled.extend(json.loads(tiles))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "humming.schema.modelopt": {"ModeloptNvfp4WeightSchema": NvfpSchema},
        "humming.transform": {"prepare_and_transform_humming_tensors": transform},
        "humming.tune": {"get_heuristics_config": tune},
        "humming.forward": {"humming_forward": forward, "may_process_input": process_input},
        "humming.kernel.humming": {
            "HummingKernel": SimpleNamespace(prepare_kernels=prepare_kernels)
        },
    }
    for name in ("humming", "humming.schema", "humming.kernel", *modules):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    compiled.clear()


def make_batch(tokens: int, kind: str) -> Batch:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, E, generator=generator).topk(K).indices.int()
    if kind == "one_expert":
        ids.fill_(E - 1)
    if kind == "empty":
        ids[0, 1], ids[-1, 0] = -1, E
    weights = torch.rand(tokens, K, generator=generator).bfloat16()
    return Batch(make_tokens(tokens, tokens, H), ids, weights)


@pytest.mark.parametrize("kind", ["random", "one_expert", "empty"])
def test_chain(kind: str) -> None:
    counts = [1, 2, 7, 90]
    weights, _ = fill_random_prepared(1, E, H, I)
    peer = humming.create(weights, K, counts)
    assert {tile[2]["block_shape"][0] for tile in compiled} == {8, 24, 40}
    for tokens in (*counts, *counts):  # what a call leaves does not hurt the next
        batch = make_batch(tokens, kind)
        output = peer.call(batch)
        assert output_error(output, batch, weights) < peer.tolerance
        assert output.shape == batch.tokens.shape


def test_only_what_is_asked_for_is_compiled() -> None:
    peer = humming.create(fill_random_prepared(1, E, H, I)[0], K, [2])
    assert {tile[2]["block_shape"][0] for tile in compiled} == {8}
    with pytest.raises(ValueError, match=r"batch: expected \[2\] tokens, got 3"):
        peer.call(make_batch(3, "random"))


def test_a_failed_call_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = fill_random_prepared(1, E, H, I)
    peer, batch = humming.create(weights, K, [7]), make_batch(7, "random")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["humming.forward"], "may_process_input", None)
        with pytest.raises(TypeError):
            peer.call(make_batch(7, "one_expert"))
    assert output_error(peer.call(batch), batch, weights) < peer.tolerance
