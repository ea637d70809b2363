"""rope: rotate the first R of D elements of each head by position * inv_freq.

style 0 (half, Llama): pairs (i, i + R/2); style 1 (interleaved, GPT-J): pairs (2i, 2i + 1). R = 2 * len(inv_freq);
other elements are copied bit for bit. (a, b) -> (a cos - b sin, b cos + a sin).

The angle is computed in fp32, with an error of |position * frequency| u32. The contract allows the roundings of the
eager composition: cos and sin, both products and the sum may each be stored in the dtype, so the error is proportional
to the sum of |terms|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, U32, UNIT, Arg, Case, Inputs, Op, TensorSpec
from autosel.ops.domains import FAR_DOWN, FAR_UP, Domain, Level, among, contents, counts, layouts, trait
from autosel.ops.draw import (
    HOSTILE,
    Change,
    Draw,
    away_from_zero,
    case,
    offset_by_one,
    relayout,
    strided,
)
from autosel.ops.rounding import flushable, stored
from autosel.values import DTYPE_BYTES, DTypeName, Workload

# (Hq, Hkv, D, R): head groups, widths, partial rotations, odd tails of vectors.
SHAPES = ((1, 1, 64, 64), (4, 2, 80, 80), (3, 1, 96, 24), (8, 2, 128, 128), (2, 2, 256, 64), (5, 5, 40, 10),
          (2, 1, 34, 34), (7, 1, 66, 2), (16, 4, 64, 32))  # fmt: skip
ANGLE_ROUNDINGS = 4  # fp32 roundings in the product, the range reduction and sin or cos


def frequencies(rotated: int, base: float) -> Tensor:
    """Return base^(-2i/R), fp32 [R/2]."""
    exponent = -torch.arange(0, rotated, 2).double() / rotated
    return (exponent * math.log(base)).exp().float()


def _packed(inputs: dict[str, Any], _: Draw) -> None:
    """Make q and k slices of one QKV projection's output."""
    q, k = inputs["q"], inputs["k"]
    both = torch.cat((q, k, k), 1)
    inputs["q"], inputs["k"] = both[:, : q.shape[1]], both[:, q.shape[1] : q.shape[1] + k.shape[1]]


