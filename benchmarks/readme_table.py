"""Write README.md's table of times from a result of `cake bench`; `--check` only compares."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- times: benchmarks/readme_table.py -->\n", "<!-- end of times -->\n"


def newest() -> Path:
    """Return the result of the complete benchmark that was measured last."""
    return max((ROOT / "benchmarks" / "results").glob("*-all.json"), key=lambda p: p.name)


def table(path: Path) -> str:
    """Return the README's text between the markers."""
    report: dict[str, Any] = json.loads(path.read_text())
    ceilings = report["ceilings"]
    rows = [r for r in report["results"] if r["routing"] == "random"]
    lines = [
        f"One {report['device']}, complete call, random routing; commit",
        f"{report['cake']['commit']}, torch {report['torch']},",
        f"driver {report['driver']}, {report['date']}. Floor: the larger of the chosen experts'",
        f"bytes at {ceilings['read_bytes_per_s'] / 1e12:.2f} TB/s and the operations at "
        f"{ceilings['matrix_flop_per_s'] / 1e12:.0f} TFLOP/s, both measured in the same run.",
        "",
        "| tokens | us | floor, us | fraction of the floor |",
        "| --: | --: | --: | --: |",
        *(
            f"| {r['tokens']} | {r['us']:.1f} | {r['floor_us']:.1f} | {r['fraction']:.2f} |"
            for r in rows
        ),
        "",
        f"[All results]({path.relative_to(ROOT)}), [as a plot](docs/bench.png).",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = README.read_text()
    wanted = re.sub(
        f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})",
        lambda _: table(newest()),
        text,
        flags=re.S,
    )
    if check:
        if wanted != text:
            print("README.md: the table of times is not that of benchmarks/readme_table.py; run it")
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
