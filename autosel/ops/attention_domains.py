"""The domains of the attention ops: contents of queries and caches, lengths, scales."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import torch

from autosel.ops import draw as d
from autosel.ops.cached import with_room
from autosel.ops.domains import (
    ABSENT,
    FAR_DOWN,
    FAR_UP,
    Domain,
    Level,
    among,
    balanced,
    contents,
    sizes,
    trait,
)
from autosel.ops.draw import Change, Draw
from autosel.values import DTypeName

HEADS = among((2, 1), (1, 1), (4, 4), (8, 2), (6, 2), (5, 1), (16, 1), (33, 11), (40, 40))
WIDTHS = among(64, 128, 80, 96, 256, 66, 16, 8, 63, 127, 255)
SEQUENCES = sizes(2, 1, powers=(2, 4), primes=(11, 30))  # always more than the eight that kernels take together
KEYS = sizes(130, 1, 17, 1500, 4099, powers=(3, 9), primes=(19, 700))
WINDOW, SOFTCAP = trait(0, 1, 3, 37), trait(0.0, 30.0, 4.3)


def attention_domains(q: str = "q", k: str = "k", v: str = "v") -> dict[str, Domain]:
    """Return the domains of query, keys, values, scale, window and softcap."""
    return {
        q: contents(
            q,
            up=SCORE_UP,
            down=FAR_DOWN,
            gentle=True,
            nan=False,
            more=(
                seen(q, "nan"),
                Level(name="balanced", edit=balanced(q, k)),
                Level(name="for huge keys", edit=_traded(q, k, up=False)),
                Level(name="for tiny keys", edit=_traded(q, k, up=True)),
            ),
        ),
        k: contents(k, up=SCORE_UP, down=FAR_DOWN, gentle=True, nan=False, more=(seen(k, "nan"),)),
        v: contents(
            v,
            up=FAR_UP,
            down=FAR_DOWN,
            nan=False,
            more=(seen(v, "nan"), seen(v, "inf"), Level(name="every key in its channel", edit=each_key(k, v))),
        ),
        "scale": _scales(q),
        "window": WINDOW,
        "softcap": SOFTCAP,
    }


FEW = 40  # keys
SCORE_UP = {"bf16": 3, "fp16": 3, "fp32": 3}  # scores of about 64: e^64 needs its maximum subtracted


def _traded(q: str, k: str, *, up: bool) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        power = 2.0 ** (40 if draw.name != "fp16" else 6)
        inputs[q].mul_(power if up else 1 / power)
        inputs[k].mul_(1 / power if up else power)

    return change


def each_key(k: str, v: str) -> Change:
    """Make all keys equal, and the values of key j zero except in channel j mod D.

    Each key then has a share of one channel, where a dropped, doubled or misplaced key shows.
    """

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        inputs[k].mul_(1 / 16)
        v_, width = inputs[v], inputs[v].shape[-1]
        heads, keys = (0, 1) if "block_table" in inputs else (1, 2)  # pages' slots in a row are keys in a row
        slot = torch.arange(v_.shape[heads] * v_.shape[keys]).view(v_.shape[heads], v_.shape[keys])
        value = (torch.arange(width) == (slot % width)[..., None]) * (1.0 + draw.uniform(*slot.shape, 1))
        v_.copy_(value[:, :, None] if heads == 0 else value)

    return change


def _scales(q: str) -> Domain:
    def given(value: float) -> Change:
        def change(inputs: dict[str, Any], _: Draw) -> None:
            inputs["scale"] = value or inputs[q].shape[-1] ** -0.5

        return change

    def small(inputs: dict[str, Any], draw: Draw) -> None:
        """Use a tiny scale with larger queries."""
        power = 2.0 ** (24 if draw.name != "fp16" else 5)
        inputs[q].mul_(power)
        inputs["scale"] = inputs[q].shape[-1] ** -0.5 / power

    def levels(_: DTypeName, rng: Random) -> list[Level]:
        found = [Level(name="0, the default", value=0.0), Level(name="1/sqrt D", edit=given(0.0))]
        found += [Level(name=f"{v:.3g}", edit=given(v)) for v in (256**-0.5, rng.uniform(0.2, 0.7), 1.0)]  # Gemma's
        return [*found, Level(name="tiny", edit=small)]

    return Domain(kind="scalar", levels=levels)


# --- lengths ----------------------------------------------------------------------------------------------------------


def lengths_domain(*, presence: str = "") -> Domain:
    """Return the domain of lengths: near and far apart, none, one, and all below `max_len`."""

    def filled(pattern: Any) -> Change:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            lengths, most = inputs["lengths"], inputs["max_len"]
            if lengths is not None:
                found = [min(most, max(0, int(n))) for n in pattern(len(lengths), most, draw)]
                lengths.copy_(torch.tensor(found, dtype=torch.int32))

        return change

    made = [
        *([ABSENT] if presence else []),
        Level(name="plain"),
        Level(name="near", edit=filled(lambda b, n, _: [n - i for i in range(b)])),
        Level(name="far apart", edit=filled(lambda b, n, _: [(n, 1, n // 2, n - 1, 0)[i % 5] for i in range(b)])),
        Level(name="shortest first", edit=filled(lambda b, n, _: [n if i == b - 1 else 1 + i for i in range(b)])),
        Level(name="tile ends", edit=filled(lambda b, n, _: [_end(n, i) for i in range(b)])),
        Level(name="beside tile ends", edit=filled(lambda b, n, _: [_end(n, i) + i % 2 * 2 - 1 for i in range(b)])),
        Level(name="all", edit=filled(lambda b, n, _: [n] * b)),
        Level(name="equal", edit=filled(lambda b, n, draw: draw.integers(1, n + 1, 1).tolist() * b)),
        Level(name="below max_len", edit=filled(lambda b, n, draw: (draw.uniform(b) * n * 0.8).tolist())),
    ]
    return Domain(kind="index", levels=lambda *_: made, presence=presence)


def _end(most: int, row: int) -> int:
    """Return a multiple of 16, decreasing with the row; 16 is the usual length of pages and tiles."""
    return max(1, most // 16 - row) * 16


def room_domain(*caches: str) -> Domain:
    """Return the domain of extra room beyond `max_len`, as a cache has."""

    def more(count: int) -> Change:
        def change(inputs: dict[str, Any], _: Draw) -> None:
            for name in caches:
                inputs[name] = with_room(inputs[name], count)

        return change

    levels = [Level(name="none"), *(Level(name=f"{n} more", edit=more(n)) for n in (1, 7, 64))]
    return Domain(kind="index", levels=lambda *_: levels)


def seen(name: str, bad: Literal["nan", "inf"]) -> Level:
    """Put one bad element into batch row 0: into its last query, or into a key that each of its queries sees.

    Unseen elements must stay finite. It does nothing in rows with few keys, because PyTorch's attention gives 0 for a
    NaN outside its vectors. It never uses the first page of a paged cache, which PyTorch's code puts in place of unused
    pages.
    """

    def edit(inputs: dict[str, Any], _: Draw) -> None:
        x, s, window = inputs[name], inputs["q"].shape[2], inputs["window"]
        end = int(inputs["lengths"][0]) if inputs.get("lengths") is not None else inputs.get("max_len", s)
        at = end - s if s < end else 0
        if min(end, window or end) < FEW or 0 < window < s or (end == s and window):
            return
        if bad == "inf":
            d.away_from_zero(inputs[name.replace("v", "k")])
        if name == "q":
            x[0, -1, -1, x.shape[3] // 3] = float(bad)
        elif "block_table" not in inputs:
            x[0, -1, at, x.shape[3] // 3] = float(bad)
        elif at >= x.shape[1]:
            x[int(inputs["block_table"][0, at // x.shape[1]]), at % x.shape[1], -1, x.shape[3] // 3] = float(bad)

    return Level(name=bad, edit=edit, special=bad)
