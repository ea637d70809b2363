"""Figures as people write them: four significant digits, thin groups, never an exponent."""

from __future__ import annotations

import math


def figure(value: float, digits: int = 4) -> str:
    """`10 090`, `827.5`, `0.325`; zeros behind the point are left out."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """`42 %`; `<1 %` for what is there and small."""
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")
