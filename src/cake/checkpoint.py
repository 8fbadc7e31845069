"""Files: the experts that a checkpoint's folder holds, and prepared layers, written and loaded.

A checkpoint is a folder of safetensors files with experts under ``<prefix>layers.L.mlp.experts.N.``
or ``<prefix>layers.L.block_sparse_moe.experts.N.``, see :mod:`cake.convert`.

A prepared layer is one safetensors file: the tensors of :class:`PreparedWeights`, ``input_scale``
(dX, float32 [1]), ``intermediate_scale`` (dA, float32 [E]) and metadata that says what they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._library import build_info
from .modelopt import PROJECTIONS, ModelOptLayer
from .prepared_weights import PreparedWeights, check_tensor

FORMAT = "cake-prepared-layer"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Groups: layer, kind.
EXPERT_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\."
    rf"(?:{'|'.join(PROJECTIONS)})\.(.+)"
)

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")  # in config.json
_SOURCE = (
    "layer",
    "tp_rank",
    "tp_size",
    "source_sha256",
    "missing_input_scale",
    "per_expert_input_scale",
)
_SIZES = ("num_experts", "hidden", "intermediate")
_PAGE = 4096  # bytes
_KINDS = {  # names of dtypes in safetensors files
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}


class Checkpoint:
    """A folder with a checkpoint; only its index is read.

    Attributes
    ----------
    directory : Path
        The folder.
    layers : dict of int to dict
        For each layer that has experts: name of each expert tensor, and the file that holds it.
    num_experts : int or None
        E, if config.json tells it; without it, missing last experts go unnoticed.

    Raises
    ------
    ValueError
        If the folder holds prepared layers, a damaged index or no experts; also a
        FileNotFoundError if it holds no checkpoint.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.layers: dict[int, dict[str, str]] = {}
        for name, shard in _weight_map(self.directory).items():
            if match := EXPERT_NAME.fullmatch(name):
                self.layers.setdefault(int(match[1]), {})[name] = shard
        if not self.layers:
            raise ValueError(
                f"{self.directory}: expected expert tensors named like "
                "'model.layers.1.mlp.experts.0.gate_proj.weight', found none"
            )
        self.num_experts = _configured_experts(self.directory / "config.json")

    def shards(self, layer: int) -> dict[str, str]:
        """Give the file of each expert tensor of a layer, after a look whether all are there.

        Raises
        ------
        ValueError
            If there is no such layer; also a FileNotFoundError if a file is missing.
        """
        if layer not in self.layers:
            known = ", ".join(map(str, sorted(self.layers)))
            raise ValueError(f"layer: expected one that has experts ({known}), got {layer}")
        for shard in sorted(set(self.layers[layer].values())):
            if not (self.directory / shard).is_file():
                raise FileNotFoundError(
                    f"{self.directory / shard}: missing, but {INDEX} names it for layer {layer}; "
                    "download it again"
                )
        return self.layers[layer]


