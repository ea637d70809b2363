"""Shared state of a measurement: device, model, cache, position of the stream, coins and clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from autosel import devices
from autosel.decode.cache import Cache, make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import prefill
from autosel.decode.model import Decoder
from autosel.decode.persistent import Kind, kind_of
from autosel.decode.prompt import prompts
from autosel.decode.reference import logits_after
from autosel.decode.run import Listener, Plan, PromptDigest
from autosel.decode.step import Place
from autosel.decode.weights import Weights
from autosel.ops.contract import UNIT
from autosel.values import DTypeName, Fingerprint

Clock = Callable[[], int]


@dataclass(slots=True, kw_only=True)
class Scene:
    """State of a measurement. `text` holds each row's tokens; the last one is what `place` feeds next."""

    plan: Plan
    fp: Fingerprint  # of the device
    kind: Kind  # how the device runs whole steps
    rng: Random  # coin flips, from the plan's seed
    listener: Listener
    clock: Clock
    decoder: Decoder
    eager: Eager
    cache: Cache  # the optimised arm's
    eager_cache: Cache  # the same one, unless the optimised arm's is paged
    place: Place
    text: list[list[int]]
    prompt: PromptDigest | None  # digest of the prompt that `text` began with
    probes: list[float] = field(default_factory=list)  # bytes/s: the median window of each probe
    ceiling: float = 0.0  # the best window of all
    ttft_ns: int | None = None
    baseline_ttft_ns: int | None = None
    logit_error: float = 0.0  # of the check closest to its bound
    logit_bound: float = 0.0
    exact: Tensor | None = None  # the reference's logits for the current tokens, if computed

    def hold(self, error: float, bound: float) -> None:
        """Remember the check that came closest to its bound."""
        if not self.logit_bound or error / bound > self.logit_error / self.logit_bound:
            self.logit_error, self.logit_bound = error, bound

    def reference(self) -> Tensor:
        """Return logits [B, V] for the current tokens in higher precision; at a fixed context only once."""
        if self.exact is None:
            self.exact = self.after(self.place.tokens[:, None], wider=True)
        return self.exact

    def after(self, tokens: Tensor, *, wider: bool = False, held: int | None = None) -> Tensor:
        """Return logits [B * S, V] after each of the tokens [B, S], by PyTorch in the dtype or in higher precision.

        They follow `held` tokens of the cache, by default all; it stays unchanged.
        """
        own = self.decoder.weights.torch_dtype
        precision = own if not wider else torch.float64 if own == torch.float32 else torch.float32
        count = self.place.longest - 1 if held is None else held
        return logits_after(self.decoder.weights, tokens, self.eager_cache, count, precision)

    def advance(self, kept: list[list[int]]) -> None:
        """Advance the stream by these tokens of each row, the same number for all rows."""
        self.exact = None
        if self.cache.paged and len(kept[0]) > 1:
            _copy_tokens(self, len(kept[0]))
        for row, tokens in zip(self.text, kept, strict=True):
            row.extend(tokens)
        self.place.tokens.copy_(torch.tensor([tokens[-1] for tokens in kept]))
        self.place.advance(len(kept[0]))

    def probe(self) -> None:
        """Measure the current read rate of memory: about twenty windows of a millisecond.

        Without a baseline, the weights that a step reads last are read, which saves a buffer.
        """
        within = None if self.plan.baseline else self.decoder.weights.memory
        windows = devices.named(self.plan.device).read_windows(within=within)
        self.probes.append(statistics.median(windows))
        self.ceiling = max(self.ceiling, *windows)


def judged(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: DTypeName) -> tuple[float, float]:
    """Return (largest error of `ours`, allowed error) of logits [..., V]; `theirs` are the baseline's.

    The RMS error may be twice the baseline's, as in parity, at the state where the baseline errs most (states amplify
    rounding differently). The largest of N normal errors is about sqrt(2 ln 2N) deviations. Storing the largest logit
    may add one rounding.
    """
    rms = error = largest = torch.zeros((), dtype=torch.float64, device=exact.device)
    for a, b, e in zip(*(t.reshape(-1, t.shape[-1]) for t in (ours, theirs, exact)), strict=True):  # a state at a time
        wide = e.double()
        rms = torch.maximum(rms, (b.double() - wide).square().mean().sqrt())
        error = torch.maximum(error, (a.double() - wide).abs().max())
        largest = torch.maximum(largest, wide.abs().max())
    allowed = 2 * rms.item() * math.sqrt(2 * math.log(2 * exact.numel())) + UNIT[dtype] * largest.item()
    return error.item(), allowed


