"""Draw docs/images/*.svg; needs an installed cake and matplotlib, no GPU.

The pictures of the layout come from cake.layout's own index functions, the plots from the tables of
the pages that show them.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cake import layout

matplotlib.use("Agg")
DOCS = Path(__file__).parent
COLORS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")
BLOCK = 32  # rows that the row order moves within
INTERMEDIATE, HIDDEN = 384, 3584


def _cell(axes: Axes, x: float, y: float, width: float, color: str, text: str) -> None:
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=color, edgecolor="white", lw=0.8))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8)


def _finish(axes: Axes, width: float, height: float, title: str) -> None:
    axes.set(xlim=(-0.2, width), ylim=(height, -1.6))
    axes.set_axis_off()
    axes.set_title(title, fontsize=10)


def _draw_rows(axes: Axes, order: list[int], names: dict[int, str], title: str) -> None:
    """Join each logical row, in order, with its place among the prepared rows."""
    logical = sorted(order)
    axes.text(1, -0.5, "logical rows", ha="center", fontsize=9)
    axes.text(6.5, -0.5, "prepared rows", ha="center", fontsize=9)
    for n, row in enumerate(order):
        color = COLORS[n // 8]
        _cell(axes, 0, logical.index(row), 2, color, names[row])
        _cell(axes, 5, n, 3, color, f"{n}: {names[row]}")
        axes.plot((2.1, 4.9), (logical.index(row) + 0.5, n + 0.5), color=color, lw=1.2)
    _finish(axes, 8.2, BLOCK, title)


def rows() -> Figure:
    """Draw the first 32-row block of w13 and of w2."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 8.5), layout="constrained")
    names = {f: f"up {f}" for f in range(INTERMEDIATE)}
    names |= {INTERMEDIATE + f: f"gate {f}" for f in range(INTERMEDIATE)}
    fc1 = layout.fc1_row_order(INTERMEDIATE)[:BLOCK].tolist()
    _draw_rows(left, fc1, names, "w13: rows 0 to 31 of an expert")
    fc2 = layout.fc2_row_order(HIDDEN)[:BLOCK].tolist()
    _draw_rows(right, fc2, {m: f"output {m}" for m in fc2}, "w2: rows 0 to 31 of an expert")
    return figure


def scales() -> Figure:
    """Draw where the block scales of a [768, 224] matrix are stored."""
    offset = layout.scale_offset(2 * INTERMEDIATE, HIDDEN // 16)
    figure, (tiles, tile) = pyplot.subplots(
        1, 2, figsize=(10.5, 3.8), width_ratios=(1, 3), layout="constrained"
    )
    shown = 4
    for i in range(3):
        for j in range(shown):
            begin = int(offset[layout.ROW_TILE * i, layout.COLUMN_TILE * j])
            _cell(tiles, 2 * j, i, 2, "#dddddd", str(begin))
    tiles.text(2 * shown + 0.3, 1.5, "...", va="center", fontsize=9)
    tiles.text(shown, 3.4, "...", ha="center", fontsize=9)
    title = "w13_sf, 768 x 224:\nfirst byte of each tile\n(128 rows x 4 columns)"
    _finish(tiles, 2 * shown + 1, 7, title)

    places = {
        int(offset[n, c]): (n, c) for n in range(layout.ROW_TILE) for c in range(layout.COLUMN_TILE)
    }
    lines = [0, 1, 2, 3, 30, 31]
    for place, line in enumerate(lines):
        y = place + (line >= 30)  # a gap for the lines left out
        tile.text(-0.3, y + 0.5, f"byte {16 * line}", ha="right", va="center", fontsize=8)
        for byte in range(16):
            n, c = places[16 * line + byte]
            _cell(tile, byte, y, 1, COLORS[n // BLOCK], f"{n},{c}")
    tile.text(8, 4.5, "...", ha="center", va="center", fontsize=9)
    _finish(tile, 16, 7, "a tile, 16 of its 512 bytes a line: row,column of the scale at each byte")
    tile.set_xlim(-2, 16)
    return figure


def table(page: str, heading: str) -> list[dict[str, str]]:
    """Return the first table below a heading of a page, by the names of its columns."""
    text = (DOCS / page).read_text().split(f"\n## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\|\n)+", text, re.M)
    assert lines, f"{page}: no table below {heading}"
    names, _, *body = (
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[0].splitlines()
    )
    return [dict(zip(names, cells, strict=True)) for cells in body]


def points(lines: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    """Return token counts and times; of a range its middle, and nothing where there is no time."""
    tokens, times = [], []
    for line in lines:
        values = re.findall(r"(?<!\w)[\d.]+", line[column].split("(")[0])
        if values:
            tokens.append(int(line["T"]))
            times.append(sum(map(float, values)) / len(values))
    return tokens, times


def _plot(
    title: str, below: bool, curves: dict[str, tuple[str, tuple[list[int], list[float]]]]
) -> Figure:
    """Draw times over token counts, those of the first curve in figures, above or below it."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.margins(y=0.08)
    for label, (style, (tokens, times)) in curves.items():
        axes.plot(tokens, times, style, label=label, ms=4)
    for tokens, time in zip(*next(iter(curves.values()))[1], strict=True):
        axes.annotate(
            f"{time:.0f}" if time >= 100 else f"{time:g}",
            (tokens, time),
            xytext=(3, -12) if below else (0, 6),
            textcoords="offset points",
            ha="left" if below else "right",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks := [2**i for i in range(15)], [str(tick) for tick in ticks], rotation=60)
    axes.set(xlabel="tokens", ylabel="time of a call, us", title=title)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def performance() -> Figure:
    """Draw what docs/performance.md measured."""
    state = table("performance.md", "Complete call at this state")
    tokens, times = points(state, "us")
    _, fractions = points(state, "fraction of the floor")
    floor = [time * fraction for time, fraction in zip(times, fractions, strict=True)]
    return _plot(
        "Measured on an H200: complete call, random routing",
        False,
        {
            "cake": ("o-", (tokens, times)),
            "humming-kernels 0.1.19 (W4A16)": (
                "s:",
                points(state, "Humming 0.1.19 (W4A16), us"),
            ),
            "floor: bytes and operations at the measured ceilings": ("k--", (tokens, floor)),
        },
    )


def blackwell() -> Figure:
    """Draw what docs/blackwell.md predicts, and what others published."""
    lines = table("blackwell.md", "Predicted bytes and times")
    published = [
        line | dict(zip(("faster", "slower"), line["B200 published"].split(","), strict=False))
        for line in lines
        if "," in line["B200 published"]
    ]
    return _plot(
        "B200: predicted, never measured",
        True,
        {
            "cake, predicted": ("o--", points(lines, "B200 predicted")),
            "published by others, faster": ("s:", points(published, "faster")),
            "published by others, slower": ("^:", points(published, "slower")),
        },
    )


PICTURES = {
    "layout-rows": rows,
    "layout-scales": scales,
    "performance": performance,
    "blackwell": blackwell,
}


def draw(folder: Path) -> None:
    """Write every picture into a folder."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "cake", "font.family": "sans-serif"}
    with pyplot.rc_context(settings):
        for name, make in PICTURES.items():
            figure = make()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    draw(DOCS / "images")
