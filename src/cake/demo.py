"""`cake demo`: one real-geometry layer, made, prepared, run and checked on this machine."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from cake import api, support
from cake.config import ActivationType
from cake.prepared_weights import PreparedWeights
from cake.testing import numeric, reference, synthetic

if TYPE_CHECKING:
    from rich.console import Console

    from cake.info import Subparsers

Result = TypeVar("Result")

MAX_ROW_ERROR = 0.1
"""Relative error of a row that fails the demo; a wrong operand gives 1, rounding below 0.06."""

_FORMAT = "cake-demo-1"
_STAGES = "quantize, route, FC1 + SiTU + requantize, FC2, finalize"


@dataclass(frozen=True, slots=True)
class Problem:
    """A layer and a routed batch: everything that a call takes, on one device."""

    seed: int
    weights: PreparedWeights
    quant_scales: list[Tensor]  # the six, see `cutlass_fused_moe`
    tokens: Tensor  # bf16 [T, H]
    topk_ids: Tensor  # int32 [T, k]
    topk_weights: Tensor  # bf16 [T, k]


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake demo`."""
    parser = commands.add_parser(
        "demo", help="make a full layer, run a batch through it and check the result"
    )
    parser.add_argument("--tokens", type=int, metavar="T", help="1 to 16384 (default 8)")
    parser.add_argument("--seed", type=int, help="of weights and tokens (default 0)")
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: the best supported)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write layer, batch and output")
    parser.add_argument(
        "--load", type=Path, metavar="FILE", help="run what --save wrote, compare with its output"
    )
    parser.set_defaults(run=run)


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return the device to run on, and why.

    Raises
    ------
    ValueError
        The named device cannot run the operation; says the reason.
    """
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {name!r}") from None
        supported, reason = support.is_supported(device)
        if not supported:
            raise ValueError(f"--device {name}: {reason}")
        return device, reason
    supported, reason = support.is_supported()
    if supported:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), reason
    return torch.device("cpu"), f"{support.is_supported('cpu')[1]}; not on the GPU: {reason}"


def make_problem(num_tokens: int, seed: int, device: torch.device) -> Problem:
    """Make a heavy-tailed layer of all experts, and a batch routed by a softmax top-k router."""
    weights, quant_scales = synthetic.make_layer(seed, device=device, progress=True)
    tokens = synthetic.make_tokens(num_tokens, seed)
    topk_ids, topk_weights = synthetic.route(num_tokens, seed, kind="softmax", tokens=tokens)
    return Problem(
        seed=seed,
        weights=weights,
        quant_scales=quant_scales,
        tokens=tokens.to(device),
        topk_ids=topk_ids.to(device),
        topk_weights=topk_weights.to(device),
    )


def save_problem(path: Path, problem: Problem, output: Tensor) -> None:
    """Write a problem and its output as safetensors; the file appears whole or not at all."""
    from safetensors.torch import save_file

    tensors = {f"weights.{name}": t for name, t in problem.weights.tensors().items()}
    tensors |= {f"quant_scales.{i}": problem.quant_scales[i] for i in (0, 2, 3, 5)}
    tensors |= {
        "tokens": problem.tokens,
        "topk_ids": problem.topk_ids,
        "topk_weights": problem.topk_weights,
        "output": output,
    }
    metadata = {
        "format": _FORMAT,
        "layout_version": str(PreparedWeights.LAYOUT_VERSION),
        "seed": str(problem.seed),
    }
    with tempfile.NamedTemporaryFile(dir=path.resolve().parent, delete=False) as partial:
        try:
            save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, partial.name, metadata)
            os.chmod(partial.name, 0o644)
            os.replace(partial.name, path)
        except BaseException:
            os.unlink(partial.name)
            raise


def load_problem(path: Path, device: torch.device) -> tuple[Problem, Tensor]:
    """Read what `save_problem` wrote.

    Raises
    ------
    ValueError
        Not such a file, damaged, or of another layout version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            version = str(PreparedWeights.LAYOUT_VERSION)
            if metadata.get("format") != _FORMAT or metadata.get("layout_version") != version:
                raise ValueError(
                    f"--load {path}: expected a file of `cake demo --save` with layout version "
                    f"{version}, got metadata {metadata}"
                )
            t = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"--load {path}: expected a safetensors file, got: {error}") from None
    try:
        names = PreparedWeights.empty(1, 128, 64).tensors()
        weights = PreparedWeights(**{name: t[f"weights.{name}"] for name in names})
        scales = [
            t["quant_scales.0"],
            weights.w13_sf,
            t["quant_scales.2"],
            t["quant_scales.3"],
            weights.w2_sf,
            t["quant_scales.5"],
        ]
        problem = Problem(
            int(metadata["seed"]), weights, scales, t["tokens"], t["topk_ids"], t["topk_weights"]
        )
        return problem, t["output"]
    except KeyError as error:
        raise ValueError(f"--load {path}: expected a tensor named {error}, found none") from None


