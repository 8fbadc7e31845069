"""What cake's plug-ins use of vLLM 0.33.0 and SGLang 0.5.23, as small doubles.

Names, places and parameters are those of the frameworks; `test_vllm_real.py` and
`test_sglang_real.py` compare them with an installed one, by `differences`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

import cake.integrations

Modules = dict[str, dict[str, Any]]


def use(monkeypatch: pytest.MonkeyPatch, package: str, modules: Modules) -> None:
    """Put these modules in the place of a package, and import its plug-in anew."""
    leave_out(monkeypatch, package)
    for path, names in modules.items():
        for parent in (path[:i] for i, c in enumerate(path + ".") if c == "."):
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        for name, value in names.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=False)


def leave_out(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Forget a package and cake's module that imports it."""
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        monkeypatch.delitem(sys.modules, name)
    method = f"{package}_method"
    monkeypatch.delitem(sys.modules, f"cake.integrations.{method}", raising=False)
    monkeypatch.delattr(cake.integrations, method, raising=False)


def differences(modules: Modules, public: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Compare the parameters of classes' methods and of functions with those of the package.

    `public` has the methods to compare by the name of their class.
    """
    for path, names in modules.items():
        real = importlib.import_module(path)
        for name, ours in names.items():
            if not hasattr(real, name):
                yield f"{path}.{name}: missing"
            for method in public.get(name, ()):
                theirs = inspect.getattr_static(getattr(real, name), method, None)
                expected = [*inspect.signature(getattr(ours, method)).parameters]
                got = [*inspect.signature(theirs).parameters] if callable(theirs) else theirs
                if expected != got:
                    yield f"{path}.{name}.{method}: expected {expected}, got {got}"


def register_parameters(
    layer: nn.Module, experts: int, hidden: int, intermediate: int, group_size: int
) -> None:
    """The parameters that both frameworks make for ModelOpt NVFP4, with anything in them."""

    def add(name: str, dtype: torch.dtype, *shape: int) -> None:
        data = torch.full(shape, 7.0).to(dtype)
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))

    scale = torch.float8_e4m3fn
    add("w13_weight", torch.uint8, experts, 2 * intermediate, hidden // 2)
    add("w2_weight", torch.uint8, experts, hidden, intermediate // 2)
    add("w13_weight_scale", scale, experts, 2 * intermediate, hidden // group_size)
    add("w2_weight_scale", scale, experts, hidden, intermediate // group_size)
    for name in ("weight_scale_2", "input_scale"):
        add(f"w13_{name}", torch.float32, experts, 2)
        add(f"w2_{name}", torch.float32, experts)


class _CreatesWeights:
    """What both frameworks' methods for ModelOpt NVFP4 experts do first."""

    quant_config: Any

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        group_size = self.quant_config.group_size
        register_parameters(
            layer, num_experts, hidden_size, intermediate_size_per_partition, group_size
        )


class _Config:
    exclude_modules: tuple[str, ...] = ()

    def is_layer_excluded(self, prefix: str) -> bool:
        return prefix in self.exclude_modules


def vllm() -> Modules:
    """Modules of vLLM."""
    configs: dict[str, type] = {}

    class RoutedExperts(nn.Module):
        def __init__(self, moe_config: Any, apply_router_weight_on_input: bool = False) -> None:
            super().__init__()
            self.moe_config = moe_config
            self.apply_router_weight_on_input = apply_router_weight_on_input

    class FusedMoEMethodBase:
        def __init__(self, moe: Any) -> None:
            self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None

        def process_weights_after_loading(self, layer: Any) -> None: ...

        def get_fused_moe_quant_config(self, layer: Any) -> None: ...

        def apply(
            self,
            layer: Any,
            x: Any,
            topk_weights: Any,
            topk_ids: Any,
            shared_experts: Any,
            shared_experts_input: Any,
        ) -> Any: ...

    class ModelOptNvFp4FusedMoE(_CreatesWeights, FusedMoEMethodBase):
        def __init__(self, quant_config: Any, moe_config: Any) -> None:
            super().__init__(moe_config)
            self.experts_cls = "vLLM's"

    class ModelOptNvFp4Config(_Config):
        moe_activation_override = None

        def __init__(self, quant_method: str = "NVFP4", group_size: int = 16) -> None:
            self.quant_method, self.group_size = quant_method, group_size

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
                return ModelOptNvFp4FusedMoE(quant_config=self, moe_config=layer.moe_config)
            return None

    class ModelOptMixedPrecisionConfig(_Config):
        def __init__(self, algorithms: dict[str, str]) -> None:
            self.nvfp4_config, self.algorithms = ModelOptNvFp4Config(), algorithms

        def _resolve_quant_algo(self, prefix: str) -> str | None:
            return self.algorithms.get(prefix)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return ("vLLM's", self._resolve_quant_algo(prefix))

    layers = "vllm.model_executor.layers"
    return {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        f"{layers}.fused_moe": {"RoutedExperts": RoutedExperts},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{layers}.quantization": {
            "register_quantization_config": lambda quantization: (
                lambda config: configs.setdefault(quantization, config)
            ),
            "get_quantization_config": lambda quantization: configs[quantization],
        },
        f"{layers}.quantization.modelopt": {
            "ModelOptMixedPrecisionConfig": ModelOptMixedPrecisionConfig,
            "ModelOptNvFp4Config": ModelOptNvFp4Config,
            "ModelOptNvFp4FusedMoE": ModelOptNvFp4FusedMoE,
        },
    }


