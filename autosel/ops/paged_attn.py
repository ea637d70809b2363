"""paged_attn: attention over a KV cache in pages, [P, page, Hkv, D], found through a block table. See attention.py.

Position j of batch row b is in page block_table[b, j // page], slot j % page. Entries beyond a row's length may have
any value, also -1, and the memory that they point to must not influence the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import attention
from autosel.ops.arguments import Binder, need_multiple
from autosel.ops.attention_cases import attn_cases
from autosel.ops.attention_domains import HEADS, KEYS, SEQUENCES, WIDTHS, attention_domains, lengths_domain
from autosel.ops.attn import Attn, grown, head_pairs, pick_heads, ragged_lengths
from autosel.ops.contract import Arg, Case, Inputs, Rows
from autosel.ops.domains import Domain, Level, among, follows, layouts
from autosel.ops.draw import Change, Draw, axes_swapped, case, offset_by_one, relayout, resident_draw, streamed_draw
from autosel.values import DTYPE_BYTES, Workload

ATTN = Attn()
FAR_POOL_BYTES = 4 << 20


def _share_pages(inputs: dict[str, Any], _: Draw) -> None:
    """Put K and V into one buffer [P, 2, page, Hkv, D], as some engines do."""
    both = torch.stack((inputs["k_pages"], inputs["v_pages"]), 1)
    inputs["k_pages"], inputs["v_pages"] = both[:, 0], both[:, 1]


# --- tables and pages -------------------------------------------------------------------------------------------------


def _in_order(inputs: dict[str, Any], _: Draw) -> None:
    table = inputs["block_table"]
    table.copy_(torch.arange(table.numel(), dtype=torch.int32).view(table.shape))


def _shared_prefix(inputs: dict[str, Any], _: Draw) -> None:
    """Make sequences share their first page, as in a prefix cache."""
    table = inputs["block_table"]
    table[:, 0] = table[0, 0]


def _stale_entries(inputs: dict[str, Any], draw: Draw) -> None:
    """Fill entries beyond a row's length with -1, invalid numbers and other sequences' pages, in a wider table."""
    table, page = inputs["block_table"], inputs["k_pages"].shape[1]
    wide = torch.cat((table, table.new_full((table.shape[0], 3), -1)), 1)
    unused = torch.arange(wide.shape[1]) * page >= inputs["lengths"][:, None]
    anything = torch.tensor([-1, 2**30, int(table[-1, 0]), -(2**31)], dtype=torch.int32)
    wide[unused] = anything[draw.integers(0, len(anything), int(unused.sum()))]
    inputs["block_table"] = wide


def _far_pages(inputs: dict[str, Any], _: Draw) -> None:
    """Use page numbers of more than 16 bits if memory allows; the pool is much larger than its used part."""
    table = inputs["block_table"]
    pages = inputs["k_pages"]
    start = 66_000 if 66_000 * pages[0].numel() * pages.itemsize <= FAR_POOL_BYTES else 300
    if start * pages[0].numel() * pages.itemsize > FAR_POOL_BYTES:
        return
    for name in ("k_pages", "v_pages"):
        inputs[name] = torch.cat((inputs[name].new_zeros(start, *pages.shape[1:]), inputs[name]))
    table.add_(start)


def _far_needle(inputs: dict[str, Any], draw: Draw) -> None:
    """Use page numbers of 17 bits, and give nearly all the weight to the last key, at the end of a long table."""
    _far_pages(inputs, draw)
    last, q = int(inputs["block_table"][0, -1]), inputs["q"].flatten()
    inputs["lengths"].fill_(inputs["max_len"])
    inputs["window"] = min(inputs["window"], inputs["max_len"])
    q.copy_(draw.normal(len(q)).sign())
    inputs["q"], inputs["k_pages"][last], inputs["v_pages"][last] = q.view(inputs["q"].shape), 8 * q, 3.0


def _bury_unused(inputs: dict[str, Any], draw: Draw) -> None:
    table, lengths, page = inputs["block_table"], inputs["lengths"], inputs["k_pages"].shape[1]
    used = torch.zeros(len(inputs["k_pages"]), dtype=torch.int64)  # slots of each page that a sequence uses
    for row, length in zip(table, lengths.tolist(), strict=True):
        for at in range(-(-length // page)):
            used[row[at]] = max(int(used[row[at]]), min(page, length - at * page))
    unseen = torch.arange(page) >= used[:, None]
    for name in ("k_pages", "v_pages"):
        junk = torch.where(draw.uniform(len(used), page) < 0.5, -800.0, 800.0).masked_fill_(
            (used == 0)[:, None], math.nan
        )
        inputs[name].copy_(torch.where(unseen[..., None, None], junk[..., None, None], inputs[name].float()))


_TABLES = (
    Level(name="shuffled"),
    Level(name="in order", edit=_in_order),
    Level(name="shared prefix", edit=_shared_prefix),
    Level(name="stale entries", edit=_stale_entries),
    Level(name="far pages", edit=_far_pages),
)


class PagedAttn(attention.AttentionOp):
    name = "paged_attn"
    values = "v_pages"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k_pages", kind="tensor", role="streamed"),
        Arg(name="v_pages", kind="tensor", role="streamed"),
        Arg(name="block_table", kind="tensor"),
        Arg(name="lengths", kind="tensor"),
        Arg(name="max_len", kind="int"),
        *attention.SETTINGS,
    )
    dim_names = ("B", "Hq", "Hkv", "S", "D", "L", "page")
    domains = {
        "B": SEQUENCES,
        "Hq Hkv": HEADS,
        "S": among(1, 2, 5, 17),
        "D": WIDTHS,
        "L": KEYS,
        "page": among(16, 1, 64, 24, 7, 256),
        **attention_domains("q", "k_pages", "v_pages"),
        "lengths": lengths_domain(),
        "max_len": follows("L"),
        "block_table": Domain(kind="index", levels=lambda *_: _TABLES),
        "layout": layouts(
            "q",
            "block_table",
            "lengths",
            more=(
                Level(name="k and v share pages", edit=_share_pages),
                Level(name="heads outside", edit=relayout(("k_pages", "v_pages"), axes_swapped)),
            ),
        ),
    }

    def affordable(self, w: Workload) -> bool:
        return super().affordable(w.at(L=_blocks(w) * w["page"]))

    def finish(self, inputs: dict[str, Any], draw: Draw) -> None:
        """Write NaN into each unused page, and large finite values into slots beyond a length."""
        _bury_unused(inputs, draw)

    def used(self, inputs: Inputs, name: str) -> Tensor | None:
        if name != "block_table":
            return None
        table, page = inputs[name], inputs["k_pages"].shape[1]
        used: Tensor = torch.arange(table.shape[1]) * page < inputs["lengths"][:, None]
        return used

    def steps(self, inputs: Inputs) -> Sequence[Inputs]:
        return grown(inputs)

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "B Hq S D")
        take.floats("k_pages", "P page Hkv D")
        take.floats("v_pages", "P page Hkv D")
        take.exactly("block_table", "B n", torch.int32)
        take.exactly("lengths", "B", torch.int32)
        need_multiple(take, "Hq", "Hkv")
        room = take.dims.pop("n") * take.dims["page"]
        take.dims.pop("P")
        take.dims["L"] = int(take.number("max_len", room, low=1))
        if take.dims["L"] > room:
            raise take.fail("max_len", f"is {take.dims['L']}, the block table reaches {room}")
        return self.workload(take.dtype_name, take.dims, **self.settings(take))

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, blocks = streamed_draw(seed, w.dtype), _blocks(w)
        shape = (w["B"] * blocks, w["page"], w["Hkv"], w["D"])
        table = draw.permutation(w["B"] * blocks).view(w["B"], blocks).int()
        pages = {"k_pages": draw.normal(*shape), "v_pages": draw.normal(*shape)}
        return self.refresh(w, {**pages, "block_table": table}, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        return {
            "q": draw.normal(w["B"], w["Hq"], w["S"], w["D"]),
            "k_pages": inputs["k_pages"],
            "v_pages": inputs["v_pages"],
            "block_table": inputs["block_table"],
            "lengths": ragged_lengths(w["B"], w["L"])[draw.permutation(w["B"])],
            "max_len": w["L"],
            **self.drawn_settings(w),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        """Return attn's battery with caches cut into pages, of the workload's size and three others."""
        cases = []
        for i, found in enumerate(attn_cases(ATTN, contiguous(w), layouts=False)):
            page = w["page"] if i % 2 == 0 else (16, 1, 64, 24)[i // 2 % 4]
            at = w.at(**dict(found.workload.dims), page=page)
            cases.append(Case(name=found.name, workload=at, make=_cut(found, page), covers=found.covers))
        small = next(c for c in cases if "Hkv2" in c.workload.key and c.workload["L"] > 100 and c.workload["page"] > 1)
        floats = ("q", "k_pages", "v_pages")
        for name, covers, change in (
            ("offset by one element", "alignment assumed", relayout(floats, offset_by_one)),
            ("k and v share pages", "page strides ignored", _share_pages),
            ("heads outside slots", "head strides ignored", relayout(floats[1:], axes_swapped)),
        ):
            cases.append(Case(name=name, workload=small.workload, make=_then(small, change), covers=covers))
        many = w.at(B=1, Hq=1, Hkv=1, S=1, D=16 // DTYPE_BYTES[w.dtype], L=4099, page=1)
        cases.append(case(self, many, "pages beyond 2^16", "page numbers or tables of few bits", _far_needle))
        return tuple(cases)

    def _exact(self, inputs: Inputs) -> tuple[attention.Exact, Tensor, Tensor]:
        where = (inputs["block_table"], inputs["lengths"], inputs["max_len"])
        k, v = (gather(inputs[n], *where) for n in ("k_pages", "v_pages"))
        q, lengths, scale, window, softcap = (inputs[n] for n in ("q", "lengths", "scale", "window", "softcap"))
        return attention.exact(q, k, v, lengths, scale, window, softcap), k, v

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        return self._part(w, inputs, head_pairs(w, count, seed))

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        return self._part(w, inputs, where[:1, 0] * w["Hkv"] + where[:1, 1] // (w["Hq"] // w["Hkv"]))

    def _part(self, w: Workload, inputs: Inputs, pairs: Tensor) -> Rows:
        group = w["Hq"] // w["Hkv"]
        b, h = pairs // w["Hkv"], pairs % w["Hkv"]
        table = inputs["block_table"][:, : _blocks(w)]  # an engine's table is as wide as its longest context
        part = {**inputs, "q": pick_heads(inputs["q"], b, h, group), "lengths": inputs["lengths"][b]}
        for name in ("k_pages", "v_pages"):
            heads = zip(b.tolist(), h.tolist(), strict=True)
            own = [inputs[name][:, :, j][table[i].long().clamp(0, len(inputs[name]) - 1)] for i, j in heads]
            part[name] = torch.cat(own)[:, :, None]
        places = torch.arange(len(pairs) * table.shape[1], dtype=torch.int32, device=table.device)
        part["block_table"] = places.view(len(pairs), -1).masked_fill(table[b.to(table.device)] < 0, -1)
        return Rows(inputs=part, pick=lambda outs: (pick_heads(outs[0], b, h, group),))

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return ATTN.bytes_moved(contiguous(w), inputs) + 4 * w["B"] * _blocks(w)

    def flops(self, w: Workload) -> int:
        return ATTN.flops(contiguous(w))


def contiguous(w: Workload) -> Workload:
    """Return the same attention over a contiguous cache with lengths."""
    dims = {name: size for name, size in w.dims if name != "page"}
    return ATTN.workload(w.dtype, dims, ragged=True, **dict(w.traits))


def gather(pages: Tensor, table: Tensor, lengths: Tensor, keys: int) -> Tensor:
    """Return the contiguous cache [B, Hkv, keys, D] of pages [P, page, Hkv, D], with zeros for a row's unused pages.

    Unused pages may be NaN, which a weight of zero does not remove.
    """
    page = pages.shape[1]
    used = torch.arange(-(-keys // page)) * page < lengths[:, None]
    known = table[:, : used.shape[1]].long().clamp(0, pages.shape[0] - 1)
    found = pages[known].masked_fill(~used[:, :, None, None, None], 0.0).flatten(1, 2)
    return found.transpose(1, 2)[:, :, :keys]


def _blocks(w: Workload) -> int:
    return -(-w["L"] // w["page"])


def _cut(found: Case, page: int) -> Any:
    def make(seed: int) -> dict[str, Any]:
        inputs, draw = found.make(seed), Draw(seed + 99_991, found.workload.dtype)
        k, v, lengths = inputs.pop("k"), inputs.pop("v"), inputs["lengths"]
        b, blocks = k.shape[0], -(-k.shape[2] // page)
        order = draw.permutation(b * blocks + 2)[: b * blocks].view(b, blocks)
        table = order.int()
        pages = {"k_pages": _pages(k, page, order), "v_pages": _pages(v, page, order)}
        table[torch.arange(blocks) * page >= lengths[:, None]] = -1
        return {"q": inputs.pop("q"), **pages, "block_table": table, **inputs}

    return make


def _pages(cache: Tensor, page: int, order: Tensor) -> Tensor:
    b, hkv, keys, d = cache.shape
    padded = torch.full((b, hkv, order.shape[1] * page, d), 800.0, dtype=cache.dtype)
    padded[:, :, :keys] = cache
    pages = torch.full((order.numel() + 2, page, hkv, d), -800.0, dtype=cache.dtype)
    pages[order.flatten()] = padded.unflatten(2, (-1, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return pages


def _then(found: Case, change: Change) -> Any:
    def make(seed: int) -> dict[str, Any]:
        inputs = found.make(seed)
        change(inputs, Draw(seed, found.workload.dtype))
        return inputs

    return make
