"""Answer a prompt with each arm alone, greedily: its own prefill, its own KV cache, its own tokens fed back.

The measurement feeds both arms the same tokens. Equal texts are shown here, by two independent streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel.decode.cache import make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import generate
from autosel.decode.model import Decoder
from autosel.decode.reference import Reference
from autosel.decode.run import Chosen
from autosel.decode.sample import largest
from autosel.decode.weights import Weights
from autosel.values import Fingerprint

OnToken = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An arm's tokens, and the logits [V] from which it chose each."""

    tokens: list[int]
    logits: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token that differs; up to it both arms had the same text.

    A gap is an arm's logit of its own token minus its logit of the other's. `fp32_gap` is PyTorch's token minus
    autosel's in fp32 arithmetic. `spacing` is the distance between stored logits of this size.
    """

    at: int  # from 0
    pytorch: int
    autosel: int
    pytorch_gap: float
    autosel_gap: float
    fp32_gap: float
    spacing: float


def by_pytorch(weights: Weights, prompt: Sequence[int], count: int, *, stop: frozenset[int], heard: OnToken) -> Answer:
    eager, device = Eager(weights), weights.device
    cache = make_cache(weights.shape, weights.dtype, rows=1, room=len(prompt) + count, device=device)
    chosen = torch.empty(1, dtype=torch.int64, device=device)
    found = Answer(tokens=[], logits=[])
    with torch.inference_mode():
        logits = eager.prefill(torch.tensor([list(prompt)], device=device), cache)
        while True:
            found.logits.append(logits[0].clone())
            found.tokens.append(int(largest(logits, chosen)))
            heard(found.tokens[-1])
            if len(found.tokens) == count or found.tokens[-1] in stop:
                return found
            logits = eager.logits(chosen[:, None], cache, len(prompt) + len(found.tokens) - 1)


def by_autosel(
    weights: Weights,
    prompt: Sequence[int],
    count: int,
    *,
    stop: frozenset[int],
    heard: OnToken,
    chosen: Chosen,
    fp: Fingerprint,
) -> Answer:
    """Answer with the decided kernels, in the form of the step that was measured."""
    made = generate(
        Decoder(weights),
        [prompt],
        count,
        stop=stop,
        chain=chosen.chain,
        form=chosen.form,
        fp=fp,
        keep_logits=True,
        heard=lambda row: heard(row[0]),
    )
    return Answer(tokens=made.tokens[0], logits=[logits[0] for logits in made.logits])


def difference(pytorch: Answer, autosel: Answer, exact: Callable[[int], Tensor]) -> Difference | None:
    """Return the first difference of two answers, None if they are equal.

    `exact` returns the logits [V] in fp32 after the prompt and that many tokens of the answer.
    """
    pairs = enumerate(zip(pytorch.tokens, autosel.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return None
    a, b = pytorch.tokens[at], autosel.tokens[at]
    theirs, ours, wide = pytorch.logits[at], autosel.logits[at], exact(at)
    return Difference(
        at=at,
        pytorch=a,
        autosel=b,
        pytorch_gap=_gap(theirs, a, b),
        autosel_gap=_gap(ours, b, a),
        fp32_gap=_gap(wide, a, b),
        spacing=torch.finfo(theirs.dtype).eps * 2.0 ** math.floor(math.log2(abs(theirs[a].item()) or 1.0)),
    )


def _gap(logits: Tensor, one: int, other: int) -> float:
    return float((logits[one].double() - logits[other].double()).item())


def reference(weights: Weights, tokens: Sequence[int]) -> Tensor:
    """Return the logits [V] after these tokens with every weight, key and value widened to fp32."""
    eager, device = Reference(weights, torch.float32), weights.device
    cache = make_cache(weights.shape, weights.dtype, rows=1, room=1, device=device)
    with torch.inference_mode():
        return eager.logits(torch.tensor([list(tokens)], device=device), cache, 0)[0]
