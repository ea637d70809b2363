"""Test that the bounds are fair: every correct way to compute an op passes every hostile case; wrong ways fail some.

Correct ways: PyTorch's eager composition (the baseline), those of unusual.py, and subnormal inputs flushed to zero.
Each op is tested in each dtype and with several traits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosel.ops import OPS, eager
from autosel.ops.array import Array
from autosel.ops.contract import TINY_NORMAL, Case, Match, Mismatch, Op
from autosel.ops.paged_attn import gather
from autosel.ops.stored import leaves
from autosel.parity.check import far_case
from autosel.parity.stage import far_strides
from autosel.values import Workload
from tests import drawn
from tests.cpu import planted, unusual
from tests.cpu.planting import kernels_of
from tests.onednn import products_leak

Outputs = tuple[Tensor, ...]
Way = Callable[[dict[str, Any]], Outputs]

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DTYPES = ("bf16", "fp16", "fp32")
SHAPES: dict[str, tuple[tuple[dict[str, int], dict[str, Any]], ...]] = {
    "linear": (({"M": 1, "N": 4096, "K": 4096}, {}), ({"M": 4, "N": 512, "K": 2048}, {"bias": True, "residual": True})),
    "attn": (
        ({"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": 8192}, {}),
        ({"B": 8, "Hq": 16, "Hkv": 8, "S": 1, "D": 64, "L": 4096}, {"ragged": True}),
        ({"B": 2, "Hq": 8, "Hkv": 4, "S": 4, "D": 64, "L": 4096}, {"ragged": True, "window": 48, "softcap": 30.0}),
        ({"B": 1, "Hq": 4, "Hkv": 1, "S": 1, "D": 64, "L": 4096}, {"window": 512}),
    ),
    "paged_attn": (
        ({"B": 2, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 4096, "page": 16}, {}),
        ({"B": 2, "Hq": 4, "Hkv": 2, "S": 2, "D": 64, "L": 4096, "page": 32}, {"window": 40, "softcap": 20.0}),
    ),
    "prefill_attn": (
        ({"B": 1, "Hq": 4, "Hkv": 2, "S": 512, "D": 64}, {}),
        ({"B": 1, "Hq": 2, "Hkv": 1, "S": 512, "D": 64}, {"window": 48, "softcap": 30.0}),
    ),
    "kv_append": (({"B": 1, "Hkv": 8, "S": 1, "D": 128}, {}), ({"B": 1, "Hkv": 8, "S": 1, "D": 128}, {"page": 16})),
    "rmsnorm": (({"M": 1, "d": 4096}, {}), ({"M": 8, "d": 1152}, {"offset": 1.0})),
    "add_rmsnorm": (
        ({"M": 1, "d": 4096}, {}),
        ({"M": 8, "d": 1152}, {"offset": 1.0, "sandwich": 1}),
        ({"M": 3, "d": 2048}, {"sandwich": 2}),
    ),
    "rope": (
        ({"M": 1, "Hq": 32, "Hkv": 8, "D": 128, "R": 128}, {}),
        ({"M": 2, "Hq": 8, "Hkv": 2, "D": 96, "R": 48}, {"style": 1}),
    ),
    "swiglu": (({"M": 1, "I": 14336}, {}),),
    "geglu": (({"M": 1, "I": 6912}, {}), ({"M": 1, "I": 6912}, {"tanh": 1})),
    "norm_qkv": (({"M": 1, "d": 4096, "N": 6144}, {}), ({"M": 2, "d": 1152, "N": 1536}, {"offset": 1.0})),
    "gate_up": (
        ({"M": 1, "d": 4096, "I": 14336}, {}),
        ({"M": 1, "d": 1152, "I": 6912}, {"offset": 1.0, "activation": 2}),
        ({"M": 1, "d": 1152, "I": 6912}, {"activation": 1}),
    ),
    "lm_head": (({"M": 1, "V": 4096, "d": 2048}, {}), ({"M": 1, "V": 4096, "d": 2048}, {"greedy": 1})),
    "sample": (({"B": 2, "V": 8192, "L": 64}, {}),),
}
WORKLOADS = [
    OPS[op].workload(dtype, dims, **traits)
    for op, shapes in SHAPES.items()
    for dims, traits in shapes
    for dtype in DTYPES
]


def run_eager(op: str, inputs: Mapping[str, Any], *, allocate: bool) -> Outputs:
    return call(getattr(eager, op), OPS[op], inputs, allocate=allocate)


def call(kernel: Callable[..., Any], op: Op, inputs: Mapping[str, Any], *, allocate: bool) -> Outputs:
    """Call a kernel on copies of the operands that it writes; `allocate`: also pass outputs."""
    inout = {a.name for a in op.args if a.role == "inout"}
    arguments = [v.clone() if n in inout else v for n, v in ((a.name, inputs[a.name]) for a in op.args)]
    outputs = op.allocate(op.workload_of(inputs), math.nan) if allocate else ()
    made = kernel(*arguments, *outputs)
    return made if isinstance(made, tuple) else (made,)


# --- other correct ways ----------------------------------------------------------------------------------------------


def linear_one_chain(i: dict[str, Any]) -> Outputs:
    """Accumulate sixteen running sums, like one vector register, and add them at the end."""
    x, w = (F.pad(i[n].float(), (0, -i[n].shape[1] % 16)).unflatten(1, (-1, 16)) for n in ("x", "w"))
    y = torch.zeros(x.shape[0], w.shape[0], 16)
    for step in range(x.shape[1]):
        y += x[:, None, step] * w[None, :, step]
    y = y.sum(-1)
    for extra in (i["bias"], i["residual"]):
        y = y if extra is None else y + extra.float()
    return (y.to(i["x"].dtype),)


def cache_of(i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "k_pages" in i:
        return tuple(gather(i[n], i["block_table"], i["lengths"], i["max_len"]) for n in ("k_pages", "v_pages"))  # type: ignore[return-value]
    keys = i.get("max_len", i["k"].shape[2])
    return i["k"][:, :, :keys], i["v"][:, :, :keys]


def attn_rounded_p(i: dict[str, Any]) -> Outputs:
    """Attend over tiles of keys, with P stored in the dtype of V."""
    (k, v), q, lengths = cache_of(i), i["q"], i.get("lengths")
    ends = torch.full((len(q),), k.shape[2]) if lengths is None else lengths.long()
    tiles = [(first, min(first + 64, k.shape[2])) for first in range(0, k.shape[2], 64)]
    made = unusual._online(q, k, v, ends, i["scale"], i["window"], i["softcap"], tiles, p_dtype=v.dtype)
    return (made.to(q.dtype),)


def norm_32(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.float() + offset)


def rmsnorm_stored_between(i: dict[str, Any]) -> Outputs:
    """Store the normalised value, then multiply it, as transformers does."""
    x, weight = i["x"], i["weight"].float() + i["offset"]
    normed = norm_32(x, torch.ones(x.shape[1]), i["eps"], 0.0).to(x.dtype)
    return ((normed.float() * weight).to(x.dtype),)


# More correct ways than unusual.py has.
MORE: dict[str, tuple[Way, ...]] = {
    "linear": (linear_one_chain,),
    "attn": (attn_rounded_p,),
    "paged_attn": (attn_rounded_p,),
    "prefill_attn": (attn_rounded_p,),
    "rmsnorm": (rmsnorm_stored_between,),
}
SLOW = ("attn_tiles_of_7", "prefill_query_by_query")  # a proof in a worker runs them


def ways_of(op: str) -> dict[str, Way]:
    found: dict[str, Way] = {
        name: partial(call, getattr(unusual, name), OPS[op], allocate=name not in unusual.ALLOCATING)
        for of, name in kernels_of(unusual)
        if of == op and name not in SLOW
    }
    return found | {way.__name__: way for way in MORE.get(op, ())}


def results_of(op: str, inputs: dict[str, Any]) -> dict[str, Outputs]:
    """Return the result of every way; `flushed` is the first way's result on flushed inputs."""
    ways = ways_of(op)
    found = {name: way(inputs) for name, way in ways.items()}
    if op != "kv_append":  # a copy copies subnormals too
        found["flushed"] = next(iter(ways.values()))(flushed(inputs))
    return found


