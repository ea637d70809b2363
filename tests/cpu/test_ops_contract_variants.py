"""Test that the bounds are fair: every correct way to compute an op passes every hostile case; wrong ways fail some.

Correct ways: PyTorch's eager composition (the baseline), everything in fp32 with one rounding, the work split and
merged, and subnormal inputs flushed to zero. Each op is tested in each dtype and with several traits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
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
from autosel.parity.check import far_case
from autosel.parity.stage import far_strides
from autosel.values import Workload
from tests import drawn

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Outputs = tuple[Tensor, ...]
Way = Callable[[dict[str, Any]], Outputs]
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
    contract = OPS[op]
    inout = {a.name for a in contract.args if a.role == "inout"}
    arguments = [v.clone() if n in inout else v for n, v in ((a.name, inputs[a.name]) for a in contract.args)]
    outputs = contract.allocate(contract.workload_of(inputs), math.nan)
    made = getattr(eager, op)(*arguments, *(outputs if allocate else [None] * len(outputs)))
    return made if isinstance(made, tuple) else (made,)


# --- other correct ways ----------------------------------------------------------------------------------------------


def linear_32(i: dict[str, Any]) -> Outputs:
    y = i["x"].float() @ i["w"].float().T
    for extra in (i["bias"], i["residual"]):
        y = y if extra is None else y + extra.float()
    return (y.to(i["x"].dtype),)


def linear_split_k(i: dict[str, Any]) -> Outputs:
    blocks = (i[n].flip(-1).float().split(96, 1) for n in ("x", "w"))
    parts = [a @ b.T for a, b in zip(*blocks, strict=True)]
    y = sum(reversed(parts), torch.zeros(()))
    for extra in (i["residual"], i["bias"]):
        y = y if extra is None else y + extra.float()
    return (y.to(i["x"].dtype),)


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


def seen_by(i: dict[str, Any], keys: int, *, shift: int = 0, window_shift: int = 0) -> Tensor:
    """Return bool [B, 1, S, keys]; shifts other than 0 are mistakes."""
    s, b, lengths = i["q"].shape[2], i["q"].shape[0], i.get("lengths")
    lengths = torch.full((b,), i.get("max_len", keys)) if lengths is None else lengths.long()
    query = (lengths[:, None] - s + torch.arange(s))[..., None]
    key = torch.arange(keys)
    seen = (key <= query + shift) & (query >= 0)
    if i["window"]:
        seen &= key > query - i["window"] - window_shift
    return seen[:, None]


def softmax_parts(i: dict[str, Any], k: Tensor, v: Tensor, seen: Tensor, p_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return maximum, sum and unnormalised output of some keys, in fp32 with P stored in p_dtype."""
    q, group = i["q"].float(), i["q"].shape[1] // k.shape[1]
    scores = q @ k.float().repeat_interleave(group, 1).mT * (i["scale"] or q.shape[-1] ** -0.5)
    if i["softcap"]:
        scores = i["softcap"] * torch.tanh(scores / i["softcap"])
    scores = scores.masked_fill(~seen, -math.inf)
    peak = scores.amax(-1, keepdim=True)
    p = torch.where(seen, (scores - peak).exp(), 0.0)
    return peak, p.sum(-1, keepdim=True), p.to(p_dtype).float() @ v.float().repeat_interleave(group, 1)


def attn_over(i: dict[str, Any], k: Tensor, v: Tensor, seen: Tensor, *, split: int, p_dtype: torch.dtype) -> Outputs:
    """Split along the keys; each part has its own maximum, and parts are merged like in flash-decoding."""
    parts = [
        softmax_parts(i, k[:, :, a : a + split], v[:, :, a : a + split], seen[..., a : a + split], p_dtype)
        for a in range(0, k.shape[2], split)
    ]
    peak = torch.stack([p[0] for p in parts]).amax(0)
    merged, total = torch.zeros(()), torch.zeros(())
    for m, length, o in parts:
        weight = torch.where(m == -math.inf, 0.0, (m - peak).exp())
        merged, total = merged + weight * o, total + weight * length
    dead = ~seen.any(-1, keepdim=True)
    return ((merged / torch.where(dead, 1.0, total)).masked_fill(dead, 0.0).to(i["q"].dtype),)


