"""Kill a tuning process, and check the state after each kill.

The process forks from one that has imported everything, and runs `pipeline.tune` on real candidates, with the real
ledger, locks, journal, rules of race and judge, crossover and snapshot. Only the two things that take seconds and store
nothing are replaced: a proof passes at once, and the samples of a race come from `autosel.testing.rates.noise`, whose
arms have known speeds. So a whole tune takes half a second, and hundreds of kills are affordable; `tests/soak` also
kills tunes in which nothing is replaced.

The tuner writes into a pipe what it was told is stored (a decision, a debit, a proof). The checks compare this with the
ledger.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from autosel import files, models, pipeline
from autosel.ledger import Ledger, host, open_ledger, snapshot
from autosel.ledger import schema as t
from autosel.ledger.commands import Command, SaveParity, Spend
from autosel.models.workloads import Named, step
from autosel.parity.check import Proof
from autosel.race.contest import Contest
from autosel.race.judge import has_lost, nominees
from autosel.race.plan import SESSIONS, plan
from autosel.race.run import RaceTerms
from autosel.race.session import Duel, SessionRules, confirm, screen
from autosel.testing.rates.noise import SimulatedBench, iid
from autosel.tuning import contend, prove
from autosel.values import Decision, NativeRecipe, Parity, Passed, Race, digest
from tests.llama import write_config

ROOT = Path(__file__).resolve().parents[2]
OPS = ("rmsnorm", "swiglu", "attn")
BASE_NS = 100_000.0
CROSSOVER = 160  # tokens: attention's kernel wins from there on, so that a bucket is split
END_S = 60.0  # a tune of half a second that is not over by then hangs


def workloads(folder: Path) -> tuple[Named, ...]:
    """Return four small workloads: two of row ops, and attention at two lengths."""
    return tuple(step(models.load(str(write_config(folder))), context=200, ops=list(OPS)))


# --- the tuning process -----------------------------------------------------------------------------------------------


class Bomb:
    """Kill this process at its n-th step: before and after each statement, begin, commit and file operation."""

    def __init__(self, fuse: int, wired: sa.Engine | None = None, also: Sequence[tuple[Any, str]] = ()) -> None:
        """Count the statements of the engine `wired`; by default of all engines, and then only their beginnings."""
        self.left = fuse
        if wired is not None:
            for name in ("before_cursor_execute", "after_cursor_execute", "begin", "commit"):
                sa.event.listen(wired, name, self.tick)
        else:
            sa.event.listen(sa.engine.Engine, "before_cursor_execute", self.tick)
        for place, name in ((os, "fsync"), (Path, "replace"), (files, "sync_folder"), *also):
            self._around(place, name)

    def _around(self, place: Any, name: str) -> None:
        original = getattr(place, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            done = original(*args, **kwargs)
            self.tick()
            return done

        setattr(place, name, around)

    def tick(self, *_: Any, **__: Any) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


class Pipe:
    """Collect the tuner's reports. One write per line, so each is complete or missing."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def tell(self, what: str, **details: Any) -> None:
        os.write(self.fd, json.dumps({"what": what, **details}).encode() + b"\n")

    # As a listener of `tune`:

    def stage(self, *_: Any) -> None:
        """Ignore the stage."""

    def rejected(self, _: Any) -> None:
        """Ignore candidates that cannot run."""

    def decided(self, decision: Decision, settled_before: bool) -> None:
        self.tell("decided", id=decision.id, digest=digest(decision), settled=settled_before)


def watched(ledger: Ledger, pipe: Pipe) -> Ledger:
    """Make the ledger repeat its acknowledgements of debits and proofs into the pipe."""
    write = ledger.write

    def writes(command: Command[Any], **options: Any) -> Any:
        made = write(command, **options)
        if isinstance(command, Spend) and made:
            pipe.tell("debited", key=command.key, amount=command.amount)
        if isinstance(command, SaveParity):
            pipe.tell("proven", proof=f"{command.arm.digest} {command.workload.bucket}")
        return made

    ledger.write = writes  # type: ignore[method-assign]
    return ledger


