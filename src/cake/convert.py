"""`cake convert`: layers of an NVFP4 checkpoint to prepared layers of one tensor-parallel rank.

Experts lie under ``<prefix>layers.L.mlp.experts.N.`` or ``...block_sparse_moe.experts.N.``, with
projections gate_proj, up_proj, down_proj or w1, w3, w2, and one of two sets of kinds::

    ModelOpt              compressed-tensors
    weight                weight_packed
    weight_scale          weight_scale
    weight_scale_2        weight_global_scale    the reciprocal
    input_scale           input_global_scale     the reciprocal
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from . import support
from .checkpoint import (
    EXPERT_NAME,
    FORMAT,
    INDEX,
    Checkpoint,
    open_safetensors,
    save_layer,
)
from .errors import DTypeError, UnsupportedError
from .layout import check_geometry
from .modelopt import KINDS, expert_keys, expert_names, prepare_modelopt_layer
from .prepared_weights import PreparedWeights, decode_scales
from .quantize import BLOCK

if TYPE_CHECKING:
    from .info import Subparsers

_COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
_DTYPES = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
_MAX_MAPPED = 32 << 20  # bytes
_RUNS = (support.KIMI_K3.num_experts, support.KIMI_K3.hidden, support.KIMI_K3.intermediate)

_Header = tuple[str, tuple[int, ...]]  # dtype as safetensors writes it, shape


class RankTensors(Mapping[str, Tensor]):
    """One rank's part of the experts of a layer under ModelOpt's names, read when looked up.

    Names, shapes and dtypes of the whole layer are checked first, from the files' headers.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where to read.
    layer : int
        Which layer.
    tp_rank, tp_size : int
        The part is features ``[rank*F/size, (rank+1)*F/size)`` of the intermediate size F.

    Raises
    ------
    ValueError
        If the layer is unknown, a file is damaged, a tensor (other than an input scale) is missing
        or has a wrong shape, or ``tp_rank`` or ``tp_size`` does not fit; also a FileNotFoundError
        for a missing file, a TypeError for a wrong dtype, a NotImplementedError for a format other
        than NVFP4.
    """

    def __init__(
        self, checkpoint: Checkpoint, layer: int, *, tp_rank: int, tp_size: int = support.TP_SIZE
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank: expected at least 0 and below {tp_size}, got {tp_rank}")
        self._directory = checkpoint.directory
        self._files: dict[str, Any] = {}
        self._mapped = 0
        self._shards = checkpoint.shards(layer)
        self._headers = {name: self._header(name) for name in self._shards}
        where = f"{self._directory}, layer {layer}"
        kinds = _kinds(where, self._headers)
        stored = {}
        for name in self._headers:
            base, _, kind = name.rpartition(".")
            stored[f"{base}.{kinds[kind]}"] = name
        names = expert_names(stored)
        count = checkpoint.num_experts or 1 + max(expert for expert, _, _ in names)
        for kind, ours in kinds.items():
            absent = [key for key in expert_keys(count, ours) if key not in names]
            if absent and ours != "input_scale":
                raise ValueError(
                    f"{where}: expected {kind} of 3 projections of experts 0 .. {count - 1}, got "
                    f"none for {len(absent)}, first {absent[0][1]} of expert {absent[0][0]}; the "
                    "checkpoint is incomplete: download it again"
                )
        first = stored[names[0, "gate", "weight"]]
        if len(self._headers[first][1]) != 2:
            raise ValueError(f"{first}: expected shape [F, H/2], got {self._headers[first][1]}")
        full, hidden = self._headers[first][1][0], 2 * self._headers[first][1][1]
        if full % (64 * tp_size) or not full:
            raise ValueError(
                f"tp_size: expected a divisor of the intermediate size {full} that leaves a "
                f"multiple of 64, got {tp_size}"
            )
        part = full // tp_size
        check_geometry(hidden, part)
        # Name in the file and the slice to read; the scalars are read whole.
        self._sources: dict[str, tuple[str, tuple[slice, slice] | None]] = {}
        for (_, projection, kind), ours in names.items():
            name, per_byte = stored[ours], 2 if kind == "weight" else BLOCK
            expected: tuple[tuple[int, ...], ...] = ((full, hidden // per_byte),)
            index: tuple[slice, slice] | None = None
            if kind not in ("weight", "weight_scale"):
                expected = ((), (1,))
            elif projection == "down":
                expected, width = ((hidden, full // per_byte),), part // per_byte
                index = slice(None), slice(tp_rank * width, (tp_rank + 1) * width)
            else:
                index = slice(tp_rank * part, (tp_rank + 1) * part), slice(None)
            dtype, shape = self._headers[name]
            if dtype != _DTYPES[kind]:
                raise DTypeError(f"{name}: expected dtype {_DTYPES[kind]}, got {dtype}")
            if shape not in expected:
                raise ValueError(f"{name}: expected shape {expected[-1]}, got {shape}")
            self._sources[ours] = name, index

    def __getitem__(self, name: str) -> Tensor:
        source, index = self._sources[name]
        # What was read counts as memory while its file is mapped, so files are opened anew now and
        # then; tensors are cloned because a view would keep its file mapped.
        if self._mapped > _MAX_MAPPED:
            self._files.clear()
            self._mapped = 0
        file = self._open(self._shards[source])
        if index is None:
            scalar: Tensor = file.get_tensor(source).clone()
            if source.endswith("_global_scale"):
                return 1.0 / decode_scales(source, scalar, 1)
            return scalar
        view: Tensor = file.get_slice(source)[index]
        self._mapped += view.stride(0) * view.shape[0]
        return view.clone(memory_format=torch.contiguous_format)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def source_sha256(self) -> str:
        """Hash name, shape, dtype and file of each tensor, size and modification time of each file.

        The bytes are left out: with them, to find that a layer is up to date would take as long as
        to convert it. So a source that was touched or copied is converted again, without need; one
        that was changed with its size and time kept goes unnoticed.
        """
        digest = hashlib.sha256()
        for name, header in sorted(self._headers.items()):
            digest.update(repr((name, self._shards[name], header)).encode())
        for shard in sorted(set(self._shards.values())):
            status = (self._directory / shard).stat()
            digest.update(repr((shard, status.st_size, status.st_mtime_ns)).encode())
        return digest.hexdigest()

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            self._files[shard] = open_safetensors(self._directory / shard)
        return self._files[shard]

    def _header(self, name: str) -> _Header:
        shard = self._shards[name]
        file = self._open(shard)
        from safetensors import SafetensorError

        try:
            stored = file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(
                f"{self._directory / shard}: expected the tensors that {INDEX} names: {error}; "
                "download both again"
            ) from None
        return str(stored.get_dtype()), tuple(stored.get_shape())


def _kinds(where: str, headers: Mapping[str, _Header]) -> dict[str, str]:
    """Give ModelOpt's kind for each kind of the layer's format, or refuse the format."""
    dtypes = {
        match[2]: dtype
        for name, (dtype, _) in headers.items()
        if (match := EXPERT_NAME.fullmatch(name))
    }
    kinds = dict(zip(_COMPRESSED if "weight_packed" in dtypes else KINDS, KINDS, strict=True))
    scaled = not {"weight_scale_2", "weight_global_scale"}.isdisjoint(dtypes)
    if not scaled or dtypes.keys() - kinds.keys():
        mxfp4 = not scaled and dtypes.get("weight_scale") in ("U8", "F8_E8M0")
        raise UnsupportedError(
            f"{where}: expected NVFP4 experts with {', '.join(kinds)}, got "
            f"{'MXFP4: ' if mxfp4 else ''}{', '.join(f'{k} {dtypes[k]}' for k in sorted(dtypes))}; "
            "use an NVFP4 release of the model, from ModelOpt or compressed-tensors"
        )
    return kinds


def layer_file_name(layer: int, tp_rank: int, tp_size: int = support.TP_SIZE) -> str:
    """Give the name of a prepared layer's file."""
    return f"layer-{layer:04d}-tp-{tp_rank}-of-{tp_size}.safetensors"