def save_layer(
    path: str | os.PathLike[str], layer: ModelOptLayer, source: Mapping[str, str]
) -> None:
    """Write a prepared layer; the file appears whole, or what was there before stays.

    Parameters
    ----------
    path : path
        The file.
    layer : ModelOptLayer
        On any device.
    source : Mapping of str to str
        ``layer``, ``tp_rank``, ``tp_size``, ``source_sha256``, ``missing_input_scale`` and
        ``per_expert_input_scale``: kept in the metadata, beside format, versions and geometry.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    path, weights = Path(path), layer.weights
    tensors = {name: tensor.cpu() for name, tensor in weights.tensors().items()}
    tensors["input_scale"] = torch.tensor([layer.input_scale], dtype=torch.float32)
    # A clone because one expanded element may have stride 0 and count as contiguous all the same.
    da = layer.intermediate_scale.cpu()
    tensors["intermediate_scale"] = da.clone(memory_format=torch.contiguous_format)
    sizes = (weights.num_experts, weights.hidden, weights.intermediate)
    metadata = {
        **source,
        **dict(zip(_SIZES, map(str, sizes), strict=True)),
        "format": FORMAT,
        "layout_version": str(PreparedWeights.LAYOUT_VERSION),
        "cake_version": str(build_info()["version"]),
    }
    write_tensors(path, tensors, metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with `sha256` in its metadata; it appears whole or not at all.

    Parameters
    ----------
    path : Path
        The file; one that is there stays until the new one is whole.
    tensors : Mapping of str to Tensor
        Contiguous, on the CPU, with at least one dimension.
    metadata : Mapping of str to str
        Without `sha256`.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    metadata = {**metadata, "sha256": _sha256(metadata, tensors)}
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        table[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    # Not by safetensors: many of its versions first copy all tensors, and it orders metadata at
    # random. Here equal layers give equal files. Spaces that fill up the header are in its format.
    header = json.dumps(table).encode()
    header = header.ljust(-(-(len(header) + 8) // _PAGE) * _PAGE - 8)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in tensors.values():
                file.write(_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(f"{path}: not written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_layer(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    expected_tp_rank: int | None = None,
    verify: bool = True,
) -> ModelOptLayer:
    """Load a prepared layer.

    Parameters
    ----------
    path : path
        A file of `cake convert`.
    device : torch.device or str, optional
        Where the tensors go; default: the CPU, where the weights stay mapped from the file.
    expected_tp_rank : int, optional
        Refuse the part of another rank.
    verify : bool
        Compare the SHA-256 of metadata and tensors with the one in the file, at 1 to 2 GB/s.

    Returns
    -------
    ModelOptLayer

    Raises
    ------
    ValueError
        If this is no such file, of another layout version or rank, incomplete or damaged; also a
        TypeError if a dtype is wrong, a FileNotFoundError if there is no file.
    """
    path = Path(path)
    file = open_safetensors(path)
    metadata: dict[str, str] = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of `cake convert`, got metadata {metadata}")
    absent = {"layout_version", "cake_version", "sha256", *_SOURCE, *_SIZES} - metadata.keys()
    if absent:
        raise ValueError(f"{path}: expected metadata {', '.join(sorted(absent))}; convert again")
    version, rank = metadata["layout_version"], metadata["tp_rank"]
    if version != str(PreparedWeights.LAYOUT_VERSION):
        raise ValueError(
            f"{path}: expected layout version {PreparedWeights.LAYOUT_VERSION}, got {version}; "
            "convert again"
        )
    if expected_tp_rank is not None and rank != str(expected_tp_rank):
        raise ValueError(f"{path}: expected the part of tp_rank {expected_tp_rank}, got {rank}")
    try:
        count, hidden, intermediate = (int(metadata[size]) for size in _SIZES)
        expected = PreparedWeights.empty(count, hidden, intermediate, "meta").tensors()
    except ValueError as error:
        raise ValueError(f"{path}: metadata: {error}; convert again") from None
    expected["input_scale"] = torch.empty(1, device="meta")
    expected["intermediate_scale"] = torch.empty(count, device="meta")
    names = set(file.keys())
    if names != expected.keys():
        raise ValueError(
            f"{path}: expected tensors {sorted(expected)}, got {sorted(names)}; convert again"
        )
    tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in expected}
    for name, like in expected.items():
        check_tensor(f"{path}: {name}", tensors[name], like.dtype, tuple(like.shape))
    if verify and not is_whole(metadata, tensors):
        raise ValueError(f"{path}: damaged: not the bytes that were written; convert again")
    tensors = {name: tensor.to(device or "cpu") for name, tensor in tensors.items()}
    dx, da = float(tensors.pop("input_scale")), tensors.pop("intermediate_scale")
    weights = PreparedWeights(**tensors)
    return ModelOptLayer(weights, weights.quant_scales(dx, da), dx, da)


def is_whole(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of a file and its metadata are those that `write_tensors` wrote."""
    return _sha256(metadata, tensors) == metadata.get("sha256")


def open_safetensors(path: Path) -> Any:
    """Map a safetensors file.

    Raises
    ------
    ValueError
        If it is damaged; also a FileNotFoundError if there is none, an ImportError without
        safetensors.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{error}; install the extra: pip install 'cake-moe[cli]'") from None
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a safetensors file, found none")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: expected a whole safetensors file: {error}; download or convert it again"
        ) from None


def _weight_map(directory: Path) -> dict[str, str]:
    """Give the file of each tensor of a checkpoint."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(shard) for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index}: expected JSON with a weight_map: {error!r}; download it again"
            ) from None
    # Prepared layers beside a checkpoint are nothing to complain of.
    layers = [] if single.is_file() else sorted(directory.glob("layer-*-tp-*-of-*.safetensors"))
    for path in [directory] if directory.is_file() else [single, *layers]:
        if path.is_file() and (open_safetensors(path).metadata() or {}).get("format") == FORMAT:
            raise ValueError(
                f"{path}: is prepared already: load it with cake.checkpoint.load_layer, or name "
                "the folder of the checkpoint that it was made from"
            )
    if single.is_file():
        return dict.fromkeys(open_safetensors(single).keys(), SINGLE)
    raise FileNotFoundError(
        f"{directory}: expected a folder with {INDEX} or {SINGLE}, found neither; name the folder "
        "that the checkpoint was downloaded to"
    )


def _configured_experts(path: Path) -> int | None:
    """Find the number of experts in config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        parts = (config, config.get("text_config") or {})
        return next((int(part[k]) for part in parts for k in _EXPERT_COUNTS if k in part), None)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _bytes(tensor: Tensor) -> memoryview:
    """Give the bytes of a contiguous tensor on the CPU, not copied."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _sha256(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hash all tensors and all metadata but the hash itself."""
    text = json.dumps({key: metadata[key] for key in sorted(metadata) if key != "sha256"})
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()
