"""Is each token of ours the baseline's, and where it is not, may it be?

A token may differ where the error that logits may have (scene.judged) leaves open which of two is the larger, and, if
it was drawn, where the draw gives it from logits within that error. All of it is asked between steps, off the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel import ops
from autosel.decode.arms import Arm, Ours, Speculating
from autosel.decode.scene import Scene
from autosel.ops.contract import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one step's tokens: how many there are, how many are the baseline's, and how many of the others were judged
    and may differ."""

    checked: int
    equal: int
    open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """N tokens chosen from N states; `exact` makes their logits in higher precision."""

    ours: Sequence[int]
    plain: Sequence[int]
    our_logits: Tensor  # [N, V]
    plain_logits: Tensor
    exact: Callable[[], Tensor]


def verdict(
    scene: Scene, ours: Ours, theirs: Arm, kept: list[list[int]], plain: list[list[int]], *, always: bool
) -> Verdict:
    """Of the step that both arms have just taken; the logits are judged where a token differs, or `always`."""
    if isinstance(ours, Speculating) and len(kept[0]) > 1:
        seen = _stream(scene, ours, theirs, kept[0])
    else:
        seen = _step(scene, ours, theirs, kept, plain)
    differ = [i for i, (a, b) in enumerate(zip(seen.ours, seen.plain, strict=True)) if a != b]
    if not differ and not always:
        return Verdict(checked=len(seen.ours), equal=len(seen.ours), open=0)
    exact = seen.exact()
    bound = scene.check_logits(seen.our_logits, seen.plain_logits, exact)
    if scene.plan.sampling.changes_greedy:
        open_ = sum(_drawn(ours, i, seen.ours[i]) for i in differ)
    else:
        open_ = sum(_within(scene, exact[i].double(), seen.ours[i], bound) for i in differ)
    return Verdict(checked=len(seen.ours), equal=len(seen.ours) - len(differ), open=open_)


def _step(scene: Scene, ours: Arm, theirs: Arm, kept: list[list[int]], plain: list[list[int]]) -> _Seen:
    """A token a row."""
    return _Seen(
        ours=[row[0] for row in kept],
        plain=[row[0] for row in plain],
        our_logits=ours.logits,
        plain_logits=theirs.logits,
        exact=scene.reference,
    )


def _stream(scene: Scene, ours: Speculating, theirs: Arm, kept: list[int]) -> _Seen:
    """All that speculation kept, against plain greedy decoding of the same stream: the baseline is fed what was kept
    so far, so that tokens that agree one after the other are its own stream."""
    fed = torch.tensor([[scene.text[0][-1], *kept[:-1]]], device=scene.place.tokens.device)
    logits = scene.after(fed)
    logits[0] = theirs.logits[0]
    return _Seen(
        ours=kept,
        plain=logits.argmax(-1).tolist(),
        our_logits=ours.passed[: len(kept)],
        plain_logits=logits,
        exact=lambda: scene.after(fed, wider=True),
    )


def _within(scene: Scene, exact: Tensor, token: int, bound: float) -> bool:
    """Does it take no more than the bound, of this token's logit and of the largest's, to choose this token?"""
    needed = (exact.max() - exact[token]).item() / 2
    scene.hold(needed, bound)
    return needed <= bound


def _drawn(ours: Ours, row: int, token: int) -> bool:
    """Does the draw give this token from our own logits, by the definition of the op `sample`?"""
    assert not isinstance(ours, Speculating), "drafts are checked against greedy decoding"
    names = [a.name for a in ops.find("sample").args]
    given = (ours.logits, *ours.sampler.arguments)
    inputs = {name: t[row : row + 1].cpu() for name, t in zip(names, given, strict=True)}
    return isinstance(ops.find("sample").verify(inputs, (torch.tensor([token]),)), Match)