def convert_layer(
    checkpoint: Checkpoint,
    destination: Path,
    layer: int,
    *,
    tp_rank: int,
    tp_size: int = support.TP_SIZE,
    missing_input_scale: Literal["error", "max"] = "error",
    per_expert_input_scale: bool = False,
    progress: bool = False,
) -> tuple[Path, bool]:
    """Prepare one layer for one rank and write it, unless that was done before.

    Beyond the rank's prepared layer, memory holds one expert and about 32 MiB of mapped files.

    Parameters
    ----------
    checkpoint : Checkpoint
        The source.
    destination : Path
        Folder to write to; made if there is none.
    layer, tp_rank, tp_size : int
        Which part, see :class:`RankTensors`.
    missing_input_scale, per_expert_input_scale, progress
        As for :func:`cake.modelopt.prepare_modelopt_layer`.

    Returns
    -------
    path : Path
        The file, named by :func:`layer_file_name`.
    converted : bool
        False if it was there, of the same source, options and layout version.

    Raises
    ------
    ValueError
        As :class:`RankTensors` and :func:`cake.modelopt.prepare_modelopt_layer`, or if the source
        changed meanwhile; also an OSError if the destination cannot be written.
    """
    path = destination / layer_file_name(layer, tp_rank, tp_size)
    tensors = RankTensors(checkpoint, layer, tp_rank=tp_rank, tp_size=tp_size)
    source = {
        "layer": str(layer),
        "tp_rank": str(tp_rank),
        "tp_size": str(tp_size),
        "source_sha256": tensors.source_sha256(),
        "missing_input_scale": missing_input_scale,
        "per_expert_input_scale": str(per_expert_input_scale),
    }
    if _is_prepared(path, source):
        return path, False
    try:
        destination.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=destination).close()
    except OSError as error:
        raise OSError(f"{destination}: expected a folder to write to: {error}") from error
    prepared = prepare_modelopt_layer(
        tensors,
        tp_rank=0,  # of 1: the tensors are this rank's part already
        tp_size=1,
        num_experts=checkpoint.num_experts,
        missing_input_scale=missing_input_scale,
        per_expert_input_scale=per_expert_input_scale,
        progress=progress,
    )
    if tensors.source_sha256() != source["source_sha256"]:
        raise ValueError(f"{checkpoint.directory}: changed while it was read; convert again")
    save_layer(path, prepared, source)
    return path, True


