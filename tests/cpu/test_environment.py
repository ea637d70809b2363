"""A broken environment is nobody's fault: real workers in environments that are really broken, then mended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from autosel.errors import EnvironmentFault
from autosel.ledger import schema
from autosel.ledger.store import Ledger, open_ledger
from autosel.models.workloads import Named
from autosel.ops import OPS
from autosel.pipeline import Rejection, Report, Request, tune
from autosel.values import Decision

WORKLOAD = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
BLAME = (schema.quarantines, schema.decisions, schema.verdicts)  # what a broken environment must not write to


class Watching:
    """Keeps what was told, and calls `at_stage` at each stage."""

    def __init__(self, at_stage: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self.at_stage, self.rejections = at_stage, list[Rejection]()

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.at_stage(name, done, total)

    def decided(self, decision: Decision, settled_before: bool) -> None: ...

    def rejected(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)


class Breakable:
    """A folder first on the PYTHONPATH of workers: a package put there hides the installed one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def break_package(self, name: str) -> None:
        package = self.folder / name
        package.mkdir()
        (package / "__init__.py").write_text(f'raise ImportError("lib{name}.so: cannot open shared object file")\n')

    def mend(self) -> None:
        for file in self.folder.glob("*/__init__.py"):
            file.unlink()
            for left in sorted(file.parent.rglob("*"), reverse=True):
                left.rmdir() if left.is_dir() else left.unlink()
            file.parent.rmdir()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Breakable:
    folder = tmp_path / "packages"
    folder.mkdir()
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), inherited))))
    return Breakable(folder)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with open_ledger(home=tmp_path / "ledger") as opened:
        yield opened


def tuned(ledger: Ledger, listener: Watching, *, force: bool = False) -> Report:
    named = Named(workload=WORKLOAD, label="rmsnorm", calls_per_step=1)
    return tune(Request(workloads=(named,), seed=5, force=force), ledger, listener)


def failed_proofs(ledger: Ledger) -> list[str]:
    with ledger.reading() as c:
        p = schema.parities.c
        return list(c.execute(sa.select(p.document).where(p.outcome == "failed")).scalars())


def rows(ledger: Ledger, *tables: sa.Table) -> dict[str, int]:
    with ledger.reading() as c:
        counts = {t.name: c.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables}
    return {name: count for name, count in counts.items() if count}


def assert_nobody_is_blamed(ledger: Ledger, listener: Watching) -> None:
    assert failed_proofs(ledger) == []
    assert rows(ledger, *BLAME) == {}
    assert [r for r in listener.rejections if r.stage != "eligible"] == []


def assert_the_next_tune_decides(ledger: Ledger) -> None:
    listener = Watching()
    (decision,) = tuned(ledger, listener).decisions
    assert decision.verdict is not None and len(decision.verdict.timings) > 1, decision.reason
    assert [r for r in listener.rejections if r.stage in ("build", "parity", "race")] == []


# --- tune -------------------------------------------------------------------------------------------------------------


def test_workers_that_cannot_import_torch_blame_nobody_and_the_next_tune_decides(
    packages: Breakable, ledger: Ledger
) -> None:
    packages.break_package("torch")
    listener = Watching()
    with pytest.raises(EnvironmentFault, match=r"libtorch\.so"):
        tuned(ledger, listener)
    assert_nobody_is_blamed(ledger, listener)
    packages.mend()
    assert_the_next_tune_decides(ledger)


def test_an_environment_that_breaks_between_proofs_and_races_quarantines_nobody(
    packages: Breakable, ledger: Ledger
) -> None:
    def once_all_is_proven(stage: str, done: int, total: int) -> None:
        if stage == "parity" and done == total > 0:
            packages.break_package("torch")

    listener = Watching(once_all_is_proven)
    with pytest.raises(EnvironmentFault, match=r"libtorch\.so"):
        tuned(ledger, listener)
    assert_nobody_is_blamed(ledger, listener)
    packages.mend()
    assert_the_next_tune_decides(ledger)


def test_where_no_native_kernel_can_be_loaded_no_native_candidate_has_failed(
    packages: Breakable, ledger: Ledger
) -> None:
    """Workers start and PyTorch works; only an empty candidate of the same kind tells."""
    packages.break_package("tvm_ffi")
    listener = Watching()
    with pytest.raises(EnvironmentFault, match=r"libtvm_ffi\.so"):
        tuned(ledger, listener)
    assert_nobody_is_blamed(ledger, listener)
    packages.mend()
    assert_the_next_tune_decides(ledger)
