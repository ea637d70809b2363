"""lm_head: logits = x @ w^T (greedy 0), or the token with the largest logit (greedy 1).

Greedy: two logits are indistinguishable if their difference is below the sum of their bounds; any such token is right.
If the arithmetic is exact (small integers: every order of summation gives the same logit), equal logits are equal for
every kernel, and only the lowest index is right. A NaN logit counts as the largest, as in torch.argmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.ops.arguments import Binder
from autosel.ops.contract import (
    DTYPE_NAME,
    TINY_NORMAL,
    U32,
    UNIT,
    Arg,
    Case,
    Inputs,
    Judge,
    Mismatch,
    Op,
    Rows,
    TensorSpec,
    edge_sample,
    row_by_row,
)
from autosel.ops.domains import (
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
    Change,
    Draw,
    case,
    offset_by_one,
    on,
    relayout,
    resident_draw,
    strided,
)
from autosel.ops.linear import Projection
from autosel.ops.rounding import LAMBDA, flushable, stored
from autosel.ops.scales import SCALES
from autosel.ops.stored_cases import weight_cases, write
from autosel.ops.weight import Matrix, Weight, exact, product, product_error, rows_of
from autosel.values import DTYPE_BYTES, Workload

MOST_CHOICES = 256  # limit of rows of a case made of domains
BLOCK = 4096  # vocabulary rows converted at a time: 64 MB of fp32 at d = 4096
# Operands that are multiples of this, with sum|x w| below 2^24 of its square, multiply and add exactly in fp32.
QUANTUM = 2.0**-6


class LmHead(Projection):
    name = "lm_head"
    width, out = "d", "V"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="w", kind="weight", role="streamed"),
        Arg(name="greedy", kind="int", default=0),
    )
    output_names = ("logits",)  # if greedy, the tokens, by the same name
    dim_names = ("M", "V", "d")
    trait_defaults = {"greedy": 0, "weight": PLAIN}
    domains = {
        "M": counts(),
        "V": widths(70_001),
        "d": widths(),
        "x": contents("x", inf=True, more=(Level(name="balanced", edit=balanced("x", "w")),)),
        "w": contents("w", inf=True),
        "greedy": trait(0, 1),
        "weight": trait(*WEIGHT_FORMATS),
        "layout": layouts("x", "w"),
    }

    def admits(self, row: Row) -> bool:
        return in_format(row, "w")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M d")
        weight = take.weight("w", "V d")
        return self.workload(take.dtype_name, take.dims, greedy=take.among("greedy", 0, (0, 1)), weight=weight)

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        if w.trait("greedy", 0):
            return (TensorSpec(name="logits", shape=(w["M"],), dtype="int64"),)
        return super().outputs(w)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        x = resident_draw(seed, w.dtype).normal(w["M"], w["d"])
        return {"x": x, "w": inputs["w"], "greedy": int(w.trait("greedy", 0))}

    def affordable(self, w: Workload) -> bool:
        """Limit rows of a greedy choice, which is judged row by row."""
        return super().affordable(w) and (not w.trait("greedy", 0) or w["M"] <= MOST_CHOICES)

    def cases(self, w: Workload) -> tuple[Case, ...]:
        if w.trait("greedy", 0):
            return _greedy_cases(self, w)
        far = case(self, w.at(M=1, V=70_001, d=8), "rows beyond 2^16", "a row number of 16 bits")
        return *super().cases(w), far

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        if not inputs["greedy"]:
            return (product(inputs["x"], inputs["w"]),)
        blocks = [product(inputs["x"], part) for part in _blocks(inputs["w"])]
        return (torch.cat(blocks, 1).argmax(-1),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if inputs["greedy"]:
            return (torch.zeros_like(reference[0], dtype=torch.float64),)
        dtype = DTYPE_NAME[inputs["x"].dtype]
        return (stored(reference[0], product_error(inputs["x"], inputs["w"], dtype), dtype),)

    def own_judge(self, inputs: Inputs) -> Judge | None:
        if not inputs["greedy"]:
            return None
        x, w = inputs["x"], inputs["w"]
        logits, largest_row = _shortlist_by(x, w)
        return row_by_row(lambda m, token: _judge(x[m], w, logits[m], token, largest_row))

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        if w.trait("greedy", 0):
            few = edge_sample(w["M"], min(count, 4), seed)  # each row costs a pass over the weights
            return Rows(inputs={**inputs, "x": inputs["x"][few]}, pick=lambda outs: (outs[0][few],))
        return super().rows(w, inputs, count, seed)

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        """Return the part at `where`; None if greedy, because `rows` judges tokens by all logits."""
        return None if w.trait("greedy", 0) else super().around(w, inputs, where)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        m, v, d = w["M"], w["V"], w["d"]
        out = 8 * m if w.trait("greedy", 0) else DTYPE_BYTES[w.dtype] * m * v
        return w.weight_format.nbytes(w.dtype, v, d) + DTYPE_BYTES[w.dtype] * m * d + out

    def flops(self, w: Workload) -> int:
        return 2 * w["M"] * w["V"] * w["d"]


# --- greedy -----------------------------------------------------------------------------------------------------------


def _blocks(w: Matrix) -> Iterator[Matrix]:
    for first in range(0, w.shape[0], BLOCK):
        yield rows_of(w, slice(first, first + BLOCK))


def _shortlist_by(x: Tensor, w: Matrix) -> tuple[Tensor, float]:
    """Return fp32 logits [M, V] and the largest finite norm of a row of w, which scales their error, in one pass over
    w.
    """
    logits, largest = [], 0.0
    for part in _blocks(w):
        wide = part.float() if isinstance(part, Tensor) else part.dequantised(torch.float32)
        logits.append(x.float() @ wide.T)
        norms = torch.linalg.vector_norm(wide, dim=-1)
        largest = max(largest, float(norms[norms.isfinite()].max()) if norms.isfinite().any() else 0.0)
    return torch.cat(logits, 1), largest


def _judge(x: Tensor, w: Matrix, logits: Tensor, token: int, largest_row: float) -> Mismatch | float:
    """Judge `token` as an argmax of x @ w^T: its distance from the top over the allowed one. `logits` are fp32's."""
    vocabulary = logits.numel()
    if not 0 <= token < vocabulary:
        return Mismatch(check="range", reason=f"token {token} of {vocabulary}", evidence={"token": token})
    top = logits.max()
    if not top.isfinite():
        first = int(logits.argmax())
        return 0.0 if token == first else _wrong("nan_pattern", token, first, logits)
    # Rows further below the top than the sum of any two bounds need no float64.
    size, unit = LAMBDA * x.double().norm().item() * largest_row, UNIT[DTYPE_NAME[x.dtype]]
    # A weight in a format may be rounded, and a row's product may be stored twice.
    roundings, rounded = (2.1, 0.0) if isinstance(w, Tensor) else (6.3, size * unit / 2)
    flushed = flushable(x).norm().item() * largest_row
    if isinstance(w, Tensor):
        flushed += TINY_NORMAL[DTYPE_NAME[x.dtype]] * x.double().abs().sum().item()
    margin = roundings * unit * top.abs().item() + 4 * x.numel() ** 0.5 * U32 * size + 4 * rounded + 2 * flushed + 1e-30
    near = (logits >= top - margin).nonzero()[:, 0]
    if token not in near.tolist():
        return _wrong("argmax", token, int(near[0]), logits)
    return _judge_near(x, w, near, token)


