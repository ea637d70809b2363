"""sample: one token per row from its logits, with explicit randomness.

In this order, in fp32: repetition penalty (once per distinct token of `history`, -1 = empty: a positive logit is
divided by it, another multiplied); temperature (0: greedy, the lowest index of the largest penalised logit, and the
rest is ignored); top_k (0: off) keeps the k largest; top_p (1: off) keeps, of those renormalised, the smallest set of
most probable tokens that reaches p, always at least one; ties go by lowest index. The kept tokens are renormalised, and
the token whose interval of cumulative probability (tokens in index order) contains `uniform` is returned. The caller
draws `uniform`, so the op is deterministic. -inf logits have probability 0; a row with a NaN or +inf logit, or with
only -inf, gives any token in range.

A token is judged by the float64 definition; what fp32 cannot decide stays open: membership within rounding of the top_k
or top_p edge, and a cumulative probability within its own error of `uniform`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from autosel.ops.arguments import Binder
from autosel.ops.contract import U32, Arg, Case, Inputs, Judge, Mismatch, Op, TensorSpec, row_by_row
from autosel.ops.domains import Domain, Level, layouts, shared_prefix, sizes, some_zeros, widths
from autosel.ops.draw import Change, Draw, case, offset_by_one, on, relayout, strided
from autosel.ops.rounding import LAMBDA, flushable
from autosel.values import DTYPE_BYTES, DTypeName, Workload

# --- domains ----------------------------------------------------------------------------------------------------------


def _settings_of(name: str, *values: float | None, more: Sequence[Level] = ()) -> Domain:
    """Return the domain of a setting: one value for all rows, or a value for each row. None means the drawn one."""

    def of(chosen: tuple[float, ...]) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            setting = inputs[name]
            setting.copy_(torch.tensor(chosen, dtype=setting.dtype)[draw.integers(0, len(chosen), len(setting))])
            if name == "repetition_penalty":
                _penalise_the_best(inputs)

        return change

    made = [Level(name="plain") if v is None else Level(name=f"{v:.6g}", edit=of((v,))) for v in values]
    known = tuple(v for v in values if v is not None)
    return Domain(kind="scalar", levels=lambda *_: [*made, Level(name="each row its own", edit=of(known)), *more])


def _penalise_the_best(inputs: dict[str, Any]) -> None:
    """Put each row's most probable token into its history, unless it is there or the history is empty, so that it
    matters.
    """
    history, best = inputs["history"], inputs["logits"].float().nan_to_num(0.0).argmax(-1)
    first = history[:, 0]
    missing = (first >= 0) & (history != best[:, None]).all(-1)
    first.copy_(torch.where(missing, best, first))


def _logit_levels(_: DTypeName, rng: Random) -> list[Level]:
    def masked(x: Tensor, draw: Draw) -> None:
        """Mask all but a few tokens, in secret places, sometimes including the last."""
        x.masked_fill_(draw.uniform(*x.shape) > 4 / x.shape[-1], float("-inf"))
        x[:, int(draw.integers(0, x.shape[-1], 1))] = 1.0

    def largest(x: Tensor, draw: Draw) -> None:
        """Put the largest logit of each row in a secret place of the second half."""
        at = draw.integers(x.shape[-1] // 2, x.shape[-1], x.shape[0])
        x[torch.arange(len(at)), at] = 25.0

    def near_the_end(x: Tensor, draw: Draw) -> None:
        x[:, -200:].abs_().add_(8.0)

    edits: tuple[tuple[str, Callable[[Tensor, Draw], Any]], ...] = (
        ("large", lambda x, _: x.mul_(200)),
        ("small", lambda x, _: x.mul_(0.01)),
        ("tiny", lambda x, _: x.mul_(2.0**-20)),
        ("negative", lambda x, _: x.abs_().neg_()),
        ("positive", lambda x, _: x.abs_()),
        ("ties", lambda x, _: x.copy_((x.float() / 2).round() * 2)),
        ("all equal", lambda x, _: x.fill_(0.75)),
        ("mostly -inf", masked),
        ("the largest in the second half", largest),
        ("the largest near the end", near_the_end),
        ("shared prefix", shared_prefix),
        ("zeros", some_zeros),
    )
    bad = tuple((str(v), float(v)) for v in ("nan", "inf"))

    def one(value: float) -> Callable[[Tensor, Draw], Any]:
        return lambda x, draw: x[::2].select(1, int(draw.integers(0, x.shape[1], 1))).fill_(value)

    return [
        Level(name="plain"),
        *(Level(name=told, edit=on("logits", edit)) for told, edit in edits),
        *(Level(name=told, edit=on("logits", one(value))) for told, value in bad),
    ]


def _of_history(change: Callable[[Tensor, Tensor, Draw], Any]) -> Change:
    return lambda inputs, draw: change(inputs["history"], inputs["logits"], draw)


def _holes(history: Tensor, _: Tensor, draw: Draw) -> None:
    history[draw.uniform(*history.shape) < 0.4] = -1


def _best_tokens(history: Tensor, logits: Tensor, _: Draw) -> None:
    """Fill the history with the most probable tokens, and repeat the first."""
    order = logits.float().argsort(-1, descending=True)
    history.copy_(order[:, :1].expand_as(history))
    few = min(history.shape[1] // 2, order.shape[1])
    history[:, :few] = order[:, :few]


def _best_last(history: Tensor, logits: Tensor, _: Draw) -> None:
    """Put the most probable tokens at the end, the best last: a kernel that reads only a part of the history misses
    them.
    """
    order, length = logits.float().argsort(-1, descending=True), history.shape[1]
    few = min(length, order.shape[1])
    history[:, length - few :] = order[:, :few].flip(-1)


def _at_an_edge(inputs: dict[str, Any], draw: Draw) -> None:
    """Set `uniform` just inside the interval of a token, sometimes of the least likely kept one.

    A kernel that keeps one token more or less, or weighs tokens differently, draws another token.
    """
    for b in range(len(inputs["uniform"])):
        row = _Row.of(inputs, b)
        if not row.greedy and not row.undefined:
            inputs["uniform"][b] = row.edge(draw)


_HISTORIES = (
    Level(name="the best tokens last", edit=_of_history(_best_last)),
    Level(name="plain"),
    Level(name="empty", edit=_of_history(lambda h, x, _: h.fill_(-1))),
    Level(name="full", edit=_of_history(lambda h, x, draw: h.copy_(draw.integers(0, x.shape[1], *h.shape)))),
    Level(name="-1 in the middle", edit=_of_history(_holes)),
    Level(name="the best tokens", edit=_of_history(_best_tokens)),
    Level(
        name="first and last token",
        edit=_of_history(lambda h, x, _: h.copy_(torch.arange(h.shape[1]) % 2 * (x.shape[1] - 1))),
    ),
)
_AT_AN_EDGE = Level(name="at an edge", edit=_at_an_edge)


class Sample(Op):
    name = "sample"
    args = tuple(
        Arg(name=name, kind="tensor")
        for name in ("logits", "history", "temperature", "top_k", "top_p", "repetition_penalty", "uniform")
    )
    output_names = ("token",)
    dim_names = ("B", "V", "L")
    by_row = tuple(arg.name for arg in args)
    domains = {
        "B": sizes(9, 1, 2, powers=(2, 5), primes=(11, 72)),
        "V": widths(66_007),
        "L": sizes(40, 1, 12, powers=(3, 7), primes=(5, 200)),
        "logits": Domain(kind="content", levels=_logit_levels),
        "history": Domain(kind="index", levels=lambda *_: _HISTORIES),
        "temperature": _settings_of("temperature", 0.50024, 0.8, 0.0, 1.0, 0.05, 30.0),
        "top_k": _settings_of("top_k", 50, 0, 1, 3, 405, 4099, 1_000_000),
        "top_p": _settings_of("top_p", 0.95, 1.0, 0.5, 0.0, 0.999),
        "repetition_penalty": _settings_of("repetition_penalty", 1.2993, 1.0, 5.0, 0.5),
        "uniform": _settings_of("uniform", None, 0.0, 1.0 - 2.0**-24, 0.5, more=(_AT_AN_EDGE,)),
        "layout": layouts("logits", "history", "temperature", "top_k", "top_p", "repetition_penalty", "uniform"),
    }

    def workload_of(self, inputs: Inputs) -> Workload:
        take = Binder(self.name, inputs)
        take.floats("logits", "B V")
        take.exactly("history", "B L", torch.int64)
        for name in ("temperature", "top_p", "repetition_penalty", "uniform"):
            take.exactly(name, "B", torch.float32)
        take.exactly("top_k", "B", torch.int32)
        return self.workload(take.dtype_name, take.dims)

    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="token", shape=(w["B"],), dtype="int64"),)

    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        """Return a mix of requests: logits like a language model's, with a usual temperature, top_k and top_p."""
        draw, b = Draw(seed, w.dtype), w["B"]
        history = draw.integers(0, w["V"], b, w["L"])
        history[:, w["L"] // 2 :] = -1
        return {
            "logits": draw.normal(b, w["V"], scale=3.0),
            "history": history,
            "temperature": torch.full((b,), 0.8),
            "top_k": torch.full((b,), min(50, w["V"]), dtype=torch.int32),
            "top_p": torch.full((b,), 0.95),
            "repetition_penalty": torch.full((b,), 1.1),
            "uniform": draw.uniform(b),
        }

    def cases(self, w: Workload) -> tuple[Case, ...]:
        return _cases(self, w)

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return (torch.tensor([_Row.of(inputs, b).token() for b in range(len(inputs["uniform"]))]),)

    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.zeros_like(reference[0], dtype=torch.float64),)

    def own_judge(self, inputs: Inputs) -> Judge:
        row = cache(partial(_Row.of, inputs))
        return row_by_row(lambda b, token: row(b).judge(token))

    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        b = w["B"]
        return DTYPE_BYTES[w.dtype] * b * w["V"] + 8 * b * w["L"] + 28 * b

    def flops(self, w: Workload) -> int:
        return 6 * w["B"] * w["V"]


