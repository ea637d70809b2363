"""From logits to the next token: greedy by argmax, otherwise by the op `sample` and a seeded stream of uniforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch
from autosel.decode.run import Sampling

EMPTY = -1  # a history's entry without a token


class Sampler:
    """Chooses for B rows at a time and remembers what each row has said, prompt included.

    Repeatable: the uniforms come from `sampling.seed` alone, one a row and step.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        room: int,
        device: torch.device,
        best: Callable[..., Any] | None = None,
    ) -> None:
        """`best` samples in place of what `best("sample")` gives (the baseline arm of a measurement)."""
        self.sampling, rows = sampling, len(prompts)
        self.greedy = not sampling.changes_greedy
        if self.greedy:
            return
        self.generator = torch.Generator(device=device).manual_seed(sampling.seed)
        self.history = torch.full((rows, room), EMPTY, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.history[row, : len(prompt)] = torch.tensor(prompt, device=device)
        self.said = [len(p) for p in prompts]

        def same(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        self.knobs = (
            same(sampling.temperature),
            same(sampling.top_k, torch.int32),
            same(sampling.top_p),
            same(sampling.repetition_penalty),
        )
        self.uniform = same(0.0)
        self.best = best or dispatch.best("sample")

    def choose(self, logits: Tensor, out: Tensor) -> Tensor:
        """logits [B, V] -> tokens [B], written to `out`."""
        if self.greedy:
            return torch.argmax(logits, -1, out=out)
        torch.rand(self.uniform.shape, generator=self.generator, out=self.uniform)
        self.best(logits, self.history, *self.knobs, self.uniform, out)
        return out

    def remember(self, tokens: Sequence[int]) -> None:
        """One more token of each row was said."""
        if self.greedy:
            return
        for row, token in enumerate(tokens):
            if self.said[row] < self.history.shape[1]:
                self.history[row, self.said[row]] = token
                self.said[row] += 1
