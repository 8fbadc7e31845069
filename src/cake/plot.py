"""`cake plot` draws what `cake bench --json` wrote: times with the floor, and fractions of it.

Peers are drawn beside cake, in its colour, with dotted lines.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cake.info import Subparsers

ONLY = "cake"  # the label where no other file has to be told from this one


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
            for name in peer_names([r]):
                _ = report["peers"][name]["version"], report["peers"][name]["numerics"]
                if float(r["peers"][name]["us"]) <= 0:
                    raise ValueError(f"no times: {r}")
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a file that `cake bench --json` wrote: {error}"
        ) from None
    return dict(report)


def peer_names(results: list[dict[str, Any]]) -> list[str]:
    """Return the peers that have a time in some of the results."""
    return sorted({name for r in results for name, p in r.get("peers", {}).items() if "us" in p})


@dataclass(frozen=True)
class Curve:
    """Times over token counts."""

    label: str
    style: str  # matplotlib's
    tokens: list[int]
    us: list[float]
    floor_us: list[float]

    def fractions(self) -> list[float]:
        """Return what part of the time the floor is."""
        return [floor / us for floor, us in zip(self.floor_us, self.us, strict=True)]


def curves(label: str, report: dict[str, Any], routing: str) -> list[Curve]:
    """Return the curve of cake, and then one for each peer, with this routing."""
    results = sorted(
        (r for r in report["results"] if r["routing"] == routing), key=lambda r: int(r["tokens"])
    )

    def curve(title: str, style: str, points: list[tuple[dict[str, Any], float]]) -> Curve:
        return Curve(
            f"{title}, {routing} routing",
            style,
            [r["tokens"] for r, _ in points],
            [us for _, us in points],
            [r["floor_us"] for r, _ in points],
        )

    found = [curve(label, "o-", [(r, r["us"]) for r in results])]
    for name in peer_names(results):
        facts = report["peers"][name]
        numerics = facts["numerics"].split(":")[0]
        timed = [(r, r["peers"].get(name, {})) for r in results]
        points = [(r, outcome["us"]) for r, outcome in timed if "us" in outcome]
        of_file = "" if label == ONLY else f", {label}"
        found.append(curve(f"{facts['version']} ({numerics}){of_file}", "s:", points))
    return found


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
            color = None  # of cake's curve: the others of this routing take it too
            for curve in curves(label, report, routing):
                style = {"ms": 4, "color": color, "label": curve.label}
                (line,) = times.plot(curve.tokens, curve.us, curve.style, **style)
                color = style["color"] = line.get_color()
                fractions.plot(curve.tokens, curve.fractions(), curve.style, **style)
                if number == 0 and curve.style == "o-":
                    label_floor = f"floor, {routing} routing"
                    times.plot(
                        curve.tokens, curve.floor_us, "--", color=color, lw=1, label=label_floor
                    )
    for axes in (times, fractions):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel("tokens")
        axes.grid(True, alpha=0.3)
    times.set_yscale("log")
    times.set_ylabel("time of a call, us")
    times.legend(fontsize=8, loc="upper left")
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
    several = len(arguments.files) > 1
    reports = {path.stem if several else ONLY: load(path) for path in arguments.files}
    draw(reports, arguments.output)
    print(arguments.output)
    return 0
