"""Attention over keys and values in a format: the additional roundings, and the hostile battery."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autosel.ops import attention
from autosel.ops.attention_cases import attn_cases, bury, small_cache
from autosel.ops.cached import Cached, quantise_cache
from autosel.ops.codes import CODES
from autosel.ops.contract import DTYPE_NAME, TINY_NORMAL, U32, UNIT, Case, Op
from autosel.ops.draw import Change, Draw, axes_swapped, case, offset_by_one, relayout, strided
from autosel.ops.rounding import LAMBDA, flushable, stored
from autosel.ops.stored_cases import KEYS, VALUES, cache_cases
from autosel.values import Workload


def cached_bound(e: attention.Exact, k: Cached, v: Cached, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the bound [B, Hkv, R, D] of attention over a cache in a format.

    It is `attention.error_bound` of values without their scale, with K's scale stored in the query, and V's scale
    applied to a stored result.
    """
    name, by = DTYPE_NAME[dtype], v.by_element()
    query, codes = e.q.double() * k.by_element(), k.numbers()
    folded = LAMBDA * UNIT[name] * (query.square() @ codes.square().mT).sqrt()
    folded = folded + torch.where(query.abs() < TINY_NORMAL[name], query.abs(), 0.0) @ codes.abs().mT
    error = attention.error_bound(e, k.exact(), v.numbers().to(dtype), scale, folded)
    error = error * by.abs() + v.by_element(flushable(v.scales)) * e.o.abs()
    error = error + U32 * (e.o * by).abs() + TINY_NORMAL["fp32"]
    return stored(e.o * by, error, name)


# --- the battery ------------------------------------------------------------------------------------------------------


def cached_cases(op: Op, w: Workload) -> tuple[Case, ...]:
    """Return attn's battery with quantised caches, except infinity, which codes lack; then cases of codes, scales,
    layouts.
    """
    cases = [_quantised(found, w) for found in attn_cases(op, plain(w), layouts=False) if found.name != "inf in v"]
    small = small_cache(w)
    for name, sizes in (("k", KEYS), ("v", VALUES)):
        cases += cache_cases(op, small, name, sizes, _nan_in_sight(name))
    for told, covers, view in (
        ("strided rows", "row strides ignored", strided),
        ("offset by one element", "alignment assumed", offset_by_one),
        ("heads inside tokens", "layout [B, L, H, D] seen through strides", axes_swapped),
    ):
        cases.append(case(op, small, told, covers, relayout(("q", "k", "v"), view)))
    return *cases, case(op, small, "small scales, large queries", "a small scale flushed", _traded)


def _traded(inputs: dict[str, Any], draw: Draw) -> None:
    """Trade scale between query and keys; scores stay the same."""
    power = 2.0 ** (20 if draw.name != "fp16" else 9)
    inputs["q"].mul_(power)
    inputs["k"].scales.div_(power)


def plain(w: Workload) -> Workload:
    """Return the same attention over a cache in q's dtype."""
    return replace(w, traits=tuple((name, value) for name, value in w.traits if name != "cache"))


def _quantised(found: Case, w: Workload) -> Case:
    """Return a case with a cache of codes."""

    def make(seed: int) -> dict[str, Any]:
        inputs, draw = found.make(seed), Draw(seed + 77_003, "fp32")
        for name in ("k", "v"):
            unseen = _beyond(inputs[name], inputs["lengths"], inputs["max_len"])
            inputs[name] = quantise_cache(torch.where(unseen, 0.0, inputs[name]), w.cache_format)
            bury(inputs[name], inputs["lengths"], inputs["max_len"], draw)
        return inputs

    at = replace(found.workload, traits=(*found.workload.traits, ("cache", w.cache_format.name)))
    return Case(name=found.name, workload=at, make=make, covers=found.covers)


def _beyond(cache: Tensor, lengths: Tensor | None, keys: int) -> Tensor:
    """Return bool [B, 1, Lmax, 1]: True beyond a sequence's length."""
    ends = torch.full((cache.shape[0],), keys) if lengths is None else lengths.long()
    return (torch.arange(cache.shape[2]) >= ends[:, None])[:, None, :, None]


def _nan_in_sight(name: str) -> Change:
    """Put a NaN code into the middle of batch row 0's first head, visible to every query; other heads get others."""

    def change(inputs: dict[str, Any], _: Draw) -> None:
        cache: Cached = inputs[name]
        nans, lengths = CODES[cache.format.code].nans, inputs["lengths"]
        end = inputs["max_len"] if lengths is None else int(lengths[0])
        for head in range(cache.shape[1]):
            cache.codes[0, head, end - inputs["q"].shape[2], cache.shape[3] // 3] = nans[head % len(nans)]

    return change
