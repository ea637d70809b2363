"""Judge a result against a float64 reference: used by parity, by the checks during races, and by the runtime guard.

A result is accepted only if (e) type, shape and dtype are exact, (d) the NaN/Inf pattern is the reference's, (a)
*every* element is within its bound (no match ratio), and, compared with a baseline that is itself right, (b) the RMS
error is at most twice the baseline's and (c) the result is not biased. Letters as in research/method.md section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosel.ops.dtypes import DTYPE_NAME, U32, UNIT

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first check that a result fails, with the element that fails worst."""

    check: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A right result; `worst` is the largest error divided by its bound."""

    worst: float


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes as integers, so that NaN equals itself and 0 differs from -0."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def compare(
    got: Sequence[Tensor],
    reference: Sequence[Tensor],
    bound: Sequence[Tensor],
    baseline: Sequence[Tensor] | None = None,
) -> Match | Mismatch:
    """Check every output of a float-valued op. Return the first failed check, else the worst error / bound."""
    worst = 0.0
    for index, (g, ref, tol) in enumerate(zip(got, reference, bound, strict=True)):
        if torch.equal(g.double(), ref):  # exact, for example a copy
            continue
        found = _pattern(g, ref) or _elements(g, ref, tol)
        if found is None and baseline is not None:
            found = _rms_and_bias(g, ref, tol, baseline[index])
        if found is not None:
            return found
        worst = max(worst, _ratio(g, ref, tol).max().item() if ref.numel() else 0.0)
    return Match(worst=worst)


def _mismatch(check: str, reason: str, **evidence: object) -> Mismatch:
    return Mismatch(check=check, reason=reason, evidence=evidence)


def _pattern(got: Tensor, ref: Tensor) -> Mismatch | None:
    """(d) Check that NaN occurs exactly where the reference has NaN, and Inf with the same sign."""
    g = got.double()
    if got.dtype != torch.float64:
        # A finite float64 reference beyond the output dtype's range rounds to Inf, which is then right.
        rounded = ref.to(got.dtype).double()
        ref = torch.where(rounded.isinf(), rounded, ref)
    wrong = (g.isnan() != ref.isnan()) | (g.isinf() != ref.isinf()) | (g.isinf() & (g != ref))
    if not wrong.any():
        return None
    where = _first(wrong)
    return _mismatch(
        "nan_pattern",
        f"element {list(where)}: got {g[where].item()}, reference {ref[where].item()}",
        index=list(where),
        got=str(g[where].item()),
        reference=str(ref[where].item()),
        wrong_elements=int(wrong.sum()),
    )


def _ratio(got: Tensor, ref: Tensor, tol: Tensor) -> Tensor:
    error = (got.double() - ref).abs()
    # A zero error needs no allowance; a NaN bound allows nothing.
    ratio = torch.where(error == 0, 0.0, error / tol).nan_to_num(nan=math.inf, posinf=math.inf)
    # Both infinite (same sign, checked before) or both NaN: no error.
    return torch.where(ref.isfinite() & got.double().isfinite(), ratio, 0.0)


def _elements(got: Tensor, ref: Tensor, tol: Tensor) -> Mismatch | None:
    """(a) Check that every element is within its own bound."""
    if not ref.numel():
        return None
    ratio = _ratio(got, ref, tol)
    worst = int(ratio.argmax())
    if ratio.flatten()[worst] <= 1.0:
        return None
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
    g, r, t = got[where].item(), ref[where].item(), tol[where].item()
    digits = next((n for n in (6, 9) if f"{g:.{n}g}" != f"{r:.{n}g}"), 17)
    return _mismatch(
        "elements",
        f"element {list(where)}: got {g:.{digits}g}, reference {r:.{digits}g}, allowed ±{t:.3g}",
        index=list(where),
        got=g,
        reference=r,
        allowed=t,
        error_over_bound=ratio.flatten()[worst].item(),
        wrong_elements=int((ratio > 1.0).sum()),
        elements=ratio.numel(),
    )


def _rms_and_bias(got: Tensor, ref: Tensor, tol: Tensor, base: Tensor) -> Mismatch | None:
    """Check (b) an RMS error of at most twice the baseline's plus a tenth of a rounding, (c) no bias beyond the
    baseline's.

    Elements whose bound reaches their value (flushed to zero, or cancelled) are ignored: they say nothing about
    precision. If the result is as precise as the sums behind it, the order alone makes one right kernel's error several
    times another's and shifts whole rows, so an eighth of the bound is allowed. A quarter of a rounding of bias is
    allowed because bf16 has only 128 significands: rounding x times a row's common factor has a bias of up to 0.2 of a
    rounding (measured); truncation, which (c) must detect, has 0.7.
    """
    telling = ref.isfinite() & got.double().isfinite() & base.double().isfinite() & (tol < ref.abs())
    y, c, b = ref[telling], got.double()[telling], base.double()[telling]
    if y.numel() < 64:  # too few elements for a meaningful average
        return None
    u_out = UNIT[DTYPE_NAME[got.dtype]]
    rms_y, rmse, rmse_b = (v.square().mean().sqrt().item() for v in (y, c - y, b - y))
    order = tol[telling].square().mean().sqrt().item() / 8 if u_out <= U32 else 0.0
    energy = y.square().sum().item()  # above zero: each of these elements exceeds its bound
    # The standard deviation of a sum of uniform roundings (variance u^2/3), relative to the energy. It matters if a few
    # large values carry the energy. Their RMS has 0.45 of it, and four of them are allowed.
    by_weight = u_out / math.sqrt(3) * y.pow(4).sum().sqrt().item() / energy
    if rmse > 2 * rmse_b + max(u_out / 10 * rms_y, order) + 4 * 0.45 * by_weight * rms_y:
        reason = f"RMS error {rmse:.3g} against the baseline's {rmse_b:.3g}"
        return _mismatch("rmse", reason, rmse=rmse, baseline=rmse_b)
    # If one value fills a row, correct rounding shifts the row: the reference's own loss by rounding is allowed too.
    rounded = ref.to(got.dtype).double()[telling]
    bias, bias_b, bias_r = (((v - y) * y).sum().item() / energy for v in (c, b, rounded))
    # Four standard deviations of the bias that unbiased roundings have by chance, by the largest of three estimates:
    # from the baseline's errors, from its errors by row (a rounded softmax weight shifts its whole row), and by weight.
    by_errors = rmse_b / (rms_y * math.sqrt(y.numel()))
    of_rows = torch.where(telling, (base.double() - ref) * ref, 0.0).reshape(-1, ref.shape[-1]).sum(-1)
    by_rows = of_rows.square().sum().sqrt().item() / energy
    allowed = max(abs(bias_b), abs(bias_r)) + 4 * max(by_errors, by_rows, by_weight) + max(u_out / 4, order / rms_y)
    if abs(bias) > allowed:
        return _mismatch("bias", f"bias {bias:.3g}, allowed ±{allowed:.3g}", bias=bias, allowed=allowed)
    return None


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])
