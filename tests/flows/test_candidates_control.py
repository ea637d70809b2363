"""Test that no candidate is blamed for a broken environment: real workers in broken, then repaired environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from autosel import fingerprint, settings
from autosel.candidates import registry
from autosel.candidates.control import CONTROL, WORKED, nothing
from autosel.cli import doctor
from autosel.errors import BuildError, EnvironmentFault
from autosel.ledger import schema
from autosel.ledger.commands import SaveParity
from autosel.ledger.store import Ledger, open_ledger
from autosel.models.workloads import Named
from autosel.native import compile as native
from autosel.ops import OPS
from autosel.pipeline import Rejection, Report, Request, tune
from autosel.tuning import prove
from autosel.tuning.shortlist import way_of
from autosel.values import Decision, Failed, to_json

WORKLOAD = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
BLAME = (schema.quarantines, schema.decisions, schema.verdicts)  # tables that a broken environment must not change


class Watching:
    """Keep the events, and call `at_stage` at each stage."""

    def __init__(self, at_stage: Callable[[str, int, int], None] = nothing) -> None:
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
        for package in self.folder.iterdir():
            shutil.rmtree(package)


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


def assert_nobody_is_blamed_for(why: str, ledger: Ledger, at_stage: Callable[[str, int, int], None] = nothing) -> None:
    """Check that a tune fails with a fault of the environment, and records nothing against a candidate."""
    listener = Watching(at_stage)
    with pytest.raises(EnvironmentFault, match=why):
        tuned(ledger, listener)
    assert failed_proofs(ledger) == []
    assert rows(ledger, *BLAME) == {}
    assert [r for r in listener.rejections if r.stage != "eligible"] == []


def assert_the_next_tune_decides(ledger: Ledger) -> None:
    listener = Watching()
    (decision,) = tuned(ledger, listener).decisions
    assert decision.verdict is not None and len(decision.verdict.timings) > 1, decision.reason
    assert [r for r in listener.rejections if r.stage in ("build", "parity", "race")] == []


# --- tune -------------------------------------------------------------------------------------------------------------


def test_without_torch_in_workers_no_candidate_is_blamed_and_the_next_tune_decides(
    packages: Breakable, ledger: Ledger
) -> None:
    packages.break_package("torch")
    assert_nobody_is_blamed_for(r"libtorch\.so", ledger)
    packages.mend()
    assert_the_next_tune_decides(ledger)


def test_an_environment_that_breaks_before_races_quarantines_no_candidate(packages: Breakable, ledger: Ledger) -> None:
    def once_all_is_proven(stage: str, done: int, total: int) -> None:
        if stage == "parity" and done == total > 0:
            packages.break_package("torch")

    assert_nobody_is_blamed_for(r"libtorch\.so", ledger, once_all_is_proven)


def test_native_candidates_do_not_fail_if_no_native_kernel_can_be_loaded(packages: Breakable, ledger: Ledger) -> None:
    """Test workers in which PyTorch works, so that only an empty candidate of the same kind shows the fault."""
    packages.break_package("tvm_ffi")
    assert_nobody_is_blamed_for(r"libtvm_ffi\.so", ledger)


# --- the compiler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Provide a compiler that has worked, in a separate home with measured rates. The returned function makes the
    compiler refuse every command, with this message."""
    script, home = tmp_path / "c++", tmp_path / "home"

    def breaks(words: str, why: str) -> None:
        refusal = [f"*{words}*) echo '{why}' >&2; exit 1 ;;"] if words else []
        script.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *refusal, "esac", 'exec g++ "$@"']))
        script.chmod(0o700)

    def forget() -> None:
        settings.read.cache_clear()
        native.find_compiler.cache_clear()

    fingerprint.take("cpu")
    shutil.copytree(settings.home() / "fingerprint", home / "fingerprint")
    breaks("", "")
    monkeypatch.setenv("AUTOSEL_CXX", str(script))
    monkeypatch.setenv("AUTOSEL_HOME", str(home))
    forget()
    native.compile_source(native.EMPTY_CPP)
    yield breaks
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(".cpp", "error: cc1plus: no such file", id="a compiler that compiles nothing any more"),
        pytest.param("/rmsnorm.cpp", "error writing to x.s: No space left on device", id="a full disk"),
    ],
)
def test_a_compiler_that_breaks_during_a_tune_fails_no_build(
    words: str, why: str, compiler: Callable[[str, str], None], ledger: Ledger
) -> None:
    compiler(words, why)
    assert_nobody_is_blamed_for(why.partition(": ")[2], ledger)