def replace_what_takes_seconds(pipe: Pipe) -> None:
    """Replace proofs by ones that pass at once, and races by ones on a simulated clock."""

    def check_all(proofs: Sequence[Proof], **_: Any) -> list[Parity]:
        for proof in proofs:
            native = isinstance(proof.recipe, NativeRecipe)
            arm = digest({"source": proof.digest, "knobs": proof.knobs.values}) if native else proof.digest
            pipe.tell("proving", proof=f"{arm} {proof.workload.bucket}")
        return [Passed(cases=1, worst=0.5, worst_case="replaced", seconds=0.01, pairs=1, pairs_of=1)] * len(proofs)

    def run(contests: Sequence[Contest], terms: RaceTerms, _: object) -> Iterator[tuple[Contest, Race]]:
        for contest in contests:
            pipe.tell("racing", workload=contest.workload.key)
            yield contest, race_of(contest, terms)

    prove.check_all = check_all  # type: ignore[assignment]
    contend.run = run  # type: ignore[assignment]


def race_of(contest: Contest, terms: RaceTerms) -> Race:
    """A race by the rules, on synthetic samples: our kernels take half the baseline's time, attention's from CROSSOVER
    tokens on; everyone else is slower than the baseline."""
    w, base, incumbent = contest.workload, contest.baseline.candidate, contest.incumbent.candidate
    wins = w.op != "attn" or w["L"] >= CROSSOVER
    truth = {name: BASE_NS * (0.5 if wins and name.startswith("cpp:") else 1.5) for name in contest.entrants}
    truth[base] = BASE_NS
    p, margin, coin = plan(BASE_NS), contest.margins["short"], Random(f"{w.key} {os.getpid()}")
    bench, rivals = SimulatedBench(truth, iid(), coin), tuple(dict.fromkeys((base, incumbent)))
    arms = list(dict.fromkeys((*rivals, *truth)))
    trial = SessionRules(plan=p, delta=margin.delta, seed=coin.getrandbits(32))
    sessions = [screen(bench, arms, trial)]
    found = nominees(sessions[0], incumbent, margin.delta)[:1]
    if found and terms.debit(contest, found[0], margin):
        duel = Duel(arms=(*rivals, found[0]), finalist=found[0], rivals=rivals)
        while len(sessions) <= SESSIONS and not (
            sessions[1:] and has_lost(sessions[-1], found[0], rivals, margin.delta)
        ):
            sessions.append(confirm(bench, duel, trial, sessions[0], sessions[1:]))
    return Race(
        workload=w,
        baseline=base,
        incumbent=incumbent,
        finalist=found[0] if found else None,
        delta=margin.delta,
        alpha_session=margin.alpha_session,
        pi=margin.pi,
        sessions=tuple(sessions),
    )


def tune(home: Path, named: Sequence[Named], pipe: Pipe, fuse: int | None = None, *, real: bool = False) -> None:
    """Run the child's tune; with `fuse`, until that step; with `real`, with real proofs and races."""
    if not real:
        replace_what_takes_seconds(pipe)
    if fuse is not None:
        Bomb(fuse, also=((Ledger, "publish"), (prove, "check_all"), (contend, "judge")))
    with open_ledger(home=home) as ledger:
        pipe.tell("opened")
        pipeline.tune(pipeline.Request(workloads=tuple(named)), watched(ledger, pipe), pipe)


def real_tune(home: str, model: str, fd: int) -> None:
    """Run `tune` with real proofs and races, for a new interpreter."""
    tune(Path(home), workloads(Path(model)), Pipe(fd), real=True)


# --- its parent -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Told:
    """Collect the acknowledged decisions of one home's tuners, and their actions."""

    decided: dict[int, str] = field(default_factory=dict)  # id -> digest
    debits: Counter[str] = field(default_factory=Counter)
    debited: list[float] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)  # actions of the last tuner
    kills: int = 0

    def hear(self, output: bytes) -> None:
        self.lines = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
        for line in self.lines:
            if line["what"] == "decided":
                assert self.decided.setdefault(line["id"], line["digest"]) == line["digest"]
            elif line["what"] == "debited":
                self.debits[line["key"]] += 1
                self.debited.append(line["amount"])


