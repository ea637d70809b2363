"""Three pictures of a certificate: roofline, ops of a step, times of the steps. Needs the extra `plots`.

They are drawn once, in stand-in colours. Picture files get the colours of a light page; in the report the stand-ins
become CSS variables of the page, so that the same picture works in light and dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autosel import extras
from autosel.certify.audit import Audit, audit
from autosel.certify.certificate import Certificate
from autosel.certify.words import figure as words
from autosel.certify.words import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Stand-in -> (CSS variable, colour on a light page). Pictures use only these colours.
INK, QUIET, GRID, ACCENT, OTHER, PAPER = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
COLOURS: Mapping[str, tuple[str, str]] = {
    INK: ("--ink", "#1c2330"),
    QUIET: ("--quiet", "#5c6675"),
    GRID: ("--grid", "#d9dee6"),
    ACCENT: ("--accent", "#0b66c3"),
    OTHER: ("--other", "#b5651d"),
    PAPER: ("--paper", "#ffffff"),
}
WIDTH_IN = 7.2
NAME_IN = 0.16  # height of a name
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "autosel",  # the same certificate gives the same bytes
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": GRID,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "legend.frameon": False,
}


def refuse_without() -> None:
    """Raise UsageError if matplotlib is missing. Call it before an hour of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise extras.missing("plots", "a report", error) from error


def pictures(made: Certificate) -> dict[str, Figure]:
    """Return the figures by name, without those that would be empty."""
    refuse_without()
    import matplotlib as mpl

    found = audit(made)
    placed = any(row.bytes and row.flops for row in found.rows)
    shown = {"roofline": placed, "ops": bool(found.rows), "latency": True}
    with mpl.rc_context(STYLE):
        return {name: draw(made, found) for name, draw in PICTURES.items() if shown[name]}


