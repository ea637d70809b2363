"""geglu: y = gelu(gate) * up. tanh 0: gelu(g) = g/2 (1 + erf(g / sqrt 2)); tanh 1: its tanh approximation (Gemma).

The contract allows the rounding of the eager composition, which stores gelu(gate) first.
"""

from __future__ import annotations

from typing import Any

from autosel.ops.activation import Activation
from autosel.ops.arguments import Binder
from autosel.ops.contract import Arg, Inputs
from autosel.ops.domains import trait
from autosel.ops.swiglu import GatedUnit
from autosel.values import Workload


class GeGlu(GatedUnit):
    name = "geglu"
    args = (
        Arg(name="gate", kind="tensor"),
        Arg(name="up", kind="tensor"),
        Arg(name="tanh", kind="int", default=0),
    )
    trait_defaults = {"tanh": 0}
    domains = {**GatedUnit.domains, "tanh": trait(0, 1)}

    def activation(self, inputs: Inputs) -> Activation:
        return "gelu_tanh" if inputs["tanh"] else "gelu_erf"

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("gate", "M I")
        take.floats("up", "M I")
        return self.workload(take.dtype_name, take.dims, tanh=take.among("tanh", 0, (0, 1)))

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        return {**super().inputs(w, seed), "tanh": int(w.trait("tanh", 0))}

    def flops(self, w: Workload) -> int:
        return 10 * w["M"] * w["I"]
