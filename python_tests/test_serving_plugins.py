"""The plug-ins inside doubles of vLLM and SGLang: which layers they take, refuse and leave."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import serving_doubles
import torch
from serving_layers import NAME, RANK, SMALL, TP, checkpoint, load

import cake
from cake.integrations import serving, sglang, vllm
from cake.modelopt import prepare_modelopt_layer
from cake.support import KIMI_K3, Geometry

VLLM = "vllm.model_executor.layers"
SGLANG = "sglang.srt.layers"


def switch_on(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("CAKE_EXPERTS", "1")
    monkeypatch.setattr(serving.metadata, "version", lambda package: version)
    serving.log_once.cache_clear()


class Framework:
    """One of the two, after `register()`."""

    name: str
    misfits: ClassVar[dict[str, dict[str, Any]]]

    def layer(self, geometry: Geometry = KIMI_K3, **changes: Any) -> Any:
        raise NotImplementedError

    def config(self, mixed: bool = False) -> Any:
        raise NotImplementedError

    def choose(self, config: Any, layer: Any, prefix: str = NAME) -> Any:
        raise NotImplementedError

    def call(self, method: Any, layer: Any, *operands: Any) -> Any:
        raise NotImplementedError


class VLLM33(Framework):
    name = "vLLM"
    misfits: ClassVar = {
        "intermediate: expected 384": {"intermediate_size_per_partition": 192},
        "num_experts: expected 896": {"num_local_experts": 112},
        "--enable-expert-parallel": {"use_ep": True},
        "--enable-eplb": {"enable_eplb": True},
        "--data-parallel-size": {"dp_size": 2},
        "--prefill-context-parallel-size": {"pcp_size": 2},
        "sequence parallelism": {"is_sequence_parallel": True},
        "--enable-lora": {"is_lora_enabled": True},
        "biases": {"has_bias": True},
        "dtype: expected torch.bfloat16": {"in_dtype": torch.float16},
        "situ_linear_beta": {"activation_situ_linear_beta": None},
        "apply_router_weight_on_input": {"apply_router_weight_on_input": True},
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serving_doubles.use(monkeypatch, "vllm", serving_doubles.vllm())
        switch_on(monkeypatch, "0.33.0")
        vllm.register()
        vllm.register()
        self.modelopt = sys.modules[f"{VLLM}.quantization.modelopt"]

    def layer(self, geometry: Geometry = KIMI_K3, **changes: Any) -> Any:
        parallel = {
            "use_ep": False,
            "enable_eplb": False,
            "dp_size": 1,
            "pcp_size": 1,
            "is_sequence_parallel": False,
        }
        moe = {
            "activation": SimpleNamespace(value=changes.pop("activation", "situ")),
            "hidden_dim": geometry.hidden,
            "intermediate_size_per_partition": geometry.intermediate,
            "num_local_experts": geometry.num_experts,
            "experts_per_token": geometry.top_k,
            "in_dtype": torch.bfloat16,
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "max_num_tokens": 8,
            "is_lora_enabled": False,
            "has_bias": False,
        }
        on_input = changes.pop("apply_router_weight_on_input", False)
        for name, value in changes.items():
            (parallel if name in parallel else moe)[name] = value
        moe["moe_parallel_config"] = SimpleNamespace(**parallel)
        experts = sys.modules[f"{VLLM}.fused_moe"].RoutedExperts
        return experts(SimpleNamespace(**moe), on_input)

    def config(self, mixed: bool = False) -> Any:
        get = sys.modules[f"{VLLM}.quantization"].get_quantization_config
        return get("modelopt_mixed")({NAME: "NVFP4"}) if mixed else get("modelopt_fp4")()

    def choose(self, config: Any, layer: Any, prefix: str = NAME) -> Any:
        return config.get_quant_method(layer, prefix)

    def call(self, method: Any, layer: Any, x: Any, ids: Any, weights: Any) -> Any:
        return method.apply(
            layer=layer,
            x=x,
            topk_weights=weights,
            topk_ids=ids,
            shared_experts=None,
            shared_experts_input=None,
        )


class SGLang23(Framework):
    name = "SGLang"
    misfits: ClassVar = {
        "intermediate: expected 384": {"intermediate_size_per_partition": 192},
        "num_experts: expected 896": {"num_local_experts": 112},
        "--ep-size": {"moe_ep_size": 8},
        "--disable-shared-experts-fusion": {"num_fused_shared_experts": 1},
        "biases": {"with_bias": True},
        "dtype: expected torch.bfloat16": {"params_dtype": torch.float16},
        "situ_linear_beta": {"gemm1_clamp_limit": None},
        "apply_router_weight_on_input": {"apply_router_weight_on_input": True},
        "no_combine": {"no_combine": True},
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.doubles = serving_doubles.sglang()
        serving_doubles.use(monkeypatch, "sglang", self.doubles)
        switch_on(monkeypatch, "0.5.23")
        sglang.register()
        sglang.register()
        self.modelopt = sys.modules[f"{SGLANG}.quantization.modelopt_quant"]
        self.hooks = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.hooks

    def layer(self, geometry: Geometry = KIMI_K3, **changes: Any) -> Any:
        moe = {
            "activation": "situ",
            "hidden_size": geometry.hidden,
            "intermediate_size_per_partition": geometry.intermediate,
            "num_local_experts": geometry.num_experts,
            "top_k": geometry.top_k,
            "params_dtype": torch.bfloat16,
            "gemm1_alpha": 4.0,
            "gemm1_clamp_limit": 25.0,
            "apply_router_weight_on_input": False,
            "no_combine": False,
        }
        outside = {name: changes.pop(name) for name in [*changes] if name not in moe}
        experts = sys.modules[f"{SGLANG}.moe.fused_moe_triton"].FusedMoE
        return experts(SimpleNamespace(**{**moe, **changes}), **outside)

    def config(self, mixed: bool = False) -> Any:
        if mixed:
            return self.modelopt.ModelOptMixedPrecisionConfig({NAME: "NVFP4"})
        return self.modelopt.ModelOptFp4Config()

    def choose(self, config: Any, layer: Any, prefix: str = NAME) -> Any:
        target = f"{type(config).__module__}.{type(config).__qualname__}.get_quant_method"
        ((hook, kind),) = [(hook, kind) for path, hook, kind in self.hooks if path == target]
        assert kind.value == "around"
        return hook(type(config).get_quant_method, config, layer, prefix)

    def call(self, method: Any, layer: Any, x: Any, ids: Any, weights: Any) -> Any:
        method.create_moe_runner(layer, layer.moe_runner_config)
        assert method.runner is None and method.get_moe_runner_backend(layer) is None
        topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
        dispatched = SimpleNamespace(hidden_states=x, topk_output=topk)
        return method.apply(layer=layer, dispatch_output=dispatched).hidden_states


FRAMEWORKS = {"vllm": VLLM33, "sglang": SGLang23}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Framework:
    return FRAMEWORKS[request.param](monkeypatch)


def ours(method: Any) -> bool:
    return type(method).__name__.startswith("CakeModelOpt")


@pytest.mark.parametrize("mixed", [False, True])
def test_kimi_k3_layers_are_taken(framework: Framework, mixed: bool) -> None:
    assert ours(framework.choose(framework.config(mixed), framework.layer()))


@pytest.mark.parametrize("mixed", [False, True])
def test_other_layers_are_the_frameworks(
    framework: Framework, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = framework.config(mixed)
    for _ in range(3):
        assert not ours(framework.choose(config, framework.layer(activation="silu")))
    assert sum(f"{framework.name}, not cake, runs" in line for line in caplog.messages) == 1
    assert not ours(framework.choose(config, torch.nn.Linear(1, 1)))
    config.exclude_modules = (NAME,)
    assert not ours(framework.choose(config, framework.layer()))
    if mixed:
        config.exclude_modules = ()
        assert not ours(framework.choose(config, framework.layer(), "model.layers.2.experts"))
        config.algorithms[NAME] = "W4A16_NVFP4"
        assert not ours(framework.choose(config, framework.layer()))


@pytest.mark.parametrize(
    "name, reason", [(name, reason) for name in FRAMEWORKS for reason in FRAMEWORKS[name].misfits]
)
def test_misfits_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    framework = FRAMEWORKS[name](monkeypatch)
    layer = framework.layer(**framework.misfits[reason])
    with pytest.raises(cake.UnsupportedError) as caught:
        framework.choose(framework.config(), layer)
    message = str(caught.value)
    assert message.startswith(f"{NAME}: ") and reason in message
    assert message.endswith(f"unset CAKE_EXPERTS to serve with the experts of {framework.name}")


def test_quantization_that_cake_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    framework: Any = VLLM33(monkeypatch)
    config = framework.config()
    config.quant_method = "W4A16_NVFP4"
    assert not ours(framework.choose(config, framework.layer()))
    config.quant_method, config.moe_activation_override = "NVFP4", "per token"
    with pytest.raises(cake.UnsupportedError, match="override of the activations' quantization"):
        framework.choose(config, framework.layer())
    framework = SGLang23(monkeypatch)
    for attribute, value in (("is_w4a16", True), ("is_checkpoint_nvfp4_serialized", False)):
        config = framework.config()
        setattr(config, attribute, value)
        assert not ours(framework.choose(config, framework.layer()))
    config = framework.config()
    config.use_per_token_activation = True
    with pytest.raises(cake.UnsupportedError, match="PER_TOKEN_ACTIVATION"):
        framework.choose(config, framework.layer())


@pytest.mark.parametrize("kind, value", [("runner", "marlin"), ("a2a", "deepep")])
def test_another_backend_of_sglang(monkeypatch: pytest.MonkeyPatch, kind: str, value: str) -> None:
    framework = SGLang23(monkeypatch)
    method = importlib.import_module("cake.integrations.sglang_method")
    backend = serving_doubles.Backend(value=value)
    monkeypatch.setattr(method, f"get_moe_{kind}_backend", lambda: backend)
    with pytest.raises(cake.UnsupportedError, match=f"--moe-{kind}-backend {value}: expected off"):
        framework.choose(framework.config(), framework.layer())


@pytest.mark.parametrize("setting", ["enable_lora", "lora_paths"])
def test_lora_of_sglang(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    framework = SGLang23(monkeypatch)
    method = importlib.import_module("cake.integrations.sglang_method")
    lora = SimpleNamespace(**{"enable_lora": None, "lora_paths": None, setting: ["adapter"]})
    monkeypatch.setattr(method, "get_lora", lambda: lora)
    with pytest.raises(cake.UnsupportedError, match="--enable-lora: expected off, got on"):
        framework.choose(framework.config(), framework.layer())


def test_a_layer_from_loading_to_a_call(
    framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KIMI_K3", SMALL)
    layer = framework.layer(SMALL)
    method = framework.choose(framework.config(), layer)
    method.create_weights(
        layer,
        num_experts=SMALL.num_experts,
        hidden_size=SMALL.hidden,
        intermediate_size_per_partition=SMALL.intermediate,
        params_dtype=torch.bfloat16,
        weight_loader=None,
    )
    assert layer.w13_input_scale.isnan().all() and layer.w2_input_scale.isnan().all()
    tensors = checkpoint(SMALL)
    load(layer, tensors, SMALL)
    method.process_weights_after_loading(layer)
    expected = prepare_modelopt_layer(tensors, tp_rank=RANK, tp_size=TP)
    assert method.loaded.experts.w13.equal(expected.weights.w13)
    assert method.loaded.experts.quant_scales[2].equal(expected.quant_scales[2])
    calls: list[Any] = []
    monkeypatch.setattr(method, "loaded", lambda *operands: calls.append(operands) or "output")
    x, ids, weights = object(), object(), object()
    assert framework.call(method, layer, x, ids, weights) == "output"
    assert calls == [(x, ids, weights)]


def test_batch_invariance_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = VLLM33(monkeypatch)
    for wanted in (False, True):
        monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", wanted)
        method = framework.choose(framework.config(), framework.layer())
        assert method.loaded.layer.batch_invariant is wanted
    assert method.loaded.layer.max_tokens == 8
    assert method.moe_kernel is None and not hasattr(method, "experts_cls")
    assert method.get_fused_moe_quant_config(framework.layer()) is None
    assert not method.supports_eplb


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_without_the_switch_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    serving_doubles.leave_out(monkeypatch, package)
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    monkeypatch.delenv("CAKE_EXPERTS", raising=False)
    importlib.import_module(f"cake.integrations.{package}").register()
    assert f"cake.integrations.{package}_method" not in sys.modules
