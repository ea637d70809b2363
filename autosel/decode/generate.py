"""Generate token ids: prefill, then one greedy step per token.

Sequences of a batch may differ in length. Shorter prompts are padded on the right, where causal attention never looks
back from, and each sequence's next token overwrites the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autosel.decode.cache import Cache, make_cache
from autosel.decode.model import Batch, Decoder
from autosel.decode.persistent import serve, write
from autosel.decode.run import FUSED, GREEDY, Chain, StepForm
from autosel.decode.sample import Sampler
from autosel.decode.step import Direct, Place
from autosel.models.passes import CHUNK, rows_at_once
from autosel.values import Fingerprint


@dataclass(slots=True, kw_only=True)
class Generated:
    """Generated tokens; `tokens[b]` are row b's new ones."""

    tokens: list[list[int]]
    logits: list[Tensor] = field(default_factory=list)  # [B, V] of each step, if requested


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    page: int = 0,
    stop: frozenset[int] = frozenset(),
    chain: Chain = FUSED,
    keep_logits: bool = False,
    heard: Callable[[list[int]], None] = lambda tokens: None,
    form: StepForm = "ops",
    fp: Fingerprint | None = None,
) -> Generated:
    """Return `count` new tokens for each prompt; fewer if one of `stop` occurs, which is then the last one.

    `heard` receives each step's tokens. `form` and `fp` are as in `persistent.write`. The caller has checked that the
    prompts hold tokens of the model, and fit its context together with the answers.
    """
    longest, weights = max(map(len, prompts)) + count, decoder.weights
    cache = make_cache(decoder.shape, weights.dtype, rows=len(prompts), room=longest, page=page, device=weights.device)
    with torch.inference_mode():
        logits = prefill(decoder, cache, prompts)
        sampler = Sampler(GREEDY, prompts, longest, logits)
        chosen = sampler.choose(logits, torch.empty(len(prompts), dtype=torch.int64, device=weights.device))
        told, done = Generated(tokens=[[] for _ in prompts]), [False] * len(prompts)

        def keep(tokens: list[int], logits: Tensor) -> None:
            if keep_logits:
                told.logits.append(logits.clone())
            for row, token in enumerate(tokens):
                if not done[row]:
                    told.tokens[row].append(token)
                    done[row] = token in stop or len(told.tokens[row]) == count
            heard(tokens)

        keep(chosen.tolist(), logits)
        place = Place.at(chosen, [len(p) for p in prompts])
        step = serve(write(decoder, cache, place, chain, sampler, form=form, fp=fp), fp)
        lengths = place.lengths.tolist()
        for passed in range(count - 1):
            if all(done):
                break
            for row, length in enumerate(lengths):
                cache.reserve(row, length + passed)
            step.run()
            assert step.chosen is not None
            place.tokens.copy_(step.chosen)
            tokens = place.tokens.tolist()
            step.settle()
            keep(tokens, step.logits)
            place.advance()
        return told


# --- prefill ---------------------------------------------------------------------------------------------------------


def prefill(decoder: Decoder, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Run the prompts and fill the cache. Return logits [B, V] after each prompt's last token."""
    longest, run = max(map(len, prompts)), Direct(decoder.weights)
    for row in range(len(prompts)):
        cache.reserve(row, longest)
    rows = rows_at_once(min(longest, CHUNK))
    starts = range(0, len(prompts), rows)
    passes = [(cache.part(b, b + rows), prompts[b : b + rows]) for b in starts]
    return decoder.logits(run, torch.cat([_last(decoder, run, part, some) for part, some in passes]))


def _last(decoder: Decoder, run: Direct, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return [B, d] after each prompt's last token, computed CHUNK positions at a time."""
    device, longest = decoder.weights.device, max(map(len, prompts))
    filled = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    last = torch.tensor([len(p) - 1 for p in prompts], device=device)
    hidden = torch.empty(len(prompts), decoder.shape.d, dtype=decoder.weights.torch_dtype, device=device)
    for start in range(0, longest, CHUNK):
        part = filled[:, start : start + CHUNK]
        made = decoder.hidden(run, batch_of(part, start), cache).view(*part.shape, -1)
        here = (last >= start) & (last < start + part.shape[1])
        hidden[here] = made[here, last[here] - start]
    return hidden


def batch_of(tokens: Tensor, start: int) -> Batch:
    """Return the batch of tokens [B, S] that follow `start` others in every row."""
    rows, s = tokens.shape
    position = torch.arange(start, start + s, device=tokens.device)
    return Batch(
        tokens=tokens.reshape(-1),
        positions=position.repeat(rows),
        starts=torch.full((rows,), start, dtype=torch.int32, device=tokens.device),
        lengths=None,
        max_len=start + s,
        rows=rows,
        fresh=start == 0,
    )


def at_once(decoder: Decoder, cache: Cache, place: Place, run: Direct, chain: Chain = FUSED) -> Tensor:
    """Run one decode step op by op; return logits [B, V]."""
    rows = place.tokens.shape[0]
    batch = Batch(
        tokens=place.tokens,
        positions=place.positions,
        starts=place.starts,
        lengths=place.lengths if cache.paged or rows > 1 else None,
        max_len=place.longest,
        rows=rows,
    )
    return decoder.logits(run, decoder.hidden(run, batch, cache, chain))