# --- the definition ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row in float64.

    `error` bounds each penalised (and tempered) logit. Tokens with the same path (raw logit, and penalised or not) are
    computed equally by every kernel, so their ties are exact.
    """

    value: Tensor  # [V], penalised, over temperature unless greedy
    error: Tensor  # [V]
    raw: Tensor  # [V]
    hit: Tensor  # bool [V], penalised
    greedy: bool
    top_k: int
    top_p: float
    uniform: float

    @staticmethod
    def of(inputs: Inputs, b: int) -> _Row:
        raw = inputs["logits"][b].double()
        history = inputs["history"][b]
        hit = torch.zeros(raw.numel(), dtype=torch.bool)
        hit[history[history >= 0]] = True
        penalty, temperature = (float(inputs[n][b]) for n in ("repetition_penalty", "temperature"))
        hit &= penalty != 1.0
        value = torch.where(hit, torch.where(raw > 0, raw / penalty, raw * penalty), raw)
        error = torch.where(hit, U32 * value.abs(), 0.0) + flushable(inputs["logits"][b]) * max(
            1.0, penalty, 1 / penalty
        )
        if temperature > 0:
            value, error = value / temperature, error / temperature + 2 * U32 * value.abs() / temperature
        return _Row(
            value=value,
            error=torch.where(value.isfinite(), error, 0.0),
            raw=raw,
            hit=hit,
            greedy=not temperature > 0,
            top_k=int(inputs["top_k"][b]),
            top_p=float(inputs["top_p"][b]),
            uniform=float(inputs["uniform"][b]),
        )

    @property
    def undefined(self) -> bool:
        return bool(self.value.isnan().any() or (self.value == math.inf).any() or not self.value.isfinite().any())

    def token(self) -> int:
        if self.greedy or self.undefined:
            return int(self.value.argmax())
        kept = self._kept()
        weights = torch.where(kept.certain | kept.nominal, kept.weights, 0.0)
        cumulative = weights.cumsum(0) / weights.sum()
        first = int((cumulative <= self.uniform).sum())
        return min(first, int(weights.nonzero()[-1]))

    def judge(self, token: int) -> Mismatch | float:
        if not 0 <= token < self.value.numel():
            return Mismatch(check="range", reason=f"token {token} of {self.value.numel()}", evidence={"token": token})
        if self.undefined:
            return 0.0
        return self._judge_greedy(token) if self.greedy else self._judge_sampled(token)

    def edge(self, draw: Draw) -> float:
        """Return a cumulative probability just inside the interval of one of the kept tokens."""
        kept = self._kept()
        weights = torch.where(kept.nominal, kept.weights, 0.0)
        p = weights / weights.sum()
        tokens = p.nonzero()[:, 0]
        least = bool(draw.uniform(1) < 0.25)
        token = int(tokens[p[tokens].argmin()] if least else tokens[draw.integers(0, len(tokens), 1)])
        end = float(p[: token + 1].sum())
        start = end - float(p[token])
        order = self.value.sort(descending=True, stable=True).indices
        inside = min(2 * self._cumulative_error(p[order], order), (end - start) / 2)
        return min(1.0 - 2.0**-24, start + inside if draw.uniform(1) < 0.5 else end - inside)

    # --- greedy

    def _judge_greedy(self, token: int) -> Mismatch | float:
        allowed = self.error + self.error[token]
        behind = self.value - self.value[token]
        if (behind > allowed).any():
            best = int(self.value.argmax())
            reason = f"token {token}, expected {best}: {float(behind.max()):.4g} below it"
            return Mismatch(check="argmax", reason=reason, evidence={"token": token, "expected": best})
        tied = self._same_path(token)[:token]
        if tied.any():
            first = int(tied.nonzero()[0])
            reason = f"token {token}, but token {first} has the very same logit and a lower index"
            return Mismatch(check="tie", reason=reason, evidence={"token": token, "expected": first})
        return 0.0

    def _same_path(self, token: int) -> Tensor:
        return (self.raw == self.raw[token]) & (self.hit == self.hit[token])

    # --- sampled

    def _kept(self) -> _Kept:
        v = self.value.numel()
        order = self.value.sort(descending=True, stable=True).indices  # stable: ties by lowest index
        value = self.value[order]
        weights = (value - value[0]).exp()
        k = min(self.top_k, v) if self.top_k > 0 else v
        open_ = self._edge(order, k)
        within = weights[:k].sum()
        before = (weights.cumsum(0) - weights) / within
        n = k
        if self.top_p < 1.0:
            n = max(1, min(k, int((before[:k] < self.top_p).sum())))
            undecided = (before - self.top_p).abs() <= self._cumulative_error(weights / within, order)
            undecided[0] = False
            undecided[k:] = False
            open_ = open_ | undecided | self._edge(order, n)
        nominal = torch.arange(v) < n
        back = torch.empty_like(order)
        back[order] = torch.arange(v)
        return _Kept(
            nominal=nominal[back],
            certain=(nominal & ~open_)[back],
            possible=(nominal | open_)[back],
            weights=weights[back],
        )

    def _edge(self, order: Tensor, n: int) -> Tensor:
        """Return bool [V] by rank: tokens whose membership of the n largest fp32 may decide either way."""
        value, error = self.value[order], self.error[order]
        if n >= value.numel():
            return torch.zeros(value.numel(), dtype=torch.bool)
        slack = 2 * torch.maximum(error[n - 1], error[n])
        if value[n - 1] - value[n] > slack:
            return torch.zeros(value.numel(), dtype=torch.bool)
        band = (value <= value[n - 1] + slack) & (value >= value[n] - slack) & value.isfinite()
        alike = self._same_path(int(order[n]))[order]
        return torch.zeros_like(band) if bool((alike | ~band).all()) else band

    def _cumulative_error(self, p: Tensor, order: Tensor) -> float:
        """Return the error of a cumulative probability in fp32: exp's argument and evaluation, the sum in any order,
        the division.
        """
        value, error = self.value[order], self.error[order]
        top, finite = value[0].abs(), value.isfinite()
        relative = torch.where(finite, error + error[0] + 4 * U32 * (value.abs() + top + 2), 0.0)
        return float(2 * (p * relative).sum() + (2 * LAMBDA * math.sqrt(p.numel()) + 4) * U32)

    def _judge_sampled(self, token: int) -> Mismatch | float:
        kept, u = self._kept(), self.uniform
        if not kept.possible[token] or kept.weights[token] == 0:
            kind = "top_k, top_p" if kept.weights[token] > 0 else "probability 0"
            return Mismatch(check="support", reason=f"token {token} is outside ({kind})", evidence={"token": token})
        order = self.value.sort(descending=True, stable=True).indices
        total = kept.weights[kept.possible].sum()
        error = self._cumulative_error(torch.where(kept.possible, kept.weights, 0.0)[order] / total, order)
        start, end = kept.interval(token)
        if start - error <= u <= end + error:
            return max(0.0, start - u, u - end) / error
        reason = f"token {token} covers {start:.6g}..{end:.6g} of the probability, uniform is {u:.6g}"
        return Mismatch(
            check="interval", reason=reason, evidence={"token": token, "start": start, "end": end, "uniform": u}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Tokens of the support by index: by the definition, certainly, possibly; and exp(value - max) of all."""

    nominal: Tensor
    certain: Tensor
    possible: Tensor
    weights: Tensor

    def interval(self, token: int) -> tuple[float, float]:
        """Return the widest interval of cumulative probability that the token can have over the open memberships."""
        sure = torch.where(self.certain, self.weights, 0.0)
        maybe = torch.where(self.possible & ~self.certain, self.weights, 0.0)
        own = self.weights[token].item()
        before, after = sure[:token].sum().item(), sure[token + 1 :].sum().item()
        open_before, open_after = maybe[:token].sum().item(), maybe[token + 1 :].sum().item()
        low = before / (before + own + after + open_after)
        high = (before + open_before + own) / (before + open_before + own + after)
        return low, high


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(op: Op, w: Workload) -> tuple[Case, ...]:
    cases = []
    for b, v, n in ((1, 1, 1), (2, 2, 1), (3, 7, 4), (7, 33, 8), (8, 64, 3), (9, 129, 16), (2, 1021, 64), (9, 911, 16),
                    (1, 4097, 5)):  # fmt: skip
        at = w.at(B=b, V=v, L=n)
        cases.append(case(op, at, f"random {at.shape_text}", "tails of vectors and tiles"))
        cases.append(case(op, at, f"plain {at.shape_text}", "everything off", _settings(k=0, p=1.0, penalty=1.0)))
        cases.append(case(op, at, f"greedy {at.shape_text}", "temperature 0", _settings(temperature=0.0)))
    flat = w.at(B=2, V=66_007, L=2)
    cases.append(case(op, flat, "top_k of 16 bits and more", "a count of 16 bits", _flat))
    cases.append(case(op, flat.at(L=40), "history beyond 2^16", "a token of 16 bits", _far_history))
    cases.append(case(op, w.at(B=64, V=787, L=40), "64 draws at edges", "settings narrowed", _at_edges))
    wide = w.at(B=1, V=min(w["V"], 200_000), L=min(w["L"], 64))
    cases.append(case(op, wide, f"random {wide.shape_text}", "the workload's own vocabulary"))
    cases.append(case(op, wide, f"plain {wide.shape_text}", "a long cumulative sum", _settings(k=0, p=1.0)))
    s = w.at(B=9, V=517, L=12)
    for name, covers, change in (
        ("a rare first token", "a uniform that is flushed or narrowed", _rare_first),
        ("top_k of nine bits", "a count narrowed to bf16", _odd_count),
        ("top_k 1", "greedy by another name", _settings(k=1)),
        ("top_k of all", "k = V", _settings(k=517)),
        ("top_k beyond all", "k > V", _settings(k=100_000)),
        ("top_k only", "top_k's edge", _settings(k=7, p=1.0)),
        ("top_p only", "top_p's edge", _settings(k=0, p=0.7)),
        ("top_p 0", "an empty support", _settings(p=0.0)),
        ("top_p almost 1", "the whole support", _settings(k=0, p=0.999_999)),
        ("a strong penalty", "penalty's two directions", _settings(penalty=5.0)),
        ("a reward", "a penalty below 1", _settings(penalty=0.5)),
        ("cold", "exp without the maximum", _settings(temperature=0.01)),
        ("hot", "a flat distribution", _settings(temperature=50.0)),
        ("uniform 0", "the first token of the support", _settings(uniform=0.0)),
        ("uniform almost 1", "the last token of the support", _settings(uniform=1.0 - 2.0**-24)),
        ("each row its own", "settings of one row used for another", _mixed),
        ("history repeats", "a penalty once per distinct token", _repeats),
        ("history empty", "-1 used as an index", _no_history),
        ("ties at top_k", "ties by lowest index", _ties),
        ("greedy ties", "the higher index of a tie", _greedy_ties),
        ("penalty decides", "greedy before the penalty", _penalty_decides),
        ("all equal", "a uniform distribution", _all_equal),
        ("mostly -inf", "a masked token drawn", _masked),
        ("large logits", "exp without the maximum", on("logits", lambda x, _: x.mul_(300))),
        ("nan", "a token out of range", _nan),
        ("strided rows", "row strides ignored", relayout(("logits", "history"), strided)),
        ("offset by one element", "alignment assumed", relayout(("logits",), offset_by_one)),
        ("a history off an aligned address", "alignment assumed", _best_at_the_end),
    ):
        cases.append(case(op, s, name, covers, change))
    return tuple(cases)


