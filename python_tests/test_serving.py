"""What the plug-ins for vLLM and SGLang share: the switch, versions, fit, weights, calls."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_calls import Layer, assert_same_bits, run
from serving_doubles import register_parameters
from serving_layers import NAME, RANK, SMALL, TP, checkpoint, load
from torch import Tensor, nn

import cake
from cake.integrations import serving, sglang, vllm
from cake.integrations.serving import ExpertsLayer, LoadedExperts, check_fit
from cake.modelopt import prepare_modelopt_layer
from cake.support import KIMI_K3, Geometry

LOGGER = logging.getLogger("test")


def experts_layer(geometry: Geometry = KIMI_K3, **changes: Any) -> ExpertsLayer:
    values = {
        "name": NAME,
        "geometry": geometry,
        "dtype": torch.bfloat16,
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
    }
    return ExpertsLayer(**{**values, **changes})


def loaded_module(loaded: LoadedExperts, tensors: dict[str, Tensor]) -> nn.Module:
    geometry, module = loaded.layer.geometry, nn.Module()
    register_parameters(module, geometry.num_experts, geometry.hidden, geometry.intermediate, 16)
    loaded.forget_input_scales(module)
    load(module, tensors, geometry)
    return module


@pytest.mark.parametrize("value, on", [(None, False), ("", False), ("0", False), ("1", True)])
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv("CAKE_EXPERTS", raising=False)
    if value is not None:
        monkeypatch.setenv("CAKE_EXPERTS", value)
    assert serving.switched_on() is on


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKE_EXPERTS", "yes")
    for plugin in (vllm, sglang):
        with pytest.raises(ValueError, match="CAKE_EXPERTS: expected 0 or 1, got 'yes'"):
            plugin.register()


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.33.1rc1", "0.33.0.dev7+g1", "0.33.9"])
def test_known_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(serving.metadata, "version", lambda package: version)
    serving.require_version("vllm", "0.32", "0.34")


@pytest.mark.parametrize("version", ["0.31.2", "0.34", "0.34.0.dev1", "1.0", "unknown", None])
@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_other_versions_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, plugin: Any, version: str | None
) -> None:
    def found(package: str) -> str:
        if version is None:
            raise PackageNotFoundError(package)
        return version

    monkeypatch.setattr(serving.metadata, "version", found)
    monkeypatch.setenv("CAKE_EXPERTS", "1")
    oldest, below = plugin.VERSIONS
    package = plugin.__name__.rpartition(".")[2]
    expected = f"{package}: .* got {version or 'none'}: pip install '{package}>={oldest},<{below}'"
    with pytest.raises(cake.UnsupportedError, match=expected):
        plugin.register()


def test_extras_and_entry_points_are_the_plugins() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    groups = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
    for plugin in (vllm, sglang):
        name = plugin.__name__.rpartition(".")[2]
        oldest, below = plugin.VERSIONS
        assert project["optional-dependencies"][name] == [f"{name}>={oldest},<{below}"]
        point = project["entry-points"][groups[name]]
        assert point == {"cake": f"{plugin.__name__}:{plugin.register.__name__}"}


def test_kimi_k3_fits() -> None:
    check_fit(experts_layer(), {"LoRA": False}, "vLLM")


def test_a_misfit_names_every_reason() -> None:
    geometry = Geometry(hidden=7168, intermediate=768, num_experts=112, top_k=8)
    layer = experts_layer(geometry, dtype=torch.float16, situ_beta=None, situ_linear_beta=0.0)
    with pytest.raises(cake.UnsupportedError) as caught:
        check_fit(layer, {"--ep-size": True, "LoRA": False}, "SGLang")
    message = str(caught.value)
    for reason in (
        f"{NAME}: cake cannot run these experts",
        "hidden: expected 3584, got 7168",
        "intermediate: expected 384 on each of 8 tensor-parallel ranks, got 768",
        "num_experts: expected 896, got 112",
        "top_k: expected 16, got 8",
        "dtype: expected torch.bfloat16, got torch.float16",
        "situ_beta: expected a positive number, got None",
        "situ_linear_beta: expected a positive number, got 0.0",
        "--ep-size: expected off, got on",
        "unset CAKE_EXPERTS to serve with the experts of SGLang",
    ):
        assert reason in message
    assert "LoRA" not in message


def test_a_device_that_cannot_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_supported", lambda: (False, "sm_80 has no kernels"))
    with pytest.raises(cake.UnsupportedError, match="sm_80 has no kernels"):
        check_fit(experts_layer(), {}, "vLLM")


def test_loaded_parameters_become_the_prepared_layer() -> None:
    loaded = LoadedExperts(experts_layer(SMALL, situ_beta=3.0, max_tokens=5), LOGGER)
    tensors = checkpoint(SMALL)
    module = loaded_module(loaded, tensors)
    loaded.take(module)
    expected = prepare_modelopt_layer(tensors, tp_rank=RANK, tp_size=TP)
    experts = loaded.experts
    assert experts is not None
    for name, tensor in expected.weights.tensors().items():
        assert getattr(experts, name).view(torch.uint8).equal(tensor.view(torch.uint8)), name
    for got, scale in zip(experts.quant_scales, expected.quant_scales, strict=True):
        assert got.view(torch.uint8).equal(scale.view(torch.uint8))
    assert experts.situ_beta is not None and experts.situ_beta.eq(3.0).all()
    assert experts.situ_linear_beta is not None and experts.situ_linear_beta.eq(25.0).all()
    assert experts.workspace.token_counts == frozenset(range(1, 6))


def test_weights_are_held_once_and_updates_keep_their_place() -> None:
    loaded = LoadedExperts(experts_layer(SMALL, max_tokens=5), LOGGER)
    module = loaded_module(loaded, checkpoint(SMALL))
    loaded.take(module)
    experts = loaded.experts
    assert experts is not None
    places = {name: buffer.data_ptr() for name, buffer in experts.named_buffers()}
    for name in ("w13", "w2"):
        assert getattr(module, f"{name}_weight").data_ptr() == places[name]
        assert getattr(module, f"{name}_weight_scale").data_ptr() == places[f"{name}_sf"]
    before = experts.w13.clone()
    with pytest.raises(cake.UnsupportedError, match="load all tensors of a layer"):
        loaded.take(module)  # nothing was loaded: the bytes are prepared already
    assert experts.w13.equal(before)
    tensors = checkpoint(SMALL, seed=1)
    load(module, tensors, SMALL)
    loaded.take(module)
    assert {name: buffer.data_ptr() for name, buffer in experts.named_buffers()} == places
    expected = prepare_modelopt_layer(tensors, tp_rank=RANK, tp_size=TP)
    assert experts.w13.equal(expected.weights.w13) and experts.w2.equal(expected.weights.w2)
    assert experts.quant_scales[5].equal(expected.quant_scales[5])


def test_the_default_dtype_of_loading_does_not_matter() -> None:
    loaded = LoadedExperts(experts_layer(SMALL, max_tokens=5), LOGGER)
    module = loaded_module(loaded, checkpoint(SMALL))
    torch.set_default_dtype(torch.bfloat16)  # as both frameworks do while they load
    try:
        loaded.take(module)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = prepare_modelopt_layer(checkpoint(SMALL), tp_rank=RANK, tp_size=TP)
    assert loaded.experts is not None
    for index in (0, 2, 3, 5):
        assert loaded.experts.quant_scales[index].equal(expected.quant_scales[index])


def test_layers_share_a_workspace() -> None:
    layers = [LoadedExperts(experts_layer(SMALL, max_tokens=5), LOGGER) for _ in range(2)]
    for layer in layers:
        layer.take(loaded_module(layer, checkpoint(SMALL)))
    first, second = (layer.experts for layer in layers)
    assert first is not None and second is not None and first.workspace is second.workspace


def test_missing_input_scales_take_the_largest(caplog: pytest.LogCaptureFixture) -> None:
    loaded = LoadedExperts(experts_layer(SMALL, max_tokens=5), LOGGER)
    tensors = checkpoint(SMALL, missing=2)
    loaded.take(loaded_module(loaded, tensors))
    expected = prepare_modelopt_layer(
        tensors, tp_rank=RANK, tp_size=TP, missing_input_scale="max"
    ).quant_scales
    assert loaded.experts is not None
    for index in (0, 2, 3, 5):
        assert loaded.experts.quant_scales[index].equal(expected[index])
    assert f"{NAME}: 3 of 18 input scales are missing" in caplog.text


def test_wrong_scales_are_refused_by_name() -> None:
    loaded = LoadedExperts(experts_layer(SMALL, max_tokens=5), LOGGER)
    module = loaded_module(loaded, checkpoint(SMALL))
    module.w2_weight_scale_2[4] = 0.0
    with pytest.raises(ValueError, match=rf"{NAME}\.4\.w2\.weight_scale_2.*got 0.0"):
        loaded.take(module)
    loaded.forget_input_scales(module)
    module.w2_weight_scale_2[4] = 1.0
    with pytest.raises(ValueError, match=f"{NAME}: expected input scales, got none"):
        loaded.take(module)
    with pytest.raises(RuntimeError, match="expected loaded weights"):
        loaded(torch.zeros(1, 128), torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 11])
def test_calls_of_any_length_are_the_operation(
    layer: Layer, tokens: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    loaded = LoadedExperts(experts_layer(max_tokens=4), LOGGER)
    loaded.experts = cake.SiTUExperts(layer.weights, layer.scales, token_counts=range(1, 5))
    call = layer.call(tokens)
    call["token_selected_experts"] = call["token_selected_experts"].to(dtypes[0])
    call["token_final_scales"] = call["token_final_scales"].to(dtypes[1])
    operands = ("input", "token_selected_experts", "token_final_scales")
    x, ids, weights = (call[name] for name in operands)
    output = loaded(x, ids, weights)
    assert_same_bits(output, run(call))
    wide = torch.cat((x, x), dim=1)
    assert_same_bits(loaded(wide[:, : x.shape[1]], ids, weights), output)


def test_calls_compile_as_one_graph(layer: Layer) -> None:
    loaded = LoadedExperts(experts_layer(max_tokens=8), LOGGER)
    loaded.experts = cake.SiTUExperts(layer.weights, layer.scales, token_counts=range(1, 9))
    torch.compiler.reset()
    compiled = torch.compile(loaded.__call__, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (2, 3, 7):
        call = layer.call(tokens)
        operands = ("input", "token_selected_experts", "token_final_scales")
        assert_same_bits(compiled(*(call[name] for name in operands)), run(call))
    torch.compiler.reset()