def _judge_near(x: Tensor, w: Matrix, near: Tensor, token: int) -> Mismatch | float:
    logits, bound, size, dtype = [], [], [], DTYPE_NAME[x.dtype]
    for some in near.split(BLOCK):
        part = rows_of(w, some)
        y = product(x[None], part)[0]
        logits.append(y)
        bound.append(stored(y, product_error(x[None], part, dtype)[0], dtype))
        size.append(_exact_arithmetic(x, part))
    y, tolerance, certain = torch.cat(logits), torch.cat(bound), torch.cat(size)
    at = int((near == token).nonzero()[0, 0])
    allowed = tolerance[at] + tolerance
    behind = y - y[at]
    if (behind > allowed).any():
        return _wrong("argmax", token, int(near[int((behind - allowed).argmax())]), None, float(behind.max()))
    tied = (near < token) & (y == y[at]) & certain
    if tied.any() and certain[at]:
        return _wrong("tie", token, int(near[tied][0]), None)
    return float((behind / allowed).max().clamp_min(0))


def _exact_arithmetic(x: Tensor, w: Matrix) -> Tensor:
    """Return bool [rows]: True if x . w is the same in fp32 for every order of summation and every allowed rounding."""
    a, b = x.double() / QUANTUM, exact(w) / QUANTUM
    whole = bool((a == a.round()).all()) & (b == b.round()).all(-1)
    return whole & (b.abs() @ a.abs() < 2**24) & (isinstance(w, Tensor) or _unrounded(x, w))


def _unrounded(x: Tensor, w: Weight) -> Tensor:
    """Return bool [rows]: True if weights and scaled products fit the dtype of x exactly (scales are powers of two)."""
    w64 = exact(w)
    y, power = w64 @ x.double(), (w.scales.double().abs().log2() % 1 == 0).view(w64.shape[0], -1).all(-1)
    return power & (w64 == w64.to(x.dtype).double()).all(-1) & (y == y.to(x.dtype).double())


