"""The hostile battery of an operand in a format: every code, the ends of its range, NaN codes, scales of all sizes.

`weight_cases` and `cache_cases` are hand-made cases; `stored_domains` has the same values as domains for the array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autosel.formats import WITH_ZEROS
from autosel.ops.codes import CODES, Code
from autosel.ops.contract import Case, Op
from autosel.ops.domains import Domain, Level
from autosel.ops.draw import Change, Draw, away_from_zero, case, on
from autosel.ops.scales import SCALES, Scales, Zeros
from autosel.ops.stored import Stored
from autosel.ops.weight import Matrix, Weight, quantise
from autosel.values import DTypeName, Workload

Numbers = Callable[[Code, Tensor, Draw], Tensor]  # codes [..., K] -> numbers to store instead
Edit = Callable[[Any, Draw], Any]  # changes an operand in a format in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The smallest and largest scale of a case by the workload's dtype; results stay within the dtype.

    Without `huge`, a scale above the dtype's range has no defined result.
    """

    tiny: Mapping[DTypeName, float]
    huge: Mapping[DTypeName, float] | None


# A product of codes up to 448 in these cases is below 2^17.
PRODUCT = Sizes(
    tiny={"bf16": 2.0**-120, "fp16": 2.0**-30, "fp32": 2.0**-120}, huge={"bf16": 1e30, "fp16": 0.25, "fp32": 1e30}
)
_SMALL: Mapping[DTypeName, float] = {"bf16": 2.0**-110, "fp16": 2.0**-20, "fp32": 2.0**-110}
# 448 times these is within the dtype; a score must be finite.
KEYS, VALUES = Sizes(tiny=_SMALL, huge=None), Sizes(tiny=_SMALL, huge={"bf16": 1e30, "fp16": 64.0, "fp32": 1e30})


def weight_cases(op: Op, w: Workload, name: str, told: str = "") -> list[Case]:
    """Return cases at a small workload w that change codes or scales of the weight `name`; `told` ends their names."""
    found = _cases(op, w, name, CODES[w.weight_format.code], PRODUCT, on(name, _nan_codes))
    more = OFFSETS if w.weight_format.offsets else ()
    more = (*more, *ZEROS) if w.weight_format.scaling in WITH_ZEROS else more
    found += [case(op, w, f"{what} in {name}", covers, on(name, edit)) for what, covers, edit in more]
    return [replace(one, name=f"{one.name}{told}") for one in found] if told else found


def cache_cases(op: Op, w: Workload, name: str, sizes: Sizes, seen: Change) -> list[Case]:
    """Return the same cases for the cache `name`; `seen` puts a NaN code where every query sees it."""
    return _cases(op, w, name, CODES[w.cache_format.code], sizes, seen)


def _cases(op: Op, w: Workload, name: str, code: Code, sizes: Sizes, nan: Change) -> list[Case]:
    values = [*CODE_VALUES, *(FLOAT_VALUES if code.dtype.is_floating_point else ())]
    cases = [case(op, w, f"{told} in {name}", covers, on(name, _coded(made))) for told, covers, made in values]
    if len(code.nans):
        cases.append(case(op, w, f"nan in {name}", "a code of NaN read as a number", nan))
    scales = _scales(w.dtype, sizes)
    return cases + [case(op, w, f"{told} in {name}", covers, on(name, edit)) for told, covers, edit in scales]


def stored_domains(sizes: Sizes, *names: str) -> dict[str, Domain]:
    """Return the domains of codes and scales of operands in a format. NaN occurs only in hand-made cases."""
    found = {f"{name}.codes": _code_domain(name) for name in names}
    return found | {f"{name}.scales": _scale_domain(name, sizes) for name in names}


def _code_domain(name: str) -> Domain:
    made = [(told, _coded(numbers)) for told, _, numbers in (*CODE_VALUES, *FLOAT_VALUES)]
    levels = [Level(name="plain"), *(_in_format(name, told, edit) for told, edit in made)]
    return Domain(kind="content", levels=lambda *_: levels)


def _scale_domain(name: str, sizes: Sizes) -> Domain:
    def levels(dtype: DTypeName, _: Any) -> list[Level]:
        made = [(told, edit) for told, _, edit in _scales(dtype, sizes) if not told.startswith("nan")]
        return [Level(name="plain"), *(_in_format(name, told, edit) for told, edit in made)]

    return Domain(kind="content", levels=levels)


