"""Draw the README's picture of decode steps from benchmarks/results/: docs/results-light.svg and
docs/results-dark.svg.

    python benchmarks/figure_readme.py

Each bar is the time of a step relative to autosel's, as in the tables "Whole steps, measured" of docs/decode.md. If a
context was measured at several read rates of memory, the row with the fastest memory is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
MODEL, ISA = "llama-1b", "avx512bf16"

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"ink": "#1f2328", "quiet": "#59636e", "autosel": "#4051b5", "llama.cpp": "#8794a5", "eager": "#c2cad4"},
    "dark": {"ink": "#e6edf3", "quiet": "#9aa4af", "autosel": "#8c9eff", "llama.cpp": "#7b8897", "eager": "#4b5561"},
}
NAMES = {"autosel": "autosel", "llama.cpp": "llama.cpp", "eager": "eager PyTorch"}
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 560, 112, 52, 16, 4, 58
GROUP = 3 * (BAR + GAP) + 30


class Context(NamedTuple):
    """Hold the times of a step relative to autosel's, at one context."""

    seq: int
    times: Mapping[str, float]


def main() -> None:
    for theme in THEMES:
        path(theme).write_text(svg(theme))


def path(theme: str) -> Path:
    return ROOT / "docs" / f"results-{theme}.svg"


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def contexts() -> Iterator[Context]:
    steps = [row for row in stored(f"step-{ISA}")["rows"] if row["model"] == MODEL]
    peers = stored(f"peers-{MODEL}-{ISA}")["rows"]
    for step in sorted(steps, key=lambda row: row["seq"]):
        fastest = max((row for row in peers if row["seq"] == step["seq"]), key=lambda row: row["read_gb_s"])
        llama = min(arm["over_first"] for name, arm in fastest["arms"].items() if name.startswith("llama.cpp"))
        times = {"autosel": 1.0, "llama.cpp": llama, "eager": step["eager_over_packed"]}
        yield Context(seq=step["seq"], times=times)


def told(value: float) -> str:
    """Return a ratio as the README states it."""
    return "1" if value == 1 else f"{value:.2f}" if value < 3 else f"{value:.1f}"


def svg(theme: str) -> str:
    colour, found = THEMES[theme], list(contexts())
    device, date = (stored(f"peers-{MODEL}-{ISA}")[name] for name in ("device", "date"))
    scale = (WIDTH - LEFT - RIGHT) / max(max(context.times.values()) for context in found)
    heading = f"Time of one decode step of {MODEL}, autosel = 1"
    height = TOP + GROUP * len(found) + 4
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" font-size="14">',
        f"<title>{heading}: {'; '.join(map(sentence, found))}</title>",
        text(0, 16, heading, colour["ink"], size=16, bold=True),
        text(0, 37, f"Shorter is better. bf16, batch 1, 2 cores of an {device}, {date}", colour["quiet"], size=13),
    ]
    for number, context in enumerate(found):
        y = TOP + GROUP * number + 14
        lines.append(text(LEFT, y, f"context {context.seq:,}", colour["quiet"], size=13))
        for place, (arm, time) in enumerate(context.times.items()):
            top = y + 8 + place * (BAR + GAP)
            width = round(time * scale, 1)
            bold = arm == "autosel"
            lines += [
                text(LEFT - 8, top + 13, NAMES[arm], colour["ink"], bold=bold, end=True),
                f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR}" rx="2" fill="{colour[arm]}"/>',
                text(round(LEFT + width + 6, 1), top + 13, told(time), colour["ink"], bold=bold),
            ]
    return "\n".join([*lines, "</svg>", ""])


def sentence(context: Context) -> str:
    others = ", ".join(f"{NAMES[arm]} {told(time)}" for arm, time in context.times.items() if arm != "autosel")
    return f"context {context.seq:,}: {others}"


def text(x: float, y: float, words: str, fill: str, *, size: int = 14, bold: bool = False, end: bool = False) -> str:
    more = (f' font-size="{size}"' if size != 14 else "") + (' font-weight="600"' if bold else "")
    more += ' text-anchor="end"' if end else ""
    return f'<text x="{x}" y="{y}" fill="{fill}"{more}>{words}</text>'


if __name__ == "__main__":
    main()
