"""`cake info`: what this installation is, and what it can do on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cake import _library, support

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake info`."""
    parser = commands.add_parser("info", help="version, build, devices and support")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="show the workspace of a call with N tokens, and its plan on a GPU",
    )
    parser.set_defaults(run=run)


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA kernel driver, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


# The oldest branch of NVIDIA's driver that runs code of a major CUDA release.
_OLDEST_DRIVERS = {"13": "580"}


def oldest_driver(cuda_compiler: str) -> str | None:
    """Return the oldest driver branch for what "nvcc 13.0.88" compiled; None without CUDA."""
    major = cuda_compiler.removeprefix("nvcc ").partition(".")[0]
    return _OLDEST_DRIVERS.get(major)


def _devices() -> list[dict[str, Any]]:
    supported, reason = support.is_supported("cpu")
    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "supported": supported,
            "reason": reason,
        }
    ]
    for index in range(torch.cuda.device_count()):
        supported, reason = support.is_supported(index)
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": torch.cuda.get_device_name(index),
                "compute_capability": f"{major}.{minor}",
                "sms": torch.cuda.get_device_properties(index).multi_processor_count,
                "supported": supported,
                "reason": reason,
            }
        )
    return devices


def collect() -> dict[str, Any]:
    """Return what `cake info --json` prints: the build, the software around it, the devices."""
    build = _library.build_info()
    return {
        "cake": build,
        "library": str(_library.library_path()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": driver_version(),
        "oldest_driver": oldest_driver(build["cuda_compiler"]),
        "devices": _devices(),
    }


def workspace_table(num_tokens: int) -> list[dict[str, Any]]:
    """Return the regions of a workspace: name, offset and bytes.

    Raises
    ------
    ValueError
        `num_tokens` is outside 0..16384.
    """
    if not 0 <= num_tokens <= support.MAX_TOKENS:
        raise ValueError(f"--tokens: expected 0 to {support.MAX_TOKENS}, got {num_tokens}")
    table: list[dict[str, Any]] = json.loads(torch.ops.cake.workspace_table(num_tokens))
    return table


def gpu_plan(
    num_tokens: int, major: int, num_sms: int, batch_invariant: bool = False
) -> dict[str, Any] | None:
    """Return how a GPU runs a call: kernels, pairs per tile, FC2's parts and pool.

    None for no tokens.
    """
    if num_tokens == 0:
        return None
    plan: dict[str, Any] = json.loads(
        torch.ops.cake.plan(num_tokens, batch_invariant, major, num_sms)
    )
    return plan


def device_plan(
    device: torch.device, num_tokens: int, batch_invariant: bool = False
) -> dict[str, Any] | None:
    """Return how this device runs a call, see `gpu_plan`; None for the CPU and for no tokens."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    return gpu_plan(num_tokens, gpu.major, gpu.multi_processor_count, batch_invariant)


def _plan_gpu(devices: list[dict[str, Any]]) -> tuple[int, int]:
    """Return major compute capability and SMs of the first supported GPU, else of an H200."""
    for device in devices[1:]:
        if device["supported"]:
            return int(device["compute_capability"].split(".")[0]), device["sms"]
    return 9, 132


def _print_info(facts: dict[str, Any]) -> None:
    build = facts["cake"]
    state = {True: " with local changes", False: "", None: ""}[build["dirty"]]
    oldest = facts["oldest_driver"]
    needed = f" (a GPU needs {oldest} or newer)" if oldest else ""
    rows = [
        ("cake", f"{build['version']}, commit {build['commit']}{state}"),
        ("library", facts["library"]),
        ("compilers", f"{build['cxx_compiler']}, {build['cuda_compiler'] or 'no CUDA'}"),
        ("CUDA code for", ", ".join(build["cuda_architectures"]) or "nothing (CPU only)"),
        ("Python, torch", f"{facts['python']}, {facts['torch']} (CUDA {facts['torch_cuda']})"),
        ("NVIDIA driver", (facts["driver"] or "none") + needed),
    ]
    for device in facts["devices"]:
        mark = "supported" if device["supported"] else "not supported"
        rows.append((device["device"], f"{device['name']}: {mark} ({device['reason']})"))
    for name, value in rows:
        print(f"{name:<14} {value}")


def _print_workspace(num_tokens: int, regions: list[dict[str, Any]], gpu: tuple[int, int]) -> None:
    print(f"\nWorkspace for {num_tokens} tokens\n{'region':<18}{'offset':>14}{'bytes':>14}")
    for region in regions:
        print(f"{region['region']:<18}{region['offset']:>14,}{region['bytes']:>14,}")
    print(f"{'total':<18}{'':>14}{torch.ops.cake.workspace_size(num_tokens):>14,}")
    plan = gpu_plan(num_tokens, *gpu)
    if plan is not None:
        print(
            f"\nPlan on compute capability {gpu[0]}, {gpu[1]} SMs: {plan['kernels']} kernels, "
            f"up to {plan['tile_pairs']} pairs a tile"
        )
        if plan["kernels"] == "decode":
            print("FC1 and FC2 in one launch")
        if plan["tokens_per_chunk"] < num_tokens:
            print(f"in chunks of up to {plan['tokens_per_chunk']} tokens")
        columns = plan["fc2_columns_per_part"]
        launch = ", one launch" if plan["fc2_finalizes"] else ""
        print(f"FC2 and finalize in {plan['fc2_parts']} part(s) of {columns} columns{launch}")
        if plan["fc2_pool_part"] > 0:
            print(
                f"FC2 is pooled: one block in {plan['fc2_pool_part']} is claimed from the work "
                f"counter, {plan['fc2_pool_rows']} rows at a time"
            )


def run(arguments: argparse.Namespace) -> int:
    """Run `cake info`."""
    facts = collect()
    regions = None if arguments.tokens is None else workspace_table(arguments.tokens)
    if arguments.json:
        if regions is not None:
            facts["workspace"] = {"tokens": arguments.tokens, "regions": regions}
            facts["plan"] = gpu_plan(arguments.tokens, *_plan_gpu(facts["devices"]))
        print(json.dumps(facts, indent=2))
        return 0
    _print_info(facts)
    if regions is not None:
        _print_workspace(arguments.tokens, regions, _plan_gpu(facts["devices"]))
    return 0
