"""sample    repetition penalty, temperature, top_k, top_p; then the token whose interval of cumulative probability
          holds `uniform`          logits[B,V], history[B,L] (-1: empty), a row's settings [B] each -> token[B]

bytes     b B V + 8 B L + 28 B (b = bytes a logit)      FLOPs   6 B V
roofline  V=128256, B=1, bf16 on an H200 (4.3 TB/s estimated): 0.26 MB, 60 ns; the actual cost is up to 20 passes of one
          SM over a row of 4 V bytes in L2 (74 GB/s estimated): 0.14 ms with top_k and top_p, a quarter of it without
knobs     none: one program per row, because its passes depend on each other and programs cannot wait for each other
source    No sort: the k-th largest score, and the score at which the probability reaches p, are found four bits per
          pass, as the largest threshold that enough tokens (enough probability) reach. Scores follow the op's
          definition: a token is penalised once, however often it occurs. Equal scores are ordered by index.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.common import NOWHERE, better, empty, exactly, partials, refuse, together, top

BLOCK = 1024  # one score per thread: sixteen levels of each take half of its registers
WAYS = tl.constexpr(16)
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _key(score):
    """Return int32 keys in the order of the scores; both zeros have the same key."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(scores, at, V):
    return tl.load(scores + at, mask=at < V, other=float("-inf"))


@triton.jit
def _prepare(logits, history, scores, V, L, penalty, divisor, BLOCK: tl.constexpr):
    """Store scores = penalised logits / divisor. Both halves start from the logits: repeats are penalised once."""
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        raw = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
        tl.store(scores + at, tl.div_rn(raw, divisor), mask=at < V)
    tl.debug_barrier()
    for start in tl.range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = tl.load(history + at, mask=at < L, other=-1)
        known = (seen >= 0) & (seen < V)
        raw = tl.load(logits + seen, mask=known, other=0.0).to(tl.float32)
        penalised = tl.where(raw > 0, tl.div_rn(raw, penalty), raw * penalty)
        tl.store(scores + seen, tl.div_rn(penalised, divisor), mask=known)
    tl.debug_barrier()


@triton.jit
def _largest(scores, V, BLOCK: tl.constexpr):
    """Return the largest score and the lowest index that has it."""
    best, where = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), NOWHERE, tl.int32)
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        fresh = (at < V) & (where == NOWHERE)
        best, later = better(_load(scores, at, V), at, best, where)
        where = tl.where(fresh, at, later)
    value, index = top(best[:, None], where[:, None])
    return tl.max(value, 0), tl.min(index, 0)