def cache_of(i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "k_pages" in i:
        return tuple(gather(i[n], i["block_table"], i["lengths"], i["max_len"]) for n in ("k_pages", "v_pages"))  # type: ignore[return-value]
    keys = i.get("max_len", i["k"].shape[2])
    return i["k"][:, :, :keys], i["v"][:, :, :keys]


def attn_32(i: dict[str, Any]) -> Outputs:
    k, v = cache_of(i)
    return attn_over(i, k, v, seen_by(i, k.shape[2]), split=k.shape[2], p_dtype=torch.float32)


def attn_split(i: dict[str, Any]) -> Outputs:
    k, v = cache_of(i)
    return attn_over(i, k, v, seen_by(i, k.shape[2]), split=40, p_dtype=torch.float32)


def attn_split_rounded_p(i: dict[str, Any]) -> Outputs:
    k, v = cache_of(i)
    return attn_over(i, k, v, seen_by(i, k.shape[2]), split=64, p_dtype=v.dtype)


def norm_32(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.float() + offset)


def rmsnorm_32(i: dict[str, Any]) -> Outputs:
    return (norm_32(*(i[n] for n in ("x", "weight", "eps", "offset"))).to(i["x"].dtype),)


def rmsnorm_stored_between(i: dict[str, Any]) -> Outputs:
    """Store the normalised value, then multiply it, as transformers does."""
    x, weight = i["x"], i["weight"].float() + i["offset"]
    normed = norm_32(x, torch.ones(x.shape[1]), i["eps"], 0.0).to(x.dtype)
    return ((normed.float() * weight).to(x.dtype),)


def rmsnorm_split(i: dict[str, Any]) -> Outputs:
    x = i["x"].float()
    energy = sum((part.square().sum(-1, keepdim=True) for part in reversed(x.split(48, 1))), torch.zeros(()))
    return ((x * (energy / x.shape[1] + i["eps"]).rsqrt() * (i["weight"].float() + i["offset"])).to(i["x"].dtype),)


def add_rmsnorm_32(i: dict[str, Any]) -> Outputs:
    x, r, dtype = i["x"].float(), i["residual"].float(), i["x"].dtype
    if i["sandwich"] == 1:
        y = norm_32(x, i["weight"], i["eps"], i["offset"])
        return y.to(dtype), (r + y).to(dtype)
    return norm_32(x + r, i["weight"], i["eps"], i["offset"]).to(dtype), (x + r).to(dtype)


def rope_32(i: dict[str, Any]) -> Outputs:
    angle = (i["positions"].float()[:, None] * i["inv_freq"])[:, None]
    return tuple(turn(i[n].float(), angle.cos(), angle.sin(), i["style"]).to(i[n].dtype) for n in ("q", "k"))


def turn(x: Tensor, cos: Tensor, sin: Tensor, style: int) -> Tensor:
    r = 2 * cos.shape[-1]
    y = x.clone()
    first, second = (slice(0, r, 2), slice(1, r, 2)) if style else (slice(0, r // 2), slice(r // 2, r))
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def swiglu_32(i: dict[str, Any]) -> Outputs:
    g = i["gate"].float()
    return ((g / (1 + (-g).exp()) * i["up"].float()).to(i["gate"].dtype),)


def geglu_32(i: dict[str, Any]) -> Outputs:
    g = i["gate"].float()
    a = F.gelu(g, approximate="tanh" if i["tanh"] else "none")
    return ((a * i["up"].float()).to(i["gate"].dtype),)


def add_rmsnorm_split(i: dict[str, Any]) -> Outputs:
    """Sum the squares by blocks, the last one first."""
    x, r, dtype = i["x"].float(), i["residual"].float(), i["x"].dtype
    normed = x if i["sandwich"] == 1 else x + r
    energy = sum((part.square().sum(-1, keepdim=True) for part in reversed(normed.split(48, 1))), torch.zeros(()))
    y = normed * (energy / x.shape[1] + i["eps"]).rsqrt() * (i["weight"].float() + i["offset"])
    return y.to(dtype), (r + y if i["sandwich"] == 1 else x + r).to(dtype)


def rope_complex(i: dict[str, Any]) -> Outputs:
    """Rotate pairs as complex numbers, one head at a time."""
    angle = i["positions"].float()[:, None] * i["inv_freq"]
    unit = torch.polar(torch.ones_like(angle), angle)
    return tuple(
        torch.stack([turn_complex(head, unit, i["style"]) for head in i[n].float().unbind(1)], 1).to(i[n].dtype)
        for n in ("q", "k")
    )


def turn_complex(x: Tensor, unit: Tensor, style: int) -> Tensor:
    r, y = 2 * unit.shape[-1], x.clone()
    pairs = x[..., :r].unflatten(-1, (-1, 2)) if style else x[..., :r].unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format)) * unit)
    y[..., :r] = (turned if style else turned.mT).flatten(-2)
    return y


