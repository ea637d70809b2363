"""gemv_fp8: y = (x @ w^T) * scale (+ bias) (+ residual), w in fp8 e4m3 with one fp32 scale a row. See fp8.py.

x and y are bf16, fp16 or fp32: the workload's dtype is theirs. The reference multiplies the numbers that the bytes and
scales stand for, so that this op is about arithmetic alone: a model in bf16 is never given it, whoever holds fp8
weights asks for it. fp32 accumulation in any order. The contract allows the roundings of the eager composition: the
product may be stored before it is scaled, the scaled product before the bias is added, the sum before the residual is.
A subnormal scale may count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import fp8
from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, TINY_NORMAL, U32, Arg, Case, Inputs, Op, Rows, TensorSpec
from autosel.ops.domains import contents, layouts
from autosel.ops.draw import COUNTS, HOSTILE, Draw, away_from_zero, case, edge_sample, on, resident_draw, streamed_draw
from autosel.ops.linear import SIZES, Linear, checked_columns, layout_cases, modest, needle_cases
from autosel.ops.rounding import flushable, matmul_error, stored
from autosel.values import DTYPE_BYTES, DTypeName, Workload

# Results stay within the dtype: a product of these cases is below 2^17.
HUGE: dict[DTypeName, float] = {"bf16": 1e30, "fp16": 0.25, "fp32": 1e30}
TINY: dict[DTypeName, float] = {"bf16": 2.0**-120, "fp16": 2.0**-30, "fp32": 2.0**-120}


class GemvFp8(Op):
    name = "gemv_fp8"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="w", kind="tensor", role="streamed"),
        Arg(name="scale", kind="tensor", role="streamed"),
        Arg(name="bias", kind="optional"),
        Arg(name="residual", kind="optional"),
    )
    output_names = ("y",)
    dim_names = ("M", "N", "K")
    trait_defaults = {"bias": False, "residual": False}
    domains = {
        **{n: found for n, found in Linear.domains.items() if n not in ("x", "w", "weight", "layout")},
        "x": contents("x"),
        "w": fp8.byte_contents("w"),
        "scale": fp8.scale_contents("scale", TINY, HUGE),
        "layout": layouts("x", "w", "bias", "residual"),
    }

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M K")
        take.exactly("w", "N K", fp8.E4M3)
        take.exactly("scale", "N", torch.float32)
        bias, residual = take.optional("bias", "N"), take.optional("residual", "M N")
        return self.workload(take.dtype_name, take.dims, bias=bias is not None, residual=residual is not None)

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", shape=(w["M"], w["N"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        weight, scale = fp8.row_quantised(streamed_draw(seed, "bf16").weight(w["N"], w["K"]))
        return self.refresh(w, {"w": weight, "scale": scale}, seed)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw = resident_draw(seed, w.dtype)
        return {
            "x": draw.normal(w["M"], w["K"]),
            "w": inputs["w"],
            "scale": inputs["scale"],
            "bias": draw.normal(w["N"]) if w.trait("bias", False) else None,
            "residual": draw.normal(w["M"], w["N"]) if w.trait("residual", False) else None,
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        def at(m: int, n: int, k: int) -> Workload:
            return w.at(M=m, N=n, K=k)

        k = min(w["K"], 16384)
        cases = [
            case(self, at(COUNTS[i % len(COUNTS)], *size), f"random M{COUNTS[i % len(COUNTS)]} N{size[0]} K{size[1]}",
                 "tails of vectors, tiles and teams")
            for i, size in enumerate(SIZES)
        ]  # fmt: skip
        for m in {1, min(w["M"], 17)}:
            shape = at(m, max(1, min(w["N"], (1 << 20) // k)), k)
            cases.append(case(self, shape, f"random {shape.shape_text}", "long sums"))
        cases += needle_cases(self, at)
        cases += _activations(self, at)
        small = at(3, 37, 321)
        cases += [case(self, small, f"{name} in w", why, fp8.edited("w", edit=edit)) for name, why, edit in fp8.VALUES]
        cases += _scales(self, small)
        cases += layout_cases(self, at, ("w",))
        return tuple(cases)

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        y = _product(inputs) * inputs["scale"].double()
        for extra in (inputs["bias"], inputs["residual"]):
            if extra is not None:
                y = y + extra.double()
        return (y,)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dtype, scale = DTYPE_NAME[inputs["x"].dtype], inputs["scale"]
        product = _product(inputs)
        error = stored(product, matmul_error(inputs["x"], inputs["w"].float()), dtype)
        y = product * scale.double()
        error = error * scale.double().abs() + flushable(scale) * product.abs() + U32 * y.abs() + TINY_NORMAL["fp32"]
        for extra in (inputs["bias"], inputs["residual"]):
            if extra is not None:
                error = stored(y, error, dtype) + flushable(extra) + U32 * (y.abs() + extra.double().abs())
                y = y + extra.double()
        return (stored(y, error, dtype),)

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        m = edge_sample(w["M"], count, seed)
        n = edge_sample(w["N"], checked_columns(w["K"], len(m), count), seed + 1)
        bias, residual = inputs["bias"], inputs["residual"]
        part = {
            "x": inputs["x"][m],
            "w": inputs["w"][n],
            "scale": inputs["scale"][n],
            "bias": None if bias is None else bias[n],
            "residual": None if residual is None else residual[m][:, n],
        }
        return Rows(inputs=part, pick=lambda outs: (outs[0][m][:, n],))

    def bytes_moved(self, w: Workload) -> int:
        m, n, k = w["M"], w["N"], w["K"]
        extra = n * bool(w.trait("bias", False)) + m * n * bool(w.trait("residual", False))
        return n * k + 4 * n + DTYPE_BYTES[w.dtype] * (m * k + m * n + extra)

    def flops(self, w: Workload) -> int:
        return 2 * w["M"] * w["N"] * w["K"]

    def label(self, w: Workload) -> str:
        return f"{self.name} {w['N']}x{w['K']}"


def _product(inputs: Inputs) -> Tensor:
    """Before the scale."""
    made: Tensor = inputs["x"].double() @ inputs["w"].double().T
    return made


# --- the battery ------------------------------------------------------------------------------------------------------


def _activations(op: Op, at: Callable[[int, int, int], Workload]) -> list[Case]:
    cases = []
    for name, covers, edit in HOSTILE:
        infinite = "inf" in name
        # Infinity times zero is NaN in every row of w that has one: keep them clear.
        clear = (_without_zeros, lambda inputs: away_from_zero(inputs["x"])) if infinite else ()
        for m in (1, 5):
            cases.append(case(op, at(m, 37, 321), f"{name} in x, M{m}", covers, on("x", modest(edit), *clear)))
    return cases


def _without_zeros(inputs: dict[str, Any]) -> None:
    numbers = inputs["w"].float()
    inputs["w"].copy_(fp8.stored_as_e4m3(torch.where(numbers.abs() < fp8.LEAST, fp8.LEAST, numbers)))


def _scales(op: Op, w: Workload) -> list[Case]:
    def each(value: Callable[[Tensor, Draw], Tensor]) -> Callable[[Tensor, Draw], None]:
        def edit(scale: Tensor, draw: Draw) -> None:
            scale.copy_(value(torch.arange(len(scale)), draw))

        return edit

    def nan(scale: Tensor, _: Draw) -> None:
        scale[::5] = float("nan")

    edits: tuple[tuple[str, str, Callable[[Tensor, Draw], None]], ...] = (
        ("a power of two a row", "another row's scale", each(lambda n, _: 2.0 ** (n % 7 - 9))),
        ("tiny scales", "a scale below the dtype's range", each(lambda n, _: TINY[w.dtype] * (n + 1))),
        ("huge scales", "a scale above the dtype's range", each(lambda n, _: HUGE[w.dtype] * (n % 4 + 1))),
        ("subnormal scales", "garbage for subnormal inputs", each(lambda n, _: 2.0**-140 * (n + 1.0))),
        ("zero scales", "division by the scale; -0.0", each(lambda n, _: torch.where(n % 2 == 0, 0.0, -0.0))),
        ("negative scales", "a scale taken as unsigned", each(lambda n, draw: -draw.uniform(len(n)) * 0.01)),
        ("nan in scale", "a swallowed NaN", nan),
    )
    return [case(op, w, name, covers, on("scale", edit)) for name, covers, edit in edits]