def run_problem(problem: Problem) -> tuple[Tensor, list[float]]:
    """Run the operation as a user would; returns the output and the seconds of three calls."""
    num_tokens, device = problem.tokens.shape[0], problem.tokens.device
    geometry = support.KIMI_K3
    nbytes = api.cutlass_fused_moe_workspace_size(
        num_tokens,
        geometry.hidden,
        geometry.intermediate,
        geometry.num_experts,
        geometry.top_k,
        x_dtype=torch.bfloat16,
        weight_dtype=torch.uint8,
        activation_type=ActivationType.Situ,
        tp_size=support.TP_SIZE,
    )
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    output = torch.full_like(problem.tokens, float("nan"))  # shows what is not written
    api.cake_fused_moe_prepare_workspace(workspace, num_tokens)
    seconds = []
    for _ in range(3):
        _synchronize(device)
        start = time.perf_counter()
        api.cutlass_fused_moe(
            problem.tokens,
            problem.topk_ids,
            problem.topk_weights,
            problem.weights.w13,
            problem.weights.w2,
            torch.bfloat16,
            problem.quant_scales,
            activation_type=ActivationType.Situ,
            tp_size=support.TP_SIZE,
            workspace_buffer=workspace,
            output=output,
        )
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return output, seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_cpu(problem: Problem) -> Problem:
    if problem.tokens.device.type == "cpu":
        return problem
    weights = PreparedWeights(**{n: t.cpu() for n, t in problem.weights.tensors().items()})
    scales = [t.cpu() for t in problem.quant_scales]
    scales[1], scales[4] = weights.w13_sf, weights.w2_sf
    return replace(
        problem,
        weights=weights,
        quant_scales=scales,
        tokens=problem.tokens.cpu(),
        topk_ids=problem.topk_ids.cpu(),
        topk_weights=problem.topk_weights.cpu(),
    )


def check_problem(
    problem: Problem, output: Tensor
) -> tuple[numeric.OutputComparison, numeric.OutputComparison]:
    """Compare with the float64 reference of the same arithmetic, and with unquantized float64."""
    problem = _to_cpu(problem)
    expected = reference.fused_moe_reference(
        problem.tokens,
        problem.topk_ids,
        problem.topk_weights,
        problem.weights.w13,
        problem.weights.w2,
        problem.quant_scales,
    )
    exact = reference.unquantized_reference(
        problem.tokens,
        problem.topk_ids,
        problem.topk_weights,
        lambda expert: synthetic.make_expert(expert, problem.seed),
        num_experts=support.KIMI_K3.num_experts,
    )
    output = output.cpu()
    return numeric.compare_outputs(output, expected), numeric.compare_outputs(output, exact)


def _step(console: Console, text: str, work: Callable[[], Result]) -> Result:
    """Do one step under a spinner and say how long it took."""
    start = time.perf_counter()
    with console.status(text):
        result = work()
    console.print(f"[green]✓[/] {text} [dim]{time.perf_counter() - start:.1f} s[/]")
    return result