def fork(work: Callable[[Pipe], None]) -> tuple[int, int]:
    """Run `work` in a child; return its pid and a pipe to read. It exits with 0, or with 1 and its error on stderr."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            work(Pipe(write))
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(write)
    return child, read


def until_killed(told: Told, work: Callable[[Pipe], None], after_s: float | None = None) -> bool:
    """Let a tuner work, SIGKILL it `after_s` from its start (None: it does so itself); did it come to its end?

    Any end but that or SIGKILL is a failure.
    """
    child, read = fork(work)
    output, until = b"", time.monotonic() + (END_S if after_s is None else after_s)
    poll = select.poll()
    poll.register(read, select.POLLIN)
    while poll.poll(max(0.0, until - time.monotonic()) * 1000):
        data = os.read(read, 1 << 16)
        output += data
        if not data:
            break
    else:
        assert after_s is not None, "it hangs"
        os.kill(child, signal.SIGKILL)
        with os.fdopen(os.dup(read), "rb") as rest:
            output += rest.read()
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"exit {status} after {output[-500:]!r}"
    told.kills += status != 0
    told.hear(output)
    return status == 0


def until_real_killed(told: Told, home: Path, model: Path, after_s: float | None) -> bool:
    """Like `until_killed`, for a whole tune in a separate interpreter; check that no worker survives it."""
    read, write = os.pipe()
    code = f"from tests.cpu.killed import real_tune; real_tune({str(home)!r}, {str(model)!r}, {write})"
    mark = f"AUTOSEL_TEST_HOME={home}"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTOSEL_TEST_HOME": str(home)},
        pass_fds=(write,),
    )
    os.close(write)
    with suppress(subprocess.TimeoutExpired):
        child.wait(after_s)
    workers = [os.pidfd_open(pid) for pid in marked(mark) if pid != child.pid]
    child.kill()
    with os.fdopen(read, "rb") as output:
        told.hear(output.read())
    assert child.wait() in (0, -signal.SIGKILL), child.returncode
    for worker in workers:
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        assert poll.poll(END_S * 1000), "a worker outlives its tuner"
        os.close(worker)
    told.kills += child.returncode != 0
    return child.returncode == 0


def marked(mark: str) -> list[int]:
    """Return the processes that have this in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def hold_to(told: Told, home: Path) -> None:
    """Check a home whose tuner was killed; check the database before opening it with autosel."""
    if not (home / "ledger.db").exists():
        assert not told.decided
        return
    with closing(sqlite3.connect(home / "ledger.db")) as raw:
        assert raw.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        tables = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        served = dict(raw.execute("SELECT decision_id, epoch FROM serving")) if "serving" in tables else {}
    published = snapshot.read(home / snapshot.FILE)  # whole, and its digest is right; raises if not
    with open_ledger(home=home) as ledger:
        _nothing_is_lost(told, ledger)
        _nothing_is_half_there(told, ledger)
        seen = {row.decision.id: row for row in published.rows} if published else {}
        assert all(ledger.decision(number) == row.decision for number, row in seen.items())
        missing = [number for number in served if number in told.decided and number not in seen]
        assert missing == [], "acknowledged, but not published"
        now = snapshot.read(home / snapshot.FILE)
        assert now is not None
        assert [(r.key, r.epoch, r.decision) for r in now.rows] == [
            (s.key, s.epoch, s.decision) for s in ledger.serving()
        ]
        assert now.epoch >= (published.epoch if published else 0)
    left = {path.name for path in home.iterdir()} - {"ledger.db", "ledger.db-wal", "ledger.db-shm", "locks"}
    assert left - {host.FILE} == {snapshot.FILE}, "the killed tuner left files behind"


def _nothing_is_lost(told: Told, ledger: Ledger) -> None:
    stored = {d.id: digest(d) for d in ledger.history()}
    assert told.decided.items() <= stored.items()
    assert len(stored) - len(told.decided) <= told.kills, "more than one unacknowledged decision per kill"
    with ledger._database.reading() as c:
        debits = Counter(c.execute(sa.select(t.debits.c.key)).scalars().all())
        amount = c.execute(sa.select(sa.func.sum(t.debits.c.amount))).scalar() or 0.0
    assert told.debits <= debits
    assert debits.total() - told.debits.total() <= told.kills
    assert amount >= sum(told.debited) * (1 - 1e-9)


def _nothing_is_half_there(told: Told, ledger: Ledger) -> None:
    for decision in ledger.history():
        evidence = ledger.evidence(decision.id)
        assert (evidence.race is None) == (decision.verdict is None)
        assert evidence.fingerprint is not None
        assert any(arm.digest == decision.arm.digest for arm, _ in evidence.parities)
    with ledger._database.reading() as c:
        for table, column in ((t.races, t.decisions.c.race_id), (t.verdicts, t.decisions.c.verdict_id)):
            orphans = sa.select(table.c.id).where(table.c.id.not_in(sa.select(column).where(column.is_not(None))))
            assert c.execute(orphans).all() == [], f"{table.name} of no decision"