def flushed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Flush subnormals of every tensor to zero, like vdpbf16ps."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

    def flush(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in names:
            return x
        return torch.where(x.abs().double() < TINY_NORMAL[names[x.dtype]], torch.zeros_like(x), x)

    return {n: flush(x) for n, x in inputs.items()}


def is_leak(found: Match | Mismatch, inputs: dict[str, Any]) -> bool:
    """Return True if a way that uses PyTorch's product is wrong here, and the judge right."""
    if not isinstance(found, Mismatch) or found.check != "nan_pattern" or not products_leak():
        return False
    half = [t for t in leaves(inputs).values() if t.dtype == torch.bfloat16]
    return any(not t.isfinite().all() for t in half)


def check_form(case: Case, inputs: dict[str, Any], w: Workload) -> None:
    """Check that a case is small, and has the workload that it declares."""
    assert OPS[w.op].workload_of(inputs) == case.workload
    assert case.workload.dtype == w.dtype
    moved = sum(v.numel() * v.element_size() for v in inputs.values() if isinstance(v, Tensor))
    assert moved <= 3 << 20, f"{case.name}: {moved} bytes"
    if w.op != "paged_attn":
        assert case.workload.traits == w.traits


@pytest.mark.parametrize("w", drawn.share(WORKLOADS, days=6), ids=lambda w: w.key)
def test_every_correct_way_passes_every_case_and_cases_are_small_and_distinct(w: Workload) -> None:
    """Run half of the workloads in one dtype a day."""
    op, cases = OPS[w.op], OPS[w.op].cases(w)
    assert len({c.name for c in cases}) == len(cases)
    for case in cases:
        inputs = case.make(1)
        check_form(case, inputs, w)
        baseline = run_eager(w.op, inputs, allocate=True)
        results = {"eager": baseline, "eager, allocating": run_eager(w.op, inputs, allocate=False)}
        if w.op == "attn" and case.workload["S"] == 1:
            results["packed"] = (eager.attn_packed(*op.arguments(inputs)),)
        results |= results_of(w.op, inputs)
        judge = op.judge(inputs)
        for name, got in results.items():
            found = judge(got)
            assert isinstance(found, Match) or is_leak(found, inputs), f"{name} refused on {case.name}: {found}"


ROWS_A_RUN = 12  # of 180 to 360


@pytest.mark.parametrize("op", OPS)
def test_every_correct_way_passes_the_array(op: str) -> None:
    """Run a share of its rows in one dtype, both selected by this run."""
    turn = Random(f"{drawn.seed} {op}")
    dtype = turn.choice(DTYPES)
    dims, traits = SHAPES[op][0]
    array = Array(OPS[op], OPS[op].workload(dtype, dims, **traits), drawn.seed, traits=True)
    cases = array.cases(lambda w: w.weight_format.plain and w.cache_format.plain)  # these ways take tensors
    for case in turn.sample(cases, ROWS_A_RUN):
        inputs = case.make(drawn.seed)
        results = {"eager": run_eager(op, inputs, allocate=True)}
        results |= results_of(op, inputs)
        judge = OPS[op].judge(inputs)
        for name, got in results.items():
            found = judge(got)
            refused = f"{name} refused at {case.workload.key}: {case.covers}: {found}"
            assert isinstance(found, Match) or is_leak(found, inputs), refused


# --- wrong ways: rewritten arithmetic; autosel.testing.mutants changes operands and results ---------------------------
# More of them are in planted.py and adversarial.py.


def then(op: str, edit: Callable[[Tensor], Tensor]) -> Way:
    """Return the eager op with every output edited."""
    return lambda i: tuple(edit(y.clone()) for y in run_eager(op, i, allocate=False))


def truncated(y: Tensor) -> Tensor:
    """Round towards zero; the rounding direction is unknown afterwards, so any element may lose one step."""
    bits = y.view(torch.int16 if y.element_size() == 2 else torch.int32)
    return torch.where(y.abs() > 1e-3, bits - 1, bits).view(y.dtype)


def attn_wrong(i: dict[str, Any], *, more: int = 0, wider: int = 0, drop: int = 0, low: bool = False) -> Outputs:
    """Attend by planted.py; `more` keys are seen if the cache has them, `wider` is added to the window."""
    q, k, v, lengths = i["q"], i["k"], i["v"], i.get("lengths")
    most = min(i.get("max_len", k.shape[2]) + more, k.shape[2])
    drop -= more if lengths is not None else 0
    window = i["window"] + wider
    return (planted.attention(q, k, v, lengths, most, i["scale"], window, i["softcap"], drop=drop, low=low),)


def centred(i: dict[str, Any]) -> Outputs:
    x = i["x"].float()
    x = x - x.mean(-1, keepdim=True)
    return (norm_32(x, i["weight"], i["eps"], i["offset"]).to(i["x"].dtype),)


def low_angle(i: dict[str, Any]) -> Outputs:
    angle = (i["positions"].float()[:, None] * i["inv_freq"]).to(torch.bfloat16).float()
    return tuple(unusual._turned(i[n], angle.cos(), angle.sin(), i["style"]).to(i[n].dtype) for n in ("q", "k"))


def silu_by_growth(i: dict[str, Any]) -> Outputs:
    g = i["gate"].float()
    return ((g * (g.exp() / (1 + g.exp())) * i["up"].float()).to(i["gate"].dtype),)


def no_ties(i: dict[str, Any]) -> Outputs:
    """Let the highest index win a tie."""
    v = i["logits"].shape[1]
    turned = {**i, "logits": i["logits"].flip(-1), "history": torch.where(i["history"] < 0, -1, v - 1 - i["history"])}
    return (v - 1 - run_eager("sample", turned, allocate=False)[0],)


WRONG: list[tuple[str, str, Way]] = [
    ("attn", "all", partial(attn_wrong, drop=1)),
    ("attn", "all", partial(attn_wrong, more=1)),
    ("attn", "window", partial(attn_wrong, wider=1)),
    ("attn", "window", partial(attn_wrong, wider=-1)),
    ("attn", "no softcap", partial(attn_wrong, low=True)),
    ("prefill_attn", "all", partial(attn_wrong, drop=1)),
    ("prefill_attn", "window", partial(attn_wrong, wider=1)),
    ("rmsnorm", "all", centred),
    ("rope", "all", low_angle),
    ("swiglu", "all", silu_by_growth),
    ("sample", "all", no_ties),
]
APPLIES: dict[str, Callable[[Workload], bool]] = {
    "all": lambda w: True,
    "window": lambda w: bool(w.trait("window", 0)),
    "no softcap": lambda w: not w.trait("softcap", 0.0),
}


def refused_by(w: Workload, way: Way, *, first: str = "", with_baseline: bool = False) -> str:
    """Return the name of a case that refuses `way`, or ""; try the case `first` before the others."""
    op = OPS[w.op]
    for case in sorted(op.cases(w), key=lambda c: c.name != first):
        inputs = case.make(1)
        found = op.verify(inputs, way(inputs), run_eager(w.op, inputs, allocate=False) if with_baseline else None)
        if isinstance(found, Mismatch):
            return case.name
    return ""


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda n: f"{WRONG[n][0]}-{n}")
def test_a_wrong_way_is_refused_by_some_case(number: int) -> None:
    op, where, way = WRONG[number]
    concerned = [w for w in WORKLOADS if w.op == op and APPLIES[where](w)]
    assert concerned
    name = ""
    for w in concerned:  # the case that refused it at one workload most likely refuses it at the next
        name = refused_by(w, way, first=name)
        assert name, f"accepted at {w.key}"


@pytest.mark.parametrize("op", ["linear", "swiglu", "rmsnorm", "rope", "attn", "gate_up"])
@pytest.mark.parametrize("edit", [lambda y: y * 1.004, truncated], ids=["scaled by 1.004", "truncated"])
def test_a_bias_within_two_roundings_is_refused_by_comparison_with_the_baseline(
    op: str, edit: Callable[[Tensor], Tensor]
) -> None:
    for w in [w for w in WORKLOADS if w.op == op and w.dtype == "bf16"]:
        assert refused_by(w, then(op, edit), with_baseline=True), f"accepted at {w.key}"


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_case_whose_rows_may_be_2_31_elements_apart(op: str) -> None:
    w = next(w for w in WORKLOADS if w.op == op)
    case = far_case(OPS[op].cases(w))
    assert case is not None
    assert far_strides(case.make(1))