def _flat(inputs: dict[str, Any], draw: Draw) -> None:
    """Keep all tokens, with the last ones a little less likely: a kernel that keeps fewer than 2^16 drops those."""
    inputs["logits"].fill_(1.0)[:, -600:] = 0.5
    inputs["uniform"].copy_(torch.tensor([0.9, 0.999]))
    _settings(k=inputs["logits"].shape[1], p=1.0, penalty=1.0)(inputs, draw)


def _odd_count(inputs: dict[str, Any], draw: Draw) -> None:
    """Make all tokens equal, keep 405 of them, and draw the last of those."""
    inputs["logits"].fill_(0.75)
    _settings(k=405, p=1.0, penalty=1.0)(inputs, draw)
    inputs["uniform"].fill_(0.999)


def _at_edges(inputs: dict[str, Any], draw: Draw) -> None:
    """Give each row other settings, among them a temperature and a penalty that no 16-bit format can hold."""
    rows = torch.arange(len(inputs["uniform"]))
    for name, values in (
        ("temperature", (0.50024, 0.50024, 0.9)),
        ("repetition_penalty", (1.2993, 1.2993, 1.2993, 1.2993, 5.0)),
        ("top_k", (405, 0, 405, 7, 50, 405, 120)),
        ("top_p", (0.95, 1.0, 1.0, 1.0, 0.95, 0.5, 1.0, 0.7, 1.0, 0.8, 0.95)),
    ):
        inputs[name].copy_(torch.tensor(values)[rows % len(values)])
    _best_last(inputs["history"], inputs["logits"], draw)
    _at_an_edge(inputs, draw)


