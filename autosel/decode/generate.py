"""Generate token ids: prefill, then one step per token; with speculation, several tokens per step.

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
from autosel.decode.persistent import AnyStep, serve, write
from autosel.decode.run import FUSED, GREEDY, Chain, Sampling, StepForm
from autosel.decode.sample import Sampler
from autosel.decode.step import Direct, Place
from autosel.decode.weights import refuse_other_tokens
from autosel.errors import UsageError
from autosel.models.passes import CHUNK, rows_at_once
from autosel.values import Fingerprint

NGRAM = 3  # longest n-gram searched for in the text so far


@dataclass(slots=True, kw_only=True)
class Generated:
    """Generated tokens; `tokens[b]` are row b's new ones. `passes` counts the forward passes after prefill."""

    tokens: list[list[int]]
    passes: int = 0
    logits: list[Tensor] = field(default_factory=list)  # [B, V] of each step, if requested


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling = GREEDY,
    page: int = 0,
    prealloc: bool = True,
    speculate: int = 0,
    stop: frozenset[int] = frozenset(),
    chain: Chain = FUSED,
    keep_logits: bool = False,
    heard: Callable[[list[int]], None] | None = None,
    form: StepForm = "ops",
    fp: Fingerprint | None = None,
) -> Generated:
    """Return `count` new tokens for each prompt; fewer if one of `stop` occurs, which is then the last one.

    `speculate` K drafts K tokens per step from the earlier text and keeps those that greedy decoding would have chosen.
    `heard` receives each step's tokens. `form` and `fp` are as in `persistent.write`. Raises UsageError.
    """
    asked = [list(p) for p in prompts]
    _refuse(decoder, asked, count, sampling, speculate)
    longest = max(map(len, asked)) + count + speculate
    shape, weights = decoder.shape, decoder.weights
    cache = make_cache(shape, weights.dtype, rows=len(asked), room=longest, page=page, device=weights.device)
    with torch.inference_mode():
        logits = prefill(decoder, cache, asked)
        sampler = Sampler(sampling, asked, longest, logits)
        token = torch.empty(len(asked), dtype=torch.int64, device=weights.device)
        sampler.choose(logits, token)
        sampler.remember(token.tolist())
        told = Generated(tokens=[[t] for t in token.tolist()], logits=[logits.clone()] if keep_logits else [])
        if heard:
            heard(token.tolist())
        if speculate:
            return _speculating(decoder, cache, asked, told, count, speculate, stop)
        place = Place.at(token, [len(p) for p in asked])
        made = serve(write(decoder, cache, place, chain, sampler, form=form, fp=fp), fp) if prealloc else None
        one = _Written(made, sampler) if made else _AtOnce(decoder, cache, place, chain, sampler)
        return _decoding(one, sampler, told, count, stop, keep_logits, heard)


def _refuse(decoder: Decoder, prompts: list[list[int]], count: int, sampling: Sampling, speculate: int) -> None:
    if not prompts or not all(prompts):
        raise UsageError("a prompt is empty", why="the first generated token needs at least one token before it")
    if count < 1:
        raise UsageError(f"cannot generate {count} tokens", todo="generate at least one")
    for prompt in prompts:
        refuse_other_tokens(prompt, decoder.shape)
    longest = max(map(len, prompts)) + count
    if longest > decoder.shape.max_context:
        raise UsageError(
            f"prompt and answer have {longest} tokens",
            why=f"{decoder.shape.name} supports contexts of at most {decoder.shape.max_context}",
            todo="use a shorter prompt, or generate fewer",
        )
    if speculate and sampling.changes_greedy:
        raise UsageError(
            "speculation and sampling are mutually exclusive",
            why="drafts are checked against greedy decoding",
            todo="remove one of them",
        )


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


# --- decode ----------------------------------------------------------------------------------------------------------


class _Written:
    """Steps by the written list."""

    def __init__(self, step: AnyStep, sampler: Sampler) -> None:
        self.step, self.cache, self.place, self.sampler = step, step.cache, step.place, sampler

    def __call__(self) -> tuple[Tensor, list[int]]:
        """Run a step. Return logits and chosen tokens, which the place feeds next."""
        assert self.step.chosen is not None
        self.sampler.draw()
        self.step.run()
        self.place.tokens.copy_(self.step.chosen)
        tokens = self.place.tokens.tolist()
        self.step.settle()
        return self.step.logits, tokens


