"""The arms of a measurement: the optimised step in its forms, and the eager baseline.

An arm runs one step from the scene's state; the measurement advances the state. A step has two parts, so that a GPU can
be timed by its own clock: `enqueue` starts everything, up to the choice of the tokens; `tokens` waits for them. On a
CPU the work is done when `enqueue` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from autosel.decode.generate import at_once
from autosel.decode.model import Batch
from autosel.decode.persistent import serve, write
from autosel.decode.run import Chain, Chosen
from autosel.decode.sample import Sampler, largest
from autosel.decode.scene import Scene
from autosel.decode.step import Direct

NGRAM = 3  # longest n-gram searched for in the text so far


class Remembers(Protocol):
    def remember(self, tokens: list[int]) -> None:
        """Append these tokens, one per row, to the stream."""


class StepArm(Remembers, Protocol):
    logits: Tensor  # [B, V] after the token that was fed

    def enqueue(self) -> None:
        """Start one step, with the choice of its tokens."""

    def tokens(self) -> list[list[int]]:
        """Wait for the step and return each row's tokens, on the host; several only when speculating."""


def step(arm: StepArm) -> list[list[int]]:
    arm.enqueue()
    return arm.tokens()


class Choosing:
    """Choice of tokens, greedy or sampled; each arm has the same stream of uniforms."""

    def __init__(self, scene: Scene, *, plain: bool = False) -> None:
        plan, weights = scene.plan, scene.decoder.weights
        self.out = torch.empty_like(scene.place.tokens)
        logits = torch.empty(plan.batch, plan.shape.V, dtype=weights.torch_dtype, device=weights.device)
        self.sampler = Sampler(plan.sampling, scene.text, plan.longest, logits, plain=plain)

    def choose(self, logits: Tensor) -> None:
        self.sampler.choose(logits, self.out)

    def tokens(self) -> list[list[int]]:
        return _rows(self.out)

    def remember(self, tokens: list[int]) -> None:
        self.sampler.remember(tokens)


def _rows(tokens: Tensor) -> list[list[int]]:
    return [[token] for token in tokens.tolist()]


class WrittenArm(Choosing):
    """The optimised step in one form, with preallocated buffers."""

    def __init__(self, scene: Scene, chosen: Chosen) -> None:
        super().__init__(scene)
        given = scene.decoder, scene.cache, scene.place, chosen.chain, self.sampler
        self.list = serve(write(*given, form=chosen.form, fp=scene.fp), scene.fp, chosen.decision)
        self.logits = self.list.logits

    def enqueue(self) -> None:
        self.sampler.draw()
        self.list.run()

    def tokens(self) -> list[list[int]]:
        assert self.list.chosen is not None
        tokens = _rows(self.list.chosen)
        self.list.settle()
        return tokens


class AtOnce(Choosing):
    """The optimised step op by op, each op allocating its result (--no-prealloc)."""

    def __init__(self, scene: Scene, chain: Chain) -> None:
        super().__init__(scene)
        self.scene, self.chain, self.run = scene, chain, Direct(scene.decoder.weights)

    def enqueue(self) -> None:
        self.logits = at_once(self.scene.decoder, self.scene.cache, self.scene.place, self.run, self.chain)
        self.choose(self.logits)


def draft(text: Sequence[int], count: int) -> list[int]:
    """Return at most `count` tokens that followed the last occurrence of the longest n-gram at the text's end."""
    for n in range(min(NGRAM, len(text) - 1), 0, -1):
        ending = list(text[-n:])
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == ending:
                return list(text[start + n : start + n + count])
    return []


def accepted(drafted: list[int], chosen: list[int]) -> list[int]:
    """Return the chosen tokens up to and including the first that differs from the draft."""
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == chosen[agreed]:
        agreed += 1
    return chosen[: agreed + 1]


class Speculating:
    """The optimised pass over the last token and its draft, for one greedy stream. `passed` holds the logits after
    each.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.run = scene, Direct(scene.decoder.weights)

    def enqueue(self) -> None:
        place, device = self.scene.place, self.scene.place.tokens.device
        room = self.scene.plan.longest - place.longest  # do not draft beyond the end of the stream
        self.drafted = draft(self.scene.text[0], min(self.scene.plan.speculate, room))
        tokens = torch.tensor([self.scene.text[0][-1], *self.drafted], device=device)
        s = len(tokens)
        batch = Batch(
            tokens=tokens,
            positions=place.positions + torch.arange(s, device=device),
            starts=place.starts,
            lengths=place.starts + s if self.scene.cache.paged else None,
            max_len=place.longest - 1 + s,
            rows=1,
        )
        logits = self.scene.decoder.logits(self.run, self.scene.decoder.hidden(self.run, batch, self.scene.cache))
        self.logits, self.passed = logits[:1], logits
        self.chosen = largest(logits, torch.empty(s, dtype=torch.int64, device=device))

    def tokens(self) -> list[list[int]]:
        return [accepted(self.drafted, self.chosen.tolist())]

    def remember(self, tokens: list[int]) -> None:
        pass


class Baseline(Choosing):
    """Hugging Face's decoder in plain PyTorch."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene, plain=True)
        self.scene = scene

    def enqueue(self) -> None:
        place = self.scene.place
        self.logits = self.scene.eager.logits(place.tokens[:, None], self.scene.eager_cache, place.longest - 1)
        self.choose(self.logits)


Ours = WrittenArm | AtOnce | Speculating


def our_arm(scene: Scene, chosen: Chosen) -> Ours:
    """Return the optimised arm: speculating or allocating if the plan requires it, else written in the chosen form."""
    if scene.plan.speculate:
        return Speculating(scene)
    return WrittenArm(scene, chosen) if scene.plan.prealloc else AtOnce(scene, chosen.chain)
