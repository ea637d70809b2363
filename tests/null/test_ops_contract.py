"""Test the common contract of all ops: names, shapes, seeds, refusals, sampled rows, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.errors import BadArguments, UnknownName
from autosel.ops import OPS, eager, find
from autosel.ops.contract import Match, Mismatch
from autosel.values import Workload

SHAPES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "linear": ({"M": 3, "N": 70, "K": 96}, {"bias": True, "residual": True}),
    "attn": ({"B": 3, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 50}, {"ragged": True, "window": 20}),
    "paged_attn": ({"B": 3, "Hq": 8, "Hkv": 2, "S": 2, "D": 64, "L": 50, "page": 16}, {"softcap": 30.0}),
    "prefill_attn": ({"B": 2, "Hq": 4, "Hkv": 2, "S": 33, "D": 64}, {}),
    "kv_append": ({"B": 3, "Hkv": 2, "S": 2, "D": 64}, {"page": 16}),
    "rmsnorm": ({"M": 5, "d": 96}, {"offset": 1.0}),
    "add_rmsnorm": ({"M": 5, "d": 96}, {"sandwich": 1}),
    "rope": ({"M": 5, "Hq": 4, "Hkv": 2, "D": 64, "R": 32}, {"style": 1}),
    "swiglu": ({"M": 5, "I": 96}, {}),
    "geglu": ({"M": 5, "I": 96}, {"tanh": 1}),
    "norm_qkv": ({"M": 3, "d": 96, "N": 70}, {"offset": 1.0}),
    "gate_up": ({"M": 3, "d": 96, "I": 70}, {"activation": 2}),
    "lm_head": ({"M": 3, "V": 70, "d": 96}, {"greedy": 1}),
    "sample": ({"B": 4, "V": 70, "L": 6}, {}),
}
WORKLOADS = [OPS[op].workload("bf16", dims, **traits) for op, (dims, traits) in SHAPES.items()]
by_op = pytest.mark.parametrize("w", WORKLOADS, ids=lambda w: w.op)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run(w: Workload, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    op = OPS[w.op]
    inout = {a.name for a in op.args if a.role == "inout"}
    values = [inputs[a.name].clone() if a.name in inout else inputs[a.name] for a in op.args]
    made = getattr(eager, w.op)(*values, *op.allocate(w))
    return made if isinstance(made, tuple) else (made,)


def tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {n: v for n, v in inputs.items() if isinstance(v, Tensor)}


def test_every_op_is_registered_under_its_name_with_a_baseline() -> None:
    assert set(OPS) == set(SHAPES)
    for name, op in OPS.items():
        assert op.name == name and callable(getattr(eager, name))


def test_gemv_and_gemm_are_linear() -> None:
    assert find("gemv") is find("gemm") is find("linear") is OPS["linear"]


def test_a_name_of_an_op_that_became_a_format_is_that_ops() -> None:
    assert find("gemv_fp8") is OPS["linear"] and find("attn_decode_fp8") is OPS["attn"]


def test_an_unknown_op_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UnknownName, match="did you mean rmsnorm"):
        find("rmsnrom")


@pytest.mark.parametrize("w", [*WORKLOADS, *(OPS[w.op].workload("bf16", dict(w.dims)) for w in WORKLOADS)], ids=str)
def test_outputs_have_the_ops_names_for_all_traits(w: Workload) -> None:
    assert tuple(spec.name for spec in OPS[w.op].outputs(w)) == OPS[w.op].output_names


@by_op
def test_arguments_describe_the_workload_they_were_made_for(w: Workload) -> None:
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    assert list(inputs) == [a.name for a in op.args]
    assert op.workload_of(inputs) == w


@by_op
def test_a_trait_at_its_default_is_not_in_the_key(w: Workload) -> None:
    op = OPS[w.op]
    assert op.workload(w.dtype, dict(w.dims), **op.trait_defaults).traits == ()


@by_op
def test_a_seed_fixes_the_inputs_and_another_changes_them(w: Workload) -> None:
    op = OPS[w.op]
    first, again, other = (tensors(op.inputs(w, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


@by_op
def test_refresh_keeps_the_streamed_operands_and_redraws_the_others(w: Workload) -> None:
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    fresh = op.refresh(w, inputs, 2)
    for arg in op.args:
        if arg.role != "resident":
            assert fresh[arg.name] is inputs[arg.name]
    assert op.workload_of(fresh) == w
    floats = [n for n, v in tensors(inputs).items() if v.is_floating_point() and fresh[n] is not inputs[n]]
    assert any(not torch.equal(fresh[n], inputs[n]) for n in floats)


@by_op
def test_activations_and_weights_are_drawn_apart(w: Workload) -> None:
    """Draw them from separate streams; otherwise q would be the beginning of k."""
    floats = [v.flatten()[:16] for v in tensors(OPS[w.op].inputs(w, 1)).values() if v.dtype == torch.bfloat16]
    for i, a in enumerate(floats):
        assert all(not torch.equal(a, b) for b in floats[i + 1 :])


@by_op
def test_outputs_have_the_shapes_the_op_says(w: Workload) -> None:
    op = OPS[w.op]
    for spec, got in zip(op.outputs(w), run(w, op.inputs(w, 1)), strict=True):
        assert tuple(got.shape) == spec.shape
        assert got.dtype == (torch.int64 if spec.dtype == "int64" else torch.bfloat16)


@by_op
def test_sampled_rows_judge_as_the_whole_does(w: Workload) -> None:
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    outputs = run(w, inputs)
    assert isinstance(op.verify(inputs, outputs), Match)
    for seed in range(4):
        rows = op.rows(w, inputs, 16, seed)
        assert isinstance(op.verify(rows.inputs, rows.pick(outputs)), Match)


@by_op
def test_sampled_rows_see_a_result_of_other_inputs(w: Workload) -> None:
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    outputs = run(w, op.inputs(w, 2))
    rows = op.rows(w, inputs, 16, 0)
    assert isinstance(op.verify(rows.inputs, rows.pick(outputs)), Mismatch)


@by_op
def test_the_reference_itself_is_right_and_its_bound_covers_every_element(w: Workload) -> None:
    op = OPS[w.op]
    inputs = op.inputs(w, 3)
    reference = op.reference(inputs)
    for r, tolerance in zip(reference, op.bound(inputs, reference), strict=True):
        assert tolerance.shape == r.shape and tolerance.dtype == torch.float64
        assert bool((tolerance >= 0).all()) and bool(tolerance.isfinite().all())


COUNTED = ("attn", "paged_attn", "kv_append", "sample")  # decided by the properties of their operands


@pytest.mark.parametrize("w", [w for w in WORKLOADS if w.op not in COUNTED], ids=lambda w: w.op)
def test_bytes_moved_are_each_operand_and_result_once(w: Workload) -> None:
    op = OPS[w.op]
    operands = tensors(op.inputs(w, 1)).values()
    results = op.allocate(w)
    assert op.bytes_moved(w) == sum(t.numel() * t.element_size() for t in (*operands, *results) if t is not None)


@pytest.mark.parametrize("op", ["attn", "paged_attn"])
def test_bytes_follow_from_the_inputs_where_they_depend_on_data(op: str) -> None:
    contract, (dims, _) = OPS[op], SHAPES[op]
    w = contract.workload("bf16", {**dims, "S": 1}, **({"ragged": True} if op == "attn" else {}))
    inputs = contract.inputs(w, 1)
    assert contract.bytes_moved(w, inputs) == contract.bytes_moved(w)
    whole = {**inputs, "lengths": torch.full_like(inputs["lengths"], w["L"])}
    one = {**inputs, "lengths": torch.ones_like(inputs["lengths"])}
    token = 2 * 2 * w["Hkv"] * w["D"]
    assert contract.bytes_moved(w, whole) - contract.bytes_moved(w, one) == token * w["B"] * (w["L"] - 1)


@by_op
def test_costs_grow_with_the_work(w: Workload) -> None:
    op, count = OPS[w.op], w.dims[0][0]
    twice = w.at(**{count: 2 * w[count]})
    assert op.bytes_moved(twice) > op.bytes_moved(w) > 0
    assert op.flops(twice) >= op.flops(w) >= 0


@pytest.mark.parametrize("beyond", [-1, 0, 10**6], ids=["none", "a neighbour's", "no page"])
def test_block_table_entries_beyond_a_rows_length_are_never_read(beyond: int) -> None:
    """Check reference, sampled rows and baseline: engines leave entries of earlier requests there, whose pages may not
    exist any more, or hold a neighbour's NaN.
    """
    op = OPS["paged_attn"]
    w = op.workload("fp32", {"B": 3, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": 32, "page": 16})
    inputs = op.inputs(w, 1)
    inputs["block_table"] = torch.tensor([[0, 1], [2, beyond], [beyond, beyond]], dtype=torch.int32)
    inputs["lengths"] = torch.tensor([32, 5, 0], dtype=torch.int32)
    for pages in (inputs["k_pages"], inputs["v_pages"]):
        pages[0, 3] = float("nan")
    (reference,), got = op.reference(inputs), eager.paged_attn(*op.arguments(inputs))
    for made in (reference, got):
        assert made.isnan().flatten(1).any(1).tolist() == [True, False, False]
    assert isinstance(op.verify(inputs, [got]), Match)
    for count, seed in ((6, 1), *((1, seed) for seed in range(6))):
        rows = op.rows(w, inputs, count, seed)
        assert isinstance(op.verify(rows.inputs, rows.pick([got])), Match)


@pytest.mark.parametrize("beyond", [-1, 0, 3, 10**6], ids=["none", "a neighbour's", "the last", "no page"])
def test_the_kept_part_of_a_paged_cache_is_correct_for_any_neighbouring_pages(beyond: int) -> None:
    op = OPS["kv_append"]
    w = op.workload("fp32", {"B": 2, "Hkv": 1, "S": 2, "D": 8}, page=16)
    inputs = op.inputs(w, 1)
    inputs["block_table"] = torch.tensor([[2, beyond], [0, 3]], dtype=torch.int32)
    inputs["positions"] = torch.tensor([4, 15], dtype=torch.int32)
    before = inputs["k_cache"].clone()
    written = op.written(w, inputs)
    assert written is not None
    outs = eager.kv_append(*op.arguments(inputs))
    assert isinstance(op.verify(written.inputs, written.pick(outs)), Match)
    written.restore()
    assert torch.equal(inputs["k_cache"], before)


@pytest.mark.parametrize("beyond", [-1, 0, 3, 10**6], ids=["none", "a neighbour's", "its next one", "no page"])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_sampled_rows_of_a_paged_cache_are_correct_for_any_neighbouring_pages(beyond: int, count: int) -> None:
    op = OPS["kv_append"]
    w = op.workload("fp32", {"B": 3, "Hkv": 1, "S": 2, "D": 8}, page=16)
    inputs = op.inputs(w, 1)
    inputs["block_table"] = torch.tensor([[2, beyond], [0, 3], [1, beyond]], dtype=torch.int32)
    inputs["positions"] = torch.tensor([4, 15, 7], dtype=torch.int32)
    rows = op.rows(w, inputs, count, 1)
    outs = eager.kv_append(*op.arguments({**inputs, "k_cache": inputs["k_cache"].clone()}))
    assert isinstance(op.verify(rows.inputs, rows.pick(outs)), Match)
    spoilt = tuple(out.index_fill(0, torch.tensor([1]), 0.0) for out in outs)
    assert isinstance(op.verify(rows.inputs, rows.pick(spoilt)), Mismatch)


def test_a_window_bounds_the_bytes_attention_reads() -> None:
    op = OPS["attn"]
    full = op.workload("bf16", {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 4096})
    near = op.workload("bf16", dict(full.dims), window=512)
    assert op.bytes_moved(near) < op.bytes_moved(full) / 7
    assert op.flops(near) == op.flops(full) // 8


# --- refusals ---------------------------------------------------------------------------------------------------------


def half(x: Tensor) -> Tensor:
    return x.to(torch.float16)


REFUSED = [
    ("linear", "w", lambda i: i["w"][:, :-1].contiguous(), "K = 96"),
    ("linear", "w", lambda i: half(i["w"]), "float16"),
    ("linear", "x", lambda i: i["x"][0], r"\[M,K\]"),
    ("linear", "x", lambda i: i["x"].double(), "float64"),
    ("linear", "w", lambda i: i["w"].T.contiguous().T, "not contiguous"),
    ("linear", "bias", lambda i: i["bias"][:-1], "N = 70"),
    ("linear", "x", lambda i: None, "expected a tensor"),
    ("attn", "k", lambda i: i["k"][:, :, :, :32].contiguous(), "D = 64"),
    ("attn", "lengths", lambda i: i["lengths"].long(), "int32"),
    ("attn", "max_len", lambda i: 51, "cache holds 50"),
    ("attn", "max_len", lambda i: 0, "at least 1"),
    ("attn", "window", lambda i: -1, "at least 0"),
    ("attn", "q", lambda i: i["q"][:, :7], "multiple"),
    ("paged_attn", "block_table", lambda i: i["block_table"][:, :-1].contiguous(), "max_len"),
    ("prefill_attn", "v", lambda i: i["v"][:, :, 1:], "S = 33"),
    ("kv_append", "positions", lambda i: i["positions"].long(), "int32"),
    ("rmsnorm", "weight", lambda i: i["weight"][1:], "d = 96"),
    ("rmsnorm", "eps", lambda i: "1e-6", "a number"),
    ("add_rmsnorm", "sandwich", lambda i: 3, "one of 0, 1, 2"),
    ("rope", "inv_freq", lambda i: torch.ones(33), "rotates 66 elements of a head of 64"),
    ("rope", "positions", lambda i: i["positions"].int(), "int64"),
    ("geglu", "tanh", lambda i: 2, "one of 0, 1"),
    ("gate_up", "w_up", lambda i: i["w_up"][1:], "I = 70"),
    ("lm_head", "greedy", lambda i: 3, "one of 0, 1"),
    ("sample", "top_k", lambda i: i["top_k"].long(), "int32"),
    ("sample", "uniform", lambda i: i["uniform"][:-1], "B = 4"),
]


@pytest.mark.parametrize(("name", "argument", "change", "said"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_arguments_are_refused_by_name(name: str, argument: str, change: Any, said: str) -> None:
    op = OPS[name]
    inputs = op.inputs(next(w for w in WORKLOADS if w.op == name), 1)
    with pytest.raises(BadArguments, match=said) as caught:
        op.workload_of({**inputs, argument: change(inputs)})
    assert name in caught.value.what