VLLM_METHODS = {
    "FusedMoEMethodBase": (
        "__init__",
        "process_weights_after_loading",
        "get_fused_moe_quant_config",
        "apply",
    ),
    "ModelOptNvFp4FusedMoE": ("create_weights",),
    "ModelOptNvFp4Config": ("get_quant_method", "is_layer_excluded"),
    "ModelOptMixedPrecisionConfig": (
        "get_quant_method",
        "is_layer_excluded",
        "_resolve_quant_algo",
    ),
}


class Backend(SimpleNamespace):
    """MoeRunnerBackend and MoeA2ABackend of SGLang."""

    def is_auto(self) -> bool:
        return self.value == "auto"

    def is_none(self) -> bool:
        return self.value == "none"


def sglang() -> Modules:
    """Modules of SGLang."""

    class FusedMoE(nn.Module):
        def __init__(self, moe_runner_config: Any, **attributes: Any) -> None:
            super().__init__()
            self.moe_runner_config = moe_runner_config
            self.moe_ep_size, self.num_fused_shared_experts, self.with_bias = 1, 0, False
            self.__dict__.update(attributes)

    class StandardCombineInput(NamedTuple):
        hidden_states: torch.Tensor

    class ModelOptNvFp4FusedMoEMethod(_CreatesWeights):
        def __init__(self, quant_config: Any) -> None:
            raise ValueError("no kernel of SGLang's runs here")

        def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None: ...

        def get_moe_runner_backend(self, layer: Any) -> None: ...

        def process_weights_after_loading(self, layer: Any) -> None: ...

        def apply(self, layer: Any, dispatch_output: Any) -> Any: ...

    class ModelOptFp4Config(_Config):
        is_checkpoint_nvfp4_serialized = True
        is_w4a16 = use_per_token_activation = False
        group_size = 16

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return ("SGLang's", prefix)

    class ModelOptMixedPrecisionConfig(_Config):
        def __init__(self, algorithms: dict[str, str]) -> None:
            self.nvfp4_config, self.algorithms = ModelOptFp4Config(), algorithms

        def resolve_quant_algo(self, prefix: str) -> str | None:
            return self.algorithms.get(prefix)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return ("SGLang's", prefix)

    class HookType(Enum):
        AROUND = "around"

    class HookRegistry:
        hooks: ClassVar[list[tuple[str, Any, Any]]] = []

        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any, *, source: Any = None) -> None:
            cls.hooks.append((target, hook, hook_type))

    quantization = "sglang.srt.layers.quantization.modelopt_quant"
    for config in (ModelOptFp4Config, ModelOptMixedPrecisionConfig):
        config.__module__, config.__qualname__ = quantization, config.__name__
    return {
        "sglang.srt.layers.moe": {
            "get_moe_runner_backend": lambda: Backend(value="auto"),
            "get_moe_a2a_backend": lambda: Backend(value="none"),
        },
        "sglang.srt.layers.moe.fused_moe_triton": {"FusedMoE": FusedMoE},
        "sglang.srt.layers.moe.token_dispatcher.standard": {
            "StandardCombineInput": StandardCombineInput
        },
        quantization: {
            "ModelOptFp4Config": ModelOptFp4Config,
            "ModelOptMixedPrecisionConfig": ModelOptMixedPrecisionConfig,
            "ModelOptNvFp4FusedMoEMethod": ModelOptNvFp4FusedMoEMethod,
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {
            "get_lora": lambda: SimpleNamespace(enable_lora=None, lora_paths=None)
        },
    }


SGLANG_METHODS = {
    "ModelOptNvFp4FusedMoEMethod": (
        "create_weights",
        "create_moe_runner",
        "get_moe_runner_backend",
        "process_weights_after_loading",
        "apply",
    ),
    "ModelOptFp4Config": ("get_quant_method", "is_layer_excluded"),
    "ModelOptMixedPrecisionConfig": ("get_quant_method", "is_layer_excluded", "resolve_quant_algo"),
    "StandardCombineInput": ("__new__",),
}