def test_a_compiler_that_never_worked_here_is_treated_as_missing(compiler: Callable[[str, str], None]) -> None:
    shutil.rmtree(native.artefacts())
    compiler(".cpp", "error: no such file")
    with pytest.raises(BuildError) as caught:
        native.compile_source(native.EMPTY_CPP)
    native.require_compiler("cpu/rmsnorm.cpp", caught.value)


def test_a_kernel_that_is_the_only_one_not_to_compile_has_failed(
    compiler: Callable[[str, str], None], ledger: Ledger
) -> None:
    compiler("/rmsnorm.cpp", "error: expected ;")
    listener = Watching()
    tuned(ledger, listener)
    assert [(r.candidate, r.stage) for r in listener.rejections if r.stage != "eligible"] == [("cpp:rmsnorm", "build")]
    assert len(failed_proofs(ledger)) == 1


@pytest.mark.parametrize(
    ("evidence", "force", "known"),
    [
        pytest.param({"cause": "raised ImportError"}, False, False, id="no control"),
        pytest.param({"cause": "raised ImportError", CONTROL: WORKED}, False, True, id="a control"),
        pytest.param({"cause": "raised ImportError", CONTROL: WORKED}, True, False, id="a control, and --force"),
    ],
)
def test_a_stored_failure_holds_if_it_has_a_control(
    evidence: dict[str, str], force: bool, known: bool, ledger: Ledger
) -> None:
    fp = fingerprint.take("cpu")
    way = way_of(registry.find("rmsnorm", "cpp:rmsnorm"), WORKLOAD, fp)
    failed = Failed(check="raised", case="load", evidence=evidence, reason="ImportError: libtorch.so")
    ledger.write(SaveParity(hw_id=fp.hw_id, workload=WORKLOAD, arm=way.arm, parity=failed))
    tuning = SimpleNamespace(ledger=ledger, fp=fp, request=Request(workloads=(), force=force))
    job = SimpleNamespace(workload=WORKLOAD)
    assert (prove._known(tuning, job, way) == failed) is known  # type: ignore[arg-type]


# --- processes that need PyTorch themselves ---------------------------------------------------------------------------


def test_a_verb_that_cannot_import_torch_has_its_own_exit_code(packages: Breakable, home: Path) -> None:
    packages.break_package("torch")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "autosel.cli.main", "tune", "--op", "rmsnorm", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 6, done.stderr
    assert "the environment is broken: PyTorch cannot be imported" in done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 6
    assert not (home / "crash.log").exists()


def test_the_daemons_child_says_that_torch_cannot_be_imported(packages: Breakable, home: Path) -> None:
    packages.break_package("torch")
    task = {"do": "tune", "workloads": [to_json(WORKLOAD)], "device": "cpu"}
    command = [sys.executable, "-P", "-m", "autosel.daemon.tuner"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(task) + "\n")
        child.stdin.flush()  # kept open, because closing it would stop the child
        said = json.loads(child.stdout.readline())
        assert child.wait(timeout=120) == 1
    assert (said["event"], said["kind"]) == ("error", "EnvironmentFault")
    assert "libtorch.so" in said["why"]


def test_doctor_finds_that_workers_do_not_work(packages: Breakable, ledger: Ledger) -> None:
    assert [f.level for f in doctor.examine_workers("workers")] == ["ok"]
    packages.break_package("tvm_ffi")
    with pytest.raises(EnvironmentFault, match=r"libtvm_ffi\.so"):
        list(doctor.examine_workers("workers"))