def gated_by_columns(activation: Callable[[dict[str, Any], Tensor], Tensor]) -> Way:
    """Compute a few columns at a time, from the right."""

    def way(i: dict[str, Any]) -> Outputs:
        parts = zip(i["gate"].split(40, 1), i["up"].split(40, 1), strict=True)
        made = [(activation(i, g.float()) * u.float()).to(g.dtype) for g, u in reversed(list(parts))]
        return (torch.cat(made[::-1], 1),)

    way.__name__ = "gated_by_columns"
    return way


def kv_append_by_row(i: dict[str, Any]) -> Outputs:
    """Append one token of one head at a time."""
    caches = [i["k_cache"].clone(), i["v_cache"].clone()]
    for cache, new in zip(caches, (i["k"], i["v"]), strict=True):
        batch, heads, tokens, _ = new.shape
        for b in range(batch):
            for s in range(tokens):
                at = int(i["positions"][b]) + s
                table = i["block_table"]
                for h in range(heads):
                    if table is None:
                        cache[b, h, at] = new[b, h, s]
                    else:
                        page = int(table[b, at // cache.shape[1]])
                        cache[page, at % cache.shape[1], h] = new[b, h, s]
    return tuple(caches)


def lm_head_split_k(i: dict[str, Any]) -> Outputs:
    blocks = zip(i["x"].float().split(96, 1), i["w"].float().split(96, 1), strict=True)
    logits = sum((x @ w.T for x, w in reversed(list(blocks))), torch.zeros(()))
    return (logits.argmax(-1),) if i["greedy"] else (logits.to(i["x"].dtype),)


def norm_qkv_32(i: dict[str, Any]) -> Outputs:
    h = norm_32(i["x"], i["norm_weight"], i["eps"], i["offset"])
    return ((h @ i["w"].float().T).to(i["x"].dtype),)


def norm_qkv_late(i: dict[str, Any]) -> Outputs:
    """Apply the norm's weights while multiplying, and divide by the norm after the sum."""
    x = i["x"].float()
    rstd = (x.square().mean(-1, keepdim=True) + i["eps"]).rsqrt()
    return (((x * (i["norm_weight"].float() + i["offset"])) @ i["w"].float().T * rstd).to(i["x"].dtype),)


def gate_up_32(i: dict[str, Any]) -> Outputs:
    h = norm_32(i["x"], i["norm_weight"], i["eps"], i["offset"])
    gate, up = h @ i["w_gate"].float().T, h @ i["w_up"].float().T
    return ((eager.ACTIVATION[i["activation"]](gate) * up).to(i["x"].dtype),)


def gate_up_split(i: dict[str, Any]) -> Outputs:
    h = norm_32(i["x"], i["norm_weight"], i["eps"], i["offset"]).to(i["x"].dtype).float()
    products = [
        sum((a @ b.float().T for a, b in zip(h.split(64, 1), i[n].split(64, 1), strict=True)), torch.zeros(()))
        for n in ("w_gate", "w_up")
    ]
    return ((eager.ACTIVATION[i["activation"]](products[0]) * products[1]).to(i["x"].dtype),)


def lm_head_32(i: dict[str, Any]) -> Outputs:
    logits = torch.cat([i["x"].float() @ rows.float().T for rows in i["w"].split(100)], 1)
    return (logits.argmax(-1),) if i["greedy"] else (logits.to(i["x"].dtype),)


def sample_loop(i: dict[str, Any]) -> Outputs:
    """Sample one row at a time in fp32, without normalising, by iterating over the sorted tokens."""
    tokens = []
    for b in range(i["logits"].shape[0]):
        v = i["logits"][b].float().clone()
        for token in set(i["history"][b].tolist()) - {-1}:
            v[token] = v[token] / i["repetition_penalty"][b] if v[token] > 0 else v[token] * i["repetition_penalty"][b]
        if i["temperature"][b] == 0:
            tokens.append(int(v.argmax()))
            continue
        v = v * (1 / i["temperature"][b])
        order = v.sort(descending=True, stable=True).indices
        order = order[: int(i["top_k"][b])] if i["top_k"][b] > 0 else order
        w = (v[order] - v[order[0]]).exp()
        if i["top_p"][b] < 1:
            enough = w.cumsum(0) - w >= i["top_p"][b] * w.sum()
            enough[0] = False
            order, w = order[~enough], w[~enough]
        by_index = order.argsort()
        cumulative = w[by_index].cumsum(0)
        at = int((cumulative <= i["uniform"][b] * cumulative[-1]).sum())
        support = by_index[w[by_index] > 0]
        tokens.append(int(order[by_index[at]] if at < len(by_index) else order[support[-1]] if len(support) else 0))
    return (torch.tensor(tokens),)


WAYS: dict[str, tuple[Way, ...]] = {
    "linear": (linear_32, linear_split_k, linear_one_chain),
    "attn": (attn_32, attn_split, attn_split_rounded_p),
    "paged_attn": (attn_32, attn_split, attn_split_rounded_p),
    "prefill_attn": (attn_32, attn_split, attn_split_rounded_p),
    "kv_append": (kv_append_by_row,),
    "rmsnorm": (rmsnorm_32, rmsnorm_stored_between, rmsnorm_split),
    "add_rmsnorm": (add_rmsnorm_32, add_rmsnorm_split),
    "rope": (rope_32, rope_complex),
    "swiglu": (swiglu_32, gated_by_columns(lambda i, g: g * torch.sigmoid(g))),
    "geglu": (geglu_32, gated_by_columns(lambda i, g: F.gelu(g, approximate="tanh" if i["tanh"] else "none"))),
    "norm_qkv": (norm_qkv_32, norm_qkv_late),
    "gate_up": (gate_up_32, gate_up_split),
    "lm_head": (lm_head_32, lm_head_split_k),
    "sample": (sample_loop,),
}


def flushed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Flush subnormals of every tensor to zero, like vdpbf16ps."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

    def flush(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in names:
            return x
        return torch.where(x.abs().double() < TINY_NORMAL[names[x.dtype]], torch.zeros_like(x), x)

    return {n: flush(x) for n, x in inputs.items()}


def judge_of(op: Op, inputs: dict[str, Any]) -> Op:
    """Return a judge that computes the op's reference and bound for these inputs once."""
    once = copy.copy(op)
    reference = op.reference(inputs)
    bound = op.bound(inputs, reference)
    vars(once).update(reference=lambda _: reference, bound=lambda *_: bound)
    return once


def check_form(case: Case, inputs: dict[str, Any], w: Workload) -> None:
    """Check that a case is small, and has the workload that it declares."""
    assert OPS[w.op].workload_of(inputs) == case.workload
    assert case.workload.dtype == w.dtype
    moved = sum(v.numel() * v.element_size() for v in inputs.values() if isinstance(v, Tensor))
    assert moved <= 3 << 20, f"{case.name}: {moved} bytes"
    if w.op != "paged_attn":
        assert case.workload.traits == w.traits


@pytest.mark.parametrize("w", drawn.share(WORKLOADS, days=3), ids=lambda w: w.key)
def test_every_correct_way_passes_every_case_and_cases_are_small_and_distinct(w: Workload) -> None:
    """Run each workload in one dtype a day."""
    op, cases = OPS[w.op], OPS[w.op].cases(w)
    assert len({c.name for c in cases}) == len(cases)
    for case in cases:
        inputs = case.make(1)
        check_form(case, inputs, w)
        baseline = run_eager(w.op, inputs, allocate=True)
        results = {"eager": baseline, "eager, allocating": run_eager(w.op, inputs, allocate=False)}
        if w.op == "attn" and case.workload["S"] == 1:
            results["packed"] = (eager.attn_packed(*op.arguments(inputs)),)
        results |= {way.__name__: way(inputs) for way in WAYS[w.op]}
        if w.op != "kv_append":  # a copy copies subnormals too
            results["flushed"] = WAYS[w.op][0](flushed(inputs))
        judge = judge_of(op, inputs)
        for name, got in results.items():
            found = judge.verify(inputs, got)
            assert isinstance(found, Match), f"{name} refused on {case.name}: {found}"


ROWS_A_RUN = 45  # of about 200


@pytest.mark.parametrize("op", WAYS)
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
        results |= {way.__name__: way(inputs) for way in WAYS[op]}
        if op != "kv_append":  # a copy copies subnormals too
            results["flushed"] = WAYS[op][0](flushed(inputs))
        judge = judge_of(OPS[op], inputs)
        for name, got in results.items():
            found = judge.verify(inputs, got)
            assert isinstance(found, Match), f"{name} refused at {case.workload.key}: {case.covers}: {found}"


# --- wrong ways: rewritten arithmetic; autosel.testing.mutants derives those of changed operands and results ----------


def then(op: str, edit: Callable[[Tensor], Tensor]) -> Way:
    """Return the eager op with every output edited."""
    return lambda i: tuple(edit(y.clone()) for y in run_eager(op, i, allocate=False))


def truncated(y: Tensor) -> Tensor:
    """Round towards zero; the rounding direction is unknown afterwards, so any element may lose one step."""
    bits = y.view(torch.int16 if y.element_size() == 2 else torch.int32)
    return torch.where(y.abs() > 1e-3, bits - 1, bits).view(y.dtype)


def accumulate_low(i: dict[str, Any]) -> Outputs:
    """Keep the running sum in the dtype, 32 products at a time."""
    x, w = i["x"].float(), i["w"].float()
    y = torch.zeros(x.shape[0], w.shape[0], dtype=i["x"].dtype)
    for a in range(0, x.shape[1], 32):
        y = (y.float() + x[:, a : a + 32] @ w[:, a : a + 32].T).to(y.dtype)
    return (y,)


def attn_mask(shift: int, window_shift: int = 0) -> Way:
    def way(i: dict[str, Any]) -> Outputs:
        i = dict(i) | ({"max_len": min(i["max_len"] + shift, i["k"].shape[2])} if "max_len" in i and shift > 0 else {})
        k, v = cache_of(i)
        lengths = dict(i)
        if shift > 0 and i.get("lengths") is None and "max_len" in i:
            return attn_over(i, k, v, seen_by(i, k.shape[2]), split=64, p_dtype=torch.float32)
        seen = seen_by(lengths, k.shape[2], shift=shift, window_shift=window_shift)
        return attn_over(i, k, v, seen, split=64, p_dtype=torch.float32)

    return way


def attn_without_maximum(i: dict[str, Any]) -> Outputs:
    k, v = cache_of(i)
    group, seen = i["q"].shape[1] // k.shape[1], seen_by(i, k.shape[2])
    scores = i["q"].float() @ k.float().repeat_interleave(group, 1).mT * (i["scale"] or i["q"].shape[-1] ** -0.5)
    p = torch.where(seen, scores.exp(), 0.0)
    total = p.sum(-1, keepdim=True)
    o = p @ v.float().repeat_interleave(group, 1) / torch.where(seen.any(-1, keepdim=True), total, 1.0)
    return (o.to(i["q"].dtype),)


def attn_low_scores(i: dict[str, Any]) -> Outputs:
    """Store scores in bf16 before the softmax."""
    k, v = cache_of(i)
    group, seen = i["q"].shape[1] // k.shape[1], seen_by(i, k.shape[2])
    scores = i["q"].float() @ k.float().repeat_interleave(group, 1).mT * (i["scale"] or i["q"].shape[-1] ** -0.5)
    p = scores.bfloat16().float().masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return ((p @ v.float().repeat_interleave(group, 1)).to(v.dtype),)


def centred(i: dict[str, Any]) -> Outputs:
    x = i["x"].float()
    x = x - x.mean(-1, keepdim=True)
    return (norm_32(x, i["weight"], i["eps"], i["offset"]).to(i["x"].dtype),)


def low_angle(i: dict[str, Any]) -> Outputs:
    angle = (i["positions"].float()[:, None] * i["inv_freq"]).to(torch.bfloat16).float()[:, None]
    return tuple(turn(i[n].float(), angle.cos(), angle.sin(), i["style"]).to(i[n].dtype) for n in ("q", "k"))


def silu_by_growth(i: dict[str, Any]) -> Outputs:
    g = i["gate"].float()
    return ((g * (g.exp() / (1 + g.exp())) * i["up"].float()).to(i["gate"].dtype),)


def last_argmax(i: dict[str, Any]) -> Outputs:
    logits = i["x"].float() @ i["w"].float().T
    return (logits.shape[1] - 1 - logits.flip(-1).argmax(-1),)


def penalised_each_time(i: dict[str, Any]) -> Outputs:
    logits = i["logits"].float().clone()
    for b in range(logits.shape[0]):
        for token in i["history"][b].tolist():
            if token >= 0:
                p = i["repetition_penalty"][b]
                logits[b, token] = logits[b, token] / p if logits[b, token] > 0 else logits[b, token] * p
    ones = torch.ones_like(i["repetition_penalty"])
    return run_eager("sample", {**i, "logits": logits, "repetition_penalty": ones}, allocate=False)


def no_ties(i: dict[str, Any]) -> Outputs:
    """Let the highest index win a tie."""
    v = i["logits"].shape[1]
    turned = {**i, "logits": i["logits"].flip(-1), "history": torch.where(i["history"] < 0, -1, v - 1 - i["history"])}
    return (v - 1 - run_eager("sample", turned, allocate=False)[0],)


WRONG: list[tuple[str, str, Way]] = [
    ("linear", "half", accumulate_low),
    ("attn", "all", attn_mask(-1)),
    ("attn", "all", attn_mask(1)),
    ("attn", "window", attn_mask(0, 1)),
    ("attn", "window", attn_mask(0, -1)),
    ("attn", "no softcap", attn_without_maximum),
    ("attn", "no softcap", attn_low_scores),
    ("prefill_attn", "all", attn_mask(-1)),
    ("prefill_attn", "window", attn_mask(0, 1)),
    ("rmsnorm", "all", centred),
    ("rope", "all", low_angle),
    ("swiglu", "all", silu_by_growth),
    ("lm_head", "greedy", last_argmax),
    ("sample", "all", penalised_each_time),
    ("sample", "all", no_ties),
]
APPLIES: dict[str, Callable[[Workload], bool]] = {
    "all": lambda w: True,
    "half": lambda w: w.dtype != "fp32",
    "window": lambda w: bool(w.trait("window", 0)),
    "no softcap": lambda w: not w.trait("softcap", 0.0),
    "greedy": lambda w: bool(w.trait("greedy", 0)),
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