def _wrong(check: str, token: int, expected: int, logits: Tensor | None, behind: float = 0.0) -> Mismatch:
    if logits is not None:
        behind = float(logits[expected] - logits[token])
    reason = (
        f"token {token}, expected {expected}: {behind:.4g} below it"
        if check != "tie"
        else (f"token {token}, but token {expected} has the very same logit and a lower index")
    )
    return Mismatch(check=check, reason=reason, evidence={"token": token, "expected": expected, "behind": behind})


def _greedy_cases(op: Op, w: Workload) -> tuple[Case, ...]:
    cases = []
    for i, (v, d) in enumerate(
        ((1, 1), (2, 3), (3, 64), (15, 17), (16, 128), (17, 129), (64, 33), (129, 257), (1021, 65))
    ):
        at = w.at(M=(1, 2, 3, 7, 8, 9, 17)[i % 7], V=v, d=d)
        cases.append(case(op, at, f"random {at.shape_text}", "tails of vectors, tiles and teams"))
    wide = w.at(M=1, V=max(1, min(w["V"], (1 << 20) // (w["d"] * DTYPE_BYTES[w.dtype]))))
    cases.append(case(op, wide, f"random {wide.shape_text}", "long sums"))
    one, many = w.at(M=1, V=1025, d=96), w.at(M=9, V=1025, d=96)
    for row in (0, 511, 512, 1023, 1024):
        cases.append(case(op, one, f"largest at {row}", "a skipped row of w", _largest_at((row,))))
    edges = (0, 1, 7, 8, 15, 16, 17, 1023, 1024)
    cases += [
        case(op, many, "largest at the edges", "a skipped row of w; rows swapped", _largest_at(edges)),
        case(op, many, "two equal rows of w", "the higher index of a tie", _tied((3, 700))),
        case(
            op,
            one,
            "equal rows across the halves",
            "the higher index of a tie between threads",
            _tied((511, 512, 1024)),
        ),
        case(op, one, "equal neighbours", "the higher index of a tie within a vector", _tied((5, 6, 7, 8))),
        case(op, many, "all zero", "an index other than 0", on("x", lambda x, _: x.zero_())),
        case(op, many, "all negative", "a maximum that starts at 0", _all_negative),
        case(op, many, "nan in x", "a token out of range", _nan_in_x),
        case(op, one, "nan in w", "a NaN that loses", _nan_in_w),
        case(op, many, "strided rows", "row strides ignored", relayout(("x", "w"), strided)),
        case(op, one, "offset by one element", "alignment assumed", relayout(("x", "w"), offset_by_one)),
    ]
    far = w.at(M=1, V=70_001, d=8)
    cases.append(case(op, far, "largest beyond 2^16", "a row number of 16 bits", _largest_at((70_000,))))
    if w.weight_format.plain:
        return *cases, case(op, one, "inf in w", "an infinity that loses", _inf_in_w)
    return *cases, *weight_cases(op, w.at(M=9, V=130, d=96), "w")


def _largest_at(where: tuple[int, ...]) -> Change:
    def change(inputs: dict[str, Any], _: Draw) -> None:
        x, w = inputs["x"], inputs["w"]
        for m in range(x.shape[0]):
            row = x[m].double()
            write(w, where[m % len(where)], row * (8 / row.square().sum().sqrt()))

    return change


def _tied(where: tuple[int, ...]) -> Change:
    """Use small integers, with the rows at `where` equal to the largest."""

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        x, w = inputs["x"], inputs["w"]
        x.copy_(draw.integers(-3, 4, *x.shape))
        x[:] = x[:1]  # the same direction for all rows, so that all have the tie
        write(w, slice(None), draw.integers(-1, 2, *w.shape), scale=0.5)
        for at in where:
            write(w, at, x[0].sign() * 2, scale=0.5)

    return change


def _all_negative(inputs: dict[str, Any], _: Draw) -> None:
    inputs["x"].abs_().add_(0.5)
    w = inputs["w"]
    write(w, slice(None), -(exact(w).abs() + 0.5))


def _nan_in_x(inputs: dict[str, Any], _: Draw) -> None:
    inputs["x"][::2, 5] = float("nan")


def _nan_in_w(inputs: dict[str, Any], _: Draw) -> None:
    w = inputs["w"]
    if isinstance(w, Tensor):
        w[700, 5] = float("nan")
    else:
        SCALES[w.format.scaling].spoil(w.rows(slice(700, 701)).scales)


def _inf_in_w(inputs: dict[str, Any], _: Draw) -> None:
    inputs["x"][:, 5] = 1.0
    inputs["w"][700, 5] = float("inf")
