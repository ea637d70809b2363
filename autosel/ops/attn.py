"""attn: decode (S = 1), speculation and chunked prefill (S > 1) over a contiguous KV cache. See attention.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import attention
from autosel.ops.arguments import Binder, need_multiple
from autosel.ops.attention_cases import attn_cases, heads_inside
from autosel.ops.attention_domains import (
    HEADS,
    KEYS,
    SEQUENCES,
    WIDTHS,
    admits,
    affordable,
    attention_domains,
    bury_unseen,
    lengths_domain,
    room_domain,
)
from autosel.ops.contract import Arg, Case, Inputs, Op, Rows, TensorSpec
from autosel.ops.domains import Level, Row, among, follows, layouts
from autosel.ops.draw import Draw, relayout, resident_draw, streamed_draw
from autosel.values import DTYPE_BYTES, Workload


class Attn(Op):
    name = "attn"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k", kind="tensor", role="streamed"),
        Arg(name="v", kind="tensor", role="streamed"),
        Arg(name="lengths", kind="optional"),
        Arg(name="max_len", kind="int"),
        Arg(name="scale", kind="float", default=0.0),
        Arg(name="window", kind="int", default=0),
        Arg(name="softcap", kind="float", default=0.0),
    )
    output_names = ("o",)
    dim_names = ("B", "Hq", "Hkv", "S", "D", "L")
    trait_defaults = {"ragged": False, "window": 0, "softcap": 0.0}
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
        "layout": layouts(
            "q", "k", "v", more=(Level(name="heads inside", edit=relayout(("q", "k", "v"), heads_inside)),)
        ),
    }

    def affordable(self, w: Workload) -> bool:
        return affordable(w)

    def admits(self, row: Row) -> bool:
        return admits(row)

    def finish(self, inputs: dict[str, Any], draw: Draw) -> None:
        bury_unseen(inputs, draw)

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "B Hq S D")
        take.floats("k", "B Hkv Lmax D")
        take.floats("v", "B Hkv Lmax D")
        need_multiple(take, "Hq", "Hkv")
        ragged = inputs.get("lengths") is not None
        if ragged:
            take.exactly("lengths", "B", torch.int32)
        room = take.dims.pop("Lmax")
        take.dims["L"] = int(take.number("max_len", room, low=1))
        if take.dims["L"] > room:
            raise take.fail("max_len", f"is {take.dims['L']}, the cache holds {room}")
        take.number("scale", 0.0, low=0.0)
        return self.workload(
            take.dtype_name,
            take.dims,
            ragged=ragged,
            window=int(take.number("window", 0, low=0)),
            softcap=float(take.number("softcap", 0.0, low=0.0)),
        )

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="o", shape=(w["B"], w["Hq"], w["S"], w["D"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, shape = streamed_draw(seed, w.dtype), (w["B"], w["Hkv"], w["L"], w["D"])
        return self.refresh(w, {"k": draw.normal(*shape), "v": draw.normal(*shape)}, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        lengths = ragged_lengths(w["B"], w["L"])[draw.permutation(w["B"])] if w.trait("ragged", False) else None
        return {
            "q": draw.normal(w["B"], w["Hq"], w["S"], w["D"]),
            "k": inputs["k"],
            "v": inputs["v"],
            "lengths": lengths,
            "max_len": w["L"],
            "scale": 0.0,
            "window": int(w.trait("window", 0)),
            "softcap": float(w.trait("softcap", 0.0)),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return attn_cases(self, w)

    def _exact(self, inputs: Inputs) -> tuple[attention.Exact, Tensor, Tensor]:
        """The definition on the keys that count, and those keys and values."""
        keys = inputs["max_len"]
        k, v, lengths = inputs["k"][:, :, :keys], inputs["v"][:, :, :keys], inputs["lengths"]
        if lengths is None:
            lengths = torch.full((k.shape[0],), keys)
        q, scale, window, softcap = (inputs[n] for n in ("q", "scale", "window", "softcap"))
        return attention.exact(q, k, v, lengths, scale, window, softcap), k, v

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return (attention.unpack(self._exact(inputs)[0].o, inputs["q"].shape),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        error = attention.error_bound(*self._exact(inputs), inputs["scale"])
        return (attention.unpack(error, inputs["q"].shape),)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        pairs = head_pairs(w, count, seed)
        group = w["Hq"] // w["Hkv"]
        b, h = pairs // w["Hkv"], pairs % w["Hkv"]
        lengths = inputs["lengths"]
        part = {
            **inputs,
            "q": pick_heads(inputs["q"], b, h, group),
            "k": inputs["k"][b, h][:, None],
            "v": inputs["v"][b, h][:, None],
            "lengths": None if lengths is None else lengths[b],
        }
        return Rows(inputs=part, pick=lambda outs: (pick_heads(outs[0], b, h, group),))

    def bytes_moved(self, w: Workload) -> int:
        b, hq, hkv, s, d = (w[n] for n in ("B", "Hq", "Hkv", "S", "D"))
        keys = sum(attention.keys_read(s, n, int(w.trait("window", 0))) for n in lengths_of(w))
        return DTYPE_BYTES[w.dtype] * (2 * hkv * keys * d + 2 * b * hq * s * d)

    def flops(self, w: Workload) -> int:
        pairs = sum(attention.pairs_seen(w["S"], n, int(w.trait("window", 0))) for n in lengths_of(w))
        return 4 * w["Hq"] * w["D"] * pairs


def ragged_lengths(b: int, longest: int) -> Tensor:
    """Evenly spread from the longest down to half of it, so that bytes are known from the workload alone; int32 [B]."""
    return torch.tensor([longest - i * (longest // 2) // b for i in range(b)], dtype=torch.int32)


def lengths_of(w: Workload) -> list[int]:
    if w.trait("ragged", False):
        return [int(n) for n in ragged_lengths(w["B"], w["L"])]
    return [w["L"]] * w["B"]


def head_pairs(w: Workload, count: int, seed: int) -> Tensor:
    """About count / (G*S) distinct (batch row, KV head) pairs, as b * Hkv + h."""
    rows_each = w["Hq"] // w["Hkv"] * w["S"]
    wanted = max(1, count // rows_each)
    order = torch.randperm(w["B"] * w["Hkv"], generator=torch.Generator().manual_seed(seed))
    return order[:wanted]


def pick_heads(rows: Tensor, b: Tensor, h: Tensor, group: int) -> Tensor:
    """[B, Hq, S, D] -> the query heads of KV heads (b, h): [n, G, S, D]."""
    b_, hq, s, d = rows.shape
    return rows.view(b_, hq // group, group, s, d)[b, h]