def _far_history(inputs: dict[str, Any], _: Draw) -> None:
    """Make tokens with numbers of more than 16 bits the most likely ones, and put them into the history."""
    logits, length = inputs["logits"], inputs["history"].shape[1]
    logits[:, -length:] = logits.abs().amax(-1, keepdim=True) + 1
    inputs["history"].copy_(torch.arange(logits.shape[1] - length, logits.shape[1]))
    inputs["repetition_penalty"].fill_(5.0)


def _best_at_the_end(inputs: dict[str, Any], draw: Draw) -> None:
    """Use greedy; only the last entry of each row's history penalises its largest logit."""
    history = inputs["history"].fill_(-1)
    history[:, -1] = inputs["logits"].float().argmax(-1)
    inputs["history"] = offset_by_one(history)
    _settings(temperature=0.0, penalty=5.0)(inputs, draw)


def _rare_first(inputs: dict[str, Any], draw: Draw) -> None:
    """Give the first token a probability of 2e-5, with `uniform` a little beyond it."""
    inputs["logits"].zero_()[:, 0] = math.log(2e-5 * inputs["logits"].shape[1])
    inputs["uniform"].fill_(5e-5)
    _settings(k=0, p=1.0, penalty=1.0, temperature=1.0)(inputs, draw)


def _settings(**values: float) -> Change:
    names = {"k": "top_k", "p": "top_p", "penalty": "repetition_penalty"}

    def change(inputs: dict[str, Any], _: Draw) -> None:
        for name, value in values.items():
            inputs[names.get(name, name)].fill_(value)

    return change


