"""From logits to the next token, by the op `sample` and a seeded stream of uniforms.

Greedy decoding is that op at temperature 0. As long as nothing is decided for it, greedy is `largest` instead: the
baseline's full sampling would be honest work that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch
from autosel.candidates import registry
from autosel.decode.run import Sampling
from autosel.ops import eager

EMPTY = -1  # a history's entry without a token
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def largest(logits: Tensor, out: Tensor) -> Tensor:
    """The index of each row's largest logit, [B, V] -> int64 [B], written to `out`.

    On a CPU without torch.argmax: that is a parallel region of a runtime whose threads then spin into the next step.
    Floats of positive sign are ordered as their bits read as integers, and the largest logit of a language model is
    practically always one; where it is not, or is no number, torch decides.
    """
    if logits.device.type != "cpu" or logits.dtype not in BITS:
        return torch.argmax(logits, -1, out=out)
    bits = logits.view(BITS[logits.dtype]).numpy()
    found = bits.argmax(-1)
    top = bits[range(len(found)), found]
    if (top <= 0).any() or (top > _infinity(logits.dtype)).any():
        return torch.argmax(logits, -1, out=out)
    return out.copy_(torch.from_numpy(found))


@cache
def _infinity(dtype: torch.dtype) -> int:
    return int(torch.tensor(math.inf, dtype=dtype).view(BITS[dtype]).item())


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
        self.greedy: Callable[[Tensor, Tensor], Tensor] = _argmax if plain else largest
        self.by_op = self.random or (not plain and self._decided(logits))

    def choose(self, logits: Tensor, out: Tensor) -> Tensor:
        """logits [B, V] -> tokens int64 [B], written to `out`."""
        if not self.by_op:
            return self.greedy(logits, out)
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


def _argmax(logits: Tensor, out: Tensor) -> Tensor:
    return torch.argmax(logits, -1, out=out)
