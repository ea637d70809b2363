"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

offset 0 is Llama's, 1 is Gemma's. fp32 inside. The contract allows the rounding of the eager composition: the
normalised value may be rounded to the dtype before the weight multiplies it (transformers does that), so two roundings
of the output dtype; fused kernels that round once are within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.errors import BadArguments
from autosel.ops.contract import (
    DTYPE_NAME,
    TINY_NORMAL,
    U32,
    UNIT,
    Arg,
    Case,
    Inputs,
    Op,
    Rows,
    TensorSpec,
)
from autosel.ops.draw import Draw, hostile_rows
from autosel.values import DTYPE_BYTES, Workload


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

    def workload_of(self, inputs: Inputs) -> Workload:
        x, weight = inputs["x"], inputs["weight"]
        if x.dim() != 2 or weight.shape != x.shape[-1:]:
            raise BadArguments(
                f"rmsnorm takes x[M,d] and weight[d], got {tuple(x.shape)} and {tuple(weight.shape)}",
                todo="flatten the leading dimensions: x.view(-1, d)",
            )
        m, d = x.shape
        return self.workload(DTYPE_NAME[x.dtype], {"M": m, "d": d}, offset=float(inputs["offset"]))

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", shape=(w["M"], w["d"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw = Draw(seed, w.dtype)
        return {
            "x": draw.normal(w["M"], w["d"]),
            "weight": draw.around_one(w["d"], offset=float(w.trait("offset", 0.0))),
            "eps": 1e-6,
            "offset": w.trait("offset", 0.0),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return hostile_rows(self, w, rows="x", count_dim="M", width_dim="d")

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        x, weight = inputs["x"].double(), inputs["weight"].double()
        rstd = (x.square().mean(-1, keepdim=True) + inputs["eps"]).rsqrt()
        return (x * rstd * (weight + inputs["offset"]),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # y = round(round(x * rstd) * w): each output rounding is relative to |y|; rstd carries half the relative error
        # of the mean, a sum of d non-negative terms (lambda * sqrt(d) * u32), and a few fp32 roundings of its own.
        (y,) = reference
        dtype = DTYPE_NAME[inputs["x"].dtype]
        d = y.shape[-1]
        relative = 2 * UNIT[dtype] * (1 + UNIT[dtype]) + (2 * d**0.5 + 8) * U32
        weight = (inputs["weight"].double() + inputs["offset"]).abs()
        # Gemma's 1 + w is formed in fp32: one more rounding, of size u32 * |1 + w|; inside the 8 above.
        rstd = (inputs["x"].double().square().mean(-1, keepdim=True) + inputs["eps"]).rsqrt()
        # Flush-to-zero is legal: a subnormal input, intermediate or output may count as zero.
        flush = TINY_NORMAL[dtype] * (1 + weight * (1 + rstd))
        return (relative * y.abs() + flush,)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        picked = torch.randperm(w["M"], generator=torch.Generator().manual_seed(seed))[:count]
        return Rows(inputs={**inputs, "x": inputs["x"][picked]}, pick=lambda outs: (outs[0][picked],))

    def bytes_moved(self, w: Workload) -> int:
        return DTYPE_BYTES[w.dtype] * (2 * w["M"] * w["d"] + w["d"])

    def flops(self, w: Workload) -> int:
        return 4 * w["M"] * w["d"]

