"""add_rmsnorm: the residual sum and the norm, in three forms.

sandwich 0 (Llama): r = x + residual; y = rmsnorm(r); new_residual = r.
sandwich 1 (Gemma): y = rmsnorm(x); new_residual = residual + y.
sandwich 2 (vLLM):  as 0, in fp32 from the sum to y: y is the norm of the unrounded sum, and rounded once.
The contract allows the eager composition's roundings: in 0, of r before it is normalised; in 1, of y before it is
added; in both, of the normalised value before the weight multiplies it. In 2 it allows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, U32, UNIT, Arg, Case, Inputs, Op, TensorSpec
from autosel.ops.domains import (
    FAR_DOWN,
    FAR_UP,
    Level,
    Row,
    contents,
    counts,
    divides_by_rms,
    layouts,
    norm_eps,
    one_storage,
    trait,
    widths,
)
from autosel.ops.draw import Draw, case, hostile_rows, on, one_nan, outliers
from autosel.ops.rmsnorm import normalise, normalise_flush, normalise_relative_error
from autosel.ops.rounding import LAMBDA, flushable, stored
from autosel.values import DTYPE_BYTES, Workload

ADD_THEN_NORM, NORM_THEN_ADD, ADD_THEN_NORM_UNROUNDED = FORMS = (0, 1, 2)


class AddRmsNorm(Op):
    name = "add_rmsnorm"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="residual", kind="tensor"),
        Arg(name="weight", kind="tensor"),
        Arg(name="eps", kind="float", default=1e-6),
        Arg(name="offset", kind="float", default=0.0),
        Arg(name="sandwich", kind="int", default=0),
    )
    output_names = ("y", "new_residual")
    dim_names = ("M", "d")
    trait_defaults = {"offset": 0.0, "sandwich": 0}
    by_row = ("x", "residual")
    domains = {
        "M": counts(),
        "d": widths(),
        "x": contents("x", inf=True),
        "residual": contents("residual", inf=True),
        "weight": contents("weight", up=FAR_UP, down=FAR_DOWN, rows=False),
        "eps": norm_eps("x", "residual"),
        "offset": trait(0.0, 1.0, 0.3),
        "sandwich": trait(0, 1, 2),
        "layout": layouts(
            "x", "residual", "weight", more=(Level(name="one storage", edit=one_storage("x", "residual")),)
        ),
    }

    def admits(self, row: Row) -> bool:
        return divides_by_rms(row, "x", "residual")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M d")
        take.floats("residual", "M d")
        take.floats("weight", "d")
        take.number("eps", 1e-6, low=0.0)
        offset, sandwich = float(take.number("offset", 0.0)), take.among("sandwich", 0, FORMS)
        return self.workload(take.dtype_name, take.dims, offset=offset, sandwich=sandwich)

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=n, shape=(w["M"], w["d"]), dtype=w.dtype) for n in self.output_names)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw, offset = Draw(seed, w.dtype), float(w.trait("offset", 0.0))
        return {
            "x": draw.stream(w["M"], w["d"]),
            "residual": draw.normal(w["M"], w["d"], scale=3.0),
            "weight": draw.around_one(w["d"], offset=offset),
            "eps": 1e-6,
            "offset": offset,
            "sandwich": int(w.trait("sandwich", 0)),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        small = w.at(M=5, d=193)
        return (
            *hostile_rows(self, w, rows="x", count_dim="M", width_dim="d"),
            case(self, small, "outliers in residual", "precision of the sum", on("residual", outliers)),
            case(self, small, "nan in residual", "a swallowed NaN", on("residual", one_nan)),
            case(self, small, "residual cancels x", "the sum rounded too early", _cancel),
        )

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        x, residual = inputs["x"].double(), inputs["residual"].double()
        if inputs["sandwich"] == NORM_THEN_ADD:
            y = normalise(x, inputs["weight"], inputs["eps"], inputs["offset"])
            return y, residual + y
        r = x + residual
        return normalise(r, inputs["weight"], inputs["eps"], inputs["offset"]), r

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        y, r = reference
        x, residual, weight = (inputs[n] for n in ("x", "residual", "weight"))
        dtype = DTYPE_NAME[x.dtype]
        once = inputs["sandwich"] == ADD_THEN_NORM_UNROUNDED
        between = 0.0 if once else UNIT[dtype]
        relative = between + normalise_relative_error(y.shape[-1])
        if inputs["sandwich"] == NORM_THEN_ADD:
            flush = normalise_flush(x, weight, inputs["eps"], inputs["offset"])
            y_error = stored(y, relative * y.abs() + flush, dtype)
            return y_error, stored(r, y_error + flushable(residual) + U32 * (r.abs() + y.abs()), dtype)
        # r: one fp32 addition (exact up to u32), one store. Storing r changes y_k by u |y_k|, and rstd by at most u
        # sum(r^2 delta) / sum(r^2): independent roundings add in squares; if one r dominates, it is u itself.
        flushed = flushable(x) + flushable(residual)
        energy, fourth = r.square().sum(-1, keepdim=True), r.pow(4).sum(-1, keepdim=True)
        shared = (LAMBDA * fourth.sqrt() / energy).clamp_max(1.0).nan_to_num(1.0)
        # A flushed element of x or residual changes r_k by its size: y_k by its share, rstd by `moved`, relative.
        rstd = (energy / r.shape[-1] + inputs["eps"]).rsqrt()
        scale = (weight.double() + inputs["offset"]).abs()
        moved = (flushed.square().sum(-1, keepdim=True) / (energy + r.shape[-1] * inputs["eps"])).sqrt()
        relative = relative + (between + U32) * (1 + shared) + moved
        error = relative * y.abs() + flushed * rstd * scale
        error = error + normalise_flush(r, weight, inputs["eps"], inputs["offset"])
        return stored(y, error, dtype), stored(r, flushed + U32 * r.abs(), dtype)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return DTYPE_BYTES[w.dtype] * (4 * w["M"] * w["d"] + w["d"])

    def flops(self, w: Workload) -> int:
        return 5 * w["M"] * w["d"]


def _cancel(inputs: dict[str, Any], _: Draw) -> None:
    inputs["residual"].copy_(-inputs["x"] * 1.01)
