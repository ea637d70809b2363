"""Call the measurements of the command line as a library: no click, no terminal, a separate listener."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.certify import compare, written
from autosel.certify.audit import audit
from autosel.certify.run import RunRequest, append, certify, failed
from autosel.certify.run_again import refuse_others, run_again
from autosel.certify.run_sweep import Grid, measure_sweep
from autosel.certify.sweep import Lengths
from autosel.certify.verify import verify
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
        self.notes: list[str] = []
        self.decisions = 0

    def stage(self, name: str, detail: str, done: int, total: int, of: str = "") -> None:
        said = f"{of}: {name}" if of else name
        self.stages += [said] if said not in self.stages else []

    def expect(self, foreseen: Mapping[tuple[str, str], float]) -> None:
        self.foreseen = foreseen

    def note(self, text: str) -> None:
        self.notes.append(text)

    def decided(self, *_: Any) -> None:
        self.decisions += 1

    def rejected(self, *_: Any) -> None: ...

    @contextmanager
    def measuring(self) -> Iterator[Heard]:
        yield self

    @contextmanager
    def tuning(self, budget_s: float) -> Iterator[Heard]:
        yield self


def plan(**changes: Any) -> Plan:
    return Plan(**{"model": MODEL, "weights": str(earlier.TINY), "seq": 24, "iters": 3, "warmup": 1, **changes})


def test_a_run_is_certified_written_compared_and_run_again(home: Path, tmp_path: Path) -> None:
    heard, file = Heard(), tmp_path / "certificates.jsonl"
    asked = RunRequest(plan=plan(), repro_cmd="mine", price_per_hour=2.0)
    made = append(file, certify(asked, None, heard))
    assert failed(made) is None and verify(file, strict=True).last == made
    assert made.repro_cmd == "mine" and made.cost.tokens_per_dollar is not None
    assert {"weights", "prefill", "decode"} <= set(heard.stages) and ("", "decode") in heard.foreseen
    refuse_others(made, asked.plan)
    again = run_again(made, asked, None, Heard())
    assert again.speedup.certified == pytest.approx(made.speedup)
    places = written.Places(audit=tmp_path / "audit.json", trace=tmp_path / "trace.json")
    for path, write in written.files(places, made, audit(made)):
        write()
        assert path.stat().st_size > 100
    (change,) = compare.against(compare.read(file), lambda: compare.of_certificates([made]))
    assert change.speedup == 1.0


def test_an_impossible_request_is_refused_on_construction(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json"):
        RunRequest(plan=plan(prompt=str(tmp_path / "absent.json")), repro_cmd="")
    with pytest.raises(UsageError, match="at most 400"):
        Grid(model=MODEL, contexts=tuple(range(2, 403)), batches=(1,), dtype="bf16")


def test_a_sweep_is_measured_and_weighted_by_given_traffic(home: Path) -> None:
    heard = Heard()
    grid = Grid(
        model=MODEL, contexts=(16, 32), batches=(1, 2), dtype="fp32", iters=2, warmup=0, tunes=False,
        traffic=(Lengths(prompt=8, output=9),), traffic_file="mine",
    )  # fmt: skip
    found = measure_sweep(grid, None, heard)
    assert found.trouble is None and heard.decisions == 0
    assert [(c.batch, c.context) for c in found.sweep.cells] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    assert all(c.figures is not None and c.figures.verified for c in found.sweep.cells)
    assert found.sweep.traffic is not None and found.sweep.traffic.requests == 1
    assert any(said.startswith("cell 4 of 4, batch 2, context 32: ") for said in heard.stages)


def test_a_sweep_that_tunes_needs_a_ledger_and_decides_in_it(home: Path) -> None:
    from dataclasses import replace

    grid = Grid(model=MODEL, contexts=(16,), batches=(1,), dtype="fp32", iters=2, warmup=0, budget_s=0.001)
    with pytest.raises(UsageError, match="needs a ledger"):
        measure_sweep(grid, None, Heard())
    with open_ledger(home=home) as ledger:
        found = measure_sweep(replace(grid, again="mine"), ledger, Heard())
    assert found.trouble is not None and found.trouble.exit_code == 5 and "mine" in found.trouble.todo
    assert all(c.figures is not None for c in found.sweep.cells)
