"""Pictures of a sweep: step time against context, tokens per second against batch. Needs the extra `plots`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autosel.certify import plots
from autosel.certify.report import replace_file, write_json
from autosel.certify.sweep import Figures, Sweep, SweepCell, document
from autosel.certify.words import figure as words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 6
CHARACTER = 0.013  # width of a digit below the axis, as a share of it
DOTS = ("o", "s", "^", "D", "v", "P")


def write(folder: Path, found: Sweep) -> list[str]:
    """Write each picture as SVG and PNG, and sweep.json. Return the names of the pictures."""
    drawn = pictures(found)
    for name, drawing in drawn.items():
        replace_file(folder / f"{name}.svg", plots.svg(drawing, for_page=False).encode())
        replace_file(folder / f"{name}.png", plots.png(drawing))
    write_json(folder / "sweep.json", document(found))
    return list(drawn)


def pictures(found: Sweep) -> dict[str, Figure]:
    """Return the figures by name; only those along an axis with several measured values."""
    plots.refuse_without()
    import matplotlib as mpl

    done = [c for c in found.cells if c.figures is not None]
    wanted: dict[str, tuple[str, str, str, CellValue]] = {}
    if len({c.context for c in done}) > 1:
        wanted["step-against-context"] = ("batch", "context", "ms of a step", _step)
    if len({c.batch for c in done}) > 1:
        wanted["rate-against-batch"] = ("context", "batch", "tokens per second", _rate)
    with mpl.rc_context(plots.STYLE):
        return {name: _drawn(done, *how) for name, how in wanted.items()}


Point = tuple[float, float, float]  # median and both ends of its 95 % interval, which are equal to it if there is none
CellValue = Callable[[SweepCell, Figures, bool], Point]  # True: of the optimised steps


def _step(cell: SweepCell, f: Figures, ours: bool) -> Point:
    """Return milliseconds of a step."""
    median, interval = (f.p50_ms, f.p50_interval_ms) if ours else (f.baseline_ms, f.baseline_interval_ms)
    return (median, interval.lo, interval.hi) if interval is not None else (median,) * 3


def _rate(cell: SweepCell, f: Figures, ours: bool) -> Point:
    """Return tokens per second."""
    median, lo, hi = _step(cell, f, ours)
    rate = f.tokens_per_s if ours else 1e3 * cell.batch / median
    return rate, rate * median / hi, rate * median / lo


def _drawn(cells: list[SweepCell], line: str, axis: str, unit: str, value: CellValue) -> Figure:
    """Plot a line for each value of `line` (up to six), optimised solid and baseline dashed, on logarithmic axes. Bars
    are 95 % intervals of the medians."""
    figure, axes = plots.new_axes(4.0)
    picked = _few(sorted({getattr(c, line) for c in cells}))
    ends = []
    for i, size in enumerate(picked):
        row = sorted((c for c in cells if getattr(c, line) == size), key=lambda c: getattr(c, axis))
        at = [getattr(c, axis) for c in row]
        for ours in (False, True):
            points = [value(c, c.figures, ours) for c in row if c.figures is not None]
            _line(axes, at, points, ours=ours, marker=DOTS[i % len(DOTS)], labelled=not i)
            if ours:
                ends.append((at[-1], points[-1][0], f"{line} {words(size)}"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*axes.get_xlim())
    plots.name_points(axes, ends, tall_in=4.0)
    _measured_ticks(axes, sorted({getattr(c, axis) for c in cells}))
    plots.plain_ticks(axes.yaxis, axes.get_ylim())
    axes.set_xlabel(f"{axis}{', tokens' if axis == 'context' else ', sequences'}")
    axes.set_ylabel(unit)
    plots.grid(axes)
    plots.legend(axes)
    return figure


def _line(axes: Axes, at: list[int], points: list[Point], *, ours: bool, marker: str, labelled: bool) -> None:
    """Plot one arm's medians as a line, with a bar for each interval."""
    bars = [[median - lo for median, lo, _ in points], [hi - median for median, _, hi in points]]
    axes.errorbar(
        at,
        [median for median, *_ in points],
        yerr=bars,
        fmt=f"{marker}{'-' if ours else '--'}",
        color=plots.ACCENT if ours else plots.OTHER,
        alpha=1.0 if ours else 0.6,
        label=("optimised" if ours else "baseline") if labelled else None,
        markersize=4,
        linewidth=1.3,
        elinewidth=1.0,
        capsize=2.5,
    )


def _few(values: list[int]) -> list[int]:
    """Return at most six of the values, including the first and the last."""
    if len(values) <= MOST_LINES:
        return values
    return sorted({values[round(i * (len(values) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)})


def _measured_ticks(axes: Axes, values: list[int]) -> None:
    """Label the measured values as numbers, the last one always; leave out those that would overlap."""
    low, high = axes.get_xlim()
    shown: list[int] = []
    for value in values[::-1]:
        room = (len(words(value)) + 1) * CHARACTER * math.log(high / low)
        if not shown or math.log(shown[-1] / value) > room:
            shown.append(value)
    plots.tick(axes.xaxis, shown[::-1])