@dataclass(slots=True)
class Continuity:
    """Check that a home's tuners do not repeat stored proofs and decided races."""

    proven: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)  # keys of workloads whose bucket was decided as a whole

    def watch(self, told: Told, home: Path) -> None:
        proving = {line["proof"] for line in told.lines if line["what"] == "proving"}
        raced = {line["workload"] for line in told.lines if line["what"] == "racing"}
        assert not self.proven & proving, "proven again"
        assert not self.settled & raced, "raced again"
        self.proven |= {line["proof"] for line in told.lines if line["what"] == "proven"}
        with open_ledger(home=home) as ledger:
            decided = [ledger.decision(number) for number in told.decided]
        self.settled |= {d.workload.key for d in decided if d.op != "attn"}


class Graveyard:
    """Homes in which tuners are killed; each is a copy of one empty ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.kills = folder, 0, 0
        (folder / "model").mkdir()
        self.named = workloads(folder / "model")
        open_ledger(home=folder / "empty").close()
        self.expected: dict[str, str] = {}

    def home(self) -> Path:
        self.count += 1
        made = self.folder / f"home{self.count}"
        shutil.copytree(self.folder / "empty", made)
        made.chmod(0o700)
        return made

    def tune(self, home: Path, fuse: int | None = None) -> Callable[[Pipe], None]:
        return lambda pipe: tune(home, self.named, pipe, fuse)

    def whole(self) -> float:
        """Run an undisturbed tune; return its seconds. Every other tune must reach the same decisions."""
        home, told, started = self.home(), Told(), time.monotonic()
        assert until_killed(told, self.tune(home))
        seconds = time.monotonic() - started
        hold_to(told, home)
        self.expected = outcome(home)
        shutil.rmtree(home)
        return seconds

    def bury(self, home: Path) -> None:
        """Check that the ledger has the same decisions as an undisturbed one."""
        assert outcome(home) == self.expected
        shutil.rmtree(home)


def outcome(home: Path) -> dict[str, str]:
    with open_ledger(home=home) as ledger:
        return {s.key: f"{s.decision.state} {s.decision.arm.candidate}" for s in ledger.serving()}


def kill_at_moments(graveyard: Graveyard, kills: int, rng: Random, longest_s: float) -> int:
    """Kill tuners at random moments, each continuing where the last one died; return the number of kills."""
    done = 0
    while done < kills:
        home, told, continuity = graveyard.home(), Told(), Continuity()
        while not until_killed(told, graveyard.tune(home), rng.uniform(0.0, longest_s)):
            hold_to(told, home)
            continuity.watch(told, home)
            done += 1
        hold_to(told, home)
        graveyard.bury(home)
    graveyard.kills += done
    return done


def kill_real(graveyard: Graveyard, kills: int, rng: Random) -> int:
    """Kill tunes with real proofs and races at random moments; return the number of kills."""
    home, told, started = graveyard.home(), Told(), time.monotonic()
    assert until_real_killed(told, home, graveyard.folder / "model", None)
    longest, done = time.monotonic() - started, 0
    hold_to(told, home)
    while done < kills:
        home, told, continuity = graveyard.home(), Told(), Continuity()
        while not until_real_killed(told, home, graveyard.folder / "model", rng.uniform(0.0, longest)):
            hold_to(told, home)
            continuity.watch(told, home)
            done += 1
            if done == kills:
                break
        hold_to(told, home)
        shutil.rmtree(home)
    graveyard.kills += done
    return done


def kill_at_step(graveyard: Graveyard, fuse: int) -> bool:
    """Kill a tuner at its n-th step, and let another finish; False if it had fewer steps."""
    home, told, continuity = graveyard.home(), Told(), Continuity()
    killed = not until_killed(told, graveyard.tune(home, fuse))
    graveyard.kills += killed
    if killed:
        hold_to(told, home)
        continuity.watch(told, home)
        assert until_killed(told, graveyard.tune(home))
        continuity.watch(told, home)
    hold_to(told, home)
    graveyard.bury(home)
    return killed
