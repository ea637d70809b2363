"""Judge a served result: the whole of it against the baseline's, and some rows against float64.

The baseline is a second opinion, not the truth: if the two differ more than usual, float64 decides, on the whole result
if that is affordable. A failed check gives a Finding, which can be applied to other results of the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel.guard.call import CheckedCall, Result
from autosel.ops.contract import DTYPE_NAME, U32, UNIT, Mismatch, Rows
from autosel.ops.rounding import LAMBDA
from autosel.ops.stored import leaves, mapped

ROWS = 4
WHOLE_BYTES = 64 << 20  # most bytes that an op may move and copy for float64 of the whole result after a suspicion
MORE_ROWS = 4  # number of samples of rows otherwise
UNUSUAL = 2.0  # times the largest difference that was found right; only decides if float64 is used
FEW_ULPS = 8.0
FORGET = 0.9  # per check: one call with outliers must not hide the baseline's differences for ever

Check = Callable[[Sequence[Tensor]], Mismatch | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """A mismatch, and its check, which can be applied to any result of the same call."""

    mismatch: Mismatch
    check: Check


class Judge:
    """Judge of one served arm's results, which learns how far right results are from the baseline's."""

    def __init__(self) -> None:
        self.usual = 0.0

    def look(
        self, call: CheckedCall, candidate: Result, baseline: Result, seed: int, *, deep: bool
    ) -> WrongResult | None:
        """Return the first check that the candidate's result fails. `deep` also checks float64 rows without a
        suspicion.
        """
        if candidate.spoilt:
            evidence = {"input": candidate.spoilt}
            mismatch = Mismatch(check="inputs", reason=f"it wrote into its input {candidate.spoilt}", evidence=evidence)
            return WrongResult(mismatch=mismatch, check=lambda _: None)
        base = baseline.outputs
        with torch.device("cpu"):  # float64 is computed there, whatever the process's default device
            found = _first([lambda o: call.same_form(o, base), lambda o: more_nonfinite(o, base)], candidate.outputs)
            if found is not None:
                return found
            distance = apart(candidate.outputs, base)
            unusual = distance > UNUSUAL * self.usual + FEW_ULPS
            checks: list[Check] = []
            if deep:
                checks += hull(call)
            if deep or unusual:
                checks.append(_against_float64(call, call.rows(ROWS, seed)))
            if unusual:
                checks += _everywhere(call, seed)
            found = _first(checks, candidate.outputs)
        if found is None and (deep or unusual) and math.isfinite(distance):
            self.usual = max(FORGET * self.usual, distance)
        return found


def _first(checks: Sequence[Check], outputs: Sequence[Tensor]) -> WrongResult | None:
    for check in checks:
        mismatch = check(outputs)
        if mismatch is not None:
            return WrongResult(mismatch=mismatch, check=check)
    return None


# --- against float64 ----------------------------------------------------------------------------------------------


def _against_float64(call: CheckedCall, rows: Rows) -> Check:
    """Return a check without the baseline's statistics.

    RMS error and bias are tests at four standard deviations. Parity uses them once; a million shadow checks would fail
    by chance.
    """
    inputs = {name: mapped(value, Tensor.cpu) for name, value in rows.inputs.items()}

    def check(outputs: Sequence[Tensor]) -> Mismatch | None:
        with torch.no_grad():
            found = call.op.verify(inputs, [o.cpu() for o in rows.pick(outputs)])
        return found if isinstance(found, Mismatch) else None

    return check


def _everywhere(call: CheckedCall, seed: int) -> list[Check]:
    """Return checks of the whole result.

    For an in-place op that is everything kept, which is little. Otherwise it is all of the result, except for a cache
    whose pool fills the device's memory and of which the call reads only some pages.
    """
    whole = call.whole()
    copied = sum(tensor.nbytes for tensor in leaves(whole.inputs).values())
    if call.written is not None or max(copied, call.op.bytes_moved(call.workload)) <= WHOLE_BYTES:
        return [_against_float64(call, whole)]
    return [_against_float64(call, call.rows(ROWS, seed + 1 + i)) for i in range(MORE_ROWS)]


# --- against the baseline -----------------------------------------------------------------------------------------


def apart(outputs: Sequence[Tensor], base: Sequence[Tensor]) -> float:
    """Return the largest difference in units of the largest value's roundoff; inf if integers differ."""
    most = 0.0
    for got, ref in zip(outputs, base, strict=True):
        if not got.is_floating_point():
            most = max(most, 0.0 if torch.equal(got, ref) else math.inf)
            continue
        if not got.numel():
            continue
        g, r = got.detach().float(), ref.detach().float()
        difference = (g - r).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()  # more_nonfinite checks NaN and Inf
        largest = r.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        unit = UNIT[DTYPE_NAME[got.dtype]] * largest
        most = max(most, difference / unit if unit else (math.inf if difference else 0.0))
    return most


def more_nonfinite(outputs: Sequence[Tensor], base: Sequence[Tensor]) -> Mismatch | None:
    """Find NaN or Inf where the baseline has a number well inside the dtype's range, or another NaN pattern."""
    for index, (got, ref) in enumerate(zip(outputs, base, strict=True)):
        if not got.is_floating_point():
            continue
        wild = ~got.isfinite()
        if not wild.any():
            continue
        wrong = wild & ref.isfinite() & (ref.abs() < torch.finfo(ref.dtype).max / 2)
        if wrong.any():
            where = [int(i) for i in wrong.nonzero()[0]]
            g, r = got[tuple(where)].item(), ref[tuple(where)].item()
            reason = f"element {where}: {g} where the baseline gives {r:.6g} ({int(wrong.sum())} such elements)"
            evidence = {"output": index, "index": where, "got": str(g), "baseline": r, "elements": int(wrong.sum())}
            return Mismatch(check="nonfinite", reason=reason, evidence=evidence)
    return None


# --- attention ----------------------------------------------------------------------------------------------------

_VALUES = {"attn": "v", "prefill_attn": "v"}  # ops whose values are available for all heads; [B, Hkv, keys, D]


def hull(call: CheckedCall) -> list[Check]:
    """Return the check that attention averages values.

    Each channel of o is between the smallest and the largest of V, or 0 if a query sees nothing. It costs one pass over
    V for all heads, and is skipped if V has NaN or Inf.
    """
    name = _VALUES.get(call.op.name)
    if name is None:
        return []

    def check(outputs: Sequence[Tensor]) -> Mismatch | None:
        o, v = outputs[0].detach(), call.inputs[name].detach()
        v = v[:, :, : call.inputs.get("max_len") or v.shape[2]]
        low, high = (t.float().repeat_interleave(o.shape[1] // v.shape[1], 1) for t in (v.amin(2), v.amax(2)))
        if not (low.isfinite().all() and high.isfinite().all()):
            return None
        # The contract's roundings (ops/attention.py) at their largest: fp32 sums over the keys, rounded P, the store.
        relative = (2 * LAMBDA * math.sqrt(v.shape[2]) + 8) * U32 + 3 * UNIT[DTYPE_NAME[o.dtype]]
        room = relative * torch.maximum(low.abs(), high.abs())
        low, high = (low.clamp_max(0) - room)[:, :, None], (high.clamp_min(0) + room)[:, :, None]
        outside = (o.float() < low) | (o.float() > high)
        if not outside.any():
            return None
        where = [int(i) for i in outside.nonzero()[0]]
        value = o[tuple(where)].item()
        reason = f"element {where}: {value:.6g} is outside of V's channel"
        return Mismatch(check="hull", reason=reason, evidence={"index": where, "got": value})

    return [check]