def _is_prepared(path: Path, source: Mapping[str, str]) -> bool:
    """Tell whether a file is a prepared layer of this source."""
    try:
        metadata = open_safetensors(path).metadata() or {}
    except (ValueError, FileNotFoundError):
        return False
    version = str(PreparedWeights.LAYOUT_VERSION)
    wanted = {**source, "format": FORMAT, "layout_version": version}
    return wanted.items() <= metadata.items()


def _sizes(path: Path) -> tuple[int, ...]:
    """Give experts, hidden and intermediate size of a prepared layer."""
    metadata = open_safetensors(path).metadata()
    return tuple(int(metadata[key]) for key in ("num_experts", "hidden", "intermediate"))


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    # Not getrusage: its ru_maxrss begins with that of the program that started this one.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake convert`."""
    parser = commands.add_parser(
        "convert", help="prepare layers of an NVFP4 checkpoint for one tensor-parallel rank"
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of the checkpoint")
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to write to")
    parser.add_argument(
        "--layer",
        type=int,
        nargs="+",
        action="extend",
        required=True,
        metavar="L",
        help="layers to convert, for example $(seq 1 60)",
    )
    parser.add_argument("--tp-rank", type=int, required=True, metavar="R", help="part, from 0")
    parser.add_argument(
        "--tp-size",
        type=int,
        default=support.TP_SIZE,
        metavar="N",
        help="number of parts; the operation runs parts of 8, the default",
    )
    parser.add_argument(
        "--missing-input-scale",
        choices=("error", "max"),
        default="error",
        help="experts that calibration did not reach: refuse, or take the largest of the others",
    )
    parser.add_argument(
        "--per-expert-input-scale",
        action="store_true",
        help="keep the intermediate scale of each expert instead of the largest for all",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `cake convert`."""
    checkpoint = Checkpoint(arguments.source)
    layers = list(dict.fromkeys(arguments.layer))
    for layer in layers:
        checkpoint.shards(layer)  # refuses what is missing before any work
    threads = torch.get_num_threads()
    # One expert's part is small: threads gain little, and lose much where ranks are converted side
    # by side or the machine is busy.
    torch.set_num_threads(1)
    try:
        for layer in layers:
            start = time.perf_counter()
            path, converted = convert_layer(
                checkpoint,
                arguments.destination,
                layer,
                tp_rank=arguments.tp_rank,
                tp_size=arguments.tp_size,
                missing_input_scale=arguments.missing_input_scale,
                per_expert_input_scale=arguments.per_expert_input_scale,
                progress=True,
            )
            done = f"{path.stat().st_size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
            print(f"layer {layer}: {path}: {done if converted else 'up to date, skipped'}")
        if (sizes := _sizes(path)) != _RUNS:
            print(f"note: experts, hidden and intermediate size are {sizes}; only {_RUNS} runs")
    finally:
        torch.set_num_threads(threads)
    print(f"peak memory: {peak_memory() / 1e6:,.0f} MB")
    return 0