@triton.jit
def _threshold(scores, V, peak, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key that `wanted` tokens (COUNT), or tokens of total weight `wanted`, reach or exceed."""
    base = tl.zeros((1,), tl.int32) + LOWEST
    way = tl.arange(0, WAYS)
    for step in tl.static_range(8):
        levels = base + way * (1 << (28 - 4 * step))
        reached = tl.zeros((WAYS,), tl.float32)
        for start in tl.range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            score = _load(scores, at, V)
            weight = (at < V).to(tl.float32)
            if not COUNT:
                weight = tl.exp(score - peak)
            reached += tl.sum(tl.where(_key(score)[:, None] >= levels[None, :], weight[:, None], 0.0), 0)
        chosen = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), 0) - 1, 0)
        base += chosen * (1 << (28 - 4 * step))
    return tl.max(base, 0)


@triton.jit
def _above(scores, V, peak, key, BLOCK: tl.constexpr):
    """Return the number and the weight of the tokens above the key, and the weight of one token at it (0 if none)."""
    many, heavy, one = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = _load(scores, at, V)
        weight, its = tl.exp(score - peak), _key(score)
        higher = (at < V) & (its > key)
        many += higher.to(tl.float32)
        heavy += tl.where(higher, weight, 0.0)
        one = tl.where((at < V) & (its == key), weight, one)
    return tl.sum(many, 0), tl.sum(heavy, 0), tl.max(one, 0)


@triton.jit
def _draw(scores, V, peak, key, ties, target, BLOCK: tl.constexpr):
    """Return the first token, in index order, at which the weight of the kept tokens passes `target`.

    Kept: all tokens above the key, and the first `ties` of those at it. If rounding puts the target past the last
    token, that one is returned.
    """
    found = tl.full((1,), NOWHERE, tl.int32)
    last = tl.zeros((1,), tl.int32)
    passed = tl.zeros((1,), tl.float32)
    equal = tl.zeros((1,), tl.float32)
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = _load(scores, at, V)
        its = _key(score)
        tied = (at < V) & (its == key)
        rank = equal + tl.cumsum(tied.to(tl.float32), 0)
        kept = (at < V) & ((its > key) | (tied & (rank <= ties)))
        weight = tl.where(kept, tl.exp(score - peak), 0.0)
        reached = passed + tl.cumsum(weight, 0)
        hit = (reached > target) & (weight > 0)
        found = tl.minimum(found, tl.min(tl.where(hit, at, NOWHERE), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        passed += tl.sum(weight, 0)
        equal += tl.sum(tied.to(tl.float32), 0)
    return tl.where(found == NOWHERE, last, found)


@triton.jit(
    do_not_specialize=["L", "stride_h"],
    do_not_specialize_on_alignment=["history", "temperature", "top_k", "top_p", "penalty", "uniform", "token"],
)
def _sample(
    logits, history, temperature, top_k, top_p, penalty, uniform, token, scores, V, L, stride_l, stride_h,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_l
    scores += row * V
    heat = tl.load(temperature + row)
    drawn = heat > 0
    _prepare(logits, history + row * stride_h, scores, V, L, tl.load(penalty + row), tl.where(drawn, heat, 1.0), BLOCK)
    peak, first = _largest(scores, V, BLOCK)
    picked = first + tl.zeros((1,), tl.int32)
    if drawn:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        key, ties = tl.zeros((), tl.int32) + LOWEST, tl.zeros((), tl.float32) + V
        if (k > 0) & (k < V):
            key = _threshold(scores, V, peak, k.to(tl.float32), True, BLOCK)
        many, heavy, one = _above(scores, V, peak, key, BLOCK)
        if (k > 0) & (k < V):
            ties = k.to(tl.float32) - many
        total = heavy + tl.where(one > 0, ties * one, 0.0)
        if p < 1.0:
            wanted = tl.maximum(p * total, 1e-30)
            at_p = _threshold(scores, V, peak, wanted, False, BLOCK)
            if at_p >= key:
                many, heavy, one = _above(scores, V, peak, at_p, BLOCK)
                needed = tl.maximum(tl.ceil((wanted - heavy) / tl.maximum(one, 1.2e-38)), 1.0)
                ties = tl.where(at_p == key, tl.minimum(ties, needed), needed)
                key = at_p
                total = heavy + tl.where(one > 0, ties * one, 0.0)
        picked = _draw(scores, V, peak, key, ties, tl.load(uniform + row) * total, BLOCK)
    tl.store(token + row + tl.arange(0, 1), tl.minimum(tl.maximum(picked, 0), V - 1).to(tl.int64))


def sample(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token=None):
    batch, v = logits.shape
    if token is None:
        token = empty((batch,), logits, torch.int64)
    together(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token)
    if v > NOWHERE.value:
        refuse(f"sample takes a vocabulary up to {NOWHERE.value}")
    exactly("history", history, (batch, *history.shape[-1:]), torch.int64)
    exactly("temperature", temperature, (batch,), torch.float32)
    exactly("top_k", top_k, (batch,), torch.int32)
    exactly("top_p", top_p, (batch,), torch.float32)
    exactly("repetition_penalty", repetition_penalty, (batch,), torch.float32)
    exactly("uniform", uniform, (batch,), torch.float32)
    exactly("token", token, (batch,), torch.int64)
    grid = (batch,)
    _sample[grid](
        logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token, partials(logits, batch * v), v,
        history.shape[1], logits.stride(0), history.stride(0), BLOCK=BLOCK, num_warps=32, enable_fp_fusion=True,
    )  # fmt: skip
    return token
