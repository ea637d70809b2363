"""Quality of the timed path on a text: perplexity, and the distance of its logits from the reference's.

The reference widens every weight to fp32 and never rounds keys and values. The text is fed token by token through the
timed step, with the same batch and chain; attention is bound again as the text grows, by the text's length instead of
--seq.

    quality          the reference has the weights of the run: shows a fault of a kernel
    format_quality   the reference is the original model (decode.original): shows the loss of a format

    difference   mean over tokens of (timed path's -ln p - reference's); its standard error is over the same tokens
    divergence   KL(reference || timed), nats, of each next-token distribution
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.decode.cache import make_cache
from autosel.decode.generate import at_once
from autosel.decode.model import Decoder
from autosel.decode.original import CHUNK, Original
from autosel.decode.persistent import write
from autosel.decode.reference import logits_after
from autosel.decode.run import Chosen, FormatQuality, Plan, Quality, Text
from autosel.decode.scene import Scene
from autosel.decode.step import Direct, Place

MOST_TOKENS = 512  # of all rows: the reference keeps its logits in memory


def quality(scene: Scene, text: Text, chosen: Chosen) -> Quality:
    """Score the text with the reference and with the chosen step."""
    rows = windows(text.tokens, scene.plan.batch, scene.plan.model.max_context)
    tokens = torch.tensor(rows, device=scene.decoder.weights.device)
    scene.listener.stage("quality", "reference", 0, len(rows[0]))
    reference = _reference(scene.decoder, tokens)
    scores = _Scores()
    for i, logits in _fed(scene, chosen, [tokens], text.name):
        scores.add(logits, reference[:, i], tokens[:, i + 1])
    return scores.quality(text)


def format_quality(scene: Scene, known: Original, chosen: Chosen) -> FormatQuality:
    """Score the chosen step, whose weights are codes, against the original model."""
    scores, rows = _Scores(), scene.plan.batch
    parts, count = known.windows.split(rows), known.windows.shape[1] - 1
    for at, (i, logits) in enumerate(_fed(scene, chosen, parts, "format")):
        if i % CHUNK == 0:
            first = at // count * rows
            reference = known.logits(slice(first, first + rows), slice(i, min(count, i + CHUNK)))
        scores.add(logits, reference[:, i % CHUNK], parts[at // count][:, i + 1])
    return scores.format_quality(known)


def _fed(scene: Scene, chosen: Chosen, parts: Sequence[Tensor], name: str) -> Iterator[tuple[int, Tensor]]:
    """Feed texts [B, S], one after the other, token by token; yield each position but the last, and the logits [B, V]
    after it.
    """
    plan, decoder = scene.plan, scene.decoder
    (rows, count), page = parts[0].shape, plan.page if plan.cache == "paged" else 0
    cache = make_cache(
        decoder.shape, decoder.weights.dtype, rows=rows, room=count, page=page, device=decoder.weights.device
    )
    for row in range(rows):
        cache.reserve(row, count)
    place = Place.at(parts[0][:, 0], [0] * rows)
    form = "ops" if chosen.form == "graph" else chosen.form  # avoids a new capture for every token
    step = write(decoder, cache, place, chosen.chain, form=form, fp=scene.fp) if plan.prealloc else None
    run = Direct(decoder.weights)
    for part, tokens in enumerate(parts):
        for i in range(count - 1):
            scene.listener.stage("quality", name, part * (count - 1) + i, len(parts) * (count - 1))
            place.tokens.copy_(tokens[:, i])
            if step is not None:
                step.run()
                step.settle()
            yield i, step.logits if step is not None else at_once(decoder, cache, place, run, chosen.chain)
            place.advance()
        place.advance(1 - count)


def windows(tokens: Sequence[int], rows: int, context: int = MOST_TOKENS) -> list[list[int]]:
    """Return consecutive equal parts of the text, one per row, none longer than the model's context."""
    count = min(min(len(tokens), MOST_TOKENS) // rows, context)
    return [list(tokens[b * count : (b + 1) * count]) for b in range(rows)]


def clipped(plan: Plan, text: Text) -> str:
    """Return a note if the text exceeds the model's context, else ""."""
    whole, most = len(windows(text.tokens, plan.batch)[0]), plan.model.max_context
    if whole <= most:
        return ""
    return f"of each row's {whole} tokens of {text.name} the first {most} were scored: the model has no longer context"


def _reference(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return fp32 logits [B, S, V] after each token. float64 would not match a user's results better."""
    nothing = make_cache(decoder.shape, decoder.weights.dtype, rows=len(tokens), room=1, device=tokens.device)
    found = logits_after(decoder.weights, tokens, nothing, 0, torch.float32)
    return found.view(*tokens.shape, -1)


class _Scores:
    """Scores of both paths, token by token."""

    def __init__(self) -> None:
        self.timed: list[float] = []
        self.reference: list[float] = []
        self.divergence: list[float] = []
        self.same_first = 0

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        ours, theirs = (t.double().log_softmax(-1) for t in (logits, reference))
        self.timed += (-ours.gather(-1, following[:, None])[:, 0]).tolist()
        self.reference += (-theirs.gather(-1, following[:, None])[:, 0]).tolist()
        self.divergence += (theirs.exp() * (theirs - ours)).sum(-1).clamp(min=0).tolist()
        self.same_first += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    def quality(self, text: Text) -> Quality:
        return Quality(
            text=text.name,
            text_sha256=text.sha256,
            tokenizer=text.tokenizer,
            reference_perplexity=_perplexity(self.reference),
            **self._common(),
        )

    def format_quality(self, known: Original) -> FormatQuality:
        ordered = sorted(self.divergence)
        return FormatQuality(
            original=known.source,
            stored=known.stored,
            original_perplexity=_perplexity(self.reference),
            p999_divergence=ordered[math.ceil(0.999 * len(ordered)) - 1],
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        differences = [a - b for a, b in zip(self.timed, self.reference, strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
        return {
            "tokens": len(differences),
            "perplexity": _perplexity(self.timed),
            "difference": statistics.fmean(differences),
            "difference_error": spread / math.sqrt(len(differences)),
            "mean_divergence": statistics.fmean(self.divergence),
            "max_divergence": max(self.divergence),
            "same_first": self.same_first / len(differences),
        }


def _perplexity(nats: Sequence[float]) -> float:
    return math.exp(min(700.0, statistics.fmean(nats)))
