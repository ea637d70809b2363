"""fp8 (e4m3) operands: bytes and an fp32 scale for each row or head; what they stand for is byte * scale.

How a caller came to the bytes is the caller's: contracts begin at them. Every e4m3 number is exact in bf16, fp16 and
fp32, its subnormals among them, which no conversion flushes: to lose them is a wrong result. 0x7f and 0xff are NaN;
there is no infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autosel.ops.contract import TINY_NORMAL
from autosel.ops.domains import Domain, Edit, Level
from autosel.ops.draw import Change, Draw
from autosel.values import DTypeName

E4M3 = torch.float8_e4m3fn
MOST = 448.0
LEAST = 2.0**-9  # the smallest subnormal
# Elements drawn and stored at a time: a vocabulary's weights in fp32 would be gigabytes.
BLOCK = 1 << 24


def stored_as_e4m3(x: Tensor) -> Tensor:
    """Rounded to nearest; beyond the range its end, as quantisers do (PyTorch's conversion gives NaN). NaN stays."""
    return x.float().clamp(-MOST, MOST).to(E4M3)


def row_quantised(w: Tensor) -> tuple[Tensor, Tensor]:
    """w[N,K] as e4m3[N,K] and scale fp32[N]: the largest element of a row becomes 448."""
    bytes_, scale = torch.empty(w.shape, dtype=E4M3), torch.empty(w.shape[0])
    rows = max(1, BLOCK // w.shape[1])
    for first in range(0, w.shape[0], rows):
        part = w[first : first + rows].float()
        scale[first : first + rows] = scale_of(part.abs().amax(1))
        bytes_[first : first + rows] = stored_as_e4m3(part / scale[first : first + rows, None])
    return bytes_, scale


def head_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[B,H,L,D] as e4m3[B,H,L,D] and scale fp32[H]: the largest element of a head becomes 448."""
    bytes_, scale = torch.empty(x.shape, dtype=E4M3), torch.empty(x.shape[1])
    for head in range(x.shape[1]):
        part = x[:, head].float()
        scale[head] = scale_of(part.abs().nan_to_num(0.0).amax())
        bytes_[:, head] = stored_as_e4m3(part / scale[head])
    return bytes_, scale


def scale_of(largest: Tensor) -> Tensor:
    """The scale at which it becomes 448; 1 for nothing but zeros, and never subnormal."""
    return torch.where(largest > 0, (largest.float() / MOST).clamp_min(TINY_NORMAL["fp32"]), 1.0)


def every_byte(shape: tuple[int, ...], draw: Draw, *, nan: bool = False) -> Tensor:
    """All 254 finite e4m3 numbers (`nan`: and the two NaN) over and over, in random order."""
    known = torch.tensor([b for b in range(256) if nan or b & 127 != 127], dtype=torch.uint8)
    count = torch.Size(shape).numel()
    order = draw.permutation(count) % len(known)
    return known[order].view(E4M3).view(shape)


# --- hostile values ---------------------------------------------------------------------------------------------------


def edited(*names: str, edit: Callable[[Tensor, Draw], None]) -> Change:
    """`edit` on the numbers of e4m3 operands, in fp32; the results are stored as e4m3 again."""

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        for name in names:
            numbers = inputs[name].float()
            edit(numbers, draw)
            inputs[name].copy_(stored_as_e4m3(numbers))

    return change


def all_bytes(x: Tensor, draw: Draw) -> None:
    x.copy_(every_byte(tuple(x.shape), draw).float())


def extremes(x: Tensor, draw: Draw) -> None:
    """448 and -448 alone: the largest products and the worst cancellation."""
    x.copy_(torch.where(draw.uniform(*x.shape) < 0.5, MOST, -MOST))


def least(x: Tensor, draw: Draw) -> None:
    """Subnormals alone: one to seven times 2^-9."""
    x.copy_(draw.integers(1, 8, *x.shape).float() * LEAST * torch.where(draw.uniform(*x.shape) < 0.5, 1.0, -1.0))


def negative_zeros(x: Tensor, draw: Draw) -> None:
    x.zero_()
    x.view(-1)[::3] = -0.0


def nans(x: Tensor, draw: Draw) -> None:
    """0x7f and 0xff, each in every fourth row (of the last dimension) from the first (the third) on."""
    rows = x.view(-1, x.shape[-1])
    hit = draw.integers(0, x.shape[-1], rows.shape[0])
    for row in range(0, rows.shape[0], 2):
        rows[row, hit[row]] = float("nan") if row % 4 == 0 else -float("nan")


VALUES: tuple[tuple[str, str, Callable[[Tensor, Draw], None]], ...] = (
    ("every number", "a conversion that is wrong for some bytes", all_bytes),
    ("448 and -448", "overflow of halves; cancellation below fp32", extremes),
    ("subnormals alone", "subnormals flushed: e4m3's count", least),
    ("zeros", "-0.0", negative_zeros),
    ("nan", "0x7f and 0xff read as 480", nans),
)


# --- domains ----------------------------------------------------------------------------------------------------------


def byte_contents(name: str) -> Domain:
    """What an e4m3 operand may hold; NaN in the hand-made cases alone, where it is seen by every result."""
    levels = [Level(name="plain")]
    levels += [
        Level(name=told, edit=edited(name, edit=edit), zeros=told == "zeros")
        for told, _, edit in VALUES
        if told != "nan"
    ]
    return Domain(kind="content", levels=lambda *_: levels)


def scale_contents(name: str, tiny: Mapping[DTypeName, float], huge: Mapping[DTypeName, float] | None) -> Domain:
    """What a vector of fp32 scales may hold. `tiny`, `huge`: by dtype, what keeps results within it."""

    def of(value: Callable[[Tensor, Draw], Tensor]) -> Edit:
        def change(inputs: dict[str, Any], draw: Draw) -> None:
            scale = inputs[name]
            scale.copy_(value(torch.arange(len(scale)), draw))

        return change

    levels = [
        Level(name="plain"),
        Level(name="each its own", edit=of(lambda n, _: 2.0 ** (n % 7 - 9))),
        Level(name="zero", edit=of(lambda n, _: n * 0.0), zeros=True),
        Level(name="negative", edit=of(lambda n, draw: -0.001 - draw.uniform(len(n)) * 0.01)),
        Level(name="tiny", edit=of(lambda n, draw: tiny[draw.name] * (n + 1))),
    ]
    if huge is not None:
        levels.append(Level(name="huge", edit=of(lambda n, draw: huge[draw.name] * (n % 4 + 1))))
    return Domain(kind="content", levels=lambda *_: levels)
