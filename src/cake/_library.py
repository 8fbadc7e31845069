"""Find and load the shared library with the operators of `torch.ops.cake`, once."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FILE_NAME = "libcake_ops.so"
_OLDEST_TORCH = (2, 10)


def library_path() -> Path:
    """Return the shared library: `CAKE_LIBRARY` if set, else the one beside this file."""
    return Path(os.environ.get("CAKE_LIBRARY") or Path(__file__).with_name(_FILE_NAME))


def _load() -> None:
    path = library_path()
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(
            f"cake needs torch 2.10 or newer, got torch {torch.__version__}: "
            "pip install --upgrade torch"
        )
    if not path.is_file():
        raise ImportError(
            f"cake: no {path.name} at {path.parent}. A source folder holds no built library: "
            "install the wheel (pip install .), or set CAKE_LIBRARY to a built library."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"cake: {path} did not load with torch {torch.__version__}: {error}. "
            "It needs Linux with glibc 2.34 or newer and the C++ runtime of GCC 11 or newer."
        ) from error


_load()


@cache
def _build_info() -> str:
    return str(torch.ops.cake.build_info())


def build_info() -> dict[str, Any]:
    """Return how this library was built.

    Returns
    -------
    dict
        `version`, `commit` (short hash or "unknown"), `dirty` (bool or None), `cxx_compiler`,
        `cuda_compiler` (empty for a build without CUDA), `cuda_architectures` (list such as
        "sm_90a"), `nvtx` (whether it has NVTX ranges), `torch_target` (oldest torch whose stable
        ABI is used) and `system`.
    """
    info: dict[str, Any] = json.loads(_build_info())
    return info
