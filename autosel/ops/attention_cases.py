"""The hostile battery of attention over a cache.

It has needles that an off-by-one error would lose or let in, junk beyond the lengths, scores that overflow without a
maximum, and every tail of every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import draw as d
from autosel.ops.cached import Cache, write_key
from autosel.ops.codes import CODES
from autosel.ops.contract import Case, Inputs, Op
from autosel.ops.draw import Change, Draw
from autosel.values import DTYPE_BYTES, Workload

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 509, 1021)
NEEDLES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 254, 255, 256)
HEADS = ((1, 1), (4, 4), (8, 2), (8, 1), (6, 2), (5, 1), (16, 1), (14, 2))
WIDTHS = (64, 80, 96, 128, 256, 66)  # the last: 8 does not divide it
BUDGET = 3 << 19
NEEDLE_SCORE = 12.0  # e^12 outweighs a quarter of a thousand keys by 500 to 1


def attn_cases(op: Op, w: Workload, *, layouts: bool = True) -> tuple[Case, ...]:
    cases: list[Case] = []

    def add(
        name: str,
        covers: str,
        at: Workload,
        edit: Change | None = None,
        *,
        room: int = 0,
        short: bool = True,
        averages: bool = True,
    ) -> None:
        make = _maker(op, at, edit, room, short)
        cases.append(Case(name=name, workload=at, make=make, covers=covers, averages=averages))

    _shapes(w, add)
    _needles(w, add)
    _values(w, add)
    if layouts:
        _layouts(w, add)
    return tuple(cases)


def _maker(op: Op, at: Workload, edit: Change | None, room: int, short: bool) -> Callable[[int], dict[str, Any]]:
    def make(seed: int) -> dict[str, Any]:
        inputs, draw = op.inputs(at, seed), Draw(seed + 77_003, at.dtype)
        if inputs["lengths"] is not None:
            inputs["lengths"] = hostile_lengths(at["B"], at["L"]) if short else near_lengths(at["B"], at["L"])
        if edit is not None:
            edit(inputs, draw)
        for name in ("k", "v"):
            if room:
                behind = inputs[name].new_empty(at["B"], at["Hkv"], room, at["D"])
                inputs[name] = torch.cat([inputs[name], behind], 2)
            bury(inputs[name], inputs["lengths"], at["L"], draw)
        return inputs

    return make


def hostile_lengths(b: int, longest: int) -> Tensor:
    pattern = (longest, 0, 1, longest - 1, 17, 64, longest // 2, 33)
    return torch.tensor([min(longest, max(0, pattern[i % len(pattern)])) for i in range(b)], dtype=torch.int32)


def near_lengths(b: int, longest: int) -> Tensor:
    return torch.tensor([max(1, longest - i) for i in range(b)], dtype=torch.int32)


def bury(cache: Cache, lengths: Tensor | None, longest: int, draw: Draw) -> None:
    """Write large finite values beyond the lengths (the largest codes), so that reading one key too many shows."""
    tensor, most = (cache, 800.0) if isinstance(cache, Tensor) else (cache.codes, CODES[cache.format.code].most)
    for b in range(tensor.shape[0]):
        start = longest if lengths is None else int(lengths[b])
        junk = tensor[b, :, start:]
        junk.copy_((torch.randint(0, 2, junk.shape, generator=draw.generator) * 2.0 - 1.0) * most)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _at(w: Workload, *, b: int, heads: tuple[int, int], keys: int, s: int = 0, width: int = 0) -> Workload:
    """Return a small workload; to stay within the budget, batch rows are dropped, then the width is halved."""
    hq, hkv = heads
    width, s = width or w["D"], s or min(w["S"], 8)
    size = DTYPE_BYTES[w.dtype] * 2 * hkv * keys
    while width > 64 and size * width > BUDGET:
        width //= 2
    return w.at(B=max(1, min(b, BUDGET // (size * width))), Hq=hq, Hkv=hkv, S=s, D=width, L=keys)


def small_cache(w: Workload) -> Workload:
    """Return a workload with two rows and two KV heads, with a short tail."""
    return _at(w, b=2, heads=(2 * _group(w), 2), keys=131)


def _group(w: Workload) -> int:
    return min(w["Hq"] // w["Hkv"], 16)


def _shapes(w: Workload, add: Any) -> None:
    g = _group(w)
    for i, keys in enumerate(LENGTHS):
        at = _at(w, b=(8, 3, 1)[i % 3], heads=((g, 1), (2 * g, 2))[i % 2 if keys < 256 else 0], keys=keys)
        add(f"random {at.shape_text}", "tails of tiles; splits of few keys", at, room=(0, 1, 5, 64)[i % 4])
    for heads in HEADS:
        at = _at(w, b=2, heads=heads, keys=97)
        add(f"random {at.shape_text}", "query heads to KV heads", at)
    for width in WIDTHS:
        at = _at(w, b=2, heads=(g, 1), keys=130, width=width)
        add(f"random {at.shape_text}", "head widths", at)
    for s in (1, 2, 3, 5):
        at = _at(w, b=4, heads=(2 * g, 2), keys=67, s=s)
        add(f"random {at.shape_text}", "causality by cache offset", at, room=3)
    add("more queries than keys", "positions before the first", _at(w, b=3, heads=(2 * g, 2), keys=2, s=5))
    window = int(w.trait("window", 0))
    for keys in (window - 1, window, window + 1, window + 77) if window else ():
        if keys > 0:
            at = _at(w, b=2, heads=(g, 1), keys=keys)
            add(f"random {at.shape_text}", "the window's edge", at, room=3, short=False)


# --- needles ----------------------------------------------------------------------------------------------------------


def ends_of(inputs: Inputs) -> list[int]:
    """Return how many keys each batch row has."""
    lengths = inputs["lengths"]
    return [inputs["max_len"]] * inputs["q"].shape[0] if lengths is None else [int(n) for n in lengths]


def aim(inputs: dict[str, Any], draw: Draw, score: float) -> Tensor:
    """Make all queries of a KV head nearly parallel; return the key [B, Hkv, D] whose score is `score`."""
    q, hkv = inputs["q"], inputs["k"].shape[1]
    grouped = q.unflatten(1, (hkv, -1))
    lead = grouped[:, :, :1, :1].double()
    near = lead * (1 + 0.05 * torch.randn(grouped.shape[:4], generator=draw.generator).double())[..., None]
    grouped.copy_(near)
    scale = inputs["scale"] or q.shape[-1] ** -0.5
    first = lead[:, :, 0, 0]
    key: Tensor = first * (score / (scale * first.square().sum(-1, keepdim=True)))
    return key


def plant(inputs: dict[str, Any], draw: Draw, positions: Sequence[int]) -> None:
    """Give key positions[b % n] of batch row b nearly all the weight, and unique values of +-3."""
    key = aim(inputs, draw, NEEDLE_SCORE)
    k, v = inputs["k"], inputs["v"]
    for b in range(k.shape[0]):
        at = positions[b % len(positions)]
        write_key(k, b, at, key[b])
        values = torch.randint(0, 2, (v.shape[1], v.shape[3]), generator=draw.generator) * 6.0 - 3.0
        write_key(v, b, at, values)


def _needles(w: Workload, add: Any) -> None:
    g, window = _group(w), int(w.trait("window", 0))
    long = _at(w, b=8, heads=(g, 1), keys=257)
    first = max(0, 257 - window) if window else 0
    inside = [p for p in NEEDLES if p >= first]
    for start in range(0, len(inside), long["B"]):
        some = inside[start : start + long["B"]]
        add(f"needles at {', '.join(map(str, some))}", "a skipped or doubled key", long, _planter(some), short=False)

    last = _edge_planter(-1)
    for keys in (33, 64, 65, 128, 129, 200):
        at = _at(w, b=8, heads=(2 * g, 2), keys=keys)
        add(f"needle at the last of {keys}", "the last key skipped", at, last, room=2, short=False)
    far = _at(w, b=1, heads=(1, 1), keys=4099, width=16)
    add("needle at the last of 4099", "a key number of 12 bits", far, last, room=2, short=False)
    many = _at(w, b=1, heads=(40, 40), keys=33, width=64)
    add("needle at the last of 40 heads", "a head number of few bits", many, last, short=False)
    if window:
        keys = window + 40
        at = _at(w, b=2, heads=(g, 1), keys=keys)
        s = at["S"]
        add("needle just outside the window", "window off by one", at, _edge_planter(-s - window), short=False)
        add("needle first in the window", "window off by one", at, _edge_planter(-window), short=False)
        if window > 1:
            add("needle second in the window", "window off by one", at, _edge_planter(1 - window), short=False)


def _planter(positions: Sequence[int]) -> Change:
    def edit(inputs: dict[str, Any], draw: Draw) -> None:
        plant(inputs, draw, [min(positions[b % len(positions)], n - 1) for b, n in enumerate(ends_of(inputs))])

    return edit


def _edge_planter(from_end: int) -> Change:
    def edit(inputs: dict[str, Any], draw: Draw) -> None:
        plant(inputs, draw, [max(0, n + from_end) for n in ends_of(inputs)])

    return edit


# --- values -----------------------------------------------------------------------------------------------------------


def _values(w: Workload, add: Any) -> None:
    g = _group(w)
    at = _at(w, b=3, heads=(2 * g, 2), keys=193)
    for name in ("q", "k", "v"):
        rare = d.outliers if name == "v" else d.few_outliers
        add(f"outliers in {name}", "precision below fp32", at, d.on(name, rare))
        add(f"zeros in {name}", "-0.0; a uniform average", at, d.on(name, d.zeros))
        add(f"subnormal {name}", "garbage for subnormal inputs", at, d.on(name, d.subnormal))
        add(f"some subnormal {name}", "garbage for subnormal inputs", at, d.on(name, d.some_subnormal))
        add(f"nan in {name}", "a swallowed NaN", at, _spoil(name, float("nan")))
    add("inf in v", "a swallowed infinity", at, _spoil("v", float("inf")))
    add("large v", "overflow of sums", at, d.on("v", d.large))
    add("large scores", "exp without the maximum", at, scaled(12.0))
    add("huge scores", "exp without the maximum", at, scaled(40.0))
    add("very negative scores", "a maximum that starts at 0", at, _negative)
    add("all equal", "a softmax that is not uniform", at, all_equal)
    add("v around one", "accumulation below fp32", at, _positive_values)
    add("rivals", "a score off by little", at, _rivals, averages=False)  # a head's elements err by one factor
    rising = _at(w, b=1, heads=(g, 1), keys=509)
    add("rising scores", "a running maximum not rescaled", rising, _slope(1.0), short=False)
    add("falling scores", "a running maximum not kept", rising, _slope(-1.0), short=False)


def _spoil(name: str, value: float) -> Change:
    """Put one bad element into batch row 0, in a key that every query there sees."""

    def edit(inputs: dict[str, Any], _: Draw) -> None:
        x, s = inputs[name], inputs["q"].shape[2]
        position = x.shape[2] // 2 if name == "q" else inputs["max_len"] - s
        x[0, -1, position, x.shape[3] // 3] = value
        if value == float("inf"):
            d.away_from_zero(inputs["k"])

    return edit


def scaled(factor: float) -> Change:
    def edit(inputs: dict[str, Any], _: Draw) -> None:
        inputs["q"].mul_(factor)
        inputs["k"].mul_(factor)

    return edit


def _negative(inputs: dict[str, Any], draw: Draw) -> None:
    """Make all scores about -200."""
    key = aim(inputs, draw, -200.0)
    inputs["k"].copy_(key[:, :, None] + 0.1 * inputs["k"].double())


def all_equal(inputs: dict[str, Any], _: Draw) -> None:
    for name in ("q", "k", "v"):
        inputs[name].fill_(0.75)


def _positive_values(inputs: dict[str, Any], _: Draw) -> None:
    inputs["v"].mul_(0.1).add_(1.0)


def _rivals(inputs: dict[str, Any], draw: Draw) -> None:
    """Give two keys nearly all the weight, with opposite values."""
    key, v = aim(inputs, draw, 30.0), inputs["v"]
    n = inputs["max_len"]
    for at, factor, value in ((0, 1.0, 3.0), (n // 2, 0.98, -3.0), (n - 1, 0.95, 3.0)):
        inputs["k"][:, :, at] = (key * factor).to(v.dtype)
        v[:, :, at] = value


def _slope(sign: float) -> Change:
    """Make scores rise (fall) along the keys: every tile brings a new maximum (none does)."""

    def edit(inputs: dict[str, Any], draw: Draw) -> None:
        key, n = aim(inputs, draw, 1.0), inputs["k"].shape[2]
        ramp = sign * torch.linspace(-40.0, 40.0, n).double()
        inputs["k"].copy_(key[:, :, None] * ramp[:, None] + 0.1 * inputs["k"].double())

    return edit


# --- layouts ----------------------------------------------------------------------------------------------------------


def _layouts(w: Workload, add: Any) -> None:
    at = small_cache(w)
    every = ("q", "k", "v")
    add("offset by one element", "alignment assumed", at, d.relayout(every, d.offset_by_one))
    add("strided rows", "row strides ignored", at, d.relayout(every, d.strided))
    inside = d.relayout(every, d.axes_swapped)
    add("heads inside tokens", "layout [B, L, H, D] seen through strides", at, inside)
    add("heads inside tokens, junk behind", "layout seen through strides", at, inside, room=3)
