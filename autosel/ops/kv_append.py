"""kv_append: write the keys and values of new tokens into the cache, bit for bit, and change nothing else of it.

Token s of batch row b goes to position positions[b] + s of k_cache[B, Hkv, Lmax, D] or, with a block table, to page
block_table[b, position // page], slot position % page, of k_cache[P, page, Hkv, D]. `judge` needs the inputs from
before the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.compare import bits
from autosel.ops.contract import Arg, Case, Inputs, Judge, Match, Mismatch, Op, Rows, TensorSpec, Written, edge_sample
from autosel.ops.domains import (
    FAR_DOWN,
    FAR_UP,
    Domain,
    Level,
    among,
    contents,
    counts,
    layouts,
    one_storage,
    trait,
)
from autosel.ops.draw import (
    Change,
    Draw,
    axes_swapped,
    case,
    offset_by_one,
    on,
    one_inf,
    one_nan,
    relayout,
    resident_draw,
    streamed_draw,
    strided,
    subnormal,
)
from autosel.values import DTYPE_BYTES, DTypeName, Workload

CAPACITY = 1024
SMALL_CAPACITY = 96
MOST_CACHE_BYTES = 3 << 19  # limit of the two caches of a case
BESIDE = 8  # positions before and after the new tokens that must stay unchanged
# (B, Hkv, S, D)
SHAPES = ((1, 1, 1, 64), (1, 8, 1, 128), (3, 2, 1, 80), (8, 1, 2, 96), (2, 2, 17, 40), (1, 3, 33, 66), (5, 1, 5, 256),
          (1, 1, 1, 2))  # fmt: skip


# --- domains ----------------------------------------------------------------------------------------------------------


def _room_levels(_: DTypeName, rng: Random) -> list[Level]:
    """Return the domain of a row's room in addition to the new tokens: caches as long as a context."""

    def of(room: int) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            k, cache, paged = inputs["k"], inputs["k_cache"], inputs["block_table"] is not None
            b, hkv, s, width = k.shape
            keys = min(room, MOST_CACHE_BYTES // (2 * b * hkv * width * k.itemsize)) + s
            if paged:
                page = cache.shape[1]
                count = -(-keys // page)
                shape: tuple[int, ...] = (b * count, page, hkv, width)
                inputs["block_table"] = draw.permutation(b * count).view(b, count).int()
            else:
                shape = (b, hkv, keys, width)
            inputs["k_cache"], inputs["v_cache"] = draw.normal(*shape), draw.normal(*shape)
            inputs["positions"] = draw.integers(0, keys - s + 1, b, dtype=torch.int32)

        return change

    found = (0, (1 << rng.randint(9, 13)) + 40, 70_000, 132_000)
    return [Level(name=str(SMALL_CAPACITY)), *(Level(name=str(n), edit=of(n)) for n in found)]


def _position_levels(_: DTypeName, rng: Random) -> list[Level]:
    share = rng.uniform(0.3, 0.9)

    def of(values: Callable[[int, int, Draw], Any]) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            positions, s, cache = inputs["positions"], inputs["k"].shape[2], inputs["k_cache"]
            table = inputs["block_table"]
            most = (cache.shape[2] if table is None else table.shape[1] * cache.shape[1]) - s
            found = torch.as_tensor(values(len(positions), most, draw))
            positions.copy_(found.clamp(0, most))

        return change

    def around_powers(b: int, most: int, draw: Draw) -> Tensor:
        powers = 1 << torch.arange(max(1, most.bit_length()))
        return powers.flip(0).repeat(b)[:b] + draw.integers(-1, 2, b)

    return [
        Level(name="plain"),
        Level(name="first", edit=of(lambda b, most, _: torch.arange(b) % 2)),
        Level(name="last", edit=of(lambda b, most, _: most - torch.arange(b) % 2)),
        Level(name="around powers of two", edit=of(around_powers)),
        Level(name="one for all", edit=of(lambda b, most, _: torch.full((b,), int(most * share)))),
        Level(name="far apart", edit=of(lambda b, most, _: torch.arange(b) % 2 * most)),
    ]


def _in_order(inputs: dict[str, Any], _: Draw) -> None:
    table = inputs["block_table"]
    if table is not None:
        table.copy_(torch.arange(table.numel(), dtype=torch.int32).view(table.shape))


def _pages_written(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The first and the last page of a row that new tokens go to, by their places in its table."""
    page, positions = inputs["k_cache"].shape[1], inputs["positions"].long()
    return positions // page, (positions + inputs["k"].shape[2] - 1) // page


def _unused_entries(inputs: dict[str, Any], draw: Draw) -> None:
    """Fill entries that no new token uses with -1, invalid numbers or another sequence's page, also in the middle of a
    row.
    """
    table = inputs["block_table"]
    if table is None:
        return
    first, last = _pages_written(inputs)
    at = torch.arange(table.shape[1])
    unused = (at < first[:, None]) | (at > last[:, None])
    anything = torch.tensor([-1, 2**30, int(table[-1, 0]), -(2**31)], dtype=torch.int32)
    table[unused] = anything[draw.integers(0, len(anything), int(unused.sum()))]


_TABLES = (
    Level(name="shuffled"),
    Level(name="in order", edit=_in_order),
    Level(name="unused entries", edit=_unused_entries),
)


class KvAppend(Op):
    name = "kv_append"
    args = (
        Arg(name="k", kind="tensor"),
        Arg(name="v", kind="tensor"),
        Arg(name="positions", kind="tensor"),
        Arg(name="block_table", kind="optional"),
        Arg(name="k_cache", kind="tensor", role="inout"),
        Arg(name="v_cache", kind="tensor", role="inout"),
    )
    output_names = ("k_cache", "v_cache")
    dim_names = ("B", "Hkv", "S", "D")
    trait_defaults = {"page": 0}
    domains = {
        "B": counts(),
        "Hkv": among(2, 1, 3, 8, 33),
        "S": among(1, 2, 5, 17, 33),
        "D": among(64, 128, 80, 66, 256, 8, 2),
        "k": contents("k", up=FAR_UP, down=FAR_DOWN, inf=True),
        "v": contents("v", up=FAR_UP, down=FAR_DOWN, inf=True),
        "k_cache": contents("k_cache", up=FAR_UP, down=FAR_DOWN, inf=True),
        "v_cache": contents("v_cache", up=FAR_UP, down=FAR_DOWN, inf=True),
        "page": trait(0, 16, 1, 24),
        "room": Domain(kind="index", levels=_room_levels),
        "positions": Domain(kind="index", levels=_position_levels),
        "block_table": Domain(kind="index", levels=lambda *_: _TABLES, needs="page"),
        "layout": layouts(
            "k",
            "v",
            "k_cache",
            "v_cache",
            "positions",
            "block_table",
            more=(
                Level(name="one storage", edit=one_storage("k", "v")),
                Level(name="axes swapped", edit=relayout(("k", "v", "k_cache", "v_cache"), axes_swapped)),
            ),
        ),
    }

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity`: positions per row of the generated cache, in addition to the new tokens."""
        self.capacity = capacity

    def used(self, inputs: Inputs, name: str) -> Tensor | None:
        if name != "block_table":
            return None
        first, last = _pages_written(inputs)
        at = torch.arange(inputs[name].shape[1])
        return (at >= first[:, None]) & (at <= last[:, None])

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("k", "B Hkv S D")
        take.floats("v", "B Hkv S D")
        take.exactly("positions", "B", torch.int32)
        paged = inputs.get("block_table") is not None
        if paged:
            take.exactly("block_table", "B n", torch.int32)
        for name in ("k_cache", "v_cache"):
            take.floats(name, "P page Hkv D" if paged else "B Hkv Lmax D")
        page = take.dims["page"] if paged else 0
        dims = {name: take.dims[name] for name in self.dim_names}
        return self.workload(take.dtype_name, dims, page=page)

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        shape = cache_shape(w, self.capacity)
        return tuple(TensorSpec(name=n, shape=shape, dtype=w.dtype) for n in self.output_names)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, shape = streamed_draw(seed, w.dtype), cache_shape(w, self.capacity)
        table = draw.permutation(shape[0]).view(w["B"], -1).int() if w.trait("page", 0) else None
        caches = {"k_cache": draw.normal(*shape), "v_cache": draw.normal(*shape)}
        return self.refresh(w, {**caches, "block_table": table}, seed)

    def small_inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        return KvAppend(SMALL_CAPACITY).inputs(w, seed)

    def affordable(self, w: Workload) -> bool:
        return 2 * DTYPE_BYTES[w.dtype] * math.prod(cache_shape(w, SMALL_CAPACITY)) <= MOST_CACHE_BYTES

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw, new = resident_draw(seed, w.dtype), (w["B"], w["Hkv"], w["S"], w["D"])
        return {
            "k": draw.normal(*new),
            "v": draw.normal(*new),
            "positions": draw.integers(0, self.capacity + 1, w["B"], dtype=torch.int32),
            "block_table": inputs["block_table"],
            "k_cache": inputs["k_cache"],
            "v_cache": inputs["v_cache"],
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        small = KvAppend(SMALL_CAPACITY)
        cases = []
        for b, hkv, s, d in SHAPES:
            at = w.at(B=b, Hkv=hkv, S=s, D=d)
            cases.append(case(small, at, f"random {at.shape_text}", "heads, widths and counts"))
        long, far = w.at(B=2, Hkv=1, S=1, D=2), 70_000
        positions = _positions(far - 1, 65_537)
        cases.append(case(KvAppend(far), long, "a long cache", "a slot of 16 bits", positions))
        at = w.at(B=3, Hkv=2, S=w["S"] if w["S"] <= 8 else 5, D=min(w["D"], 256))
        two = at.at(S=2)
        end = SMALL_CAPACITY
        news, caches = ("k", "v"), ("k_cache", "v_cache")
        cases += [
            case(small, at, "first positions", "a slot off by one", _positions(0, 0, 1)),
            case(small, at, "last positions", "a write past the end", _positions(end, end - 1, end)),
            case(small, two, "across a page", "a page boundary inside one call", _positions(15, 31, 63)),
            case(small, at, "nan in k", "copied bit for bit", on("k", one_nan)),
            case(small, at, "inf in v", "copied bit for bit", on("v", one_inf)),
            case(small, at, "subnormal v", "a copy must not flush", on("v", subnormal)),
            case(small, at, "nan in the cache", "untouched slots rewritten", on("k_cache", one_nan)),
            case(small, at, "strided rows", "row strides ignored", relayout(news + caches, strided)),
            case(small, at, "offset by one element", "alignment assumed", relayout(news + caches, offset_by_one)),
            case(small, at, "slices of one projection", "token strides ignored", relayout(news, axes_swapped)),
            case(small, at, "cache axes swapped in memory", "cache strides ignored", relayout(caches, axes_swapped)),
        ]
        return tuple(cases)

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(_appended(inputs, new, cache).double() for new, cache in (("k", "k_cache"), ("v", "v_cache")))

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(r) for r in reference)  # a copy

    def own_judge(self, inputs: Inputs) -> Judge:
        """Compare bit for bit: the sign of a zero and the bits of a NaN are copied too."""
        appended = [_appended(inputs, new, name) for new, name in zip(("k", "v"), self.output_names, strict=True)]

        def judged(got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
            for found, expected, name in zip(got, appended, self.output_names, strict=True):
                wrong = bits(found) != bits(expected)
                if wrong.any():
                    where = tuple(int(i) for i in wrong.nonzero()[0])
                    g, r = str(found[where].item()), str(expected[where].item())
                    evidence = {"index": list(where), "got": g, "reference": r, "wrong_elements": int(wrong.sum())}
                    reason = f"{name} {list(where)}: {g}, expected {r}"
                    return Mismatch(check="elements", reason=reason, evidence=evidence)
            return Match(worst=0.0)

        return judged

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """Return batch rows with about `count` tokens, and their whole part of the cache."""
        b = edge_sample(w["B"], max(1, count // w["S"]), seed)
        part = {n: inputs[n][b] for n in ("k", "v", "positions")}
        kept, own = (b, None) if inputs["block_table"] is None else _pages_of(b, inputs)
        part |= {"block_table": own, "k_cache": inputs["k_cache"][kept], "v_cache": inputs["v_cache"][kept]}
        return Rows(inputs=part, pick=lambda outs: (outs[0][kept], outs[1][kept]))

    def written(self, w: Workload, inputs: Inputs) -> Written:
        """Return the new tokens' slots and `BESIDE` more on each side; for a paged cache, their pages."""
        where, part = _touched(w, inputs)
        caches = (inputs["k_cache"], inputs["v_cache"])
        before = tuple(cache[where] for cache in caches)
        paged = inputs["block_table"] is not None

        def small(part_of: Tensor) -> Tensor:  # [B, slots, Hkv, D] as a cache of the op
            return part_of.clone() if paged else part_of.transpose(1, 2).contiguous()

        def restore() -> None:
            for cache, values in zip(caches, before, strict=True):
                cache[where] = values

        return Written(
            inputs={**inputs, **part, "k_cache": small(before[0]), "v_cache": small(before[1])},
            pick=lambda outs: tuple(small(out[where]) for out in outs),
            restore=restore,
        )

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return 4 * DTYPE_BYTES[w.dtype] * w["B"] * w["Hkv"] * w["S"] * w["D"] + 4 * w["B"]

    def flops(self, w: Workload) -> int:
        return 0


def cache_shape(w: Workload, capacity: int) -> tuple[int, ...]:
    keys, page = capacity + w["S"], int(w.trait("page", 0))
    if page:
        return (w["B"] * -(-keys // page), page, w["Hkv"], w["D"])
    return (w["B"], w["Hkv"], keys, w["D"])


def _touched(w: Workload, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """Return an index into the caches, and positions and a block table that address the same slots within its part."""
    positions, table, s = inputs["positions"].long(), inputs["block_table"], w["S"]
    there = positions.device  # may be a GPU, for a call in service
    if table is None:
        room = inputs["k_cache"].shape[2]
        count = min(room, s + 2 * BESIDE)
        start = (positions - BESIDE).clamp(0, room - count)
        slot = start[:, None] + torch.arange(count, device=there)
        rows = torch.arange(len(positions), device=there)[:, None].expand_as(slot)
        return (rows, slice(None), slot), {"positions": (positions - start).int()}
    page = inputs["k_cache"].shape[1]
    count = min(table.shape[1], (s - 1) // page + 2)
    start = (positions // page).clamp(0, table.shape[1] - count)
    beside = table.long().gather(1, start[:, None] + torch.arange(count, device=there))
    # An entry that no token uses may have any value, also a page that another row writes: each page is kept once.
    pages, own = beside.clamp(0, len(inputs["k_cache"]) - 1).unique(return_inverse=True)
    return pages, {"positions": (positions - start * page).int(), "block_table": own.int()}


def _pages_of(rows: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the pages in these rows' tables, each once and without those that other rows write, and the rows' new
    tables.

    An entry that no token uses may have any value: an invalid page, or one of another row.
    """
    table, page, s = inputs["block_table"].long(), inputs["k_cache"].shape[1], inputs["k"].shape[2]
    others = torch.ones(len(table), dtype=torch.bool)
    others[rows] = False
    position = inputs["positions"].long()[:, None] + torch.arange(s)
    theirs = table.gather(1, position // page)[others]
    named = table[rows].clamp(0, len(inputs["k_cache"]) - 1)
    pages = named.unique()
    pages = pages[~torch.isin(pages, theirs)]
    return pages, torch.searchsorted(pages, named).clamp(max=len(pages) - 1).int()


def slots(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the index of each new token in the cache viewed as [batch row or page, slot, Hkv, D]: two of [B, S]."""
    b, s = inputs["k"].shape[0], inputs["k"].shape[2]
    position = inputs["positions"].long()[:, None] + torch.arange(s)
    if inputs["block_table"] is None:
        return torch.arange(b)[:, None].expand(b, s), position
    page = inputs["k_cache"].shape[1]
    return inputs["block_table"].long().gather(1, position // page), position % page


def _appended(inputs: Inputs, new: str, cache: str) -> Tensor:
    """Return the cache with the new tokens, in its own dtype."""
    made: Tensor = inputs[cache].clone()
    by_token = made if inputs["block_table"] is not None else made.transpose(1, 2)
    by_token[slots(inputs)] = inputs[new].transpose(1, 2)
    return made


def _positions(*where: int) -> Change:
    def change(inputs: dict[str, Any], _: Draw) -> None:
        inputs["positions"].copy_(torch.tensor(where)[: len(inputs["positions"])])

    return change
