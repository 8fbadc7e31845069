"""What the plug-ins of serving frameworks share: the switch, versions, a layer's weights and call.

vLLM and SGLang load an NVFP4 checkpoint of ModelOpt into parameters of the same names and shapes,
gate before up, cut to the rank's share. This module makes `SiTUExperts` of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from logging import INFO, Logger

import torch
from torch import Tensor, nn

from cake.errors import UnsupportedError
from cake.modelopt import KINDS, ModelOptLayer, prepare_modelopt_layer
from cake.module import SharedWorkspace, SiTUExperts
from cake.support import KIMI_K3, MAX_TOKENS, TP_SIZE, Geometry, is_supported


def switched_on() -> bool:
    """Tell whether the environment asks for cake's experts: `CAKE_EXPERTS=1`.

    Raises
    ------
    ValueError
        The variable is neither 0 nor 1.
    """
    value = os.environ.get("CAKE_EXPERTS", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"CAKE_EXPERTS: expected 0 or 1, got {value!r}")
    return value == "1"


@cache
def log_once(logger: Logger, level: int, message: str) -> None:
    """Log what would else be said of each layer."""
    logger.log(level, message)


def require_version(package: str, oldest: str, below: str) -> None:
    """Raise unless the installed version of a package lies in [oldest, below).

    Raises
    ------
    UnsupportedError
        It is missing, too old or too new; says what to install.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "none"
    if not _release(oldest) <= _release(found) < _release(below):
        raise UnsupportedError(
            f"{package}: expected a version from {oldest} to below {below}, which this plug-in "
            f"knows, got {found}: pip install '{package}>={oldest},<{below}', or install a cake "
            "that knows this one"
        )


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer:
    """A layer of routed SiTU experts on one rank, as a framework describes it.

    Attributes
    ----------
    name : str
        Of the layer in the model, ending in `.experts`.
    geometry : Geometry
        H, I of this rank, E of this rank, and the experts of a token.
    dtype : torch.dtype
        Of the tokens.
    situ_beta, situ_linear_beta : float or None
        The bounds of gate and up.
    max_tokens : int
        The most tokens of one call; larger calls run in parts.
    batch_invariant : bool
        As in `cutlass_fused_moe`.
    """

    name: str
    geometry: Geometry
    dtype: torch.dtype
    situ_beta: float | None
    situ_linear_beta: float | None
    max_tokens: int = MAX_TOKENS
    batch_invariant: bool = False


def check_fit(layer: ExpertsLayer, asked: Mapping[str, bool], framework: str) -> None:
    """Raise unless cake runs this layer on the current device.

    Parameters
    ----------
    layer : ExpertsLayer
        The layer.
    asked : mapping of str to bool
        What cake does not do, and whether the deployment asks for it.
    framework : str
        Whose experts run without cake.

    Raises
    ------
    UnsupportedError
        With every reason, each as what was expected and what came.
    """
    problems = []
    expected, got = asdict(KIMI_K3), asdict(layer.geometry)
    for name, size in got.items():
        if size != expected[name]:
            hint = ""
            if name == "intermediate":
                hint = f" on each of {TP_SIZE} tensor-parallel ranks"
            problems.append(f"{name}: expected {expected[name]}{hint}, got {size}")
    if layer.dtype != torch.bfloat16:
        problems.append(f"dtype: expected torch.bfloat16, got {layer.dtype}")
    for name in ("situ_beta", "situ_linear_beta"):
        value = getattr(layer, name)
        if value is None or value <= 0:
            problems.append(f"{name}: expected a positive number, got {value}")
    problems += [f"{name}: expected off, got on" for name, on in asked.items() if on]
    supported, reason = is_supported()
    if not supported:
        problems.append(reason)
    if problems:
        raise UnsupportedError(
            f"{layer.name}: cake cannot run these experts: {'; '.join(problems)}. Change this, or "
            f"unset CAKE_EXPERTS to serve with the experts of {framework}"
        )


