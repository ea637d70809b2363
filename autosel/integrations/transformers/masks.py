"""Read attention masks: the keys that each row sees, or the causal half of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosel import devices
from autosel.integrations.transformers.proof import deciding

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Describe a mask's visible keys: (first, last + 1) for each row's single query, or a prompt's causal half."""

    spans: Spans | None
    causal: bool
    asked_by: set[int]


def look(mask: Tensor, module: Any) -> _Seen | None:
    """Read a mask [B,1,S,L], boolean or added to the scores, once for all modules of a step. A module that reads it
    twice starts another step, before which the caller may have changed its mask. None: not read, or it weakens single
    scores."""
    if torch.compiler.is_compiling() or mask.dim() != 4 or mask.shape[1] != 1 or not devices.on_host(mask.device.type):
        return None  # reading it on a GPU would have to wait, which breaks a capture
    found: _Seen | None = getattr(mask, "_autosel", None)
    if found is None or id(module) in found.asked_by:
        lets = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if mask.dtype != torch.bool and not bool((lets | (mask[:, 0] <= torch.finfo(mask.dtype).min)).all()):
            return None
        one, square = lets.shape[1] == 1, lets.shape[1] == lets.shape[2]
        causal = square and not one and bool((lets == torch.ones_like(lets).tril()).all())
        found = _Seen(spans=_spans(lets[:, 0]) if one else None, causal=causal, asked_by=set())
        mask._autosel = found  # type: ignore[attr-defined]
    found.asked_by.add(id(module))
    return found


def _spans(seen: Tensor) -> Spans | None:
    """Return (first, last + 1) of the keys that each row sees, from bool [B, L]; None unless each row sees one unbroken
    run."""
    first, count = seen.int().argmax(-1), seen.sum(-1)
    end = seen.shape[1] - seen.flip(-1).int().argmax(-1)
    if not bool(((end - first == count) & (count > 0)).all()):
        return None
    return tuple(zip(first.tolist(), end.tolist(), strict=True))


def by_spans(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, cap: float) -> Tensor | None:
    """Split rows that see different keys into separate calls, unless all begin at the first key."""
    attn = deciding("attn")
    if len(set(spans)) == 1:
        first, end = spans[0]
        made: Tensor = attn(q, k[:, :, first:end], v[:, :, first:end], None, end - first, scale, 0, cap)
        return made
    if len(spans) != q.shape[0]:
        return None
    if all(first == 0 for first, _ in spans):
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
        ragged: Tensor = attn(q, k, v, ends, int(ends.max()), scale, 0, cap)
        return ragged
    out = torch.empty_like(q)
    for row, (first, end) in enumerate(spans):
        here = slice(row, row + 1)
        out[here] = attn(q[here], k[here, :, first:end], v[here, :, first:end], None, end - first, scale, 0, cap)
    return out
