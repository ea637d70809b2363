"""Prove and replace linear layers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from autosel import ops
from autosel.errors import BadArguments
from autosel.integrations.transformers.norms import tensors_of
from autosel.integrations.transformers.proof import (
    Forward,
    NotReplaceable,
    as_rows,
    drawn_tensor,
    needs_own_code,
    refuse_replaced,
    refuse_wrong_kernel,
    serving,
    why_wrong,
)
from autosel.ops.arguments import FLOATS

CHECKED = 16  # rows of a projection that are checked in float64


def prove_linear(module: nn.Linear) -> Forward:
    """Prove a linear layer. A subclass is one if its own forward computes the op."""
    refuse_replaced(module)
    weight = module.weight
    if weight.dtype not in FLOATS:
        raise NotReplaceable(f"its weight is {weight.dtype}")
    contract, served, original = ops.find("linear"), serving("linear"), type(module).forward
    x = drawn_tensor(1, module.in_features, dtype=weight.dtype)
    inputs = {"x": x, "w": weight, "bias": module.bias, "residual": None}
    rows = contract.rows(contract.workload_of(inputs), inputs, CHECKED, 1)
    if original is not nn.Linear.forward:
        _refuse_other_linear(module, rows, original)
    refuse_wrong_kernel("linear", rows.inputs, *rows.pick((served(x, weight, module.bias, None),)))

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if weight is not None and not needs_own_code(self, input, weight):
            shape = input.shape
            try:
                made: Tensor = served(as_rows(input), weight, bias, None)
                return made.view(*shape[:-1], weight.shape[0])
            except BadArguments:
                pass
        found: Tensor = original(self, input)
        return found

    return forward


def _refuse_other_linear(module: nn.Linear, rows: Any, original: Forward) -> None:
    """Check a subclass. It may not compute by anything else that it holds, which may change later."""
    name, known = type(module).__name__, {"in_features", "out_features", "training"}
    held = {*tensors_of(module), *module._modules} - {"weight", "bias"}
    read = set(inspect.unwrap(original).__code__.co_names) & set(vars(module)) - known
    if held or read:
        raise NotReplaceable(f"{name} computes by {', '.join(sorted(held | read))} too")
    own = original(module, rows.inputs["x"])
    if not isinstance(own, Tensor) or own.shape != (1, module.out_features):
        raise NotReplaceable(f"{name} returns something else than its product")
    wrong = why_wrong("linear", rows.inputs, *rows.pick((own,)))
    if wrong:
        raise NotReplaceable(f"{name} computes something else than x @ weight^T + bias ({wrong})")
