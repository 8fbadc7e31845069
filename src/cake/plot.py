"""`cake plot` draws what `cake bench --json` wrote: times with the floor, and fractions of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cake.info import Subparsers


def load(path: Path) -> dict[str, Any]:
    """Read a file of `cake bench`.

    Raises
    ------
    ValueError
        The file is no such file.
    """
    try:
        report = json.loads(path.read_text())
        if not report["results"]:
            raise ValueError("no results")
        _ = report["cake"]["version"], report["device"]
        for r in report["results"]:
            if int(r["tokens"]) < 1 or min(float(r["us"]), float(r["floor_us"])) <= 0:
                raise ValueError(f"no times: {r}")
            _ = str(r["routing"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a file that `cake bench --json` wrote: {error}"
        ) from None
    return dict(report)


def draw(reports: dict[str, dict[str, Any]], output: Path) -> None:
    """Draw the reports, by label, into an image file; its suffix says the format.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ImportError(
            f"matplotlib is needed to draw ({error}): pip install 'cake-moe[bench]'"
        ) from None
    figure, (times, fractions) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, (label, report) in enumerate(reports.items()):
        for routing in dict.fromkeys(r["routing"] for r in report["results"]):
            rows = sorted(
                (r for r in report["results"] if r["routing"] == routing),
                key=lambda r: int(r["tokens"]),
            )
            tokens = [r["tokens"] for r in rows]
            name = f"{label}, {routing} routing"
            (line,) = times.plot(tokens, [r["us"] for r in rows], "o-", ms=4, label=name)
            if number == 0:
                times.plot(
                    tokens,
                    [r["floor_us"] for r in rows],
                    "--",
                    color=line.get_color(),
                    lw=1,
                    label=f"floor, {routing} routing",
                )
            fractions.plot(
                tokens,
                [r["floor_us"] / r["us"] for r in rows],
                "o-",
                ms=4,
                color=line.get_color(),
                label=name,
            )
    for axes in (times, fractions):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel("tokens")
        axes.grid(True, alpha=0.3)
    times.set_yscale("log")
    times.set_ylabel("time of a call, us")
    times.legend(fontsize=8)
    fractions.set_ylim(0, 1)
    fractions.set_ylabel("fraction of the floor")
    first = next(iter(reports.values()))
    figure.suptitle(f"cake {first['cake']['version']} on {first['device']}", fontsize=11)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def add_command(commands: Subparsers) -> None:
    """Add the parser of `cake plot`."""
    parser = commands.add_parser("plot", help="draw files of cake bench")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench.png"),
        metavar="IMAGE",
        help="default: bench.png; the suffix says the format",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `cake plot`."""
    reports = {path.stem: load(path) for path in arguments.files}
    draw(reports, arguments.output)
    print(arguments.output)
    return 0
