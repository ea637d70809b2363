"""Judge an op's result that is a token for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from autosel.ops.contract import Judge, Match, Mismatch


def row_by_row(judge: Callable[[int, int], Mismatch | float]) -> Judge:
    """Return a judge of all rows. `judge` returns a Mismatch, or the share of the bound that a row's token uses."""

    def judged(got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
        worst = 0.0
        for row, token in enumerate(got[0].tolist()):
            found = judge(row, token)
            if isinstance(found, Mismatch):
                evidence = {"row": row, **found.evidence}
                return Mismatch(check=found.check, reason=f"row {row}: {found.reason}", evidence=evidence)
            worst = max(worst, found)
        return Match(worst=worst)

    return judged