class _AtOnce:
    """Steps op by op, each op allocating its result."""

    def __init__(self, decoder: Decoder, cache: Cache, place: Place, chain: Chain, sampler: Sampler) -> None:
        self.decoder, self.cache, self.place, self.chain, self.sampler = decoder, cache, place, chain, sampler
        self.run = Direct(decoder.weights)

    def __call__(self) -> tuple[Tensor, list[int]]:
        logits = at_once(self.decoder, self.cache, self.place, self.run, self.chain)
        return logits, self.sampler.choose(logits, self.place.tokens).tolist()


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


def _decoding(
    stepper: _Written | _AtOnce,
    sampler: Sampler,
    told: Generated,
    count: int,
    stop: frozenset[int],
    keep_logits: bool,
    heard: Callable[[list[int]], None] | None,
) -> Generated:
    place, done = stepper.place, [bool(stop) and row[-1] in stop for row in told.tokens]
    lengths = place.lengths.tolist()
    while not all(done) and len(max(told.tokens, key=len)) < count:
        for row, length in enumerate(lengths):
            stepper.cache.reserve(row, length + told.passes)
        logits, tokens = stepper()
        sampler.remember(tokens)
        place.advance()
        told.passes += 1
        if keep_logits:
            told.logits.append(logits.clone())
        for row, token in enumerate(tokens):
            if not done[row]:
                told.tokens[row].append(token)
                done[row] = token in stop
        if heard:
            heard(tokens)
    return told


# --- speculation -----------------------------------------------------------------------------------------------------


def draft(text: Sequence[int], count: int) -> list[int]:
    """Return at most `count` tokens that followed the last occurrence of the longest n-gram at the text's end."""
    for n in range(min(NGRAM, len(text) - 1), 0, -1):
        ending = list(text[-n:])
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == ending:
                return list(text[start + n : start + n + count])
    return []


def _speculating(
    decoder: Decoder,
    cache: Cache,
    prompts: list[list[int]],
    told: Generated,
    count: int,
    speculate: int,
    stop: frozenset[int],
) -> Generated:
    """Feed each row's last token and its draft in every pass, and keep draft tokens that greedy decoding chose too.

    All rows are fed the same number of tokens; padding is never kept.
    """
    run, rows, device = Direct(decoder.weights), len(prompts), decoder.weights.device
    held = [len(p) for p in prompts]  # tokens in the cache
    done = [row[-1] in stop or len(row) >= count for row in told.tokens]
    while not all(done):
        drafts = [[] if done[b] else draft(prompts[b] + told.tokens[b], speculate) for b in range(rows)]
        s = 1 + max(map(len, drafts))
        fed = [[told.tokens[b][-1], *drafts[b], *[0] * (s - 1 - len(drafts[b]))] for b in range(rows)]
        for row in range(rows):
            cache.reserve(row, held[row] + s)
        starts = torch.tensor(held, device=device)
        batch = Batch(
            tokens=torch.tensor(fed, device=device).view(-1),
            positions=(starts[:, None] + torch.arange(s, device=device)).view(-1),
            starts=starts.int(),
            lengths=(starts + s).int() if cache.paged or rows > 1 else None,
            max_len=max(held) + s,
            rows=rows,
        )
        chosen = decoder.logits(run, decoder.hidden(run, batch, cache)).argmax(-1).view(rows, s).tolist()
        told.passes += 1
        for b in range(rows):
            if not done[b]:
                kept = accepted(drafts[b], chosen[b])
                done[b] = _append(told.tokens[b], kept, count, stop)
                held[b] = len(prompts[b]) + len(told.tokens[b]) - 1
    return told


def accepted(drafted: list[int], chosen: list[int]) -> list[int]:
    """Return the chosen tokens up to and including the first that differs from the draft."""
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == chosen[agreed]:
        agreed += 1
    return chosen[: agreed + 1]


def _append(told: list[int], kept: list[int], count: int, stop: frozenset[int]) -> bool:
    """Append the kept tokens. Return True if the row is done."""
    for token in kept:
        told.append(token)
        if token in stop or len(told) >= count:
            return True
    return False