def _mixed(inputs: dict[str, Any], _: Draw) -> None:
    inputs["temperature"].copy_(torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 0.7, 1.0, 1.5, 0.3]))
    inputs["top_k"].copy_(torch.tensor([0, 5, 0, 40, 3, 1, 500, 2, 0], dtype=torch.int32))
    inputs["top_p"].copy_(torch.tensor([1.0, 0.9, 0.5, 1.0, 0.1, 1.0, 0.99, 0.6, 0.0]))
    inputs["repetition_penalty"].copy_(torch.tensor([1.0, 1.2, 1.0, 1.3, 2.0, 1.0, 0.8, 1.1, 1.5]))


def _repeats(inputs: dict[str, Any], _: Draw) -> None:
    inputs["history"][:, :] = inputs["logits"].float().argmax(-1, keepdim=True)
    inputs["repetition_penalty"].fill_(1.7)


def _no_history(inputs: dict[str, Any], _: Draw) -> None:
    inputs["history"].fill_(-1)
    inputs["logits"][:, 0] = 9.0
    inputs["repetition_penalty"].fill_(4.0)


def _ties(inputs: dict[str, Any], _: Draw) -> None:
    """Let ten tokens share the top; five may stay."""
    inputs["logits"][:, 100:150:5] = 12.0
    inputs["history"].fill_(-1)
    _settings(k=5, p=1.0)(inputs, _)


def _greedy_ties(inputs: dict[str, Any], _: Draw) -> None:
    for at in (3, 4, 255, 256, 516):
        inputs["logits"][:, at] = 20.0
    inputs["history"].fill_(-1)
    inputs["temperature"].zero_()


def _penalty_decides(inputs: dict[str, Any], _: Draw) -> None:
    inputs["logits"][:, 7], inputs["logits"][:, 9] = 20.0, 19.0
    inputs["history"][:, 0] = 7
    inputs["history"][:, 1:] = -1
    _settings(temperature=0.0, penalty=1.5)(inputs, _)


def _all_equal(inputs: dict[str, Any], _: Draw) -> None:
    inputs["logits"].fill_(0.75)
    _settings(k=0, p=1.0, penalty=1.0)(inputs, _)


def _masked(inputs: dict[str, Any], _: Draw) -> None:
    inputs["logits"][:, 3:] = float("-inf")
    inputs["history"].fill_(2)


def _nan(inputs: dict[str, Any], _: Draw) -> None:
    inputs["logits"][::2, 11] = float("nan")
