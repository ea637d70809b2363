"""Domains: the values that each dimension of an op's contract can have, the ordinary one first.

An op declares one for every dimension, trait and argument (`undeclared` lists missing ones; an op with a gap cannot be
registered). `array.py` makes cases from them in which every pair of values occurs. Sizes that a level leaves open are
drawn from a secret seed, so that no kernel can know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from autosel.formats import PLAIN
from autosel.ops import draw as d
from autosel.ops.draw import Change, Draw
from autosel.values import DTypeName, Scalar

if TYPE_CHECKING:
    from autosel.ops.contract import Op

Kind = Literal["count", "trait", "content", "scalar", "index", "layout"]
ORDER: tuple[Kind, ...] = (
    "count",
    "trait",
    "index",
    "content",
    "scalar",
    "layout",
)  # order in a case


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One value of a domain.

    Counts (a tuple for dimensions that belong together), traits and scalars have a `value`; `edit` changes the inputs
    in place. `special`: at most one operand of a case has NaN or infinity. `zeros`: it contains zeros, or numbers that
    a kernel may count as zeros, which together with an infinity have no defined result.
    """

    name: str
    value: Any = None
    edit: Change | None = None
    special: Literal["", "nan", "inf"] = ""
    zeros: bool = False


ABSENT = Level(name="absent")
Levels = Callable[[DTypeName, Random], Sequence[Level]]
Row = Mapping[str, Level]  # a level for each domain of an op


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The range of one dimension of a contract; `levels` may draw sizes from a secret source.

    `follows` names the dimension or trait that determines the value. An optional argument names a trait in `presence`,
    which is true if and only if the argument is present; its first level is ABSENT. `needs` names a trait without which
    the argument is absent.
    """

    kind: Kind
    levels: Levels
    follows: str = ""
    presence: str = ""
    needs: str = ""


def dimensions(op: Op) -> list[str]:
    """Return all variables of an op's contract: its dimensions, traits and arguments."""
    return list(dict.fromkeys((*op.dim_names, *op.trait_defaults, *(a.name for a in op.args))))


def undeclared(op: Op) -> list[str]:
    """Return the dimensions of a contract that have no domain, or one with fewer than two values."""
    declared = {
        name
        for names, domain in op.domains.items()
        for name in (*names.split(), domain.presence)
        if domain.follows or all(len(domain.levels(dtype, Random(0))) > 1 for dtype in ("bf16", "fp16", "fp32"))
    }
    return [name for name in dimensions(op) if name not in declared]


def compatible(row: Row) -> bool:
    """Return True if these levels have a defined result together, or may have one once open factors are set."""
    special = [level.special for level in row.values() if level.special]
    return len(special) <= 1 and not ("inf" in special and any(level.zeros for level in row.values()))


# --- sizes ------------------------------------------------------------------------------------------------------------


@cache
def _primes(low: int, high: int) -> list[int]:
    return [n for n in range(low, high) if all(n % p for p in range(2, int(n**0.5) + 1))]


BEYOND_16_BITS = (32_769, 40_000)


