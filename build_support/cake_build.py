"""PEP 517 backend: scikit-build-core, asking only for the toolchain that this machine lacks.

CMake runs the same file, so that both look in the same places: `python cake_build.py torch` prints
the folder with torch's headers, `nvcc` the compiler (or nothing).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

TORCH = ["torch==2.13.0"]
# One CUDA release throughout: nvcc's own requirements are open and would pull a newer nvvm,
# whose PTX the older ptxas refuses.
NVCC = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-nvtx==13.0.85",
]
STABLE_HEADER = "torch/csrc/stable/library.h"


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)  # locates without importing
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def torch_include() -> Path | None:
    """The include folder of a torch with the stable ABI, or None."""
    named = os.environ.get("CAKE_TORCH_INCLUDE")
    # The environment that pip builds for; build isolation hides it from sys.path only.
    outer = Path(sysconfig.get_path("purelib")) / "torch"
    folders = (
        [Path(named)] if named else [p / "include" for p in [*_package_folders("torch"), outer]]
    )
    return next((d for d in folders if (d / STABLE_HEADER).is_file()), None)


def _is_recent(compiler: Path) -> bool:
    """Whether nvcc is of CUDA 13, the first release that compiles for every GPU we build for."""
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False
        )
    except OSError:  # no program
        return False
    release = re.search(r"release (\d+)\.", answer.stdout)
    return release is not None and int(release[1]) >= 13


def nvcc() -> Path | None:
    """Nvcc 13 or newer of an installed toolkit, else of the PyPI packages, else None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    named = [
        os.environ.get("CUDACXX"),
        *(f"{h}/bin/nvcc" for h in homes if h),
        shutil.which("nvcc"),
    ]
    installed = [Path(name).resolve() for name in named if name and Path(name).is_file()]
    packaged = [c for d in _package_folders("nvidia") for c in sorted(d.glob("cu1*/bin/nvcc"))]
    return next((c for c in [*installed, *packaged] if _is_recent(c)), None)


def _wants_cuda(config_settings: dict[str, str | list[str]] | None) -> bool:
    """False when the caller switches CUDA off: CMAKE_ARGS, or pip's -C option."""
    words = os.environ.get("CMAKE_ARGS", "").split()
    for key, value in (config_settings or {}).items():
        if key.endswith("cmake.define.CAKE_CUDA"):
            words.append(f"-DCAKE_CUDA={value}")
        elif key.endswith("cmake.args"):
            words += value if isinstance(value, list) else [value]
    chosen = [w.split("=", 1)[1].upper() for w in words if w.startswith("-DCAKE_CUDA")]
    return not chosen or chosen[-1] not in {"OFF", "0", "FALSE", "NO"}


def _toolchain(config_settings: dict[str, str | list[str]] | None) -> list[str]:
    need_nvcc = _wants_cuda(config_settings) and not nvcc()
    return [*([] if torch_include() else TORCH), *(NVCC if need_nvcc else [])]


def get_requires_for_build_wheel(
    config_settings: dict[str, str | list[str]] | None = None,
) -> list[str]:
    import scikit_build_core.build as backend

    return [*backend.get_requires_for_build_wheel(config_settings), *_toolchain(config_settings)]


def get_requires_for_build_editable(
    config_settings: dict[str, str | list[str]] | None = None,
) -> list[str]:
    import scikit_build_core.build as backend

    return [*backend.get_requires_for_build_editable(config_settings), *_toolchain(config_settings)]


def __getattr__(name: str) -> Any:
    """Every other hook is scikit-build-core's own (PEP 562)."""
    import scikit_build_core.build as backend

    return getattr(backend, name)


if __name__ == "__main__":
    print({"torch": torch_include, "nvcc": nvcc}[sys.argv[1]]() or "")
