"""Faults in one tensor: wrong reads of an operand, or wrong elements in a result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.testing.mutants.mutant import Edit

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CAPACITIES = (4, 32, 256, 4096, 65536)
TILE = 16
SPECIAL = {"with NaN swallowed": "nan", "with infinity clamped": "inf"}  # the value that shows a fault


# --- numbers ----------------------------------------------------------------------------------------------------------


def narrowed(to: torch.dtype) -> Edit:
    def edit(x: Tensor) -> Tensor:
        most = torch.finfo(to).max
        wide = x.float()
        clamped = torch.where(wide.isfinite(), wide.clamp(-most, most), wide) if to == NARROW["fp8"] else wide
        return clamped.to(to).float().to(x.dtype)

    return edit


def _without_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.zeros_like(x), x)


def _without_inf(x: Tensor) -> Tensor:
    most = torch.finfo(x.dtype).max
    return torch.where(x.isinf(), x.sign() * most, x)


def of_floats(dtype: torch.dtype, *, least: float, largest: float, negative: bool) -> Mapping[str, Edit]:
    """Return faults in the values of a float operand with magnitudes of zero and from `least` to `largest`."""
    if dtype.itemsize == 1:
        return {}
    return {
        **{f"narrowed to {name}": narrowed(to) for name, to in NARROW.items() if to != dtype},
        "taken for 0": torch.zeros_like,
        "taken for 1": torch.ones_like,
        **({"without its sign": torch.abs} if negative else {}),
        **({"above 1000 clamped": lambda x: x.clamp(-1e3, 1e3).where(x.isfinite(), x)} if largest > 1000 else {}),
        **({"below 2^-14 flushed": lambda x: x.where(~(x.abs() < 2.0**-14), 0)} if least < 2.0**-14 else {}),
        "with NaN swallowed": _without_nan,
        "with infinity clamped": _without_inf,
    }


def _wrapped(n: int, x: Tensor) -> Tensor:
    return torch.where(x > 0, x % n, x)


def of_integers(largest: float) -> Mapping[str, Edit]:
    """Return faults in indices and counts up to `largest`."""
    powers = [n for n in (16, 256, 4096, 65536) if n <= largest]
    return {
        "taken for 0": torch.zeros_like,
        "off by +1": lambda x: x + 1,
        "off by -1": lambda x: x - 1,
        **{f"wrapped at {n}": partial(_wrapped, n) for n in powers},
        **{f"clipped to {n - 1}": partial(torch.clamp, max=n - 1) for n in powers},
        "narrowed to fp16": lambda x: x.half().clamp(-65504, 65504).to(x.dtype),
        "narrowed to bf16": lambda x: x.bfloat16().to(x.dtype) if x.abs().max() < 2**30 else None,
    }


def of_results(dtype: torch.dtype) -> Mapping[str, Edit]:
    if not dtype.is_floating_point:
        return {"off by +1": lambda y: y + 1, "taken for 0": torch.zeros_like}
    return {
        **{f"narrowed to {name}": narrowed(to) for name, to in NARROW.items() if to != dtype},
        "truncated": _truncated,
        "a unit too large": lambda y: (y.float() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype),
        "without its sign": torch.abs,
        "clamped at 0": lambda y: y.clamp(min=0),
        "wrong in one element of 997": _one_in(997),
        "with NaN swallowed": _without_nan,
        "with infinity clamped": _without_inf,
        "zero": torch.zeros_like,
    }


def _truncated(y: Tensor) -> Tensor:
    """Move every element one step towards zero, which is the most that truncation changes."""
    integers = y.contiguous().view(torch.int16 if y.itemsize == 2 else torch.int32)
    return torch.where((y.abs() > 1e-3) & y.isfinite(), integers - 1, integers).view(y.dtype)


def _one_in(n: int) -> Edit:
    """Change about one element in n, chosen by its bits: those that are 0 modulo n."""

    def edit(y: Tensor) -> Tensor:
        integers = y.contiguous().view(torch.int16 if y.itemsize == 2 else torch.int32)
        return torch.where((integers.int() % n == 0) & (y != 0), y * 1.25, y)

    return edit


# --- places -----------------------------------------------------------------------------------------------------------


def along(axis: int, longest: int) -> Mapping[str, Edit]:
    """Return faults along an axis with a length of up to `longest`."""

    def picked(choose: object, least: int = 2) -> Edit:
        def edit(x: Tensor) -> Tensor | None:
            n = x.shape[axis] if axis < x.dim() else 0
            return None if n < least else x.index_select(axis, choose(torch.arange(n)))  # type: ignore[operator]

        return edit

    def dropped(choose: object) -> Edit:
        def edit(x: Tensor) -> Tensor | None:
            n = x.shape[axis] if axis < x.dim() else 0
            where = choose(torch.arange(n), n)  # type: ignore[operator]
            if not where.any():
                return None
            made = x.clone(memory_format=torch.contiguous_format)
            bits(made).index_fill_(axis, where.nonzero()[:, 0], 0)
            return made

        return edit

    sizes = [n for n in CAPACITIES if n < longest]
    edits = {
        "the first for all": picked(torch.zeros_like),
        "the neighbour's": picked(lambda i: i.roll(1)),
        "the last from its neighbour": picked(lambda i: torch.cat((i[:-1], i[-2:-1]))),
        "the last dropped": dropped(lambda i, n: i == n - 1),
        **{f"wrapped at {m}": picked(lambda i, m=m: i % m, m + 1) for m in sizes},
        **{f"clipped to {m}": picked(lambda i, m=m: i.clamp(max=m - 1), m + 1) for m in sizes},
    }
    if longest > 8:
        edits["the rest of 8 dropped"] = dropped(lambda i, n: i >= n // 8 * 8)
    if longest > TILE:
        edits[f"tile 1 of {TILE} dropped"] = dropped(lambda i, _: i // TILE == 1)
        edits["the second half dropped"] = dropped(lambda i, n: i >= max(1, n // 2))
    return edits


# --- memory -----------------------------------------------------------------------------------------------------------


def of_layouts(rank: int) -> Mapping[str, Edit]:
    """Return faults in the addresses from which an operand is read."""
    edits: dict[str, Edit] = {"read from an aligned address": _aligned}
    return {**edits, "read as contiguous": _contiguous} if rank > 1 else edits


def _contiguous(x: Tensor) -> Tensor | None:
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    if x.is_contiguous() or x.numel() > room:
        return None
    return x.as_strided(x.shape, _dense(x.shape))


def _dense(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _aligned(x: Tensor) -> Tensor | None:
    """Read from the next lower multiple of 16 bytes, as loads do that drop the low bits of an address."""
    off = x.storage_offset() * x.itemsize % 16
    if not off:
        return None
    return x.as_strided(x.shape, x.stride(), x.storage_offset() - off // x.itemsize)


# --- rows that look alike ---------------------------------------------------------------------------------------------


def of_rows() -> Mapping[str, Edit]:
    """Return faults that replace a row by an earlier one that looks like it."""
    return {
        "rows of one prefix taken for one": lambda x: _as_first(x, lambda rows: rows[:, : -(-rows.shape[1] // 2)]),
        "rows of one sum taken for one": lambda x: _as_first(x, lambda rows: rows.abs().sum(-1, keepdim=True)),
    }


def _as_first(x: Tensor, key: object) -> Tensor | None:
    if x.dim() < 2 or x.numel() == 0 or x.shape[-1] < 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    keys = key(rows.double().nan_to_num(7.0))  # type: ignore[operator]
    _, group = torch.unique((keys * 2**20).round(), dim=0, return_inverse=True)
    first = torch.full((int(group.max()) + 1,), len(group)).scatter_reduce_(0, group, torch.arange(len(group)), "amin")
    return rows[first[group]].view(x.shape)
