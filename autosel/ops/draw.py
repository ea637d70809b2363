"""Random operands from a seed, and hostile variations for all ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosel.ops.contract import Case
from autosel.ops.dtypes import DTYPE, TINY_NORMAL
from autosel.ops.stored import mapped
from autosel.values import DTypeName, Workload

if TYPE_CHECKING:
    from autosel.ops.contract import Op

Change = Callable[[dict[str, Any], "Draw"], None]

# Magnitudes whose squares and sums of squares are finite in fp32 (and, for fp16, whose value is).
LARGE: dict[str, float] = {"bf16": 1e15, "fp16": 1e4, "fp32": 1e15}


class Draw:
    """Seeded source of tensors in one dtype. Values are drawn in fp32 and rounded once, so operands are exact."""

    def __init__(self, seed: int, dtype: DTypeName) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.name = dtype
        self.dtype = DTYPE[dtype]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self._tiled(shape, scale).to(self.dtype)

    def stream(self, *shape: int) -> Tensor:
        """Return rows of a residual stream.

        They do not have unit variance: a norm's 1/rms within half a unit of 1 would round to 1, and every element would
        have the same error.
        """
        return self.normal(*shape, scale=1.3)

    def weight(self, *shape: int) -> Tensor:
        """Return a projection's weights, with variance 1/fan-in, so that outputs are of order one."""
        return self._tiled(shape, 1.0 / math.sqrt(shape[-1])).to(self.dtype)

    def around_one(self, *shape: int, offset: float = 0.0) -> Tensor:
        """Return a norm's weights: near one, or near zero if an offset of one is added."""
        return (torch.randn(shape, generator=self.generator) * 0.1 + (1.0 - offset)).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def _tiled(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Return normal values; above 16 Mi elements a block is repeated with a shift, because drawing 500 M takes
        seconds.

        The period, 2^24 - 3 elements, is prime, so that no row or tile of a real shape repeats another.
        """
        count = math.prod(shape)
        period = (1 << 24) - 3
        block = torch.randn(min(count, period), generator=self.generator).mul_(scale)
        if count <= period:
            return block.view(shape)
        block = block.to(self.dtype)
        out = torch.empty(count, dtype=self.dtype)
        for start in range(0, count, period):
            part = out[start : start + period]
            part.copy_(block[: part.numel()])
        return out.view(shape)


def resident_draw(seed: int, dtype: DTypeName) -> Draw:
    """Return the source of activations, separate from `streamed_draw` so that only they can be refreshed."""
    return Draw(2 * seed, dtype)


def streamed_draw(seed: int, dtype: DTypeName) -> Draw:
    return Draw(2 * seed + 1, dtype)


# --- cases ------------------------------------------------------------------------------------------------------------


def case(op: Op, w: Workload, name: str, covers: str = "", change: Change | None = None) -> Case:
    """Return a case: op.inputs at w, then `change(inputs, draw)` in place."""

    def make(seed: int) -> dict[str, Any]:
        made = op.inputs(w, seed)
        if change is not None:
            change(made, Draw(seed + 77_003, w.dtype))
        return made

    return Case(name=name, workload=w, make=make, covers=covers)


# --- hostile values ---------------------------------------------------------------------------------------------------


def outliers(x: Tensor, draw: Draw) -> None:
    """Make a thousandth of the elements (at least one) a thousand times larger, as in real activations."""
    flat = x.view(-1)
    hit = draw.integers(0, flat.numel(), max(1, flat.numel() // 1000))
    flat[hit] = flat[hit] * 1000 + 100


def few_outliers(x: Tensor, draw: Draw) -> None:
    """Use outliers of 30 instead of 1000: scores stay meaningful after exp, products of halves within their range."""
    flat = x.view(-1)
    flat[draw.integers(0, flat.numel(), max(1, flat.numel() // 1000))] = 30.0


def large(x: Tensor, draw: Draw) -> None:
    x.mul_(LARGE[draw.name])


def equal(x: Tensor, _: Draw) -> None:
    """Fill with three significant bits: exact in every dtype, as are its sums."""
    x.fill_(0.75)


def zeros(x: Tensor, _: Draw) -> None:
    x.zero_()
    x.view(-1)[::3] = -0.0


def subnormal(x: Tensor, draw: Draw) -> None:
    """Make every element subnormal in the dtype, some positive, some negative."""
    x.copy_((draw.uniform(*x.shape).double() * 2 - 1) * TINY_NORMAL[draw.name])


def some_subnormal(x: Tensor, draw: Draw) -> None:
    hit = draw.uniform(*x.shape) < 0.3
    x[hit] = x[hit] * TINY_NORMAL[draw.name]


def any_nan(dtype: torch.dtype, draw: Draw) -> Tensor:
    """Return a NaN of either sign: a signalling one, one whose bits are all ones, or any."""
    kind, exponent, mantissa = {
        torch.bfloat16: (torch.int16, 0x7F80, 7),
        torch.float16: (torch.int16, 0x7C00, 10),
        torch.float32: (torch.int32, 0x7F800000, 23),
    }[dtype]
    most = (1 << mantissa) - 1
    payload = (1, most, int(draw.integers(1, most + 1, 1)))[int(draw.integers(0, 3, 1))]
    sign = torch.iinfo(kind).min if draw.uniform(1) < 0.5 else 0
    return torch.tensor(sign + exponent + payload, dtype=kind).view(dtype)


def one_of(value: float) -> Callable[[Tensor, Draw], None]:
    """Return the edit that puts one such value into every second row."""

    def edit(x: Tensor, draw: Draw) -> None:
        rows = x.view(-1, x.shape[-1])
        hit = draw.integers(0, x.shape[-1], rows.shape[0])
        for i in range(0, rows.shape[0], 2):
            rows[i, hit[i]] = value

    return edit


one_nan, one_inf = one_of(float("nan")), one_of(float("inf"))


def away_from_zero(x: Tensor) -> None:
    """Replace subnormals and zeros by the smallest safe size: flushing one would turn Inf * x into NaN."""
    least = TINY_NORMAL["fp16"] if x.dtype == torch.float16 else 2.0**-60
    x[x.abs() < 2 * least] = 2 * least


HOSTILE: tuple[tuple[str, str, Callable[[Tensor, Draw], None]], ...] = (
    ("outliers", "accumulation below fp32; a norm's cancellation", outliers),
    ("large", "overflow of intermediates below fp32's range", large),
    ("all equal", "a result that depends on order; variance instead of mean square", equal),
    ("zeros", "division by a zero norm; -0.0", zeros),
    ("subnormal", "garbage instead of zero for subnormal inputs", subnormal),
    ("some subnormal", "garbage instead of zero for subnormal inputs", some_subnormal),
    ("nan", "a swallowed NaN", one_nan),
    ("inf", "a swallowed infinity", one_inf),
    ("-inf", "a swallowed infinity", one_of(float("-inf"))),
)


# --- layouts ----------------------------------------------------------------------------------------------------------


def offset_by_one(x: Tensor) -> Tensor:
    """Return the same values one element off an aligned address: 16-byte loads must not assume alignment."""
    room = torch.full((x.numel() + 1,), _junk(x), dtype=x.dtype)[1:].view(x.shape)
    return room.copy_(x)


def strided(x: Tensor, gap: int = 3) -> Tensor:
    """Return the same values as a slice of wider rows: an odd row stride, different from the row's length."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + gap), _junk(x), dtype=x.dtype)
    return room[..., : x.shape[-1]].copy_(x)


def _junk(x: Tensor) -> float:
    """Return a value that shows in a result that reads it; for indices a valid one."""
    if x.itemsize == 1:
        return 448.0 if x.is_floating_point() else 100
    return 1e4 if x.is_floating_point() else 0


def axes_swapped(x: Tensor) -> Tensor:
    """Return the same tensor with axes 1 and 2 swapped in memory, as a QKV projection leaves tokens and heads.

    The scales of a cache are unchanged.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


def same_row(x: Tensor) -> Tensor:
    """Return the first row for every row, by stride 0."""
    return x[:1].expand_as(x)


def relayout(names: Iterable[str], view: Callable[[Tensor], Tensor]) -> Change:
    chosen = tuple(names)

    def change(inputs: dict[str, Any], _: Draw) -> None:
        for name in chosen:
            inputs[name] = mapped(inputs.get(name), view)

    return change


def on(name: str, edit: Callable[[Any, Draw], Any], *also: Callable[[dict[str, Any]], None]) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        edit(inputs[name], draw)
        for more in also:
            more(inputs)

    return change


COUNTS = (1, 2, 3, 7, 8, 9, 17)
WIDTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 509, 1021)


def hostile_rows(
    op: Op, w: Workload, *, rows: str, count_dim: str, width_dim: str, skip: tuple[str, ...] = ()
) -> tuple[Case, ...]:
    """Return cases for an op that processes each row of tensor `rows` [count, width] separately.

    `skip` names entries of HOSTILE that the op's contract does not cover.
    """
    wide = w.at(**{count_dim: 2, width_dim: min(w[width_dim], 8192)})
    small = w.at(**{count_dim: 5, width_dim: 193})
    tensors = [a.name for a in op.args if a.kind in ("tensor", "optional")]
    cases = [case(op, wide, f"random {wide.shape_text}", "the workload's own width")]
    for i, width in enumerate(WIDTHS):
        at = w.at(**{count_dim: COUNTS[i % len(COUNTS)], width_dim: width})
        cases.append(case(op, at, f"random {at.shape_text}", "tails of vectors, tiles and teams"))
    for name, covers, edit in HOSTILE:
        if name not in skip:
            clear = tuple((lambda inputs, n=n: away_from_zero(inputs[n])) for n in tensors) if "inf" in name else ()
            cases.append(case(op, small, name, covers, on(rows, edit, *clear)))
    for name, covers, which, view in (
        ("strided rows", "row strides ignored", tensors, _rows_only_strided),
        ("offset by one element", "alignment assumed", tensors, offset_by_one),
        ("stride 0", "row strides ignored", [rows], same_row),
    ):
        cases.append(case(op, small, name, covers, relayout(which, view)))
    return tuple(cases)


def _rows_only_strided(x: Tensor) -> Tensor:
    return strided(x) if x.dim() >= 2 else x
