"""attn: decode (S = 1), speculation and chunked prefill (S > 1) over a contiguous KV cache. See attention.py.

k and v are tensors, or `Cached` in a format: code * scale. The reference is attention over these numbers. In addition
to attn's own roundings, a candidate may multiply K's scale into the query and store the product, and store a result
before V's scale is applied. A subnormal scale may count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.formats import CACHE_FORMATS, PLAIN
from autosel.ops import attention
from autosel.ops.arguments import Binder, need_multiple
from autosel.ops.attention_cases import attn_cases, bury
from autosel.ops.attention_domains import HEADS, KEYS, SEQUENCES, WIDTHS, attention_domains, lengths_domain, room_domain
from autosel.ops.cached import Cache, Cached, exact, first_keys, numbers, quantise_cache, scales_of, some_heads
from autosel.ops.cached_attention import cached_bound, cached_cases
from autosel.ops.contract import Arg, Case, Inputs, Rows
from autosel.ops.domains import Level, Row, among, follows, in_format, layouts, trait
from autosel.ops.draw import Draw, axes_swapped, relayout, resident_draw, streamed_draw
from autosel.ops.stored_cases import KEYS as KEY_SCALES
from autosel.ops.stored_cases import VALUES as VALUE_SCALES
from autosel.ops.stored_cases import stored_domains
from autosel.values import DTYPE_BYTES, Workload

STEPS = 3  # of a decode


class Attn(attention.AttentionOp):
    name = "attn"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k", kind="cache", role="streamed"),
        Arg(name="v", kind="cache", role="streamed"),
        Arg(name="lengths", kind="optional"),
        Arg(name="max_len", kind="int"),
        *attention.SETTINGS,
    )
    dim_names = ("B", "Hq", "Hkv", "S", "D", "L")
    trait_defaults = {"ragged": False, **attention.AttentionOp.trait_defaults, "cache": PLAIN}
    domains = {
        "B": SEQUENCES,
        "Hq Hkv": HEADS,
        "S": among(1, 2, 5, 17),
        "D": WIDTHS,
        "L": KEYS,
        **attention_domains(),
        "lengths": lengths_domain(presence="ragged"),
        "max_len": follows("L"),
        "room": room_domain("k", "v"),
        "cache": trait(*CACHE_FORMATS),
        **stored_domains(KEY_SCALES, "k"),
        **stored_domains(VALUE_SCALES, "v"),
        "layout": layouts(
            "q", "k", "v", "lengths", more=(Level(name="heads inside", edit=relayout(("q", "k", "v"), axes_swapped)),)
        ),
    }

    def admits(self, row: Row) -> bool:
        return super().admits(row) and in_format(row, "k", "v", trait="cache")

    def finish(self, inputs: dict[str, Any], draw: Draw) -> None:
        """Write large finite values beyond the lengths."""
        for name in ("k", "v"):
            bury(inputs[name], inputs["lengths"], inputs["max_len"], draw)

    def steps(self, inputs: Inputs) -> Sequence[Inputs]:
        return grown(inputs)

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "B Hq S D")
        for name in ("k", "v"):
            take.cache(name, "B Hkv Lmax D")
        need_multiple(take, "Hq", "Hkv")
        ragged = inputs.get("lengths") is not None
        if ragged:
            take.exactly("lengths", "B", torch.int32)
        room = take.dims.pop("Lmax")
        take.dims["L"] = int(take.number("max_len", room, low=1))
        if take.dims["L"] > room:
            raise take.fail("max_len", f"is {take.dims['L']}, the cache holds {room}")
        traits = self.settings(take)
        return self.workload(take.dtype_name, take.dims, ragged=ragged, **traits, cache=take.one_format("k", "v"))

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, shape = streamed_draw(seed, w.dtype), (w["B"], w["Hkv"], w["L"], w["D"])
        made = {name: quantise_cache(draw.normal(*shape), w.cache_format) for name in ("k", "v")}
        return self.refresh(w, made, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        lengths = ragged_lengths(w["B"], w["L"])[draw.permutation(w["B"])] if w.trait("ragged", False) else None
        return {
            "q": draw.normal(w["B"], w["Hq"], w["S"], w["D"]),
            "k": inputs["k"],
            "v": inputs["v"],
            "lengths": lengths,
            "max_len": w["L"],
            **self.drawn_settings(w),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return attn_cases(self, w) if w.cache_format.plain else cached_cases(self, w)

    def _exact(self, inputs: Inputs) -> tuple[attention.Exact, Cache, Cache]:
        """Return the result for the keys in use, and these keys and values; V's scale is not yet applied."""
        keys = inputs["max_len"]
        k, v, lengths = first_keys(inputs["k"], keys), first_keys(inputs["v"], keys), inputs["lengths"]
        if lengths is None:
            lengths = torch.full((k.shape[0],), keys)
        q, scale, window, softcap = (inputs[n] for n in ("q", "scale", "window", "softcap"))
        return attention.exact(q, exact(k), numbers(v), lengths, scale, window, softcap), k, v

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        e, _, v = self._exact(inputs)
        by = scales_of(v)
        return (attention.unpack(e.o if by is None else e.o * by, inputs["q"].shape),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        e, k, v = self._exact(inputs)
        if isinstance(k, Cached) and isinstance(v, Cached):
            error = cached_bound(e, k, v, inputs["scale"], inputs["q"].dtype)
        else:
            assert isinstance(k, Tensor) and isinstance(v, Tensor)
            error = attention.error_bound(e, k, v, inputs["scale"])
        return (attention.unpack(error, inputs["q"].shape),)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """Return some KV heads, the same for some batch rows: a head may have its own scale."""
        wanted = max(1, count // (w["Hq"] // w["Hkv"] * w["S"]))
        order = torch.Generator().manual_seed(seed)
        h = torch.randperm(w["Hkv"], generator=order)[:wanted]
        return self._part(w, inputs, torch.randperm(w["B"], generator=order)[: max(1, wanted // len(h))], h)

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        return self._part(w, inputs, where[:1, 0], where[:1, 1] // (w["Hq"] // w["Hkv"]))

    def _part(self, w: Workload, inputs: Inputs, b: Tensor, h: Tensor) -> Rows:
        def heads(x: Tensor) -> Tensor:
            picked: Tensor = x.unflatten(1, (w["Hkv"], -1))[b[:, None], h]
            return picked.flatten(1, 2)

        lengths = inputs["lengths"]
        part = {
            **inputs,
            "q": heads(inputs["q"]),
            "k": some_heads(inputs["k"], b, h),
            "v": some_heads(inputs["v"], b, h),
            "lengths": None if lengths is None else lengths[b],
        }
        return Rows(inputs=part, pick=lambda outs: (heads(outs[0]),))

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        b, hq, hkv, s, d = (w[n] for n in ("B", "Hq", "Hkv", "S", "D"))
        keys = sum(attention.keys_read(s, n, int(w.trait("window", 0))) for n in held(w, inputs))
        cache = w.cache_format.nbytes(w.dtype, hkv * keys * d, {"B": b, "H": hkv, "L": w["L"]})
        return 2 * cache + DTYPE_BYTES[w.dtype] * 2 * b * hq * s * d

    def flops(self, w: Workload) -> int:
        pairs = sum(attention.pairs_seen(w["S"], n, int(w.trait("window", 0))) for n in lengths_of(w))
        return 4 * w["Hq"] * w["D"] * pairs


def grown(inputs: Inputs) -> list[Inputs]:
    """Steps of a decode: the keys are there already, one more is seen at each."""
    most, lengths, found = inputs["max_len"], inputs["lengths"], list[Inputs]()
    for fewer in range(min(STEPS, most - 1), -1, -1):
        seen = None if lengths is None else (lengths - fewer).clamp(min=0)
        found.append({**inputs, "max_len": most - fewer, "lengths": seen})
    return found


def ragged_lengths(b: int, longest: int) -> Tensor:
    """Return int32 [B], evenly spread from the longest to half of it, so that the workload determines the bytes."""
    return torch.tensor([longest - i * (longest // 2) // b for i in range(b)], dtype=torch.int32)


def held(w: Workload, inputs: Inputs | None) -> list[int]:
    """Return how many keys each sequence of these inputs has, or of the inputs that the workload draws."""
    lengths = None if inputs is None else inputs["lengths"]
    return lengths_of(w) if lengths is None else [int(n) for n in lengths]


def lengths_of(w: Workload) -> list[int]:
    if w.trait("ragged", False):
        return [int(n) for n in ragged_lengths(w["B"], w["L"])]
    return [w["L"]] * w["B"]


def head_pairs(w: Workload, count: int, seed: int) -> Tensor:
    """Return about count / (G*S) distinct (batch row, KV head) pairs, as b * Hkv + h."""
    rows_each = w["Hq"] // w["Hkv"] * w["S"]
    wanted = max(1, count // rows_each)
    order = torch.randperm(w["B"] * w["Hkv"], generator=torch.Generator().manual_seed(seed))
    return order[:wanted]


def pick_heads(rows: Tensor, b: Tensor, h: Tensor, group: int) -> Tensor:
    """Return the query heads [n, G, S, D] of KV heads (b, h) in [B, Hq, S, D]."""
    b_, hq, s, d = rows.shape
    return rows.view(b_, hq // group, group, s, d)[b, h]