def set_scene(plan: Plan, weights: Weights, fp: Fingerprint, listener: Listener, clock: Clock) -> Scene:
    """Run the prompt with both arms, timed, or fill the cache. The first timed step comes next."""
    prompt = prompts(plan)
    text = prompt.rows

    def cache(page: int) -> Cache:
        return make_cache(plan.shape, plan.dtype, rows=plan.batch, room=plan.longest, page=page, device=weights.device)

    ours = cache(plan.page if plan.cache == "paged" else 0)
    for row in range(plan.batch):
        ours.reserve(row, plan.longest)
    last = torch.tensor([row[-1] for row in text], device=weights.device)
    scene = Scene(
        plan=plan,
        fp=fp,
        kind=kind_of(plan.device),
        rng=Random(plan.seed),
        listener=listener,
        clock=clock,
        decoder=Decoder(weights),
        eager=Eager(weights),
        cache=ours,
        eager_cache=cache(0) if ours.paged else ours,
        place=Place.at(last, [plan.seq - 1] * plan.batch),
        text=text,
        prompt=prompt.digest,
    )
    if plan.prompt == "synthetic":
        _fill(scene)
    else:
        _prefill(scene)
    for said, token in zip(scene.text, scene.place.tokens.tolist(), strict=True):
        said.append(token)
    return scene


def _fill(scene: Scene) -> None:
    """Fill both caches with the same keys and values of variance one."""
    generator = torch.Generator(device=scene.place.tokens.device).manual_seed(scene.plan.seed)
    for tensor in (*scene.cache.k, *scene.cache.v):
        tensor.normal_(generator=generator)
    if scene.cache.paged:
        _copy_pages(scene)


def _copy_pages(scene: Scene) -> None:
    """Copy the paged cache's content to the baseline's, in order."""
    ours, theirs = scene.cache, scene.eager_cache
    assert ours.block_table is not None
    for mine, other in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
        gathered = mine[ours.block_table.long()].flatten(1, 2).transpose(1, 2)
        count = min(gathered.shape[2], other.shape[2])
        other[:, :, :count] = gathered[:, :, :count]


def _copy_tokens(scene: Scene, count: int) -> None:
    """Copy `count` tokens from the current place on, which only the optimised pass has run, to the baseline's cache."""
    ours, theirs, first = scene.cache, scene.eager_cache, scene.place.longest - 1
    assert ours.block_table is not None
    at = torch.arange(first, first + count, device=ours.block_table.device)
    pages = ours.block_table[:, at // ours.page].long()
    for mine, other in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
        other[:, :, first : first + count] = mine[pages, at % ours.page].transpose(1, 2)


def _prefill(scene: Scene) -> None:
    """Run the prompt once with each arm of the plan, cold, as a user would. Both then use the optimised arm's cache."""
    listener, clock = scene.listener, scene.clock
    if scene.plan.baseline:
        listener.stage("prefill", "baseline", 0, 2)
        filled = torch.tensor(scene.text, device=scene.place.tokens.device)
        begin = clock()
        scene.eager.prefill(filled, scene.eager_cache).argmax(-1).tolist()
        scene.baseline_ttft_ns = clock() - begin
    listener.stage("prefill", "optimised", 1, 2)
    begin = clock()
    torch.argmax(prefill(scene.decoder, scene.cache, scene.text), -1, out=scene.place.tokens)
    scene.place.tokens.tolist()
    scene.ttft_ns = clock() - begin
    if scene.cache.paged:
        _copy_pages(scene)
    listener.stage("prefill", scene.plan.prompt, 2, 2)
