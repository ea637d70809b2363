"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

offset 0 is Llama's, 1 is Gemma's. Arithmetic is fp32. The contract allows the rounding of the eager composition: the
normalised value may be rounded to the dtype before it is multiplied by the weight (as in transformers), so two
roundings of the output dtype; fused kernels that round once are within it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import (
    DTYPE_NAME,
    TINY_NORMAL,
    TINY_SUBNORMAL,
    U32,
    UNIT,
    Arg,
    Case,
    Inputs,
    Op,
    TensorSpec,
)
from autosel.ops.domains import (
    FAR_DOWN,
    FAR_UP,
    Row,
    contents,
    counts,
    divides_by_rms,
    layouts,
    norm_eps,
    trait,
    widths,
)
from autosel.ops.draw import Draw, hostile_rows
from autosel.ops.rounding import flushable, stored
from autosel.values import DTYPE_BYTES, Workload


def normalise(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return the definition's value for a float64 x, in float64."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * (weight.double() + offset)


def normalise_relative_error(width: int) -> float:
    """Return a bound on a norm's fp32 roundings, relative to |y|.

    rstd has half the relative error of the mean, a sum of `width` non-negative terms (4 sqrt(width) u32); eight more
    roundings cover rsqrt, products and 1 + weight.
    """
    return (2 * math.sqrt(width) + 8) * U32


def normalise_flush(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return the additional error if subnormals are flushed: in x, in weight, and in a stored normalised value."""
    dtype, x64 = DTYPE_NAME[weight.dtype], x.double()
    rstd = (x64.square().mean(-1, keepdim=True) + eps).rsqrt()
    scale = (weight.double() + offset).abs()
    normed = (x64 * rstd).abs()
    middle = torch.where(normed < TINY_NORMAL[dtype], normed, TINY_SUBNORMAL[dtype])
    lost = torch.where(x64.abs() < TINY_NORMAL[dtype], x64.abs(), 0.0) * rstd
    return (lost + middle) * scale + normed * flushable(weight)


class RmsNorm(Op):
    name = "rmsnorm"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="weight", kind="tensor"),
        Arg(name="eps", kind="float", default=1e-6),
        Arg(name="offset", kind="float", default=0.0),
    )
    output_names = ("y",)
    dim_names = ("M", "d")
    trait_defaults = {"offset": 0.0}
    by_row = ("x",)
    domains = {
        "M": counts(),
        "d": widths(),
        "x": contents("x", inf=True),
        "weight": contents("weight", up=FAR_UP, down=FAR_DOWN, rows=False, inf=True),
        "eps": norm_eps("x"),
        "offset": trait(0.0, 1.0, 0.3),
        "layout": layouts("x", "weight"),
    }

    def admits(self, row: Row) -> bool:
        return divides_by_rms(row, "x")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M d")
        take.floats("weight", "d")
        take.number("eps", 1e-6, low=0.0)
        return self.workload(take.dtype_name, take.dims, offset=float(take.number("offset", 0.0)))

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", shape=(w["M"], w["d"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw = Draw(seed, w.dtype)
        offset = float(w.trait("offset", 0.0))
        return {
            "x": draw.stream(w["M"], w["d"]),
            "weight": draw.around_one(w["d"], offset=offset),
            "eps": 1e-6,
            "offset": offset,
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return hostile_rows(self, w, rows="x", count_dim="M", width_dim="d")

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return (normalise(inputs["x"].double(), inputs["weight"], inputs["eps"], inputs["offset"]),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # y = round(round(x * rstd) * w): each of the two roundings is relative to |y|.
        (y,) = reference
        dtype = DTYPE_NAME[inputs["x"].dtype]
        error = (UNIT[dtype] + normalise_relative_error(y.shape[-1])) * y.abs()
        error = error + normalise_flush(inputs["x"], inputs["weight"], inputs["eps"], inputs["offset"])
        return (stored(y, error, dtype),)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return DTYPE_BYTES[w.dtype] * (2 * w["M"] * w["d"] + w["d"])

    def flops(self, w: Workload) -> int:
        return 4 * w["M"] * w["d"]