def _in_format(name: str, told: str, edit: Edit) -> Level:
    """Return the level that edits an operand, if it is in a format."""

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        if isinstance(inputs[name], Stored):
            edit(inputs[name], draw)

    zeros = told in ("zeros", "every code", "zero scales", "subnormal scales")
    return Level(name=told, edit=change, zeros=zeros)


def clear_of_zero(w: Matrix) -> None:
    """Replace weights that are zero or may count as zero: they would turn Inf * w into NaN."""
    if isinstance(w, Tensor):
        away_from_zero(w)
        return
    code = CODES[w.format.code]
    numbers = code.numbers(w.codes)
    w.codes.copy_(code.nearest(torch.where(numbers == 0, code.least, numbers)))


def write(w: Matrix, where: Any, numbers: Tensor, *, scale: float | None = None) -> None:
    """Write the numbers, rounded to the format, into rows `where` of w; with `scale`, at this scale."""
    if isinstance(w, Tensor):
        w[where] = numbers.to(w.dtype)
        return
    numbers = numbers.view(-1, w.shape[1]).float()
    if scale is None:
        made = quantise(numbers, w.format)
        assert isinstance(made, Weight)
        for part, into in w.parts().items():
            into[where] = made.parts()[part].view(into[where].shape)
        return
    assert w.zeros is None, "a zero would shift them"
    some, middle = w.rows(where if isinstance(where, slice) else slice(where, where + 1)), 8 if w.format.offsets else 0
    scales, offsets = some.groups()
    same = torch.full_like(scales, scale)
    SCALES[w.format.scaling].write(some.scales, same, None if offsets is None else -middle * same)
    some.codes.copy_(CODES[w.format.code].nearest(numbers / scale + middle).view(some.codes.shape))


# --- codes ------------------------------------------------------------------------------------------------------------


def _coded(numbers: Numbers) -> Edit:
    def edit(w: Stored, draw: Draw) -> None:
        code = CODES[w.format.code]
        made = numbers(code, w.codes, draw)
        w.codes.copy_(made if made.dtype == code.dtype else code.nearest(made))

    return edit