def sizes(*fixed: int, powers: tuple[int, int], primes: tuple[int, int], far: bool = False) -> Domain:
    """Return the domain of `fixed` sizes and secret ones.

    Secret sizes are a power of two (exponents from..to) and its neighbours, a prime, and twice another prime (even, but
    not a multiple of four); with `far` also a size that does not fit 16 bits.
    """

    def levels(_: DTypeName, rng: Random) -> list[Level]:
        power = 1 << rng.randint(*powers)
        low, high = primes
        found = [*fixed, power - 1, power, power + 1, rng.choice(_primes(low, high))]
        found.append(2 * rng.choice(_primes(max(3, low // 2), high // 2)))
        found += [rng.randint(*BEYOND_16_BITS)] if far else []
        return [Level(name=str(n), value=n) for n in dict.fromkeys(found)]

    return Domain(kind="count", levels=levels)


def counts(*fixed: int) -> Domain:
    """Return the domain of rows: tokens or sequences."""
    return sizes(2, 1, *fixed, powers=(2, 5), primes=(11, 72), far=True)


def widths(*fixed: int) -> Domain:
    """Return the domain of the elements of a row or of a sum."""
    return sizes(192, 1, *fixed, powers=(3, 8), primes=(257, 1024), far=not fixed)


def among(*values: Any) -> Domain:
    """Return the domain of a few fixed sizes; tuples for dimensions that belong together."""
    made = [Level(name="x".join(map(str, v)) if isinstance(v, tuple) else str(v), value=v) for v in values]
    return Domain(kind="count", levels=lambda *_: made)


# --- traits and scalars -----------------------------------------------------------------------------------------------


def trait(*values: Scalar) -> Domain:
    """Return the domain of a static attribute; the first value is its default."""
    return Domain(kind="trait", levels=lambda *_: [Level(name=str(v), value=v) for v in values])


def in_format(row: Row, *operands: str, trait: str = "weight") -> bool:
    """Return True if contents and format of the operands fit together.

    An operand in a format has only quantised contents, codes and scales: it is not balanced, and not multiplied by Inf.
    A plain one has no codes and scales.
    """
    stored = any(level.name != "plain" for name, level in row.items() if "." in name)
    shaped = any(row[name].name != "plain" for name in operands if name in row)
    shaped = shaped or any(level.name in TRADED or level.special == "inf" for level in row.values())
    names = {level.name for level in row.values()}
    if "huge scales" in names and names & {"huge", "outliers", "magnitudes"}:
        return False  # products beyond the dtype's range have no defined result
    if trait not in row:
        return not (stored and shaped)
    return not (stored if row[trait].value == PLAIN else shaped)


TRADED = ("balanced", "for huge keys", "for tiny keys")  # contents of one operand that change another


def scalar(*values: float, edit: Callable[[float], Change] | None = None) -> Domain:
    """Return the domain of a number. `edit(value)` changes operands so that this value matters."""
    made = [Level(name=f"{v:.4g}", value=v, edit=None if edit is None else edit(v)) for v in values]
    return Domain(kind="scalar", levels=lambda *_: made)


def follows(dimension: str) -> Domain:
    """Return the domain of an argument that a dimension or trait of the same case determines."""
    return Domain(kind="scalar", levels=lambda *_: [Level(name=f"as {dimension}")], follows=dimension)


NORM_EPS = (1e-6, 1e-5, 1e-3, 0.0, 0.25, 1e-12)  # Qwen's and Gemma's; Llama's and Mistral's; beyond; BERT's


def norm_eps(*rows: str) -> Domain:
    """Return the domain of a norm's epsilon, with `rows` whose mean square has about the same size."""

    def edit(eps: float) -> Change:
        def change(inputs: dict[str, Any], _: Draw) -> None:
            for name in rows:
                x = inputs[name]
                if 0.5 < x.float().square().mean().sqrt() < 8:  # not if they already have another magnitude
                    x.mul_(1.2 * (eps or NORM_EPS[0]) ** 0.5)
                if not eps:  # a row of possible zeros has no norm
                    d.away_from_zero(x)

        return change

    return scalar(*NORM_EPS, edit=edit)


def divides_by_rms(row: Row, *operands: str) -> bool:
    """Refuse rows of zeros, or of possible zeros, without an epsilon: they have no defined result."""
    without = "eps" in row and row["eps"].value == 0.0
    return not (without and any(row[n].zeros or row[n].name in SPREAD for n in operands if n in row))


def infinite_beside(row: Row, operand: str, *others: str) -> bool:
    """Refuse an infinity in `operand` with others of varying magnitude: intermediate values may underflow the dtype."""
    infinite = operand in row and row[operand].special == "inf"
    return not (infinite and any(row[name].name in SPREAD for name in others if name in row))


SPREAD = ("tiny", "magnitudes", "outliers", "balanced")


# --- contents of a float operand --------------------------------------------------------------------------------------

Power = Mapping[str, int]
UP: Power = {"bf16": 40, "fp16": 5, "fp32": 40}  # 2^40 is beyond fp16
DOWN: Power = {"bf16": -45, "fp16": -5, "fp32": -45}  # 2^-45 is below fp16's subnormals
FAR_UP: Power = {"bf16": 60, "fp16": 8, "fp32": 60}  # for values that are not multiplied
FAR_DOWN: Power = {"bf16": -60, "fp16": -7, "fp32": -60}
APART: Power = {"bf16": 18, "fp16": 3, "fp32": 18}  # magnitudes within one operand


def _on(name: str, edit: Callable[[Tensor, Draw], Any]) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        if inputs.get(name) is not None:
            edit(inputs[name], draw)

    return change


def scaled(power: int) -> Callable[[Tensor, Draw], Any]:
    return lambda x, _: x.mul_(2.0**power)


def rows_apart(x: Tensor, draw: Draw, most: int = 0) -> None:
    """Give each row another magnitude: one scale for all rows, or for eight, loses some."""
    most = most or APART[draw.name]
    x.view(-1, x.shape[-1]).mul_((2.0 ** draw.integers(-most, most + 1, x.numel() // x.shape[-1], 1)).to(x.dtype))


def columns_apart(x: Tensor, draw: Draw) -> None:
    most = APART[draw.name]
    x.mul_((2.0 ** draw.integers(-most, most + 1, x.shape[-1])).to(x.dtype))


def same_rows(x: Tensor, _: Draw) -> None:
    rows = x.view(-1, x.shape[-1])
    rows.copy_(rows[:1].clone().expand_as(rows))


def shared_prefix(x: Tensor, _: Draw) -> None:
    """Make rows differ only in their last quarter."""
    rows, most = x.view(-1, x.shape[-1]), x.shape[-1] - -(-x.shape[-1] // 4)
    rows[:, :most] = rows[:1, :most].clone()


def shared_sum(x: Tensor, _: Draw) -> None:
    """Make rows of the same elements in another order: sums, maxima and norms are equal."""
    rows, width = x.view(-1, x.shape[-1]), x.shape[-1]
    turned = (torch.arange(width) - torch.arange(rows.shape[0])[:, None]) % width
    rows.copy_(rows[0].clone()[turned])


def some_zeros(x: Tensor, draw: Draw) -> None:
    """Make about every third element a zero, of either sign."""
    hit = draw.uniform(*x.shape)
    x.masked_fill_(hit < 0.2, 0.0).masked_fill_(hit > 0.8, -0.0)


def positive(x: Tensor, _: Draw) -> None:
    """Make sums grow: a running sum in a narrow dtype stops growing."""
    x.abs_()


def negative(x: Tensor, _: Draw) -> None:
    x.abs_().neg_()


def contents(
    name: str,
    *,
    up: Power = UP,
    down: Power = DOWN,
    inf: bool = False,
    nan: bool = True,
    rows: bool = True,
    gentle: bool = False,
    presence: str = "",
    more: Sequence[Level] = (),
) -> Domain:
    """Return the domain of a float operand's contents.

    `rows` allows equal rows and rows of other magnitudes. `gentle` is for operands whose sums enter an exponential and
    must stay meaningful.
    """

    apart = partial(rows_apart, most=2) if gentle else rows_apart if rows else columns_apart

    def levels(dtype: DTypeName, _: Random) -> list[Level]:
        made = [
            *([ABSENT] if presence else []),
            Level(name="plain"),
            Level(name="huge", edit=_on(name, scaled(up[dtype]))),
            Level(name="tiny", edit=_on(name, scaled(down[dtype]))),
            Level(name="positive", edit=_on(name, positive)),
            Level(name="negative", edit=_on(name, negative)),
            Level(name="outliers", edit=_on(name, d.few_outliers if gentle or dtype == "fp16" else d.outliers)),
            Level(name="magnitudes", edit=_on(name, apart)),
            Level(name="some subnormal", edit=_on(name, d.some_subnormal), zeros=True),
            Level(name="zeros", edit=_on(name, some_zeros), zeros=True),
        ]
        if rows:
            made += [
                Level(name="same rows", edit=_on(name, same_rows)),
                Level(name="shared prefix", edit=_on(name, shared_prefix)),
                Level(name="shared sum", edit=_on(name, shared_sum)),
            ]
        if nan:
            made.append(Level(name="nan", edit=_on(name, _some_nan), special="nan"))
        if inf:
            made.append(Level(name="inf", edit=_infinite(name), special="inf"))
        return [*made, *more]

    return Domain(kind="content", levels=levels, presence=presence)


def _some_nan(x: Tensor, draw: Draw) -> None:
    """Put one NaN into a row or vector."""
    at = draw.integers(0, x.numel(), 1)
    x.view(-1)[at] = d.any_nan(x.dtype, draw)


def _infinite(name: str) -> Change:
    """Put one infinity in, and remove numbers that may count as zero: infinity times zero is NaN."""

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        if inputs.get(name) is None:
            return
        for value in inputs.values():
            if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                d.away_from_zero(value)
        x = inputs[name]
        x.view(-1)[draw.integers(0, x.numel(), 1)] = float("inf") if draw.uniform(1) < 0.5 else float("-inf")

    return change


def balanced(up: str, *down: str) -> Change:
    """Multiply columns of `up` by powers of two and divide those of `down` by them.

    Each product of two elements stays the same, and no operand fits a narrower format.
    """

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        most = APART[draw.name]
        by = 2.0 ** draw.integers(-most, most + 1, inputs[up].shape[-1])
        inputs[up].mul_(by.to(inputs[up].dtype))
        for name in down:
            inputs[name].div_(by.to(inputs[name].dtype))

    return change


# --- layouts ----------------------------------------------------------------------------------------------------------


def layouts(*names: str, more: Sequence[Level] = ()) -> Domain:
    """Return the domain of the memory layout of the float operands `names`."""
    made = [
        Level(name="plain"),
        Level(name="strided rows", edit=d.relayout(names, _rows_strided)),
        Level(name="offset by one", edit=d.relayout(names, d.offset_by_one)),
        Level(name="wide gaps", edit=d.relayout(names, _wide_gaps)),
        *more,
    ]
    return Domain(kind="layout", levels=lambda *_: made)


def _rows_strided(x: Tensor) -> Tensor:
    return d.strided(x) if x.dim() >= 2 else d.offset_by_one(x)


def _wide_gaps(x: Tensor) -> Tensor:
    """Make rows slices of a projection that is half as wide again."""
    return d.strided(x, gap=-(-x.shape[-1] // 2)) if x.dim() >= 2 else x


def one_storage(*names: str) -> Change:
    """Make operands slices of one buffer's rows, as a fused projection leaves them: they share rows of memory."""

    def change(inputs: dict[str, Any], _: Draw) -> None:
        present = [n for n in names if isinstance(inputs.get(n), Tensor)]
        if len({inputs[n].shape[:-1] for n in present}) != 1:
            return
        both, at = torch.cat([inputs[n] for n in present], -1), 0
        for n in present:
            width = inputs[n].shape[-1]
            inputs[n] = both[..., at : at + width]
            at += width

    return change
