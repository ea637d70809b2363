"""Test every op as a PyTorch operator: in eager code, under opcheck, in a compiled graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import autosel
from autosel import ops
from autosel.candidates.convention import pure_outputs
from autosel.errors import UsageError
from autosel.formats import CACHE_FORMATS, WEIGHT_FORMATS
from autosel.ops.cached import Cached
from autosel.ops.contract import Op
from autosel.ops.weight import Weight
from autosel.values import Workload
from tests import drawn

DIMS = {"M": 2, "N": 24, "K": 16, "B": 2, "Hq": 4, "Hkv": 2, "D": 16, "L": 20, "page": 16, "I": 24, "V": 32, "R": 16}
FORMATS = {"weight": WEIGHT_FORMATS, "cache": CACHE_FORMATS}
OF = {"prefill_attn": {"S": 5}, "sample": {"L": 4}}
OPS = list(ops.OPS.values())
NAMES = [op.name for op in OPS]


def small(op: Op) -> Workload:
    sizes = {"S": 1, "d": 16, **DIMS, **OF.get(op.name, {})}
    return op.workload("fp32", {n: sizes[n] for n in op.dim_names})


def inputs_of(op: Op, seed: int = 1) -> dict[str, Any]:
    return op.inputs(small(op), seed)


def operator(op: Op) -> Any:
    return getattr(torch.ops.autosel, op.name)


def outputs_of(op: Op) -> dict[str, Tensor]:
    return dict(zip(pure_outputs(op), (t for t in op.allocate(small(op)) if t is not None), strict=True))


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    return () if made is None else made if isinstance(made, tuple) else (made,)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_an_operator_returns_what_best_returns(op: Op) -> None:
    ours, theirs = inputs_of(op), inputs_of(op)
    made = operator(op)(*op.arguments(ours))
    expected = autosel.best(op.name)(*op.arguments(theirs))
    if not pure_outputs(op):
        made, expected = op.arguments(ours)[-2:], op.arguments(theirs)[-2:]
    for one, other in zip(as_tuple(made), as_tuple(expected), strict=True):
        assert torch.equal(one, other) and one.is_contiguous()


@pytest.mark.parametrize("op", [o for o in OPS if pure_outputs(o)], ids=lambda o: o.name)
def test_the_out_form_writes_into_out(op: Op) -> None:
    inputs, outs = inputs_of(op), outputs_of(op)
    assert operator(op).out(*op.arguments(inputs), **outs) is None
    expected = as_tuple(operator(op)(*op.arguments(inputs)))
    assert all(torch.equal(outs[name], e) for name, e in zip(outs, expected, strict=True))


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_opcheck_passes(op: Op) -> None:
    """Check the schema (only declared writes), the fake kernel, autograd's registration, and symbolic tracing."""
    asked = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(op).default, op.arguments(inputs_of(op)), test_utils=asked)
    if pure_outputs(op):
        torch.library.opcheck(operator(op).out, op.arguments(inputs_of(op)), outputs_of(op), test_utils=asked)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_a_graph_contains_the_operator_as_one_node(op: Op) -> None:
    inputs = inputs_of(op)
    function = torch.compile(operator(op), fullgraph=True, backend="aot_eager")
    made = function(*op.arguments(inputs))
    again = inputs_of(op)
    expected = operator(op)(*op.arguments(again))
    if not pure_outputs(op):
        made, expected = op.arguments(inputs)[-2:], op.arguments(again)[-2:]
    assert all(torch.equal(a, b) for a, b in zip(as_tuple(made), as_tuple(expected), strict=True))


STORED = {
    "linear": "weight",
    "norm_qkv": "weight",
    "gate_up": "weight",
    "lm_head": "weight",
    "attn": "cache",
}  # the operands of each op that have formats


def parts_of(value: Any) -> list[Any]:
    """Return an argument in the form that a stored op takes."""
    if isinstance(value, Weight):
        return [value.codes, value.scales, value.zeros, value.format.name]
    return [value.codes, value.scales, value.format.name] if isinstance(value, Cached) else [value]


@pytest.mark.parametrize(
    ("op", "name"),
    drawn.share([(op, name) for op, kind in STORED.items() for name in FORMATS[kind] if name != "plain"], days=3),
)
def test_a_stored_form_takes_the_parts_of_operands_in_a_format(op: str, name: str) -> None:
    """Skip PyTorch's schema check, which multiplies values to compare them and fails in fp8; parity covers it."""
    contract = ops.find(op)
    w = small(contract)
    inputs = contract.inputs(replace(w, traits=(*w.traits, (STORED[op], name))), 1)
    given = [part for value in contract.arguments(inputs) for part in parts_of(value)]
    operator = getattr(torch.ops.autosel, f"{op}_stored")
    expected = autosel.best(op)(*contract.arguments(inputs))
    assert torch.equal(operator(*given), expected)
    graph = torch.compile(operator, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(*given), expected)
    asked = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.default, tuple(given), test_utils=asked)


def test_every_op_that_takes_a_format_has_a_stored_form() -> None:
    taken = {op.name for op in OPS if any(arg.kind in ("weight", "cache") for arg in op.args)}
    assert taken == STORED.keys()


def test_a_growing_length_does_not_recompile() -> None:
    op = ops.find("attn")
    q, k, v, *_ = op.arguments(inputs_of(op))
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    step = torch.compile(
        lambda length: torch.ops.autosel.attn(q, k, v, None, length), fullgraph=True, backend=backend, dynamic=True
    )
    for length in (9, 10, 11, 12):
        assert torch.equal(step(length), autosel.best("attn")(q, k, v, None, length))
    assert len(seen) == 1


def test_a_backward_pass_raises_with_the_reason() -> None:
    x, weight = torch.randn(2, 16, requires_grad=True), torch.randn(16)
    made = torch.ops.autosel.rmsnorm(x, weight)
    with pytest.raises(UsageError, match="for inference"):
        made.sum().backward()


def test_bad_arguments_name_the_argument() -> None:
    with pytest.raises(autosel.errors.BadArguments, match="weight"):
        torch.ops.autosel.rmsnorm(torch.randn(2, 16), torch.randn(17))