class LoadedExperts:
    """The experts of one layer, from a framework's parameters once they are loaded.

    Parameters
    ----------
    layer : ExpertsLayer
        A layer that `check_fit` passed.
    logger : logging.Logger
        One that the framework shows.
    """

    def __init__(self, layer: ExpertsLayer, logger: Logger) -> None:
        self.layer, self.logger = layer, logger
        self.experts: SiTUExperts | None = None
        self._limit = min(layer.max_tokens, MAX_TOKENS)

    def forget_input_scales(self, module: nn.Module) -> None:
        """Mark the input scales as not loaded: calibration leaves out experts it never hit."""
        for name in ("w13_input_scale", "w2_input_scale"):
            getattr(module, name).data.fill_(float("nan"))

    def take(self, module: nn.Module) -> None:
        """Lay out the parameters of a module that has loaded them, and keep them there.

        The parameters of the weights and block scales then hold the prepared bytes, and the input
        scales are forgotten: a second call is for a layer of which all was loaded anew. It writes
        what comes of it to where the first one put it, so that captured graphs read it.

        Parameters
        ----------
        module : torch.nn.Module
            With `w13_weight` uint8 [E, 2I, H/2] (gate first), `w2_weight` uint8 [E, H, I/2],
            `w13_weight_scale` and `w2_weight_scale` float8_e4m3fn [E, 2I, H/16] and [E, H, I/16],
            linear, and float32 decode scales: `w13_weight_scale_2` and `w13_input_scale` [E, 2],
            `w2_weight_scale_2` and `w2_input_scale` [E]; NaN is an input scale that is missing.

        Raises
        ------
        ValueError
            A scale is not usable, by its name in the checkpoint; no input scale was loaded; also
            what `prepare_modelopt_layer` raises.
        """
        prepared = self._prepare(module)
        if self.experts is not None:
            self.experts.refit(prepared.weights, prepared.quant_scales)
        else:
            self.experts = self._make(prepared)
        for name, buffer in (("w13_weight", "w13"), ("w2_weight", "w2")):
            getattr(module, name).data = getattr(self.experts, buffer)
            getattr(module, f"{name}_scale").data = getattr(self.experts, f"{buffer}_sf")
        self.forget_input_scales(module)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run the experts; arguments and result as in `SiTUExperts.forward`, for any T."""
        if self.experts is None:
            raise RuntimeError(f"{self.layer.name}: expected loaded weights, got none")
        if x.shape[0] <= self._limit:
            result: Tensor = self.experts(x, topk_ids, topk_weights)
            return result
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = (tensor.split(self._limit) for tensor in (x, topk_ids, topk_weights, output))
        for part in zip(*parts, strict=True):
            self.experts(*part)
        return output

    def _prepare(self, module: nn.Module) -> ModelOptLayer:
        tensors = checkpoint_tensors(module, self.layer.name)
        inputs = sum(name.endswith(".input_scale") for name in tensors)
        expected = 3 * self.layer.geometry.num_experts
        if not inputs:
            raise UnsupportedError(
                f"{self.layer.name}: expected input scales, got none: load all tensors of a layer, "
                "of a checkpoint with quantized activations"
            )
        if inputs < expected:
            self.logger.warning(
                "%s: %d of %d input scales are missing; those experts take the largest of the "
                "others",
                self.layer.name,
                expected - inputs,
                expected,
            )
        return prepare_modelopt_layer(
            tensors,
            tp_rank=0,
            tp_size=1,  # the framework has cut the rank's share
            num_experts=self.layer.geometry.num_experts,
            missing_input_scale="max",
        )

    def _make(self, prepared: ModelOptLayer) -> SiTUExperts:
        weights = prepared.weights

        def everywhere(value: float | None) -> Tensor:
            assert value is not None  # check_fit
            return torch.full_like(weights.w2_scale, value)  # whatever the default dtype is now

        log_once(self.logger, INFO, f"cake runs the NVFP4 SiTU experts on {weights.device}")
        return SiTUExperts.from_modelopt(
            prepared,
            workspace=_workspace(weights.device, self._limit),
            batch_invariant=self.layer.batch_invariant,
            situ_beta=everywhere(self.layer.situ_beta),
            situ_linear_beta=everywhere(self.layer.situ_linear_beta),
        )


def checkpoint_tensors(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Give the parameters of a layer as views, expert by expert, under a checkpoint's names.

    Parameters
    ----------
    module : torch.nn.Module
        As in `LoadedExperts.take`.
    name : str
        Of the layer, ending in `.experts`.

    Returns
    -------
    dict of str to Tensor
        As `prepare_modelopt_layer` takes it; input scales that are NaN are left out.
    """
    prefix = f"{name.removesuffix('experts').removesuffix('.')}.experts".removeprefix(".")
    tensors = {}
    for kind in KINDS:
        w13, w2 = (getattr(module, f"{w}_{kind}").data for w in ("w13", "w2"))
        if kind in ("weight", "weight_scale"):
            gate, up = w13.chunk(2, dim=1)
        else:  # one number each: read from the device once, not one by one
            w13, w2 = w13.cpu(), w2.cpu()
            gate, up = w13.unbind(1)
        for projection, stacked in (("w1", gate), ("w3", up), ("w2", w2)):
            for expert, tensor in enumerate(stacked.unbind(0)):
                if kind != "input_scale" or not bool(tensor.isnan()):
                    tensors[f"{prefix}.{expert}.{projection}.{kind}"] = tensor
    return tensors


@cache
def _workspace(device: torch.device, max_tokens: int) -> SharedWorkspace:
    """One for all layers of a process: they run one after another. Ready for every count."""
    return SharedWorkspace(range(1, max_tokens + 1), device)
