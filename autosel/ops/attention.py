"""Common parts of the three attention ops: visibility, the float64 definition, the bound.

Query i of S is at position length - S + i and sees keys at positions <= its own and, with a window w, > its own - w. A
query that sees nothing (length 0, or fewer keys than queries) gives zeros. Scores are fp32; the probabilities may be
rounded to the dtype before they multiply V (as tensor cores and torch's CPU kernel do), normalised or not.

NaN: in q, it affects its row; in a visible k, every query that sees it; in a visible v, its channel. Keys that a query
does not see do not influence it if they are finite. An infinite score has no defined result (libraries differ).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import DTYPE_NAME, TINY_NORMAL, TINY_SUBNORMAL, U32, UNIT, Arg, Inputs, Op, TensorSpec
from autosel.ops.domains import Row
from autosel.ops.rounding import LAMBDA, flushable, matmul_error, stored
from autosel.values import Scalar, Workload

# Error of PyTorch's exponential on a CPU when P is stored in halves (ATen, vec: fexp_u20); measured: 2^-15.6.
HALF_EXP = 2.0**-15


def visible(s: int, keys: int, lengths: Tensor, window: int) -> Tensor:
    """Return bool [B, S, keys]: True if query i of batch row b sees key j."""
    query = lengths.long()[:, None] - s + torch.arange(s)
    key = torch.arange(keys)
    seen = key <= query[..., None]
    return seen & (key > query[..., None] - window) if window else seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Attention in float64. Rows are packed by KV head: [B, Hkv, G*S, ...]."""

    q: Tensor  # as given, packed
    scores: Tensor  # [B, Hkv, R, L], after softcap, -inf where unseen
    peak: Tensor  # [B, Hkv, R, 1], largest score (0 for a row that sees nothing)
    p: Tensor  # [B, Hkv, R, L]
    p_max: Tensor  # [B, Hkv, R, 1]
    seen: Tensor  # bool [B, 1, R, L]
    o: Tensor  # [B, Hkv, R, D]


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int, softcap: float) -> Exact:
    """Return float64 attention of q[B,Hq,S,D] over k/v[B,Hkv,L,D], lengths[B].

    The queries are the last S of `lengths` positions.
    """
    (b, hq, s, d), hkv, keys = q.shape, k.shape[1], k.shape[2]
    packed = q.reshape(b, hkv, hq // hkv * s, d)
    seen = visible(s, keys, lengths, window).repeat(1, hq // hkv, 1)[:, None]
    scores = packed.double() @ k.double().mT * (scale or d**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    alive = seen.any(-1, keepdim=True)
    peak = torch.where(alive, scores.amax(-1, keepdim=True), 0.0)
    weights = torch.where(seen, (scores - peak).exp(), 0.0)
    total = torch.where(alive, weights.sum(-1, keepdim=True), 1.0)
    p = weights / total
    return Exact(q=packed, scores=scores, peak=peak, p=p, p_max=p.amax(-1, keepdim=True), seen=seen, o=p @ v.double())


def unpack(rows: Tensor, shape: torch.Size) -> Tensor:
    """Reshape [B, Hkv, G*S, D] to q's [B, Hq, S, D]."""
    return rows.reshape(shape)


def error_bound(e: Exact, k: Tensor, v: Tensor, scale: float, folded: Tensor | float = 0.0) -> Tensor:
    """Return the bound [B, Hkv, R, D]: score errors through the softmax, rounded P, fp32 sums, one store.

    `folded` is an additional error of q . k before scaling.
    """
    dtype, d, keys = DTYPE_NAME[v.dtype], k.shape[-1], k.shape[2]
    # A score has its dot product's error (softcap only shrinks it) and a few fp32 roundings of s, max and exp.
    score = (matmul_error(e.q, k) + folded) * (scale or d**-0.5)
    score = score + 8 * U32 * (torch.where(e.seen, e.scores.abs(), 0.0) + e.peak.abs())
    contested = _contested(e, score, v)
    score = torch.where(e.p > 0, score, 0.0)
    # do = sum p e (v - o) <= sqrt(sum p e^2) * sqrt(sum p (v - o)^2), by Cauchy-Schwarz; exp() where e is not small.
    v64, v_abs = v.double(), v.double().abs()
    spread = (e.p @ v64.square() - e.o.square()).clamp_min(0).sqrt()
    moved = (e.p * score.expm1().square()).sum(-1, keepdim=True).sqrt() * (e.p * score).sum(-1, keepdim=True).exp()
    weighted = e.p @ v_abs
    # If all values are equal, no error of a score matters, however large.
    error = torch.where(spread > 0, moved * spread, 0.0) + (2 * LAMBDA * math.sqrt(keys) + 8) * U32 * weighted
    error = error + 2 * keys * TINY_NORMAL["fp32"]  # products that underflow
    # P below the dtype's range (1 is its largest value before normalisation), and underflow of exp.
    floor = (TINY_SUBNORMAL[dtype] if dtype != "fp32" else 0.0) + TINY_NORMAL["fp32"]
    error = error + floor * e.p_max * (e.seen.double() @ v_abs)
    if dtype != "fp32":
        # P is rounded, then divided by the sum of the rounded values: sum p d (v - o), |d| <= u.
        error = error + (UNIT[dtype] + HALF_EXP) * (weighted + e.o.abs())
    v_flush = flushable(v)
    if v_flush.any():
        error = error + e.p @ v_flush
    return stored(e.o, error + contested, dtype)


# Score errors up to LARGE are small in the sense of Cauchy-Schwarz. A weight of exp(-FAR) is nothing.
LARGE, FAR = 0.5, 40.0


def _contested(e: Exact, score: Tensor, v: Tensor) -> Tensor:
    """Return what a row may change because errors of scores decide which key is the largest; float64 [B, Hkv, R, D].

    Scores of 10^13 have errors of 10^6 in fp32. Keys whose scores are closer than that may take any share, also keys
    whose exact share is below 10^-300: the result lies anywhere between their values.
    """
    most = torch.where(e.seen, score, 0.0).amax(-1, keepdim=True)
    reach = e.seen & (e.peak - e.scores <= score + most + FAR)
    rows = (most > LARGE) & (reach.sum(-1, keepdim=True) > 1)
    if not rows.any():
        return torch.zeros_like(e.o)
    among = (reach & rows).any(-2)[..., None]
    high = v.double().masked_fill(~among, -math.inf).amax(-2, keepdim=True)
    low = v.double().masked_fill(~among, math.inf).amin(-2, keepdim=True)
    width = (high - low).nan_to_num(0.0, posinf=math.inf).clamp_min(0.0)
    return torch.where(rows, width, 0.0)


def keys_read(s: int, length: int, window: int) -> int:
    """Return the number of keys that any of the last S queries sees."""
    return min(length, window + s - 1) if window else length


def pairs_seen(s: int, length: int, window: int) -> int:
    """Return the number of visible (query, key) pairs."""
    total = 0
    for i in range(max(0, s - length), s):
        at = length - s + i + 1
        total += min(at, window) if window else at
    return total


# --- the ops ----------------------------------------------------------------------------------------------------------

SETTINGS = (
    Arg(name="scale", kind="float", default=0.0),
    Arg(name="window", kind="int", default=0),
    Arg(name="softcap", kind="float", default=0.0),
)
QUIET = ("plain", "same rows", "shared prefix", "shared sum", "positive", "negative")  # no weight is zero in fp32
ALIKE = ("same rows", "shared prefix")


class AttentionOp(Op):
    """Common base of the attention ops. `values` names the operand with the values."""

    output_names = ("o",)
    trait_defaults = {"window": 0, "softcap": 0.0}
    values: ClassVar[str] = "v"

    def affordable(self, w: Workload) -> bool:
        """Return True if the reference is small: it sees every key, and has a dozen float64 operations for each
        score.
        """
        keys = dict(w.dims).get("L", w["S"])
        cache, scores = w["B"] * w["Hkv"] * keys * w["D"], w["B"] * w["Hq"] * w["S"] * keys
        return cache <= 100_000 and scores <= 20_000

    def admits(self, row: Row) -> bool:
        """Refuse combinations without a defined result or bound.

        With scores that span more than fp32's range, a NaN or infinity could have weight zero for one kernel and a tiny
        weight for another. Equal values with equal scores round equally at each key, beyond a bound of independent
        roundings.
        """
        scores = [row[n].name for n in ("q", "k", "k_pages") if n in row]
        v = row.get(self.values)
        if v is None:
            return True
        if v.name in ALIKE and any(name not in QUIET or name in ALIKE for name in scores):
            return False
        return not v.special or all(name in QUIET for name in scores)

    def settings(self, take: Binder) -> dict[str, Scalar]:
        """Check scale, window and softcap; return the traits among them."""
        take.number("scale", 0.0, low=0.0)
        window, softcap = take.number("window", 0, low=0), take.number("softcap", 0.0, low=0.0)
        return {"window": int(window), "softcap": float(softcap)}

    def drawn_settings(self, w: Workload) -> dict[str, Any]:
        """Return the workload's scale, window and softcap."""
        return {"scale": 0.0, "window": int(w.trait("window", 0)), "softcap": float(w.trait("softcap", 0.0))}

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="o", shape=(w["B"], w["Hq"], w["S"], w["D"]), dtype=w.dtype),)

    @abstractmethod
    def _exact(self, inputs: Inputs) -> tuple[Exact, Any, Any]:
        """Return the result, and the keys and values in use."""

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return (unpack(self._exact(inputs)[0].o, inputs["q"].shape),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (unpack(error_bound(*self._exact(inputs), inputs["scale"]), inputs["q"].shape),)
