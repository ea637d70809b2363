"""Compare the whole of a large result with the baseline's; find the elements that are then judged in float64.

A float64 reference of the whole result would take seconds. The baseline's result is cheap, and differs from a correct
result by at most the sum of both bounds. An element with a larger error therefore ranks before all correct ones, and
the float64 reference decides. The difference is relative to the element plus the result's root mean square, because
small elements have small bounds unless they result from cancellation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autosel.ops.contract import Inputs, Op, Rows
from autosel.values import Workload

JUDGED = 8  # elements that differ most
MOST_FLOPS = 1 << 36  # most operations of a baseline, which runs on one thread: about two seconds


def worst(op: Op, w: Workload, inputs: Inputs, got: Tensor, base: Tensor) -> Rows | None:
    """Return the inputs of the elements that differ most from the baseline; None if no element differs."""
    apart = _apart(got, base)
    values, order = apart.flatten().topk(min(JUDGED, apart.numel()))
    order = order[values > 0]
    if not len(order):
        return None
    return op.around(w, inputs, torch.stack(torch.unravel_index(order, apart.shape), 1))


def _apart(got: Tensor, base: Tensor) -> Tensor:
    """Return each element's difference, relative to its own size plus the root mean square.

    It is infinite if only one of the two is a number.
    """
    one, other = got.float(), base.float()
    size = other.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    apart = (one - other).abs() / (other.abs() + size)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(nan=torch.inf, posinf=torch.inf))
