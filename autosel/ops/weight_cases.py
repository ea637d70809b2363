"""The hostile battery of a weight in a format: every code, the ends of its range, NaN codes, scales of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops.codes import CODES, Code
from autosel.ops.contract import Case, Op
from autosel.ops.draw import Change, Draw, away_from_zero, case
from autosel.ops.weight import Matrix, Weight, quantise
from autosel.values import DTypeName, Workload

# Results stay within the dtype: a product of these cases, of codes up to 448, is below 2^17.
HUGE: dict[DTypeName, float] = {"bf16": 1e30, "fp16": 0.25, "fp32": 1e30}
TINY: dict[DTypeName, float] = {"bf16": 2.0**-120, "fp16": 2.0**-30, "fp32": 2.0**-120}

Numbers = Callable[[Code, Tensor, Draw], Tensor]  # of codes [N, K]: numbers to store in their place


def weight_cases(op: Op, w: Workload, name: str) -> list[Case]:
    """Cases at w, a small workload, that change codes or scales of the weight `name`."""
    code = CODES[w.weight_format.code]
    values = [*CODE_VALUES, *(FLOAT_VALUES if code.dtype.is_floating_point else ())]
    cases = [case(op, w, f"{what} in {name}", covers, _on_codes(name, numbers)) for what, covers, numbers in values]
    if len(code.nans):
        cases.append(case(op, w, f"nan in {name}", "a code of NaN read as a number", _on_nans(name)))
    return cases + [case(op, w, f"{what} in {name}", covers, change(name)) for what, covers, change in _scales(w.dtype)]


def clear_of_zero(w: Matrix) -> None:
    """No weight that is zero, or that may count as zero: it would turn Inf * w into NaN."""
    if isinstance(w, Tensor):
        away_from_zero(w)
        return
    code = CODES[w.format.code]
    numbers = code.numbers(w.codes)
    w.codes.copy_(code.nearest(torch.where(numbers == 0, code.least, numbers)))


def write(w: Matrix, where: Any, numbers: Tensor, *, scale: float | None = None) -> None:
    """Rows `where` of w become these numbers, as nearly as the format has them; with `scale`, at this one."""
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
    assert w.zeros is None, "a zero would move them"
    w.scales[where] = scale
    w.codes[where] = CODES[w.format.code].nearest(numbers / scale).view(w.codes[where].shape)


# --- codes ------------------------------------------------------------------------------------------------------------


def _on_codes(name: str, numbers: Numbers) -> Change:
    def change(inputs: dict[str, Any], draw: Draw) -> None:
        w: Weight = inputs[name]
        code = CODES[w.format.code]
        made = numbers(code, w.codes, draw)
        w.codes.copy_(made if made.dtype == code.dtype else code.nearest(made))

    return change


def _every(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    return code.every_finite(tuple(codes.shape), draw)


def _extremes(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    """The largest and its negative alone: the largest products and the worst cancellation."""
    return torch.where(draw.uniform(*codes.shape) < 0.5, code.most, -code.most)


def _lowest(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    """The code of the least number there is, such as int8's -128, which no quantiser makes."""
    numbers = code.numbers(code.all).nan_to_num(0.0)
    return code.all[numbers.argmin()].expand(codes.shape)


def _zeros(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    made = torch.zeros(codes.shape)
    made.view(-1)[::3] = -0.0
    return made


def _subnormal(code: Code, codes: Tensor, draw: Draw) -> Tensor:
    """Subnormals alone: one to seven times the least."""
    sign = torch.where(draw.uniform(*codes.shape) < 0.5, 1.0, -1.0)
    return draw.integers(1, 8, *codes.shape).float() * code.least * sign


CODE_VALUES: Sequence[tuple[str, str, Numbers]] = (
    ("every code", "a conversion that is wrong for some codes", _every),
    ("largest and smallest codes", "overflow of halves; cancellation below fp32", _extremes),
    ("the lowest code", "a range taken as symmetric; a sign lost", _lowest),
    ("zeros", "-0.0", _zeros),
)
FLOAT_VALUES: Sequence[tuple[str, str, Numbers]] = (
    ("subnormals alone", "subnormal codes flushed: they count", _subnormal),
)


def _on_nans(name: str) -> Change:
    """A code of NaN in every second row from the first on, each such code in turn."""

    def change(inputs: dict[str, Any], draw: Draw) -> None:
        w: Weight = inputs[name]
        nans, hit = CODES[w.format.code].nans, draw.integers(0, w.codes.shape[-1], w.codes.shape[0])
        for row in range(0, w.codes.shape[0], 2):
            w.codes[row, hit[row]] = nans[row // 2 % len(nans)]

    return change


# --- scales -----------------------------------------------------------------------------------------------------------


def _scales(dtype: DTypeName) -> list[tuple[str, str, Callable[[str], Change]]]:
    """(name, what it covers, the change of a weight's scales); `n` numbers a weight's scales from zero."""

    def each(value: Callable[[Tensor, Draw], Tensor]) -> Callable[[str], Change]:
        def of(name: str) -> Change:
            def change(inputs: dict[str, Any], draw: Draw) -> None:
                scales = inputs[name].scales
                scales.copy_(value(torch.arange(scales.numel()), draw).view(scales.shape))

            return change

        return of

    def nan(name: str) -> Change:
        def change(inputs: dict[str, Any], _: Draw) -> None:
            inputs[name].scales.view(-1)[::5] = float("nan")

        return change

    return [
        ("scales that are powers of two", "another group's scale", each(lambda n, _: 2.0 ** (n % 7 - 9))),
        ("tiny scales", "a scale below the dtype's range", each(lambda n, _: TINY[dtype] * (n + 1))),
        ("huge scales", "a scale above the dtype's range", each(lambda n, _: HUGE[dtype] * (n % 4 + 1))),
        ("subnormal scales", "garbage for subnormal inputs", each(lambda n, _: 2.0**-140 * (n + 1.0))),
        ("zero scales", "division by the scale; -0.0", each(lambda n, _: torch.where(n % 2 == 0, 0.0, -0.0))),
        ("negative scales", "a scale taken as unsigned", each(lambda n, draw: -draw.uniform(len(n)) * 0.01)),
        ("nan scales", "a swallowed NaN", nan),
    ]