def _print_table(
    console: Console,
    problem: Problem,
    path: str,
    seconds: list[float],
    comparisons: tuple[numeric.OutputComparison, numeric.OutputComparison],
) -> None:
    from rich.table import Table

    num_tokens = problem.tokens.shape[0]
    to_reference, to_exact = comparisons
    experts = int(problem.topk_ids.unique().numel())
    table = Table(show_header=False, title=f"{num_tokens} tokens, {experts} of 896 experts")
    rows: list[tuple[str, str]] = [
        ("device", f"{problem.tokens.device}: {path}"),
        ("stages of the one call", _STAGES),
        ("time of a call", f"{sorted(seconds)[1] * 1e3:,.2f} ms (median of {len(seconds)})"),
        (
            "error per row, worst",
            f"{to_reference.worst_row_error:.1e} (row {to_reference.worst_row})",
        ),
        ("error per row, median", f"{to_reference.median_row_error:.1e}"),
        ("cost of NVFP4, median row", f"{to_exact.median_row_error:.2f}"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        "An error per row is |output - reference| / |reference| (L2). The first two compare with a "
        "float64 reference of the same quantized arithmetic: 0 to 1e-2 is rounding. The third "
        "compares with unquantized float64: it is what 4-bit weights and activations cost on "
        "these heavy-tailed random weights, with any implementation."
    )


def _chosen(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return token count and seed after checking all options that need no work to check."""
    if arguments.load is not None:
        for option in ("tokens", "seed"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option}: comes from the file with --load; leave it out")
        if not arguments.load.is_file():
            raise ValueError(f"--load: expected a file, got {arguments.load}")
    if arguments.save is not None and not arguments.save.resolve().parent.is_dir():
        raise ValueError(f"--save: expected an existing folder, got {arguments.save.parent}")
    num_tokens = 8 if arguments.tokens is None else arguments.tokens
    if not 1 <= num_tokens <= support.MAX_TOKENS:
        raise ValueError(f"--tokens: expected 1 to {support.MAX_TOKENS}, got {num_tokens}")
    return num_tokens, arguments.seed or 0


def run(arguments: argparse.Namespace) -> int:
    """Run `cake demo`."""
    try:
        import safetensors  # noqa: F401
        from rich.console import Console
    except ImportError as error:
        raise ImportError(f"{error}; install the extra: pip install 'cake-moe[cli]'") from None
    num_tokens, seed = _chosen(arguments)
    device, path = choose_device(arguments.device)
    console = Console(highlight=False)
    saved: Tensor | None = None
    start = time.perf_counter()
    if arguments.load is not None:
        problem, saved = _step(
            console, f"load {arguments.load}", lambda: load_problem(arguments.load, device)
        )
    else:
        console.print(
            "Making one layer: 896 experts, heavy-tailed BF16 weights, quantized, prepared"
        )
        problem = make_problem(num_tokens, seed, device)
        console.print(f"[green]✓[/] layer and batch [dim]{time.perf_counter() - start:.1f} s[/]")
    output, seconds = _step(console, "run the operation", lambda: run_problem(problem))
    comparisons = _step(
        console, "compare with float64 references", lambda: check_problem(problem, output)
    )
    if arguments.save is not None:
        _step(
            console,
            f"write {arguments.save}",
            lambda: save_problem(arguments.save, problem, output),
        )
    _print_table(console, problem, path, seconds, comparisons)
    if not comparisons[0].worst_row_error < MAX_ROW_ERROR:
        raise ValueError(
            f"output: expected every row within {MAX_ROW_ERROR} of the reference, got "
            f"{comparisons[0]}"
        )
    if saved is not None:
        difference = numeric.bitwise_difference(output, saved)
        if difference is not None:
            raise ValueError(f"--load: the output differs from the saved one: {difference}")
        console.print("The output equals the saved one bit for bit.")
    console.print(f"Done in {time.perf_counter() - start:.0f} s.")
    return 0