def _every(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    return code.every_finite(tuple(codes.shape), draw)


def _extremes(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    """Return only the largest number and its negative: the largest products and the worst cancellation."""
    return torch.where(draw.uniform(*code.count(codes)) < 0.5, code.most, -code.most)


def _lowest(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    return code.lowest(tuple(codes.shape))


def _zeros(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    made = torch.zeros(code.count(codes))
    made.view(-1)[::3] = -0.0
    return made


def _subnormal(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    """Return only subnormals: one to seven times the least."""
    sign = torch.where(draw.uniform(*code.count(codes)) < 0.5, 1.0, -1.0)
    return draw.integers(1, 8, *code.count(codes)).float() * code.least * sign


CODE_VALUES: Sequence[tuple[str, str, Numbers]] = (
    ("every code", "a conversion that is wrong for some codes", _every),
    ("largest and smallest codes", "overflow of halves; cancellation below fp32", _extremes),
    ("the lowest code", "a range taken as symmetric; a sign lost", _lowest),
    ("zeros", "-0.0", _zeros),
)
FLOAT_VALUES: Sequence[tuple[str, str, Numbers]] = (
    ("subnormals alone", "subnormal codes flushed: they count", _subnormal),
)


def _nan_codes(w: Weight, draw: Draw) -> None:
    """Put a NaN code into every second row, starting with the first, each such code in turn."""
    nans, hit = CODES[w.format.code].nans, draw.integers(0, w.codes.shape[-1], w.codes.shape[0])
    for row in range(0, w.codes.shape[0], 2):
        w.codes[row, hit[row]] = nans[row // 2 % len(nans)]


# --- scales -----------------------------------------------------------------------------------------------------------


def _scales(dtype: DTypeName, sizes: Sizes) -> list[tuple[str, str, Edit]]:
    """Return (name, what it covers, the edit of an operand's scales); `n` numbers the scales from zero."""

    def each(value: Callable[[Tensor, Draw], Tensor]) -> Edit:
        def edit(w: Stored, draw: Draw) -> None:
            how = _scales_of(w)
            how.put(w.scales, value(torch.arange(how.numbers(w.scales).numel()), draw), draw)

        return edit

    huge = sizes.huge
    return [
        ("scales that are powers of two", "another group's scale", each(lambda n, _: 2.0 ** (n % 7 - 9))),
        ("tiny scales", "a scale below the dtype's range", each(lambda n, _: sizes.tiny[dtype] * (n + 1))),
        *(
            [("huge scales", "a scale above the dtype's range", each(lambda n, _: huge[dtype] * (n % 4 + 1)))]
            if huge is not None
            else ()
        ),
        ("subnormal scales", "garbage for subnormal inputs", each(lambda n, _: 2.0**-140 * (n + 1.0))),
        ("zero scales", "division by the scale; -0.0", each(lambda n, _: torch.where(n % 2 == 0, 0.0, -0.0))),
        ("negative scales", "a scale taken as unsigned", each(lambda n, draw: -draw.uniform(len(n)) * 0.01)),
        ("nan scales", "a swallowed NaN", lambda w, _: _scales_of(w).spoil(w.scales)),
    ]


def _scales_of(w: Stored) -> Scales:
    """Return how an operand stores its scales; those of a cache are numbers."""
    return SCALES[w.format.scaling] if isinstance(w, Weight) else SCALES["one"]


# --- offsets ----------------------------------------------------------------------------------------------------------


def _offsets(value: Callable[[Tensor], Tensor]) -> Edit:
    """Return the edit that gives each group a scale and offset by its number, as near as the format can."""

    def edit(w: Weight, _: Draw) -> None:
        n = _groups_of(w)
        scales = 2.0 ** (n % 5 - 9)
        SCALES[w.format.scaling].write(w.scales, scales, value(n) * scales)

    return edit


def _groups_of(w: Weight) -> Tensor:
    """Return the numbers of the groups, in their order."""
    shape = w.groups()[0].shape
    return torch.arange(shape.numel()).view(shape)


def _cancelling(w: Weight, draw: Draw) -> None:
    """Make weights of about a scale from the largest codes and offsets that nearly cancel them."""
    code = CODES[w.format.code]
    scales = 2.0**-9 * (1 + (_groups_of(w) // 2 % 7) / 9)
    SCALES[w.format.scaling].write(w.scales, scales, (1 - code.most) * scales)
    w.codes.copy_(code.nearest(code.most - draw.integers(0, 3, *code.count(w.codes)).float()))


OFFSETS: Sequence[tuple[str, str, Edit]] = (
    ("offsets that cancel", "an offset that is left out or has the wrong sign", _offsets(lambda n: -(n % 5 + 5.0))),
    ("large offsets", "another group's offset", _offsets(lambda n: -(2.0 ** (n % 7)))),
    ("few offsets", "an offset at the wrong place", _offsets(lambda n: torch.where(n % 5 == 3, -15.0, -0.0))),
    ("codes and offsets that cancel", "code x scale, or an offset, rounded alone", _cancelling),
)


# --- zero points ------------------------------------------------------------------------------------------------------


def _at_zero_points(w: Weight, draw: Draw) -> None:
    """Give groups each zero point in turn, uneven scales, and codes that equal their zero point but for every 13th."""
    n = _groups_of(w)
    scales = (1 + draw.uniform(n.numel()).view(n.shape)) * 2.0**-6
    least, most = _ends_of(w)
    zeros = n % 16 * ((most - least) // 15) + least
    SCALES[w.format.scaling].write(w.scales, scales, -zeros * scales)
    numbers = w.along_k(zeros).expand(w.shape).clone()
    numbers[:, 5::13] += 1
    w.codes.copy_(CODES[w.format.code].nearest(numbers))


def _ends(w: Weight, draw: Draw) -> None:
    """Give neighbouring groups the largest and smallest zero point: all numbers of a group have one sign."""
    least, most = _ends_of(w)
    _offsets(lambda n: -torch.where(n % 3 == 1, float(most), float(least)))(w, draw)


def _ends_of(w: Weight) -> tuple[int, int]:
    """Return the smallest and the largest zero point."""
    how = SCALES[w.format.scaling]
    assert isinstance(how, Zeros)
    return how.least, how.most


ZEROS: Sequence[tuple[str, str, Edit]] = (
    ("codes at their zero points", "a product that is rounded before the zero point is subtracted", _at_zero_points),
    ("zero points at both ends", "a zero point of another group; a signed one", _ends),
)
