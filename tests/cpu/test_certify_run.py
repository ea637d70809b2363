"""Call the measurements of the command line as a library: no click, no terminal, a separate listener."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.certify.run import RunRequest
from autosel.certify.run_sweep import Grid, measure_sweep
from autosel.decode.run import Plan
from autosel.errors import UsageError
from autosel.ledger import open_ledger
from tests import earlier

MODEL = models.load(earlier.TINY)


class Heard:
    """Keep the events of a run."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.foreseen: Mapping[tuple[str, str], float] = {}

    def stage(self, name: str, detail: str, done: int, total: int, of: str = "") -> None:
        self.stages.append(f"{of}: {name}" if of else name)

    def expect(self, foreseen: Mapping[tuple[str, str], float]) -> None:
        self.foreseen = foreseen

    def note(self, text: str) -> None: ...

    def decided(self, *_: Any) -> None: ...

    def rejected(self, *_: Any) -> None: ...

    @contextmanager
    def measuring(self) -> Iterator[Heard]:
        yield self

    @contextmanager
    def tuning(self, budget_s: float) -> Iterator[Heard]:
        yield self


def plan(**changes: Any) -> Plan:
    return Plan(**{"model": MODEL, "weights": str(earlier.TINY), "seq": 24, "iters": 3, "warmup": 1, **changes})


def test_an_impossible_request_is_refused_on_construction(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json"):
        RunRequest(plan=plan(prompt=str(tmp_path / "absent.json")), repro_cmd="")
    with pytest.raises(UsageError, match="at most 400"):
        Grid(model=MODEL, contexts=tuple(range(2, 403)), batches=(1,), dtype="bf16")


def test_a_sweep_that_tunes_needs_a_ledger_and_decides_in_it(home: Path) -> None:
    from dataclasses import replace

    grid = Grid(model=MODEL, contexts=(16,), batches=(1,), dtype="fp32", iters=2, warmup=0, budget_s=0.001)
    with pytest.raises(UsageError, match="needs a ledger"):
        measure_sweep(grid, None, Heard())
    with open_ledger(home=home) as ledger:
        heard = Heard()
        found = measure_sweep(replace(grid, again="mine"), ledger, heard)
    assert any(said.startswith("cell 1 of 1, batch 1, context 16: ") for said in heard.stages)
    assert "decode" in {stage for _, stage in heard.foreseen}
    assert found.trouble is not None and found.trouble.exit_code == 5 and "mine" in found.trouble.todo
    assert all(c.figures is not None for c in found.sweep.cells)
