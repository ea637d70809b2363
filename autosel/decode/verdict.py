"""Compare each token with the baseline's, and judge if a different token is allowed.

A token may differ if the error that logits may have (scene.judged) does not decide which of two is larger, and, for a
drawn token, if the draw gives it from logits within that error. All checks run between steps, outside timed regions.

Without a baseline, the tokens are compared with those of passes that take its place (`Passes`): PyTorch in the dtype of
the run, with some rows of a weight at a time (reference.py). The bound follows from their error as from the baseline's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autosel import ops
from autosel.decode.arms import Choosing, Ours, Speculating, StepArm
from autosel.decode.scene import Scene, judged
from autosel.ops.contract import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVerdict:
    """Counts for one step's tokens: all, those equal to the baseline's, and judged ones that differ but may."""

    checked: int
    equal: int
    open: int


LATER = TokenVerdict(checked=0, equal=0, open=0)  # of a step whose tokens are judged together with later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChosenTokens:
    """N tokens chosen from N states; `exact` computes their logits in higher precision."""

    ours: Sequence[int]
    plain: Sequence[int]
    our_logits: Tensor  # [N, V]
    plain_logits: Tensor
    exact: Callable[[], Tensor]


def verdict(
    scene: Scene, ours: Ours, theirs: StepArm, kept: list[list[int]], plain: list[list[int]], *, always: bool
) -> TokenVerdict:
    """Judge the step that both arms have just run; logits are compared if a token differs, or if `always`."""
    if isinstance(ours, Speculating) and len(kept[0]) > 1:
        seen = _stream(scene, ours, theirs.logits, kept[0])
    else:
        seen = _step(scene, ours, theirs.logits, kept, plain)
    return _judged(scene, ours, seen, always=always)


def _judged(scene: Scene, ours: Ours, seen: _ChosenTokens, *, always: bool) -> TokenVerdict:
    differ = [i for i, (a, b) in enumerate(zip(seen.ours, seen.plain, strict=True)) if a != b]
    if not differ and not always:
        return TokenVerdict(checked=len(seen.ours), equal=len(seen.ours), open=0)
    exact = seen.exact()
    error, bound = judged(seen.our_logits, seen.plain_logits, exact, scene.plan.dtype)
    scene.hold(error, bound)
    if scene.plan.sampling.changes_greedy:
        open_ = sum(_drawn(ours, i, seen.ours[i]) for i in differ)
    else:
        open_ = sum(_within(scene, exact[i].double(), seen.ours[i], bound) for i in differ)
    return TokenVerdict(checked=len(seen.ours), equal=len(seen.ours) - len(differ), open=open_)


def _step(scene: Scene, ours: StepArm, theirs: Tensor, kept: list[list[int]], plain: list[list[int]]) -> _ChosenTokens:
    """Return one token per row."""
    return _ChosenTokens(
        ours=[row[0] for row in kept],
        plain=[row[0] for row in plain],
        our_logits=ours.logits,
        plain_logits=theirs,
        exact=scene.reference,
    )


def _stream(scene: Scene, ours: Speculating, theirs: Tensor | None, kept: list[int]) -> _ChosenTokens:
    """Return all tokens that speculation kept, against plain greedy decoding of the same stream.

    The baseline is fed the tokens kept so far, so that consecutive equal tokens are its own stream. `theirs` are its
    logits after the first one.
    """
    fed = torch.tensor([[scene.text[0][-1], *kept[:-1]]], device=scene.place.tokens.device)
    logits = scene.after(fed)
    if theirs is not None:
        logits[0] = theirs[0]
    return _ChosenTokens(
        ours=kept,
        plain=logits.argmax(-1).tolist(),
        our_logits=ours.passed[: len(kept)],
        plain_logits=logits,
        exact=lambda: scene.after(fed, wider=True),
    )


def _within(scene: Scene, exact: Tensor, token: int, bound: float) -> bool:
    """Return True if an error within the bound, of this logit and the largest one, can explain the choice of this
    token.
    """
    needed = (exact.max() - exact[token]).item() / 2
    scene.hold(needed, bound)
    return needed <= bound


def _drawn(ours: Ours, row: int, token: int) -> bool:
    """Return True if the draw gives this token from the optimised logits, by the definition of the op `sample`."""
    assert not isinstance(ours, Speculating), "drafts are checked against greedy decoding"
    names = [a.name for a in ops.find("sample").args]
    given = (ours.logits, *ours.sampler.arguments)
    inputs = {name: t[row : row + 1].cpu() for name, t in zip(names, given, strict=True)}
    return isinstance(ops.find("sample").verify(inputs, (torch.tensor([token]),)), Match)


# --- without a baseline ----------------------------------------------------------------------------------------------

AT_ONCE = 16  # steps of an advancing stream whose tokens one pass judges


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Consecutive steps of a greedy, advancing stream that follow `held` tokens of the cache."""

    held: int
    fed: list[Tensor] = field(default_factory=list)  # [B] of each step
    tokens: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [B, V]


class Passes:
    """The verdicts of a run without a baseline."""

    def __init__(self, scene: Scene, ours: Ours) -> None:
        self.scene, self.ours, plan = scene, ours, scene.plan
        self.plain = Choosing(scene, plain=True)
        for _ in range(plan.warmup):  # the optimised arm has drawn for these steps
            self.plain.sampler.draw()
        self.together = plan.advance and not plan.sampling.changes_greedy and not plan.speculate
        self.logits: Tensor | None = None  # at a fixed context, of every step
        self.stretch: _Stretch | None = None
        self.checked_first = False

    def verdict(self, kept: list[list[int]], *, first: bool, last: bool) -> TokenVerdict:
        """Judge the step that has just run; LATER if its tokens are judged with those of the next steps."""
        if isinstance(self.ours, Speculating):
            seen = _stream(self.scene, self.ours, None, kept[0])
            return _judged(self.scene, self.ours, seen, always=first or last)
        if self.together:
            return self._with_others(kept, last=last)
        if self.logits is None or self.scene.plan.advance:
            self.logits = self.scene.after(self.scene.place.tokens[:, None])
        self.plain.choose(self.logits)
        seen = _step(self.scene, self.ours, self.logits, kept, self.plain.tokens())
        return _judged(self.scene, self.ours, seen, always=first or last)

    def remember(self, tokens: list[int]) -> None:
        self.plain.remember(tokens)

    def _with_others(self, kept: list[list[int]], *, last: bool) -> TokenVerdict:
        if self.stretch is None:
            self.stretch = _Stretch(held=self.scene.place.longest - 1)
        found = self.stretch
        found.fed.append(self.scene.place.tokens.clone())
        found.tokens.append([row[0] for row in kept])
        found.logits.append(self.ours.logits.clone())
        if len(found.fed) < AT_ONCE and not last:
            return LATER
        self.stretch, first, self.checked_first = None, not self.checked_first, True
        return _judged(self.scene, self.ours, self._seen(found), always=first or last)

    def _seen(self, found: _Stretch) -> _ChosenTokens:
        """Return the tokens of all steps, a row after the other."""
        fed = torch.stack(found.fed, 1)
        plain = self.scene.after(fed, held=found.held)
        return _ChosenTokens(
            ours=[step[row] for row in range(len(fed)) for step in found.tokens],
            plain=plain.argmax(-1).tolist(),
            our_logits=torch.stack(found.logits, 1).flatten(0, 1),
            plain_logits=plain,
            exact=lambda: self.scene.after(fed, wider=True, held=found.held),
        )