def svg(figure: Figure, *, for_page: bool) -> str:
    """Return SVG in light colours for a file, or with the report page's CSS variables."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "autosel"})
    text = out.getvalue()
    for stand_in, (variable, colour) in COLOURS.items():
        text = text.replace(stand_in, f"var({variable})" if for_page else colour)
    if for_page:
        text = text[text.index("<svg") :]
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", text, count=1)
        text = re.sub(r"font: ([\d.]+px) '[^']*'[^;\"]*", r"font: \1 var(--font)", text)
    return text


def png(figure: Figure) -> bytes:
    """Return PNG in the colours of a light page, at 144 dots per inch."""
    out = io.BytesIO()
    _paint(figure)
    figure.savefig(out, format="png", dpi=144, metadata={"Software": "autosel"})
    return out.getvalue()


def _paint(figure: Figure) -> None:
    """Replace the stand-in colours in place; call it after the SVG has been written."""
    from matplotlib.colors import to_hex

    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get: Callable[[], Any] | None = getattr(artist, f"get_{name}", None)
            put: Callable[[Any], None] | None = getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            value = get()
            values = [value] if isinstance(value, (str, tuple)) else list(value) if hasattr(value, "__len__") else []
            shown = [COLOURS[to_hex(v)][1] for v in values if _is_colour(v) and to_hex(v) in COLOURS]
            if len(shown) == 1:
                alpha = artist.get_alpha()
                put(shown[0])
                artist.set_alpha(alpha)


def _is_colour(value: Any) -> bool:
    from matplotlib.colors import is_color_like

    return not (isinstance(value, str) and value == "none") and is_color_like(value)


def new_axes(height_in: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.add_subplot()


def _roofline(made: Certificate, found: Audit) -> Figure:
    """Plot GFLOP/s against FLOPs per byte: the limits of memory and arithmetic, and each op."""
    figure, axes = new_axes(3.6)
    rows = [r for r in found.rows if r.bytes and r.flops]
    points = [(r.flops / r.bytes, r.flops / r.time_us / 1e3, r) for r in rows]
    read, peak = found.read_bytes_per_s / 1e9, found.peak_flops / 1e9
    ridge = peak / read if peak else 100.0
    low = min([p[0] for p in points] + [0.1, ridge / 30]) / 2
    high = max([p[0] for p in points] + [ridge]) * 6
    roof = [min(read * x, peak or float("inf")) for x in (low, ridge, high)]
    limits = f"{words(read, 3)} GB/s, read in this run" + (f", and {words(peak, 3)} GFLOP/s" if peak else "")
    axes.loglog([low, ridge, high], roof, color=QUIET, linewidth=1.2, label=f"limits: {limits}")
    top = max(p[2].share for p in points)
    for x, y, row in points:
        axes.scatter([x], [y], s=18 + 150 * row.share / top, color=ACCENT, alpha=0.75, linewidths=0)
    axes.set_xlim(low, high)
    name_points(axes, [(x, y, row.label) for x, y, row in points], tall_in=3.6)
    plain_ticks(axes.xaxis, (low, high))
    plain_ticks(axes.yaxis, axes.get_ylim())
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("GFLOP/s")
    grid(axes)
    legend(axes)
    return figure


def _ops(made: Certificate, found: Audit) -> Figure:
    """Plot the milliseconds of each op in a step, and the part that its roofline explains."""
    rows = list(found.rows)[:16]
    figure, axes = new_axes(0.9 + 0.27 * (len(rows) + 1))
    names = [r.label for r in rows] + ["rest"]
    times = [r.time_us / 1e3 for r in rows] + [found.rest_us / 1e3]
    floors = [min(1.0, r.roofline) * r.time_us / 1e3 for r in rows] + [0.0]
    at = range(len(names))
    axes.barh(at, times, height=0.66, color=ACCENT, alpha=0.35, label="time")
    axes.barh(at, floors, height=0.66, color=ACCENT, label="of it, what the roofline needs")
    for i, (time, share) in enumerate(zip(times, [*(r.share for r in rows), found.rest_share], strict=True)):
        roof = f"   {percent(rows[i].roofline)} of the roofline, {rows[i].limit}" if i < len(rows) else ""
        say(axes, percent(share) + roof, (time, i), (4, 0), va="center", fontsize=8)
    axes.set_yticks(list(at), names)
    axes.tick_params(axis="y", colors=INK, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(times) * 1.52)
    axes.set_xlabel("ms of a step")
    grid(axes, "x")
    legend(axes)
    return figure


def _latency(made: Certificate, found: Audit) -> Figure:
    """Plot the share of steps that took at most a given time, for each arm, without smoothing."""
    figure, axes = new_axes(2.9)
    arms = [("optimised", made.samples.optimised_ns, made.latency_ms.med, ACCENT, "-")]
    if made.baseline is not None:
        arms.append(("baseline", made.samples.baseline_ns, made.baseline.med, OTHER, "--"))
    for name, samples, med, colour, dash in arms:
        ordered = sorted(ns / 1e6 for ns in samples)
        shares = [0.0, *(100 * (i + 1) / len(ordered) for i in range(len(ordered)))]
        times = [ordered[0], *ordered]
        label = f"{name}, median {words(med, 3)} ms"
        axes.step(times, shares, where="post", color=colour, linestyle=dash, linewidth=1.6, label=label)
    low, high = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xlim(min(min(a[1]) for a in arms) / 1e6 / 1.1, max(low, high) * 1.05)
    plain_ticks(axes.xaxis, axes.get_xlim())
    axes.set_ylim(0, 101)
    axes.set_xlabel("ms of a step (log)")
    axes.set_ylabel("% of the steps")
    grid(axes)
    legend(axes)
    return figure


def say(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **{"color": QUIET, **style})


NamedPoint = tuple[float, float, str]  # x, y and name of a point


def name_points(axes: Axes, points: Sequence[NamedPoint], tall_in: float) -> None:
    """Write the points' names in a column right of logarithmic axes whose limits are set, each with a thin line.
    `tall_in`: height of the figure."""
    axes.set_ylim(*axes.get_ylim())
    low, high = axes.get_ylim()
    right, tall = axes.get_xlim()[1], math.log(high / low)
    points = sorted(points, key=lambda point: point[1])
    places = apart([math.log(y / low) / tall for _, y, _ in points], NAME_IN / (tall_in - 0.8))
    for (x, y, name), place in zip(points, places, strict=True):
        there = low * math.exp(place * tall)
        axes.plot([x, right], [y, there], color=GRID, linewidth=0.7, zorder=0.5)
        say(axes, name, (right, there), (4, 0), va="center", color=INK, fontsize=8, annotation_clip=False)


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """Return ascending places at least so far apart and within 0 to 1, as near as possible to the ascending ones that
    are wanted."""
    groups: list[tuple[float, int]] = []  # mean of the wanted places without the distances below them, and how many
    for rank, at in enumerate(wanted):
        mean, count = at - rank * least, 1
        while groups and groups[-1][0] > mean:
            before, many = groups.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        groups.append((mean, count))
    top = 1 - least / 2 - (len(wanted) - 1) * least
    means = [min(max(mean, least / 2), top) for mean, count in groups for _ in range(count)]
    return [mean + rank * least for rank, mean in enumerate(means)]


def legend(axes: Axes) -> None:
    """Write the legend above the axes, where nothing is drawn."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, fontsize=8)


def grid(axes: Axes, axis: Literal["both", "x"] = "both") -> None:
    axes.grid(True, axis=axis, which="major", linewidth=0.5)
    axes.set_axisbelow(True)


def plain_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Label a logarithmic axis with about six numbers instead of powers of ten."""
    low, high = limits
    steps = next(s for s in TICK_STEPS if high / low < s[0])[1]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tick(axis, [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high])


def tick(axis: Axis, shown: Sequence[float]) -> None:
    """Label these values of an axis, as numbers, and no others."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(shown))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_locator(NullLocator())


# span of an axis -> its ticks within a decade
TICK_STEPS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (1.6, tuple(1 + 0.1 * i for i in range(90))),
    (4.0, (1.0, 1.2, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)),
    (30.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    (300.0, (1.0, 3.0)),
    (float("inf"), (1.0,)),
)

PICTURES: Mapping[str, Callable[[Certificate, Audit], Figure]] = {
    "roofline": _roofline,
    "ops": _ops,
    "latency": _latency,
}
