"""linear: y = x @ w^T (+ bias) (+ residual), called gemv at M = 1 and gemm above; it is one op.

w is a tensor, or a `Weight` in a format, whose roundings weight.py lists. fp32 accumulation in any order, one rounding.
The contract allows the roundings of the eager composition: the product may be stored before the bias is added, and the
sum before the residual is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, U32, Arg, Case, Inputs, Op, Rows, TensorSpec, edge_sample
from autosel.ops.domains import (
    FAR_DOWN,
    FAR_UP,
    Level,
    Row,
    balanced,
    contents,
    counts,
    in_format,
    layouts,
    trait,
    widths,
)
from autosel.ops.draw import (
    COUNTS,
    HOSTILE,
    Draw,
    case,
    offset_by_one,
    on,
    relayout,
    resident_draw,
    same_row,
    streamed_draw,
    strided,
)
from autosel.ops.rounding import flushable, stored
from autosel.ops.stored_cases import PRODUCT, clear_of_zero, stored_domains, weight_cases
from autosel.ops.weight import drawn, product, product_error, rows_of
from autosel.values import DTYPE_BYTES, Workload

# N and K around the edges of register tiles, vectors and cache-line groups; primes.
SIZES = ((1, 1), (2, 3), (3, 15), (4, 16), (5, 17), (7, 31), (8, 33), (9, 63), (15, 64), (16, 65), (17, 127), (31, 128),
         (33, 129), (64, 255), (65, 256), (97, 257), (127, 509), (129, 1021))  # fmt: skip
NEEDLES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1027,
           1028)  # fmt: skip
# 4 Mi products are checked in a few tens of milliseconds.
CHECKED_PRODUCTS = 1 << 22


class Projection(Op):
    """Common base of ops that multiply x[M, width] by streamed weights [out, width]; elements of y[M, out] are checked
    alone.
    """

    weights: ClassVar[tuple[str, ...]] = ("w",)
    width: ClassVar[str]
    out: ClassVar[str]

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name=self.output_names[0], shape=(w["M"], w[self.out]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw = streamed_draw(seed, w.dtype)
        weights = {name: drawn(draw, w[self.out], w[self.width], w.weight_format) for name in self.weights}
        return self.refresh(w, weights, seed)

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return projection_cases(self, w, weights=self.weights, width=self.width, out=self.out)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        m = edge_sample(w["M"], count, seed)
        columns = checked_columns(len(self.weights) * w[self.width], len(m), count)
        return self._part(inputs, m, edge_sample(w[self.out], columns, seed + 1))

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        return self._part(inputs, where[:, 0].unique(), where[:, 1].unique())

    def _part(self, inputs: Inputs, m: Tensor, n: Tensor) -> Rows:
        part = {**inputs, "x": inputs["x"][m], **{name: rows_of(inputs[name], n) for name in self.weights}}
        return Rows(inputs=part, pick=lambda outs: (outs[0][m][:, n],))


class Linear(Projection):
    name = "linear"
    width, out = "K", "N"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="w", kind="weight", role="streamed"),
        Arg(name="bias", kind="optional"),
        Arg(name="residual", kind="optional"),
    )
    output_names = ("y",)
    dim_names = ("M", "N", "K")
    trait_defaults = {"bias": False, "residual": False, "weight": PLAIN}
    domains = {
        "M": counts(),
        "N": widths(),
        "K": widths(),
        "x": contents("x", inf=True, more=(Level(name="balanced", edit=balanced("x", "w")),)),
        "w": contents("w", inf=True),
        "bias": contents("bias", up=FAR_UP, down=FAR_DOWN, rows=False, inf=True, presence="bias"),
        "residual": contents("residual", up=FAR_UP, down=FAR_DOWN, inf=True, presence="residual"),
        "weight": trait(*WEIGHT_FORMATS),
        **stored_domains(PRODUCT, "w"),
        "layout": layouts("x", "w", "bias", "residual"),
    }

    def admits(self, row: Row) -> bool:
        return in_format(row, "w")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M K")
        weight = take.weight("w", "N K")
        bias, residual = take.optional("bias", "N") is not None, take.optional("residual", "M N") is not None
        return self.workload(take.dtype_name, take.dims, bias=bias, residual=residual, weight=weight)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        return {
            "x": draw.normal(w["M"], w["K"]),
            "w": inputs["w"],
            "bias": draw.normal(w["N"]) if w.trait("bias", False) else None,
            "residual": draw.normal(w["M"], w["N"]) if w.trait("residual", False) else None,
        }

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        y = product(inputs["x"], inputs["w"])
        for extra in (inputs["bias"], inputs["residual"]):
            if extra is not None:
                y = y + extra.double()
        return (y,)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dtype = DTYPE_NAME[inputs["x"].dtype]
        error, extras = product_error(inputs["x"], inputs["w"], dtype), (inputs["bias"], inputs["residual"])
        y = product(inputs["x"], inputs["w"]) if any(e is not None for e in extras) else reference[0]
        for extra in extras:
            if extra is not None:
                error = stored(y, error, dtype) + flushable(extra) + U32 * (y.abs() + extra.double().abs())
                y = y + extra.double()
        return (stored(y, error, dtype),)

    def _part(self, inputs: Inputs, m: Tensor, n: Tensor) -> Rows:
        bias, residual = inputs["bias"], inputs["residual"]
        extras = {
            "bias": None if bias is None else bias[n],
            "residual": None if residual is None else residual[m][:, n],
        }
        return super()._part({**inputs, **extras}, m, n)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        m, n, k = w["M"], w["N"], w["K"]
        extra = n * bool(w.trait("bias", False)) + m * n * bool(w.trait("residual", False))
        return w.weight_format.nbytes(w.dtype, n, k) + DTYPE_BYTES[w.dtype] * (m * k + m * n + extra)

    def flops(self, w: Workload) -> int:
        return 2 * w["M"] * w["N"] * w["K"]


def checked_columns(k: int, rows: int, wanted: int) -> int:
    """Return how many outputs per row to check in float64: enough to notice a wrong tile, few enough during a race.

    A caller that wants fewer than 8 rows (the runtime guard) also gets fewer columns.
    """
    return max(16, CHECKED_PRODUCTS * min(wanted, 8) // 8 // (k * rows))


# --- the battery of every op that multiplies x by streamed weights ----------------------------------------------------


def projection_cases(
    op: Op, w: Workload, *, weights: tuple[str, ...], width: str, out: str = "N", skip: tuple[str, ...] = ()
) -> tuple[Case, ...]:
    """Return cases for y[M,out] = f(x[M,width] @ weights[out,width]^T ...). `skip` is "inf in weights" or nothing."""

    def at(m: int, n: int, k: int) -> Workload:
        return w.at(**{"M": m, out: n, width: k})

    cases = []
    for i, (n, k) in enumerate(SIZES):
        shape = at(COUNTS[i % len(COUNTS)], n, k)
        cases.append(case(op, shape, f"random {shape.shape_text}", "tails of vectors, tiles and teams"))
    many = at(2, 330, 40)
    cases.append(case(op, many, f"random {many.shape_text}", "a row number of 8 bits"))
    # The workload's own K, rows of w as far as 2 MiB go.
    k = min(w[width], 16384)
    for m in {1, min(w["M"], 17)}:
        shape = at(m, max(1, min(w[out], (1 << 20) // (k * DTYPE_BYTES[w.dtype] * len(weights)))), k)
        cases.append(case(op, shape, f"random {shape.shape_text}", "long sums"))
    cases += needle_cases(op, at)
    cases += _values(op, at, weights, skip)
    if not w.weight_format.plain and w["M"] > 8:  # other kernels, or other code of them
        cases += [c for name in weights for c in weight_cases(op, at(9, 37, 321), name, ", M9")]
    cases += layout_cases(op, at, weights)
    return tuple(cases)


def needle_cases(op: Op, at: Any) -> list[Case]:
    """Return cases whose x is zero except for one element per row, at an edge."""

    def needle(positions: tuple[int, ...]) -> Any:
        def change(inputs: dict[str, Any], _: Draw) -> None:
            x = inputs["x"]
            x.zero_()
            for row in range(x.shape[0]):
                x[row, positions[row % len(positions)]] = 3.0

        return change

    one = at(1, 24, 1029)
    return [
        *(case(op, one, f"needle at {p}", "a skipped k", needle((p,))) for p in (0, 512, 1023, 1024, 1028)),
        case(op, at(24, 17, 1029), "needles at tile edges", "a skipped k; rows swapped", needle(NEEDLES)),
        case(op, at(8, 40, 1029), "needles, 8 rows", "a skipped k", needle(NEEDLES[-8:])),
    ]


def _values(op: Op, at: Any, weights: tuple[str, ...], skip: tuple[str, ...]) -> list[Case]:
    cases, found = [], at(1, 1, 1).weight_format
    plain = found.plain
    for name, covers, edit in HOSTILE:
        # Inf times a flushed subnormal would be NaN, so the weights avoid subnormals.
        infinite = "inf" in name
        if infinite and found.offsets:
            continue  # a sum of codes and one of offsets may be infinities of opposite signs
        clear = tuple((lambda inputs, n=n: clear_of_zero(inputs[n])) for n in ("x", *weights)) if infinite else ()
        for m in (1, 5):
            shape = at(m, 37, 321)
            cases.append(case(op, shape, f"{name} in x, M{m}", covers, on("x", modest(edit), *clear)))
        if plain and name not in ("large", "-inf") and not (infinite and "inf in weights" in skip):
            shape = at(3, 37, 321)
            cases.append(case(op, shape, f"{name} in {weights[-1]}", covers, on(weights[-1], edit, *clear)))
    return cases if plain else cases + [c for name in weights for c in weight_cases(op, at(3, 37, 321), name)]


def modest(edit: Any) -> Any:
    """Limit sizes for fp16, whose stored products must stay below 65504."""

    def change(x: Tensor, draw: Draw) -> None:
        edit(x, draw)
        if draw.name == "fp16":
            x.copy_(torch.where(x.isfinite(), x.clamp(-1000, 1000), x))

    return change


def layout_cases(op: Op, at: Any, weights: tuple[str, ...]) -> list[Case]:
    floats = [a.name for a in op.args if a.kind in ("tensor", "optional", "weight")]
    matrices = ["x", *weights, "residual"]
    cases = []
    for m in (1, 4):
        shape = at(m, 37, 321)
        gaps, shift = relayout(matrices, strided), relayout(floats, offset_by_one)
        cases.append(case(op, shape, f"strided rows, M{m}", "row strides ignored", gaps))
        cases.append(case(op, shape, f"offset by one element, M{m}", "alignment assumed", shift))
    cases.append(case(op, at(4, 37, 321), "stride 0", "row strides ignored", relayout(("x",), same_row)))
    return cases
