"""Write docs/blackwell.md's tables from cake.roofline; `--check` only compares.

Every time in them is predicted, or published by others. Needs an installed cake, no GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from readme_table import put

from cake import roofline

BEGIN = "<!-- predictions: benchmarks/blackwell_table.py -->\n"
END = "<!-- end of predictions -->\n"

# 95 % of the stated 8 TB/s, as an H200 reads 4.55 of its 4.8; a node of a CUDA graph 1 us.
B200 = roofline.Gpu(num_sms=148, read_bytes_per_s=7.6e12, graph_node_us=1.0)
B300 = roofline.Gpu(num_sms=160, read_bytes_per_s=7.6e12, graph_node_us=1.0)
MATRIX_FLOP_PER_S = 10e15  # dense NVFP4, as stated for a B200
LARGE_PART_BYTES = 224 * 2**20  # an H200's

TOKENS = tuple(2**i for i in range(15))
# Published by others for this shape and uniform routing, microseconds of a call.
B200_SLOWER = (
    {1: 32, 8: 91, 16: 135, 32: 232, 64: 373, 128: 386, 256: 406, 512: 441, 1024: 487}
    | {2048: 560, 4096: 665}
)  # fmt: skip
B200_FASTER = (
    {1: 24, 8: 78, 16: 126, 32: 210, 64: 341, 128: 345, 256: 349, 512: 359, 1024: 389}
    | {2048: 456, 4096: 545}
)  # fmt: skip
B300_PUBLISHED = {1: 22.5, 8: 88, 16: 120, 32: 179, 64: 240}


def predict(tokens: int, gpu: roofline.Gpu, part_bytes: float | None = None) -> roofline.Prediction:
    """Predict uniform random routing, with FC2 in parts of at most `part_bytes` if given."""
    plan = roofline.plan_of(tokens, gpu)
    load = roofline.expected_load(tokens, plan)
    if part_bytes is not None:
        plan["fc2_parts"] = max(1, -int(-load.pairs * 7168 // part_bytes))
    return roofline.predict(load, plan, gpu)


def rows(header: str, lines: list[list[object]]) -> list[str]:
    """Return a table of right-aligned columns."""
    columns = [name.strip() for name in header.split("|")]
    table = [columns, ["--:"] * len(columns), *([str(cell) for cell in line] for line in lines)]
    return [f"| {' | '.join(line)} |" for line in table]


def times() -> list[str]:
    """Predicted and published times."""
    lines: list[list[object]] = []
    for tokens in TOKENS:
        predicted = predict(tokens, B200)
        floor = roofline.floor_us(
            roofline.expected_experts(tokens), tokens, B200.read_bytes_per_s, MATRIX_FLOP_PER_S
        )
        stages = [
            f"{predicted.chunks * stage.us:.0f} {stage.limiter}" for stage in predicted.stages
        ]
        published = "-"
        if tokens in B200_FASTER:
            published = f"{B200_FASTER[tokens]}, {B200_SLOWER[tokens]}"
        lines.append(
            [
                tokens,
                roofline.plan_of(tokens, B200)["tile_pairs"],
                *stages,
                f"**{predicted.us:.0f}**",
                f"{floor / predicted.us:.2f}",
                published,
                f"**{predict(tokens, B300).us:.0f}**",
                B300_PUBLISHED.get(tokens, "-"),
            ]
        )
    header = (
        "T | tile | route | FC1 | FC2 | finalize | B200 predicted | of the floor | "
        "B200 published | B300 predicted | B300 published"
    )
    return rows(header, lines)


def traffic() -> list[str]:
    """Predicted bytes of a call."""
    lines: list[list[object]] = []
    for tokens in TOKENS:
        call = predict(tokens, B200)
        moved = [stage.traffic for stage in call.stages]
        memory = [f"{call.chunks * t.memory / 1e6:.1f}" for t in moved]
        l2 = [f"{call.chunks * t.l2 / 1e6:.1f}" for t in moved[1:]]
        shared = [f"{call.chunks * t.shared / B200.num_sms / 1e6:.1f}" for t in moved[1:3]]
        total = call.chunks * sum(t.memory for t in moved) / 1e6
        lines.append([tokens, *memory, f"**{total:.1f}**", *l2, *shared])
    header = (
        "T | memory: route | FC1 | FC2 | finalize | all | L2: FC1 | FC2 | finalize | "
        "shared memory of an SM: FC1 | FC2"
    )
    return rows(header, lines)


def parts() -> list[str]:
    """Predicted times with FC2's parts as they are and as an H200 has them."""
    lines: list[list[object]] = []
    for tokens in (1024, 2048, 4096, 8192):
        now = predict(tokens, B200)
        large = predict(tokens, B200, LARGE_PART_BYTES)
        plan = roofline.plan_of(tokens, B200)
        part = tokens * 16 * 2 * plan["fc2_columns_per_part"] / 1e6
        saved = 2 * (large.fc2.traffic.memory - now.fc2.traffic.memory) / 1e6
        times = [f"{call.us:.0f}" for call in (now, large)]
        lines.append([tokens, plan["fc2_parts"], f"{part:.0f}", *times, f"{saved:.0f}"])
    header = "T | parts | MB of a part | us | us in parts of 224 MiB | MB of memory traffic saved"
    return rows(header, lines)


INTRO = """\
Microseconds of a call, predicted (never measured) for uniform random routing, 7.6 TB/s and 1 us a
node of a CUDA graph, on 148 SMs (B200) and 160 (B300); each stage of the B200 with its limiter.
Published: by others, on a B200 the faster and the slower of two implementations. Of the floor: the
distinct experts' bytes at 7.6 TB/s, over the prediction.
"""


def tables() -> str:
    """Return the text between the markers."""
    lines = [INTRO, *times(), "", "Megabytes that a call moves:", "", *traffic(), ""]
    return "\n".join([*lines, "FC2's rows in parts that fit L2 (B200):", "", *parts(), ""])


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    path = Path(__file__).parent.parent / "docs" / "blackwell.md"
    text = path.read_text()
    wanted = put(text, BEGIN, END, tables())
    if wanted is None:
        print("docs/blackwell.md: expected the markers of these tables")
        return 1
    if not arguments.check:
        path.write_text(wanted)
    elif wanted != text:
        print("docs/blackwell.md: the tables are not those of benchmarks/blackwell_table.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
