"""prefill_attn: causal attention of a prompt over itself; query i sees keys 0..i (the last `window` of them).

See attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autosel.ops import attention
from autosel.ops import attention_cases as hostile
from autosel.ops.arguments import Binder, need_multiple
from autosel.ops.attention_domains import HEADS, SEQUENCES, WIDTHS, attention_domains
from autosel.ops.contract import Arg, Case, Inputs, Op, Rows
from autosel.ops.domains import Level, layouts, sizes
from autosel.ops.draw import (
    Change,
    Draw,
    axes_swapped,
    case,
    large,
    offset_by_one,
    on,
    outliers,
    relayout,
    strided,
    subnormal,
    zeros,
)
from autosel.values import DTYPE_BYTES, Workload

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 193)


class PrefillAttn(attention.AttentionOp):
    name = "prefill_attn"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k", kind="tensor"),
        Arg(name="v", kind="tensor"),
        *attention.SETTINGS,
    )
    dim_names = ("B", "Hq", "Hkv", "S", "D")
    domains = {
        "B": SEQUENCES,
        "Hq Hkv": HEADS,
        "S": sizes(66, 1, 5, powers=(3, 7), primes=(11, 200)),
        "D": WIDTHS,
        **attention_domains(),
        "layout": layouts(
            "q", "k", "v", more=(Level(name="heads inside", edit=relayout(("q", "k", "v"), axes_swapped)),)
        ),
    }

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "B Hq S D")
        take.floats("k", "B Hkv S D")
        take.floats("v", "B Hkv S D")
        need_multiple(take, "Hq", "Hkv")
        return self.workload(take.dtype_name, take.dims, **self.settings(take))

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, cache = Draw(seed, w.dtype), (w["B"], w["Hkv"], w["S"], w["D"])
        return {
            "q": draw.normal(w["B"], w["Hq"], w["S"], w["D"]),
            "k": draw.normal(*cache),
            "v": draw.normal(*cache),
            **self.drawn_settings(w),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return tuple(_cases(self, w))

    def _exact(self, inputs: Inputs) -> tuple[attention.Exact, Tensor, Tensor]:
        q, k, v, scale, window, softcap = (inputs[a.name] for a in self.args)
        lengths = torch.full((k.shape[0],), k.shape[2])
        return attention.exact(q, k, v, lengths, scale, window, softcap), k, v

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """Return consecutive queries of one head and the keys up to its end: the reference takes fewer queries than
        keys.
        """
        generator = torch.Generator().manual_seed(seed)
        wanted = max(1, min(w["S"], count))
        end = w["S"] if seed % 2 else int(torch.randint(wanted, w["S"] + 1, (1,), generator=generator))
        b, h = (int(torch.randint(0, w[n], (1,), generator=generator)) for n in ("B", "Hkv"))
        return self._part(w, inputs, b, h, slice(end - wanted, end))

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        b, head, s, _ = where[0].tolist()
        return self._part(w, inputs, b, head // (w["Hq"] // w["Hkv"]), slice(s, s + 1))

    def _part(self, w: Workload, inputs: Inputs, b: int, h: int, rows: slice) -> Rows:
        group = w["Hq"] // w["Hkv"]
        heads, end = slice(h * group, (h + 1) * group), rows.stop
        part = {**inputs, "q": inputs["q"][b : b + 1, heads, rows]}
        part |= {n: inputs[n][b : b + 1, h : h + 1, :end] for n in ("k", "v")}
        return Rows(inputs=part, pick=lambda outs: (outs[0][b : b + 1, heads, rows],))

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return DTYPE_BYTES[w.dtype] * 2 * w["B"] * (w["Hq"] + w["Hkv"]) * w["S"] * w["D"]

    def flops(self, w: Workload) -> int:
        pairs = attention.pairs_seen(w["S"], w["S"], int(w.trait("window", 0)))
        return 4 * w["B"] * w["Hq"] * w["D"] * pairs


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(op: Op, w: Workload) -> list[Case]:
    g, window, d = min(w["Hq"] // w["Hkv"], 8), int(w.trait("window", 0)), min(w["D"], 256)
    cases: list[Case] = []

    def add(name: str, covers: str, s: int, change: Change | None = None, **dims: int) -> None:
        at = w.at(**{"B": 2 if s < 100 else 1, "Hq": g, "Hkv": 1, "S": s, "D": d, **dims})
        name = f"random {at.shape_text}" if name == "random" else name
        cases.append(case(op, at, name, covers, change))

    for s in LENGTHS:
        add("random", "tails of tiles; the diagonal", s)
    for hq, hkv in hostile.HEADS:
        add("random", "query heads to KV heads", 37, Hq=hq, Hkv=hkv)
    for width in (*hostile.WIDTHS, *([w["D"]] if w["D"] > d else [])):
        add("random", "head widths", 66, D=width)
    for at in (0, 1, 15, 16, 17, 63, 64, 65, 126, 127, 128):
        add(f"needle at {at}", "the diagonal off by one; a skipped key", 129, _needle(at))
    if window:
        for s in sorted({window, window + 1, window + 33} if window <= 1024 else {window + 1}):
            add(f"needle leaves the window, S{s}", "the window off by one", s, _needle(0), B=1, Hq=1, D=min(d, 64))
    _add_values(add, window)
    for name, covers, view in (
        ("offset by one element", "alignment assumed", offset_by_one),
        ("strided rows", "row strides ignored", strided),
        ("heads inside tokens", "layout seen through strides", axes_swapped),
    ):
        add(name, covers, 67, relayout(("q", "k", "v"), view), Hq=2 * g, Hkv=2)
    return cases


def _add_values(add: Any, window: int) -> None:
    for name in ("q", "k", "v"):
        add(f"zeros in {name}", "-0.0; a uniform average", 97, on(name, zeros))
        add(f"subnormal {name}", "garbage for subnormal inputs", 97, on(name, subnormal))
        if name == "q" or not window:  # every query must see the bad key, because a library may read masked keys
            add(f"nan in {name}", "a swallowed NaN", 97, _nan(name))
    add("outliers in v", "precision below fp32", 97, on("v", outliers))
    add("large v", "overflow of sums", 97, on("v", large))
    add("large scores", "exp without the maximum", 97, hostile.scaled(12.0))
    add("all equal", "a softmax that is not uniform", 97, hostile.all_equal)


def _needle(at: int) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        hostile.plant(inputs, draw, [at])

    return change


def _nan(name: str) -> Change:
    def change(inputs: dict[str, Any], _: Draw) -> None:
        inputs[name][0, 0, 40 if name == "q" else 0, 3] = float("nan")

    return change
