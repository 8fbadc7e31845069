"""Write README.md's table of times from a result of `cake bench`; `--check` only compares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- times: benchmarks/readme_table.py -->\n", "<!-- end of times -->\n"


def newest(root: Path) -> Path | None:
    """Return the result of the complete benchmark that was measured last."""
    results = (root / "benchmarks" / "results").glob("*-all.json")
    return max(results, key=lambda p: p.name, default=None)


def peer_columns(outcome: dict[str, Any]) -> str:
    """Return time and ratio of a peer, if it has them."""
    if "ratio" not in outcome:
        return " none | |"
    return f" {outcome['us']:.1f} | {outcome['ratio']:.2f} |"


def table(path: Path, root: Path) -> str:
    """Return the README's text between the markers."""
    report: dict[str, Any] = json.loads(path.read_text())
    ceilings = report["ceilings"]
    rows = sorted(
        (r for r in report["results"] if r["routing"] == "random"), key=lambda r: r["tokens"]
    )
    peers = sorted({name for r in rows for name, p in r.get("peers", {}).items() if "ratio" in p})
    facts = [report["peers"][name] for name in peers]
    dirty = " (with uncommitted changes)" if report["cake"].get("dirty") else ""
    lines = [
        f"One {report['device']}, complete call, random routing; commit",
        f"{report['cake']['commit']}{dirty}, torch {report['torch']},",
        f"driver {report['driver']}, {report['date']}. Floor: the larger of the chosen experts'",
        f"bytes at {ceilings['read_bytes_per_s'] / 1e12:.2f} TB/s and the operations at "
        f"{ceilings['matrix_flop_per_s'] / 1e12:.0f} TFLOP/s, both measured in the same run.",
        *(f"{f['version']}, timed in the same process, is {f['numerics']}." for f in facts),
        "",
        "| tokens | us | floor, us | fraction of the floor |"
        + "".join(f" {f['version']}, us | its time over cake's |" for f in facts),
        "| --: | --: | --: | --: |" + " --: | --: |" * len(peers),
        *(
            f"| {r['tokens']} | {r['us']:.1f} | {r['floor_us']:.1f} | {r['fraction']:.2f} |"
            + "".join(peer_columns(r.get("peers", {}).get(name, {})) for name in peers)
            for r in rows
        ),
        "",
        f"[All results]({path.relative_to(root)}), [as a plot](docs/bench.png).",
    ]
    return "\n".join(lines) + "\n"


def put(text: str, begin: str, end: str, body: str) -> str | None:
    """Return `text` with `body` between two markers; None if they are not there."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    return before + begin + body + end + after if found and ended else None


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    arguments = parser.parse_args()
    readme = arguments.root / "README.md"
    text = readme.read_text()
    path = newest(arguments.root)
    if path is None and BEGIN not in text:
        return 0
    wanted = put(text, BEGIN, END, table(path, arguments.root)) if path else None
    if wanted is None:
        print("README.md: expected the markers of this table if and only if there are results")
        return 1
    if arguments.check:
        if wanted != text:
            print("README.md: the table of times is not that of benchmarks/readme_table.py; run it")
        return int(wanted != text)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
