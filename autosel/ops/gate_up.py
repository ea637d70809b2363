"""gate_up: y = act(h @ w_gate^T) * (h @ w_up^T), h = rmsnorm(x): a gated MLP up to its down projection.

activation 0: silu, 1: gelu (erf), 2: gelu (tanh). The contract allows the roundings of the eager composition: two of h
(the norm's), both products, the activation and the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.ops import activation
from autosel.ops.activation import ACTIVATIONS
from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, Arg, Case, Inputs
from autosel.ops.domains import (
    Level,
    Row,
    balanced,
    contents,
    counts,
    divides_by_rms,
    in_format,
    layouts,
    norm_eps,
    trait,
    widths,
)
from autosel.ops.draw import Draw, case, resident_draw
from autosel.ops.linear import Projection, projection_cases
from autosel.ops.norm_qkv import normed_matmul_error
from autosel.ops.rmsnorm import normalise
from autosel.ops.rounding import stored
from autosel.ops.stored_cases import write
from autosel.ops.weight import product
from autosel.values import DTYPE_BYTES, Workload

# Two products are multiplied: these powers of two keep the result within the dtype.
MODEST_UP = {"bf16": 24, "fp16": 2, "fp32": 24}
MODEST_DOWN = {"bf16": -24, "fp16": -2, "fp32": -24}


def _overflow(inputs: dict[str, Any], draw: Draw) -> None:
    """Make gate and up finite but their product infinite: positive in some columns, negative in others."""
    big = 2.0 ** (9 if draw.name == "fp16" else 70)
    for name in ("x", "norm_weight"):
        inputs[name].fill_(1.0)
    write(inputs["w_gate"], slice(None), torch.full(inputs["w_gate"].shape, big / 64))
    signs = torch.where(torch.arange(inputs["w_up"].shape[0]) % 2 == 0, 1.0, -1.0)[:, None]
    write(inputs["w_up"], slice(None), (signs * big / 64).expand(inputs["w_up"].shape))


class GateUp(Projection):
    name = "gate_up"
    weights, width, out = ("w_gate", "w_up"), "d", "I"
    args = (
        Arg(name="x", kind="tensor"),
        Arg(name="norm_weight", kind="tensor"),
        Arg(name="w_gate", kind="weight", role="streamed"),
        Arg(name="w_up", kind="weight", role="streamed"),
        Arg(name="eps", kind="float", default=1e-6),
        Arg(name="offset", kind="float", default=0.0),
        Arg(name="activation", kind="int", default=0),
    )
    output_names = ("y",)
    dim_names = ("M", "d", "I")
    trait_defaults = {"offset": 0.0, "activation": 0, "weight": PLAIN}
    domains = {
        "M": counts(),
        "d": widths(),
        "I": widths(),
        "x": contents("x", inf=True),
        "norm_weight": contents(
            "norm_weight",
            up=MODEST_UP,
            down=MODEST_DOWN,
            rows=False,
            more=(Level(name="balanced", edit=balanced("norm_weight", "w_gate", "w_up")),),
        ),
        "w_gate": contents("w_gate", up=MODEST_UP, down=MODEST_DOWN),
        "w_up": contents("w_up", up=MODEST_UP, down=MODEST_DOWN),
        "eps": norm_eps("x"),
        "offset": trait(0.0, 1.0, 0.3),
        "activation": trait(0, 1, 2),
        "weight": trait(*WEIGHT_FORMATS),
        "layout": layouts("x", "norm_weight", "w_gate", "w_up"),
    }

    def admits(self, row: Row) -> bool:
        return divides_by_rms(row, "x") and in_format(row, "w_gate", "w_up")

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("x", "M d")
        take.floats("norm_weight", "d")
        take.weight("w_gate", "I d")
        take.weight("w_up", "I d")
        weight = take.one_format("w_gate", "w_up")
        take.number("eps", 1e-6, low=0.0)
        offset, kind = float(take.number("offset", 0.0)), take.among("activation", 0, (0, 1, 2))
        return self.workload(take.dtype_name, take.dims, offset=offset, activation=kind, weight=weight)

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        draw, offset = resident_draw(seed, w.dtype), float(w.trait("offset", 0.0))
        return {
            "x": draw.stream(w["M"], w["d"]),
            "norm_weight": draw.around_one(w["d"], offset=offset),
            "w_gate": inputs["w_gate"],
            "w_up": inputs["w_up"],
            "eps": 1e-6,
            "offset": offset,
            "activation": int(w.trait("activation", 0)),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        # An infinite weight makes an infinite gate, which has no defined result (swiglu). An infinite x gives NaN.
        cases = projection_cases(self, w, weights=self.weights, width="d", out="I", skip=("inf in weights",))
        over = case(self, w.at(M=2, d=64, I=24), "overflow", "the largest number in place of infinity", _overflow)
        return *cases, over

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        gate, up = self._products(inputs)
        return (activation.value(ACTIVATIONS[inputs["activation"]], gate) * up,)

    def _products(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        h = normalise(inputs["x"].double(), inputs["norm_weight"], inputs["eps"], inputs["offset"])
        return product(h, inputs["w_gate"]), product(h, inputs["w_up"])

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (y,), (gate, up) = reference, self._products(inputs)
        dtype, kind = DTYPE_NAME[inputs["x"].dtype], ACTIVATIONS[inputs["activation"]]

        def error_of(value: Tensor, name: str) -> Tensor:
            norm = (inputs["eps"], inputs["offset"])
            return stored(value, normed_matmul_error(inputs["x"], inputs["norm_weight"], inputs[name], *norm), dtype)

        gate_error, up_error = error_of(gate, "w_gate"), error_of(up, "w_up")
        a = activation.value(kind, gate)
        a_error = stored(a, activation.propagate(kind, gate, gate_error), dtype)
        return (stored(y, a_error * up.abs() + a.abs() * up_error + a_error * up_error, dtype),)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        m, d, i = w["M"], w["d"], w["I"]
        return 2 * w.weight_format.nbytes(w.dtype, i, d) + DTYPE_BYTES[w.dtype] * (m * d + d + m * i)

    def flops(self, w: Workload) -> int:
        return 4 * w["M"] * w["d"] * w["I"] + 4 * w["M"] * w["d"] + 5 * w["M"] * w["I"]
