"""From logits to the next token, by the op `sample` and a seeded stream of uniforms.

Greedy decoding is that op at temperature 0. As long as nothing is decided for it, greedy is one argmax instead: the
baseline's full sampling would be honest work that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch
from autosel.candidates import registry
from autosel.decode.run import Sampling
from autosel.ops import eager

EMPTY = -1  # a history's entry without a token


class Sampler:
    """Chooses for B rows at a time and remembers what each row has said, prompt included.

    Repeatable: the uniforms come from `sampling.seed` alone, one a row and step. `logits` [B, V] show the shape.
    `plain` samples in eager PyTorch (the baseline arm of a measurement).
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], room: int, logits: Tensor, *, plain: bool = False
    ) -> None:
        self.sampling, rows, device = sampling, len(prompts), logits.device
        self.random = sampling.changes_greedy
        self.generator = torch.Generator(device=device).manual_seed(sampling.seed)
        self.history = torch.full((rows, room), EMPTY, dtype=torch.int64, device=device)
        self.said = [0] * rows
        for row, prompt in enumerate(prompts):
            self.remember_row(row, prompt)

        def same(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        self.uniform = same(0.0)
        self.arguments: tuple[Any, ...] = (
            self.history,
            same(sampling.temperature),
            same(sampling.top_k, torch.int32),
            same(sampling.top_p),
            same(sampling.repetition_penalty),
            self.uniform,
        )
        self.best: Callable[..., Any] = eager.sample if plain else dispatch.best("sample")
        self.by_op = self.random or (not plain and self._decided(logits))

    def choose(self, logits: Tensor, out: Tensor) -> Tensor:
        """logits [B, V] -> tokens int64 [B], written to `out`."""
        if not self.by_op:
            return torch.argmax(logits, -1, out=out)
        self.draw()
        self.best(logits, *self.arguments, out)
        return out

    def draw(self) -> None:
        """The next step's uniforms."""
        if self.random:
            torch.rand(self.uniform.shape, generator=self.generator, out=self.uniform)

    def remember(self, tokens: Sequence[int]) -> None:
        """One more token of each row was said."""
        for row, token in enumerate(tokens):
            self.remember_row(row, (token,))

    def remember_row(self, row: int, tokens: Sequence[int]) -> None:
        if self.random:  # greedy decoding asks nobody what was said
            start = self.said[row]
            self.history[row, start : start + len(tokens)] = torch.tensor(tokens, device=self.history.device)
            self.said[row] += len(tokens)

    def _decided(self, logits: Tensor) -> bool:
        bound = dispatch.best("sample", like=(logits, *self.arguments))
        return bound.candidate != registry.baseline("sample").name
