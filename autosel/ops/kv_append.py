"""kv_append: write the keys and values of new tokens into the cache, bit for bit; nothing else of it changes.

Token s of batch row b goes to position positions[b] + s: of k_cache[B, Hkv, Lmax, D], or, with a block table, to page
block_table[b, position // page], slot position % page, of k_cache[P, page, Hkv, D].
`verify` needs the inputs as they were before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import Arg, Case, Inputs, Op, Rows, TensorSpec, Written
from autosel.ops.draw import (
    Change,
    Draw,
    case,
    edge_sample,
    offset_by_one,
    one_inf,
    one_nan,
    relayout,
    resident_draw,
    streamed_draw,
    strided,
    subnormal,
)
from autosel.values import DTYPE_BYTES, Workload

CAPACITY = 1024  # positions a row of the generated cache has room for, beside the new tokens
SMALL_CAPACITY = 96
BESIDE = 8  # positions before and after the new tokens that must stay as they are
# (B, Hkv, S, D)
SHAPES = ((1, 1, 1, 64), (1, 8, 1, 128), (3, 2, 1, 80), (8, 1, 2, 96), (2, 2, 17, 40), (1, 3, 33, 66), (5, 1, 5, 256),
          (1, 1, 1, 2))  # fmt: skip


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
        shape = cache_shape(w, CAPACITY)
        return tuple(TensorSpec(name=n, shape=shape, dtype=w.dtype) for n in self.output_names)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        return self.sized(w, seed, CAPACITY)

    def sized(self, w: Workload, seed: int, capacity: int) -> dict[str, Any]:
        """Inputs with a cache of room for `capacity` positions beside the new ones."""
        draw, shape = streamed_draw(seed, w.dtype), cache_shape(w, capacity)
        table = draw.permutation(shape[0]).view(w["B"], -1).int() if w.trait("page", 0) else None
        caches = {"k_cache": draw.normal(*shape), "v_cache": draw.normal(*shape)}
        return self.refresh(w, {**caches, "block_table": table, "capacity": capacity}, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw, new = resident_draw(seed, w.dtype), (w["B"], w["Hkv"], w["S"], w["D"])
        capacity = inputs.get("capacity", CAPACITY)
        return {
            "k": draw.normal(*new),
            "v": draw.normal(*new),
            "positions": draw.integers(0, capacity + 1, w["B"], dtype=torch.int32),
            "block_table": inputs["block_table"],
            "k_cache": inputs["k_cache"],
            "v_cache": inputs["v_cache"],
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        small = _Small(self)
        cases = []
        for b, hkv, s, d in SHAPES:
            at = w.at(B=b, Hkv=hkv, S=s, D=d)
            cases.append(case(small, at, f"random {at.shape_text}", "heads, widths and counts"))
        at = w.at(B=3, Hkv=2, S=w["S"] if w["S"] <= 8 else 5, D=min(w["D"], 256))
        two = at.at(S=2)
        end = SMALL_CAPACITY
        news, caches = ("k", "v"), ("k_cache", "v_cache")
        cases += [
            case(small, at, "first positions", "a slot off by one", _positions(0, 0, 1)),
            case(small, at, "last positions", "a write past the end", _positions(end, end - 1, end)),
            case(small, two, "across a page", "a page boundary inside one call", _positions(15, 31, 63)),
            case(small, at, "nan in k", "copied bit for bit", lambda i, draw: one_nan(i["k"], draw)),
            case(small, at, "inf in v", "copied bit for bit", lambda i, draw: one_inf(i["v"], draw)),
            case(
                small,
                at,
                "subnormal v",
                "a copy must not flush",
                lambda i, draw: subnormal(i["v"], draw),
            ),
            case(
                small, at, "nan in the cache", "untouched slots rewritten", lambda i, draw: one_nan(i["k_cache"], draw)
            ),
            case(small, at, "strided rows", "row strides ignored", relayout(news + caches, strided)),
            case(small, at, "offset by one element", "alignment assumed", relayout(news + caches, offset_by_one)),
            case(small, at, "slices of one projection", "token strides ignored", relayout(news, _tokens_outside)),
            case(small, at, "cache axes swapped in memory", "cache strides ignored", relayout(caches, _tokens_outside)),
        ]
        return tuple(cases)

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(_appended(inputs, new, cache) for new, cache in (("k", "k_cache"), ("v", "v_cache")))

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(r) for r in reference)  # a copy

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """About `count` tokens' batch rows with their whole part of the cache."""
        b = edge_sample(w["B"], max(1, count // w["S"]), seed)
        part = {n: inputs[n][b] for n in ("k", "v", "positions")}
        table = inputs["block_table"]
        if table is None:
            part |= {"block_table": None, "k_cache": inputs["k_cache"][b], "v_cache": inputs["v_cache"][b]}
            return Rows(inputs=part, pick=lambda outs: (outs[0][b], outs[1][b]))
        pages, own = _pages_of(b, inputs)
        part |= {"block_table": own, "k_cache": inputs["k_cache"][pages], "v_cache": inputs["v_cache"][pages]}
        return Rows(inputs=part, pick=lambda outs: (outs[0][pages], outs[1][pages]))

    def written(self, w: Workload, inputs: Inputs) -> Written:
        """The new tokens' slots and `BESIDE` more on each side; of a paged cache the pages they lie in."""
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

    def bytes_moved(self, w: Workload) -> int:
        return 4 * DTYPE_BYTES[w.dtype] * w["B"] * w["Hkv"] * w["S"] * w["D"] + 4 * w["B"]

    def flops(self, w: Workload) -> int:
        return 0


def cache_shape(w: Workload, capacity: int) -> tuple[int, ...]:
    keys, page = capacity + w["S"], int(w.trait("page", 0))
    if page:
        return (w["B"] * -(-keys // page), page, w["Hkv"], w["D"])
    return (w["B"], w["Hkv"], keys, w["D"])


def _touched(w: Workload, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """An index of the caches, and the positions and block table that say the same within what it picks."""
    positions, table, s = inputs["positions"].long(), inputs["block_table"], w["S"]
    there = positions.device  # a GPU, of a call in service
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
    # An entry that no token goes to may be anything, also a page that another row writes: each page is kept once.
    pages, own = beside.clamp(0, len(inputs["k_cache"]) - 1).unique(return_inverse=True)
    return pages, {"positions": (positions - start * page).int(), "block_table": own.int()}


def _pages_of(rows: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The pages that these rows' tables name, each once, without those that other rows write; their tables anew.

    An entry that no token goes to may be anything: no page at all, or one of another row's.
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
    """Index of each new token in the cache seen as [batch row or page, slot, Hkv, D]: two of [B, S]."""
    b, s = inputs["k"].shape[0], inputs["k"].shape[2]
    position = inputs["positions"].long()[:, None] + torch.arange(s)
    if inputs["block_table"] is None:
        return torch.arange(b)[:, None].expand(b, s), position
    page = inputs["k_cache"].shape[1]
    return inputs["block_table"].long().gather(1, position // page), position % page


def _appended(inputs: Inputs, new: str, cache: str) -> Tensor:
    made: Tensor = inputs[cache].double()  # a copy: double() of bf16, fp16 and fp32 always is
    by_token = made if inputs["block_table"] is not None else made.transpose(1, 2)
    by_token[slots(inputs)] = inputs[new].double().transpose(1, 2)
    return made


class _Small:
    """KvAppend with a small cache, for `case`."""

    def __init__(self, op: KvAppend) -> None:
        self.op = op

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        return self.op.sized(w, seed, SMALL_CAPACITY)


def _positions(*where: int) -> Change:
    def change(inputs: dict[str, Any], _: Draw) -> None:
        inputs["positions"].copy_(torch.tensor(where)[: len(inputs["positions"])])

    return change


def _tokens_outside(x: Tensor) -> Tensor:
    """The same tensor with its two middle axes swapped in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
