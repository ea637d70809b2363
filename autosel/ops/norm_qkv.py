"""norm_qkv: y = rmsnorm(x) @ w^T, w the query, key and value projections stacked.

The contract allows the eager composition's roundings: the norm's two, and the result's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, TINY_NORMAL, U32, UNIT, Arg, Inputs
from autosel.ops.domains import (
    Level,
    Row,
    balanced,
    contents,
    counts,
    divides_by_rms,
    in_format,
    infinite_beside,
    layouts,
    norm_eps,
    trait,
    widths,
)
from autosel.ops.draw import resident_draw
from autosel.ops.linear import Projection
from autosel.ops.rmsnorm import normalise, normalise_flush, normalise_relative_error
from autosel.ops.rounding import LAMBDA, stored
from autosel.ops.weight import Matrix, product, product_error
from autosel.values import DTYPE_BYTES, Workload


def normed_matmul_error(x: Tensor, norm_weight: Tensor, w: Matrix, eps: float, offset: float) -> Tensor:
    """Return a bound on rmsnorm(x) @ w^T before it is stored.

    Storing h (two roundings) changes each product by up to 2u of itself. Roundings of different values are independent
    and add in squares; equal values round equally and change the whole sum by 2u of itself, as an error of rstd does.
    """
    dtype = DTYPE_NAME[x.dtype]
    h = normalise(x.double(), norm_weight, eps, offset)
    apart = LAMBDA * (math.sqrt(2) * UNIT[dtype] + 4 * U32)
    together = 2 * UNIT[dtype] + normalise_relative_error(x.shape[-1])
    flush = normalise_flush(x, norm_weight, eps, offset)
    flush = flush + torch.where(h.abs() < TINY_NORMAL[dtype], h.abs(), 0.0)
    return product_error(h, w, dtype, apart=apart, together=together, flushed=flush)


class NormQkv(Projection):
    name = "norm_qkv"
    width, out = "d", "N"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="norm_weight", kind="tensor"),
        Arg(name="w", kind="weight", role="streamed"),
        Arg(name="eps", kind="float", default=1e-6),
        Arg(name="offset", kind="float", default=0.0),
    )
    output_names = ("y",)
    dim_names = ("M", "d", "N")
    trait_defaults = {"offset": 0.0, "weight": PLAIN}
    domains = {
        "M": counts(),
        "d": widths(),
        "N": widths(),
        "x": contents("x", inf=True),
        "norm_weight": contents(
            "norm_weight", rows=False, more=(Level(name="balanced", edit=balanced("norm_weight", "w")),)
        ),
        "w": contents("w", inf=True),
        "eps": norm_eps("x"),
        "offset": trait(0.0, 1.0, 0.3),
        "weight": trait(*WEIGHT_FORMATS),
        "layout": layouts("x", "norm_weight", "w"),
    }

    def admits(self, row: Row) -> bool:
        return divides_by_rms(row, "x") and in_format(row, "w") and infinite_beside(row, "w", "x", "norm_weight")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M d")
        take.floats("norm_weight", "d")
        weight = take.weight("w", "N d")
        take.number("eps", 1e-6, low=0.0)
        return self.workload(take.dtype_name, take.dims, offset=float(take.number("offset", 0.0)), weight=weight)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw, offset = resident_draw(seed, w.dtype), float(w.trait("offset", 0.0))
        return {
            "x": draw.stream(w["M"], w["d"]),
            "norm_weight": draw.around_one(w["d"], offset=offset),
            "w": inputs["w"],
            "eps": 1e-6,
            "offset": offset,
        }

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        h = normalise(inputs["x"].double(), inputs["norm_weight"], inputs["eps"], inputs["offset"])
        return (product(h, inputs["w"]),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, norm_weight, w = inputs["x"], inputs["norm_weight"], inputs["w"]
        error = normed_matmul_error(x, norm_weight, w, inputs["eps"], inputs["offset"])
        return (stored(reference[0], error, DTYPE_NAME[x.dtype]),)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        m, d, n = w["M"], w["d"], w["N"]
        return w.weight_format.nbytes(w.dtype, n, d) + DTYPE_BYTES[w.dtype] * (m * d + d + m * n)

    def flops(self, w: Workload) -> int:
        return 2 * w["M"] * w["d"] * w["N"] + 4 * w["M"] * w["d"]
