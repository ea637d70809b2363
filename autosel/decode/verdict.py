"""Compare each token with the baseline's, and judge if a different token is allowed.

A token may differ if the error that logits may have (scene.judged) does not decide which of two is larger, and, for a
drawn token, if the draw gives it from logits within that error. All checks run between steps, outside timed regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel import ops
from autosel.decode.arms import Ours, Speculating, StepArm
from autosel.decode.scene import Scene
from autosel.ops.contract import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVerdict:
    """Counts for one step's tokens: all, those equal to the baseline's, and judged ones that differ but may."""

    checked: int
    equal: int
    open: int


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
        seen = _stream(scene, ours, theirs, kept[0])
    else:
        seen = _step(scene, ours, theirs, kept, plain)
    differ = [i for i, (a, b) in enumerate(zip(seen.ours, seen.plain, strict=True)) if a != b]
    if not differ and not always:
        return TokenVerdict(checked=len(seen.ours), equal=len(seen.ours), open=0)
    exact = seen.exact()
    bound = scene.check_logits(seen.our_logits, seen.plain_logits, exact)
    if scene.plan.sampling.changes_greedy:
        open_ = sum(_drawn(ours, i, seen.ours[i]) for i in differ)
    else:
        open_ = sum(_within(scene, exact[i].double(), seen.ours[i], bound) for i in differ)
    return TokenVerdict(checked=len(seen.ours), equal=len(seen.ours) - len(differ), open=open_)


def _step(scene: Scene, ours: StepArm, theirs: StepArm, kept: list[list[int]], plain: list[list[int]]) -> _ChosenTokens:
    """Return one token per row."""
    return _ChosenTokens(
        ours=[row[0] for row in kept],
        plain=[row[0] for row in plain],
        our_logits=ours.logits,
        plain_logits=theirs.logits,
        exact=scene.reference,
    )


def _stream(scene: Scene, ours: Speculating, theirs: StepArm, kept: list[int]) -> _ChosenTokens:
    """Return all tokens that speculation kept, against plain greedy decoding of the same stream.

    The baseline is fed the tokens kept so far, so that consecutive equal tokens are its own stream.
    """
    fed = torch.tensor([[scene.text[0][-1], *kept[:-1]]], device=scene.place.tokens.device)
    logits = scene.after(fed)
    logits[0] = theirs.logits[0]
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
