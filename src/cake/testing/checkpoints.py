"""NVFP4 checkpoints, mostly small, with the files, names, dtypes and shapes of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..quantize import BLOCK

Family = Literal["kimi", "deepseek"]
Format = Literal["modelopt", "compressed-tensors", "mxfp4"]

_GATE, _UP, _DOWN = 0, 1, 2
_FAMILIES: dict[Family, tuple[str, str, tuple[str, str, str]]] = {
    "kimi": ("language_model.model.", "block_sparse_moe", ("w1", "w3", "w2")),
    "deepseek": ("model.", "mlp", ("gate_proj", "up_proj", "down_proj")),
}
_KINDS: dict[Format, tuple[str, ...]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
    "mxfp4": ("weight_packed", "weight_scale"),
}
_QUANTIZATION: dict[Format, dict[str, str]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    },
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}
# E4M3 bytes of block scales: 2 .. 448.
_LOWEST_SCALE, _HIGHEST_SCALE = 0x40, 0x7E


def make_expert_tensors(
    expert: int, layer: int, seed: int, hidden: int, intermediate: int
) -> tuple[tuple[Tensor, Tensor, float, float], ...]:
    """Generate one expert: codes, block scales and two encoding scales of gate, up and down.

    Parameters
    ----------
    expert, layer, seed : int
        What the values are a function of.
    hidden, intermediate : int
        H and the full F.

    Returns
    -------
    tuple of (codes, block scales, weight scale, input scale)
        For gate and up uint8 [F, H/2] and float8_e4m3fn [F, H/16], for down uint8 [H, F/2] and
        float8_e4m3fn [H, F/16]; the scales are 1/dW and 1/dX or 1/dA as float32 numbers. Gate and
        up have equal scales but in every fourth expert.
    """
    generator = torch.Generator().manual_seed((seed * 1000 + layer) * 4096 + expert)
    projections = []
    for projection in (_GATE, _UP, _DOWN):
        rows, cols = (hidden, intermediate) if projection == _DOWN else (intermediate, hidden)
        codes = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(
            _LOWEST_SCALE,
            _HIGHEST_SCALE + 1,
            (rows, cols // BLOCK),
            generator=generator,
            dtype=torch.uint8,
        )
        weight_scale = 6000.0 + 37 * expert + (1000 if projection == _DOWN else 0)
        if projection == _UP and expert % 4 == 1:
            weight_scale *= 1.25
        input_scale = (90.0 if projection == _DOWN else 350.0) + 3 * (5 * expert % 8) + layer
        projections.append((codes, scales.view(torch.float8_e4m3fn), weight_scale, input_scale))
    return tuple(projections)


def write_checkpoint(
    path: str | Path,
    *,
    family: Family = "kimi",
    format: Format = "modelopt",
    layers: Sequence[int] = (1, 2),
    num_experts: int = 8,
    hidden: int = 256,
    intermediate_full: int = 1024,
    shards: int = 3,
    seed: int = 0,
    missing_input_scales: Collection[int] = (),
) -> None:
    """Write a checkpoint: safetensors files, index and config.json.

    Experts hold the same values in all families and formats of one seed. Attention, norms, router
    and shared experts lie beside them, and a dense layer 0, all in bfloat16. The experts of one
    file are in memory at a time.

    Parameters
    ----------
    path : str or Path
        Folder; made if there is none.
    family : {"kimi", "deepseek"}
        Names ``...block_sparse_moe.experts.N.w1`` or ``...mlp.experts.N.gate_proj``.
    format : {"modelopt", "compressed-tensors", "mxfp4"}
        Kinds of tensors; the global scales of compressed-tensors are reciprocals. MXFP4 is there to
        be refused: its block scales have no meaning beside these codes.
    layers : sequence of int
        Layers with experts.
    num_experts, hidden, intermediate_full : int
        E, H and the intermediate size before tensor parallelism.
    shards : int
        Number of files; layers lie across their borders. One file has no index.
    seed : int
        What all values are a function of.
    missing_input_scales : collection of int
        Experts without input scales, as calibration leaves them.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    prefix, block, projections = _FAMILIES[family]
    kinds = _KINDS[format]
    generator = torch.Generator().manual_seed(seed)

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).bfloat16()

    def scalar(encoding: float) -> Tensor:
        value = torch.tensor(encoding, dtype=torch.float32)
        return value.reshape(1) if format == "compressed-tensors" else 1.0 / value

    @lru_cache(maxsize=1)
    def expert_tensors(layer: int, expert: int) -> tuple[tuple[Tensor, Tensor, float, float], ...]:
        return make_expert_tensors(expert, layer, seed, hidden, intermediate_full)

    def expert_tensor(layer: int, expert: int, projection: int, kind: int) -> Tensor:
        codes, scales, weight, activation = expert_tensors(layer, expert)[projection]
        if format == "mxfp4":  # a power of two for 32 elements
            scales = scales[:, ::2].contiguous().view(torch.uint8)
        return (codes, scales, scalar(weight), scalar(activation))[kind]

    tensors: dict[str, Tensor | Callable[[], Tensor]] = {}  # those of experts are made when written
    tensors[f"{prefix}embed_tokens.weight"] = bf16(64, hidden)
    for name in ("gate_proj", "up_proj"):
        tensors[f"{prefix}layers.0.mlp.{name}.weight"] = bf16(2 * hidden, hidden)
    tensors[f"{prefix}layers.0.mlp.down_proj.weight"] = bf16(hidden, 2 * hidden)
    for layer in layers:
        base = f"{prefix}layers.{layer}."
        tensors[f"{base}input_layernorm.weight"] = bf16(hidden)
        tensors[f"{base}self_attn.o_proj.weight"] = bf16(hidden, hidden)
        tensors[f"{base}{block}.gate.weight"] = bf16(num_experts, hidden)
        tensors[f"{base}{block}.gate.e_score_correction_bias"] = bf16(num_experts).float()
        for expert in range(num_experts):
            for i, name in enumerate(projections):
                for j, kind in enumerate(kinds):
                    if not kind.startswith("input") or expert not in missing_input_scales:
                        tensors[f"{base}{block}.experts.{expert}.{name}.{kind}"] = partial(
                            expert_tensor, layer, expert, i, j
                        )
        tensors[f"{base}{block}.shared_experts.up_proj.weight"] = bf16(hidden, hidden)
    tensors[f"{prefix}norm.weight"] = bf16(hidden)
    tensors["lm_head.weight"] = bf16(64, hidden)

    names = list(tensors)
    weight_map = {}
    size = 0
    for i in range(shards):
        file = (
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        )
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        made = {n: t if isinstance(t := tensors[n], Tensor) else t() for n in part}
        save_file(made, path / file, {"format": "pt"})
        size += sum(tensor.nbytes for tensor in made.values())
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    sizes = {"num_experts": num_experts, "hidden_size": hidden}
    sizes["moe_intermediate_size"] = intermediate_full
    config = {"text_config": sizes} if family == "kimi" else sizes
    text = json.dumps({**config, "quantization_config": _QUANTIZATION[format]}, indent=2)
    (path / "config.json").write_text(text)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read all tensors of the safetensors files in a folder."""
    from safetensors.torch import load_file

    return {k: t for f in sorted(path.glob("*.safetensors")) for k, t in load_file(f).items()}


def edit_checkpoint(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in place; it becomes one file without an index."""
    from safetensors.torch import save_file

    tensors = read_checkpoint(path)
    change(tensors)
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, path / "model.safetensors")
