"""The operation at real geometry against its definition, and what may not change a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layer_calls import Call, E, K, Layer, assert_same_bits, betas, reference, run
from torch import Tensor

from cake.testing.numeric import check_outputs
from cake.testing.synthetic import Routing, route


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "tokens, routing",
    [
        (1, "random"),
        (3, "softmax"),
        (3, "zipf"),
        (8, "one_expert"),
        (3, "duplicates"),
        (8, "same"),
        (64, "same"),
        (64, "one_expert"),
    ],
)
def test_agrees_with_the_definition(layer: Layer, tokens: int, routing: Routing) -> None:
    if routing == "softmax":
        call = layer.call(tokens)
        ids, weights = route(tokens, kind="softmax", tokens=call["input"])
        call |= {"token_selected_experts": ids, "token_final_scales": weights}
    else:
        call = layer.call(tokens, routing=routing)
    check_outputs(run(call), reference(call), context=f"{routing}, {tokens} tokens")


def test_smoothing_parameters_per_expert(layer: Layer) -> None:
    call = {**layer.call(3), **betas()}
    call["situ_beta"] = torch.linspace(0.5, 8.0, E)
    call["situ_linear_beta"] = torch.linspace(40.0, 3.0, E)
    output = run(call)
    check_outputs(output, reference(call), min_peak=0.5)
    assert not torch.equal(output, run(call, **betas()))


def test_negative_and_unnormalized_weights(layer: Layer) -> None:
    call = layer.call(3)
    call["token_final_scales"] = (torch.randn(3, K) * 3).bfloat16()
    check_outputs(run(call), reference(call))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_stays_in_its_token(layer: Layer, value: float) -> None:
    call = layer.call(4, routing="same")
    expected = run(call)
    x = call["input"].clone()
    x[1, 77] = value
    others = [0, 2, 3]
    assert_same_bits(run(call, input=x)[others], expected[others])
    weights = call["token_final_scales"].clone()
    weights[1, 5] = value
    actual = run(call, token_final_scales=weights)
    assert_same_bits(actual[others], expected[others])
    assert not actual[1].isfinite().any()


@pytest.mark.parametrize("routing", ["random", "same"])
def test_permuted_tokens_give_permuted_rows(layer: Layer, routing: Routing) -> None:
    call = layer.call(8, routing=routing)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
    permuted = {
        name: call[name][order]
        for name in ("input", "token_selected_experts", "token_final_scales")
    }
    assert_same_bits(run(call, **permuted), run(call)[order])


def _alone(layer: Layer, call: Call, token: int) -> Tensor:
    row = slice(token, token + 1)
    names = ("input", "token_selected_experts", "token_final_scales")
    return run(layer.call(1), **{name: call[name][row] for name in names})


def test_a_token_gives_the_same_bits_in_any_batch(layer: Layer) -> None:
    call = layer.call(8, routing="same")
    batch = run(call)
    for token in (0, 3, 7):
        assert_same_bits(_alone(layer, call, token), batch[token : token + 1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("routing", ["random", "one_expert"])
def test_any_number_of_threads_gives_the_same_bits(layer: Layer, routing: Routing) -> None:
    call = layer.call(8, routing=routing)
    expected = run(call)
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        for _ in range(3):
            assert_same_bits(run(call), expected)


def test_a_duplicated_expert_counts_as_often_as_it_is_listed(layer: Layer) -> None:
    call = layer.call(1)
    call["token_selected_experts"] = torch.full((1, K), 17, dtype=torch.int32)
    call["token_final_scales"] = torch.zeros(1, K, dtype=torch.bfloat16)
    call["token_final_scales"][0, 0] = 1.0
    once = run(call)
    call["token_final_scales"][0] = 1.0
    assert_same_bits(run(call), (16 * once.float()).bfloat16())


def test_weighted_slots_add_up_in_ascending_order(layer: Layer) -> None:
    """Each slot alone, then a float32 sum in the order of the slots."""
    call = layer.call(1)
    total = torch.zeros(1, call["input"].shape[1])
    for slot in range(K):
        one = torch.zeros(1, K, dtype=torch.bfloat16)
        one[0, slot] = 1.0
        row = run(call, token_final_scales=one)
        total += call["token_final_scales"][:, slot, None].float() * row.float()
    assert_same_bits(run(call), total.bfloat16())
