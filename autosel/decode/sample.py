"""Choose the next token from logits by the op `sample`, with a seeded stream of uniforms.

Greedy decoding is that op at temperature 0. While the op is undecided, greedy decoding uses `largest` instead: the
baseline's full sampling would do unneeded work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autosel import devices, dispatch
from autosel.candidates import registry
from autosel.decode.run import Sampling
from autosel.ops import eager

EMPTY = -1  # history entry without a token
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def largest(logits: Tensor, out: Tensor) -> Tensor:
    """Write the index of each row's largest logit to `out`: [B, V] -> int64 [B].

    On a CPU this avoids torch.argmax, a parallel region whose threads would still spin in the next step. Bits of
    positive floats, read as integers, have the same order as the floats, and the largest logit of a language model is
    practically always positive. If it is not positive or is NaN, torch.argmax runs.
    """
    if not devices.on_host(logits.device.type) or logits.dtype not in BITS:
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
    """Choose tokens for B rows at a time and remember each row's tokens, prompt included.

    Repeatable: the uniforms depend only on `sampling.seed`, one per row and step. `logits` [B, V] show the shape.
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
        """Write the tokens (int64 [B]) for logits [B, V] to `out`."""
        if not self.by_op:
            return self.greedy(logits, out)
        self.draw()
        self.best(logits, *self.arguments, out)
        return out

    def draw(self) -> None:
        """Draw the next step's uniforms."""
        if self.random:
            torch.rand(self.uniform.shape, generator=self.generator, out=self.uniform)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same uniforms afterwards, whatever was drawn meanwhile."""
        held = self.generator.get_state()
        yield
        self.generator.set_state(held)

    def remember(self, tokens: Sequence[int]) -> None:
        """Append one more token to each row's history."""
        for row, token in enumerate(tokens):
            self.remember_row(row, (token,))

    def remember_row(self, row: int, tokens: Sequence[int]) -> None:
        if self.random:  # greedy decoding does not need the history
            start = self.said[row]
            self.history[row, start : start + len(tokens)] = torch.tensor(tokens, device=self.history.device)
            self.said[row] += len(tokens)

    def _decided(self, logits: Tensor) -> bool:
        bound = dispatch.best("sample", like=(logits, *self.arguments))
        return bound.candidate != registry.baseline("sample").name


def _argmax(logits: Tensor, out: Tensor) -> Tensor:
    return torch.argmax(logits, -1, out=out)
