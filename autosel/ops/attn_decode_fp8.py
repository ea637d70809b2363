"""attn_decode_fp8: attn over a cache in fp8 e4m3, an fp32 scale a KV head for K and one for V (attention.py, fp8.py).

K = k * k_scale[h], V = v * v_scale[h]; q and o are bf16, fp16 or fp32: the workload's dtype is theirs. The reference is
attention over these numbers, so that this op is about arithmetic alone: a model with a bf16 cache is never given it.
The contract allows the roundings of the eager composition beside attn's: K's scale may be multiplied into the query and
the product stored, a result may be stored before V's scale is applied. A subnormal scale may count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import attention, fp8
from autosel.ops.arguments import Binder, need_multiple
from autosel.ops.attention_cases import attn_cases, heads_inside, small_cache
from autosel.ops.attention_domains import SCORE_UP, affordable
from autosel.ops.attn import Attn, lengths_of, ragged_lengths
from autosel.ops.contract import DTYPE_NAME, TINY_NORMAL, U32, UNIT, Arg, Case, Inputs, Op, Rows, TensorSpec
from autosel.ops.domains import FAR_DOWN, Level, contents, layouts
from autosel.ops.draw import Change, Draw, case, offset_by_one, on, relayout, resident_draw, streamed_draw, strided
from autosel.ops.rounding import LAMBDA, flushable, stored
from autosel.values import DTYPE_BYTES, DTypeName, Workload

ATTN = Attn()
# 448 times these is within the dtype.
HUGE: dict[DTypeName, float] = {"bf16": 1e30, "fp16": 64.0, "fp32": 1e30}
TINY: dict[DTypeName, float] = {"bf16": 2.0**-110, "fp16": 2.0**-20, "fp32": 2.0**-110}


class AttnDecodeFp8(Op):
    name = "attn_decode_fp8"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k", kind="tensor", role="streamed"),
        Arg(name="v", kind="tensor", role="streamed"),
        Arg(name="k_scale", kind="tensor", role="streamed"),
        Arg(name="v_scale", kind="tensor", role="streamed"),
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
        **{n: found for n, found in Attn.domains.items() if n not in ("q", "k", "v", "room", "layout")},
        "q": contents("q", up=SCORE_UP, down=FAR_DOWN, gentle=True),
        "k": fp8.byte_contents("k"),
        "v": fp8.byte_contents("v"),
        "k_scale": fp8.scale_contents("k_scale", TINY, None),
        "v_scale": fp8.scale_contents("v_scale", TINY, HUGE),
        "layout": layouts(
            "q", "k", "v", more=(Level(name="heads inside", edit=relayout(("q", "k", "v"), heads_inside)),)
        ),
    }

    def affordable(self, w: Workload) -> bool:
        return affordable(w)

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "B Hq S D")
        for name in ("k", "v"):
            take.exactly(name, "B Hkv Lmax D", fp8.E4M3)
        for name in ("k_scale", "v_scale"):
            take.exactly(name, "Hkv", torch.float32)
        need_multiple(take, "Hq", "Hkv")
        ragged = inputs.get("lengths") is not None
        if ragged:
            take.exactly("lengths", "B", torch.int32)
        room = take.dims.pop("Lmax")
        take.dims["L"] = int(take.number("max_len", room, low=1))
        if take.dims["L"] > room:
            raise take.fail("max_len", f"is {take.dims['L']}, the cache holds {room}")
        take.number("scale", 0.0, low=0.0)
        window, softcap = take.number("window", 0, low=0), take.number("softcap", 0.0, low=0.0)
        return self.workload(
            take.dtype_name, take.dims, ragged=ragged, window=int(window), softcap=float(softcap)
        )  # fmt: skip

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="o", shape=(w["B"], w["Hq"], w["S"], w["D"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, made = streamed_draw(seed, "bf16"), {}
        for name in ("k", "v"):
            numbers = draw.normal(w["B"], w["Hkv"], w["L"], w["D"])
            made[name], made[f"{name}_scale"] = fp8.head_quantised(numbers)
        return self.refresh(w, made, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        lengths = ragged_lengths(w["B"], w["L"])[draw.permutation(w["B"])] if w.trait("ragged", False) else None
        return {
            "q": draw.normal(w["B"], w["Hq"], w["S"], w["D"]),
            **{name: inputs[name] for name in ("k", "v", "k_scale", "v_scale")},
            "lengths": lengths,
            "max_len": w["L"],
            "scale": 0.0,
            "window": int(w.trait("window", 0)),
            "softcap": float(w.trait("softcap", 0.0)),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        """attn's battery, its caches quantised, all but the infinity that e4m3 lacks; then bytes, scales, layouts."""
        found = attn_cases(ATTN, unquantised(w), layouts=False)
        cases = [_quantised(self, c) for c in found if c.name != "inf in v"]
        small = small_cache(w)
        for name, covers, edit in fp8.VALUES[:-1]:
            for cache in ("k", "v"):
                cases.append(case(self, small, f"{name} in {cache}", covers, fp8.edited(cache, edit=edit)))
        cases += [case(self, small, f"0xff in {n}", "0xff read as -480", _one_byte(n, 0xFF)) for n in ("k", "v")]
        cases += _scales(self, small)
        for name, covers, view in (
            ("offset by one element", "alignment assumed", offset_by_one),
            ("strided rows", "row strides ignored", strided),
            ("heads inside tokens", "layout [B, L, H, D] seen through strides", heads_inside),
        ):
            cases.append(case(self, small, name, covers, relayout(("q", "k", "v"), view)))
        return tuple(cases)

    def _exact(self, inputs: Inputs) -> attention.Exact:
        """Of the values as stored: V's scale is still to come."""
        keys, lengths = inputs["max_len"], inputs["lengths"]
        k, v = inputs["k"][:, :, :keys].double(), inputs["v"][:, :, :keys].double()
        if lengths is None:
            lengths = torch.full((k.shape[0],), keys)
        scaled = k * _by_head(inputs["k_scale"])
        return attention.exact(inputs["q"], scaled, v, lengths, *(inputs[n] for n in ("scale", "window", "softcap")))

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        o = self._exact(inputs).o * _by_head(inputs["v_scale"])
        return (attention.unpack(o, inputs["q"].shape),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        e, keys, dtype = self._exact(inputs), inputs["max_len"], DTYPE_NAME[inputs["q"].dtype]
        k, v = inputs["k"][:, :, :keys].double(), inputs["v"][:, :, :keys].to(inputs["q"].dtype)
        by = _by_head(inputs["v_scale"])
        query = e.q.double() * _by_head(inputs["k_scale"])
        folded = LAMBDA * UNIT[dtype] * (query.square() @ k.square().mT).sqrt()
        folded = folded + torch.where(query.abs() < TINY_NORMAL[dtype], query.abs(), 0.0) @ k.abs().mT
        error = attention.error_bound(e, k * _by_head(inputs["k_scale"]), v, inputs["scale"], folded)
        error = error * by.abs() + _by_head(flushable(inputs["v_scale"])) * e.o.abs()
        error = error + U32 * (e.o * by).abs() + TINY_NORMAL["fp32"]
        return (attention.unpack(stored(e.o * by, error, dtype), inputs["q"].shape),)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """Some KV heads, and of some batch rows the same ones: a head has one scale."""
        wanted = max(1, count // (w["Hq"] // w["Hkv"] * w["S"]))
        draw = Draw(seed, "fp32")
        h = draw.permutation(w["Hkv"])[:wanted]
        b = draw.permutation(w["B"])[: max(1, wanted // len(h))]

        def heads(x: Tensor) -> Tensor:
            picked: Tensor = x.unflatten(1, (w["Hkv"], -1))[b[:, None], h]
            return picked.flatten(1, 2)

        part = {
            **inputs,
            "q": heads(inputs["q"]),
            "k": inputs["k"][b[:, None], h],
            "v": inputs["v"][b[:, None], h],
            "k_scale": inputs["k_scale"][h],
            "v_scale": inputs["v_scale"][h],
            "lengths": None if inputs["lengths"] is None else inputs["lengths"][b],
        }
        return Rows(inputs=part, pick=lambda outs: (heads(outs[0]),))

    def bytes_moved(self, w: Workload) -> int:
        b, hq, hkv, s, d = (w[n] for n in ("B", "Hq", "Hkv", "S", "D"))
        keys = sum(attention.keys_read(s, n, int(w.trait("window", 0))) for n in lengths_of(w))
        return 2 * hkv * keys * d + 8 * hkv + DTYPE_BYTES[w.dtype] * 2 * b * hq * s * d

    def flops(self, w: Workload) -> int:
        return ATTN.flops(unquantised(w))


def unquantised(w: Workload) -> Workload:
    """The same attention over a cache in q's dtype."""
    return ATTN.workload(w.dtype, dict(w.dims), **dict(w.traits))


def _by_head(scale: Tensor) -> Tensor:
    made: Tensor = scale.double()[:, None, None]
    return made


# --- the battery ------------------------------------------------------------------------------------------------------


def _quantised(op: Op, found: Case) -> Case:
    """attn's case over a cache of bytes; beyond the lengths they are 448 and -448."""

    def make(seed: int) -> dict[str, Any]:
        old, draw, made = found.make(seed), Draw(seed + 77_003, "fp32"), {}
        for name in ("k", "v"):
            unseen = _beyond(old[name], old["lengths"], old["max_len"])
            made[name], made[f"{name}_scale"] = fp8.head_quantised(torch.where(unseen, 0.0, old[name]))
            junk = torch.where(draw.uniform(*old[name].shape) < 0.5, fp8.MOST, -fp8.MOST)
            made[name].copy_(torch.where(unseen, junk, made[name].float()))
        every = {**old, **made}
        return {a.name: every[a.name] for a in op.args}

    at = op.workload(found.workload.dtype, dict(found.workload.dims), **dict(found.workload.traits))
    return Case(name=found.name, workload=at, make=make, covers=found.covers)


def _beyond(cache: Tensor, lengths: Tensor | None, keys: int) -> Tensor:
    """bool [B, 1, Lmax, 1]: of no sequence's length."""
    ends = torch.full((cache.shape[0],), keys) if lengths is None else lengths.long()
    return (torch.arange(cache.shape[2]) >= ends[:, None])[:, None, :, None]


def _one_byte(name: str, byte: int) -> Change:
    """In the middle of batch row 0's first head, which every query sees."""

    def change(inputs: dict[str, Any], _: Draw) -> None:
        x, lengths = inputs[name], inputs["lengths"]
        end = inputs["max_len"] if lengths is None else int(lengths[0])
        x.view(torch.uint8)[0, 0, end - inputs["q"].shape[2], x.shape[3] // 3] = byte

    return change


def _scales(op: Op, w: Workload) -> list[Case]:
    def filled(value: float) -> Callable[[Tensor, Draw], None]:
        def edit(scale: Tensor, _: Draw) -> None:
            scale.copy_(value * (torch.arange(len(scale)) + 1))

        return edit

    def negative(scale: Tensor, _: Draw) -> None:
        scale.neg_()

    def nan(scale: Tensor, _: Draw) -> None:
        scale[0] = float("nan")

    edits: list[tuple[str, str, str, Callable[[Tensor, Draw], None]]] = [
        ("a scale a head", "another head's scale", "k_scale", filled(2.0**-7)),
        ("a scale a head", "another head's scale", "v_scale", filled(2.0**-7)),
        ("zero", "division by the scale", "k_scale", filled(0.0)),
        ("zero", "division by the scale; -0.0", "v_scale", filled(-0.0)),
        ("tiny", "a scale below the dtype's range", "k_scale", filled(TINY[w.dtype])),
        ("tiny", "a scale below the dtype's range", "v_scale", filled(TINY[w.dtype])),
        ("huge", "a scale above the dtype's range", "v_scale", filled(HUGE[w.dtype])),
        ("subnormal", "garbage for subnormal inputs", "v_scale", filled(2.0**-140)),
        ("negative", "a scale taken as unsigned", "k_scale", negative),
        ("negative", "a scale taken as unsigned", "v_scale", negative),
        ("nan", "a swallowed NaN", "k_scale", nan),
        ("nan", "a swallowed NaN", "v_scale", nan),
    ]
    return [case(op, w, f"{name} in {which}", covers, on(which, edit)) for name, covers, which, edit in edits]
