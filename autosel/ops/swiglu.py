"""swiglu: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

The contract allows the rounding of the eager composition, which stores silu(gate) first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import activation
from autosel.ops.activation import Activation
from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, Arg, Case, Inputs, Op, TensorSpec
from autosel.ops.domains import UP, Level, contents, counts, layouts, one_storage, widths
from autosel.ops.draw import Draw, case, hostile_rows, on, one_nan, outliers
from autosel.ops.rounding import flushable, stored
from autosel.values import DTYPE_BYTES, Workload


def _infinite_up(inputs: dict[str, Any], draw: Draw) -> None:
    """Put an infinity into `up`, with gates of at least 0.5: the activation of a very negative one may be zero."""
    inputs["gate"].abs_().add_(0.5)
    up = inputs["up"].view(-1)
    up[draw.integers(0, up.numel(), 1)] = float("inf")


class GatedUnit(Op):
    """Common base of swiglu and geglu: act(gate) * up."""

    output_names = ("y",)
    dim_names = ("M", "I")
    by_row = ("gate", "up")
    domains = {
        "M": counts(),
        "I": widths(),
        "gate": contents("gate", up={**UP, "fp16": 4}),
        "up": contents("up", more=(Level(name="inf", edit=_infinite_up, special="inf"),)),
        "layout": layouts("gate", "up", more=(Level(name="one storage", edit=one_storage("gate", "up")),)),
    }

    def activation(self, inputs: Inputs) -> Activation:
        raise NotImplementedError

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", shape=(w["M"], w["I"]), dtype=w.dtype),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        draw = Draw(seed, w.dtype)
        return {"gate": draw.normal(w["M"], w["I"], scale=2.0), "up": draw.normal(w["M"], w["I"])}

    def cases(self, w: Workload) -> tuple[Case, ...]:
        # An infinite gate has no defined result: at -inf the limit is 0 but g * sigmoid(g) is NaN, and torch's
        # vectorised erf gives NaN at both ends. Large gates have their own cases.
        shared = hostile_rows(self, w, rows="gate", count_dim="M", width_dim="I", skip=("large", "inf", "-inf"))
        small = w.at(M=5, I=193)
        return (
            *shared,
            case(self, small, "large gate", "exp overflow", on("gate", lambda x, _: x.mul_(60.0))),
            case(self, small, "gate beyond exp's range", "exp overflow gives NaN", on("gate", _ramp)),
            case(self, small, "outliers in up", "precision", on("up", outliers)),
            case(self, small, "nan in up", "a swallowed NaN", on("up", one_nan)),
        )

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return (activation.value(self.activation(inputs), inputs["gate"].double()) * inputs["up"].double(),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (y,), gate, up = reference, inputs["gate"], inputs["up"]
        dtype, kind, g = DTYPE_NAME[gate.dtype], self.activation(inputs), gate.double()
        a = activation.value(kind, g)
        error = stored(a, activation.propagate(kind, g, flushable(gate)), dtype)
        return (stored(y, error * up.double().abs() + a.abs() * flushable(up), dtype),)

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        return 3 * DTYPE_BYTES[w.dtype] * w["M"] * w["I"]

    def flops(self, w: Workload) -> int:
        return 5 * w["M"] * w["I"]


class SwiGlu(GatedUnit):
    name = "swiglu"
    args = (Arg(name="gate", kind="tensor"), Arg(name="up", kind="tensor"))

    def activation(self, inputs: Inputs) -> Activation:
        return "silu"

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("gate", "M I")
        take.floats("up", "M I")
        return self.workload(take.dtype_name, take.dims)


def _ramp(x: Tensor, _: Draw) -> None:
    x.copy_(torch.linspace(-120.0, 120.0, x.numel()).view(x.shape))