def _heads_outside(x: Tensor) -> Tensor:
    """Return the same [M, H, D] in memory laid out as [H, M, D]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


# --- domains ----------------------------------------------------------------------------------------------------------


def _position_levels(_: DTypeName, rng: Random) -> list[Level]:
    power = 1 << rng.randint(8, 20)
    near = [max(0, power + n) for n in (-1, 0, 1)]

    def of(values: Callable[[int, Draw], Tensor]) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            positions = inputs["positions"]
            positions.copy_(values(len(positions), draw))

        return change

    return [
        Level(name="plain"),
        Level(name="0", edit=of(lambda m, _: torch.zeros(m))),
        Level(name="in order", edit=of(lambda m, _: torch.arange(m))),
        Level(name="falling", edit=of(lambda m, _: torch.arange(m).flip(0) * 37)),
        Level(name="one for all", edit=of(lambda m, draw: draw.integers(0, 131_072, 1))),
        Level(name=f"near {power}", edit=of(lambda m, _: torch.tensor(near).repeat(m // 3 + 1)[:m])),
        Level(name="far", edit=of(lambda m, draw: draw.integers(0, 1 << 20, m))),
        Level(name="beyond 2^20", edit=of(lambda m, draw: draw.integers(1 << 20, 1 << 30, m))),
    ]


def _frequency_levels(_: DTypeName, rng: Random) -> list[Level]:
    def of(made: Callable[[int, Draw], Tensor]) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            inputs["inv_freq"] = made(2 * len(inputs["inv_freq"]), draw)

        return change

    def stretched(rotated: int, _: Draw) -> Tensor:
        """Return frequencies like Llama 3.1's, with slower slow ones."""
        found = frequencies(rotated, 500_000.0)
        return torch.where(found < 1e-3, found / 8, found)

    def drawn(rotated: int, draw: Draw) -> Tensor:
        """Return frequencies of either sign."""
        found = 10.0 ** (-5 * draw.uniform(rotated // 2))
        return torch.where(draw.uniform(rotated // 2) < 0.5, -found, found)

    return [
        Level(name="plain"),
        Level(name="base 10000", edit=of(lambda r, _: frequencies(r, 10_000.0))),
        Level(name="base 1e6", edit=of(lambda r, _: frequencies(r, 1e6))),
        Level(name="linear-scaled", edit=of(lambda r, _: frequencies(r, 500_000.0) / 8)),
        Level(name="stretched", edit=of(stretched)),
        Level(name="any", edit=of(drawn)),
        Level(name="rising", edit=of(lambda r, _: frequencies(r, 10_000.0).flip(0).contiguous())),
        Level(name="zero", edit=of(lambda r, _: torch.zeros(r // 2))),
    ]


FAR_START = 1 << 20


class Rope(Op):
    name = "rope"
    args = (
        Arg(name="q", kind="tensor"),
        Arg(name="k", kind="tensor"),
        Arg(name="positions", kind="tensor"),
        Arg(name="inv_freq", kind="tensor"),
        Arg(name="style", kind="int", default=0),
    )
    output_names = ("q_out", "k_out")
    dim_names = ("M", "Hq", "Hkv", "D", "R")
    trait_defaults = {"style": 0}
    by_row = ("q", "k", "positions")
    domains = {
        "M": counts(),
        "Hq Hkv": among((4, 2), (1, 1), (8, 2), (5, 5), (16, 4), (33, 3)),
        "D R": among((64, 64), (128, 128), (96, 24), (256, 64), (40, 10), (34, 34), (66, 2), (80, 80)),
        "q": contents("q", up=FAR_UP, down=FAR_DOWN),
        "k": contents("k", up=FAR_UP, down=FAR_DOWN),
        "positions": Domain(kind="index", levels=_position_levels),
        "inv_freq": Domain(kind="content", levels=_frequency_levels),
        "style": trait(0, 1),
        "layout": layouts(
            "q",
            "k",
            "positions",
            "inv_freq",
            more=(
                Level(name="one storage", edit=_packed),
                Level(name="heads outside", edit=relayout(("q", "k"), _heads_outside)),
            ),
        ),
    }

    def steps(self, inputs: Inputs) -> Sequence[Inputs]:
        """Steps of a decode further on than any hand-made case: tables of angles grow by a row at each."""
        first = FAR_START + inputs["positions"] % 1000
        return [{**inputs, "positions": first + step} for step in range(3)]

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("q", "M Hq D")
        take.floats("k", "M Hkv D")
        take.exactly("positions", "M", torch.int64)
        take.exactly("inv_freq", "R/2", torch.float32)
        take.dims["R"] = 2 * take.dims.pop("R/2")
        if take.dims["R"] > take.dims["D"]:
            raise take.fail("inv_freq", f"rotates {take.dims['R']} elements of a head of {take.dims['D']}")
        return self.workload(take.dtype_name, take.dims, style=take.among("style", 0, (0, 1)))

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        m, d = w["M"], w["D"]
        return (
            TensorSpec(name="q_out", shape=(m, w["Hq"], d), dtype=w.dtype),
            TensorSpec(name="k_out", shape=(m, w["Hkv"], d), dtype=w.dtype),
        )

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw = Draw(seed, w.dtype)
        return {
            "q": draw.normal(w["M"], w["Hq"], w["D"]),
            "k": draw.normal(w["M"], w["Hkv"], w["D"]),
            "positions": draw.integers(0, 8192, w["M"]),
            "inv_freq": frequencies(w["R"], 500_000.0),
            "style": int(w.trait("style", 0)),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        own = w.at(M=3)
        cases = [case(self, own, f"random {own.shape_text}", "the workload's own heads")]
        for i, (hq, hkv, d, r) in enumerate(SHAPES):
            at = w.at(M=(1, 2, 3, 7, 8, 9, 17)[i % 7], Hq=hq, Hkv=hkv, D=d, R=r)
            cases.append(case(self, at, f"random {at.shape_text}", "partial rotation; tails of vectors"))
        d = min(w["D"], 256)
        small = w.at(M=6, Hq=4, Hkv=2, D=d, R=min(w["R"], d))
        for name, covers, edit in HOSTILE:
            if name != "-inf":
                cases.append(case(self, small, name, covers, _on_both(edit, finite="inf" not in name)))
        cases += [
            case(self, small, "positions at the edges", "an int32 or low-precision angle", _positions),
            case(self, small, "terms that cancel", "a product rounded too early", _cancelling),
            case(self, small, "linear-scaled frequencies", "precomputed frequencies ignored", _scaled_frequencies),
            case(self, small, "strided rows", "row strides ignored", relayout(("q", "k"), strided)),
            case(self, small, "offset by one element", "alignment assumed", relayout(("q", "k"), offset_by_one)),
            case(self, small, "slices of one projection", "token strides ignored", _packed),
            case(self, small, "heads outside tokens", "head strides ignored", relayout(("q", "k"), _heads_outside)),
        ]
        return tuple(cases)

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        angle = _angle(inputs)
        return tuple(rotate(inputs[n].double(), angle.cos(), angle.sin(), inputs["style"]) for n in ("q", "k"))

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        angle, style = _angle(inputs), inputs["style"]
        return tuple(_bound(inputs[n], y, angle, style) for n, y in zip(("q", "k"), reference, strict=True))

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        heads = w["Hq"] + w["Hkv"]
        return 2 * DTYPE_BYTES[w.dtype] * w["M"] * heads * w["D"] + 8 * w["M"] + 2 * w["R"]

    def flops(self, w: Workload) -> int:
        return 3 * w["M"] * (w["Hq"] + w["Hkv"]) * w["R"]


def _angle(inputs: Inputs) -> Tensor:
    """Return float64 [M, 1, R/2]."""
    angle: Tensor = inputs["positions"].double()[:, None] * inputs["inv_freq"].double()
    return angle[:, None]


def halves(x: Tensor, rotated: int, style: int) -> tuple[Tensor, Tensor]:
    """Return the two members of each pair, [M, H, R/2] each."""
    x = x[..., :rotated]
    return (x[..., ::2], x[..., 1::2]) if style else (x[..., : rotated // 2], x[..., rotated // 2 :])


def join(a: Tensor, b: Tensor, rest: Tensor, style: int) -> Tensor:
    """Invert `halves`, and append the part that is not rotated."""
    pair = torch.stack((a, b), -1).flatten(-2) if style else torch.cat((a, b), -1)
    return torch.cat((pair, rest), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: int) -> Tensor:
    rotated = 2 * cos.shape[-1]
    a, b = halves(x, rotated, style)
    return join(a * cos - b * sin, b * cos + a * sin, x[..., rotated:], style)


def _bound(x: Tensor, y: Tensor, angle: Tensor, style: int) -> Tensor:
    dtype, rotated = DTYPE_NAME[x.dtype], 2 * angle.shape[-1]
    (a, b), (fa, fb) = halves(x.double().abs(), rotated, style), halves(flushable(x), rotated, style)
    cos, sin = angle.cos().abs(), angle.sin().abs()
    turned = ANGLE_ROUNDINGS * U32 * (angle.abs() + 1)  # error of the angle and of sin, cos themselves
    terms = join(a * cos + b * sin, b * cos + a * sin, torch.zeros_like(x[..., rotated:], dtype=torch.float64), style)
    moved = join((a + b) * turned, (a + b) * turned, torch.zeros_like(x[..., rotated:], dtype=torch.float64), style)
    flush = join(fa + fb, fa + fb, flushable(x)[..., rotated:], style)
    # cos, sin and products are stored: 2u of every term; products may underflow the dtype: `stored` on each.
    error = moved * (1 + UNIT[dtype]) + stored(terms, (UNIT[dtype] + 2 * U32) * terms, dtype) + flush
    through = torch.arange(x.shape[-1]) >= rotated  # copied: exact
    return torch.where(through, flush, stored(y, error, dtype))


def _on_both(edit: Any, *, finite: bool) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        for name in ("q", "k"):
            edit(inputs[name], draw)
            if not finite:
                away_from_zero(inputs[name])
        if not finite:
            inputs["positions"].clamp_(min=1)  # sin 0 = 0 makes inf * 0

    return change


def _positions(inputs: dict[str, Any], _: Draw) -> None:
    inputs["positions"].copy_(torch.tensor([0, 1, 2, 4095, 131_071, 1_000_000])[: len(inputs["positions"])])


def _cancelling(inputs: dict[str, Any], _: Draw) -> None:
    """Rotate each pair onto an axis, so that one member of the result is pure cancellation."""
    angle = _angle(inputs)
    for name in ("q", "k"):
        x, rotated = inputs[name], 2 * angle.shape[-1]
        a = torch.ones(x.shape[0], x.shape[1], rotated // 2, dtype=torch.float64) * 100
        x.copy_(join(a * angle.sin(), a * angle.cos(), x[..., rotated:].double(), inputs["style"]))


def _scaled_frequencies(inputs: dict[str, Any], _: Draw) -> None:
    inputs["inv_freq"] = inputs["inv_freq"] / 8
