"""Test the parts of the daemon separately: queue, writer, events, idleness, view, charts, peers, unit."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from autosel import models
from autosel.candidates import registry
from autosel.daemon import bind, charts, idle, jobs, peers, shown, tuner, upkeep
from autosel.daemon.events import BEHIND, Events
from autosel.daemon.hub import Options
from autosel.daemon.idle import BusyMeter, CpuReading
from autosel.daemon.jobs import Full, Jobs, QueuedJob
from autosel.daemon.protocol import OnePiece
from autosel.daemon.serve import unit
from autosel.daemon.view import View, bucket_of
from autosel.daemon.writer import MOST_LINGER_S, Busy, Writer, _Gathering, _Item
from autosel.dispatch.handover import MOST_FAULTS, Handover
from autosel.errors import AutoselError, LedgerError, UsageError
from autosel.ledger import Ledger, commands, open_ledger
from autosel.ledger.commands import Demote, Spend, TakeOver
from autosel.ledger.faults import Fault
from autosel.ledger.key import budget_key
from autosel.models.workloads import step
from autosel.tuning.shortlist import way_of
from autosel.values import Fingerprint, Rate, Workload, to_json
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, FAILED, FP, PASSED, record, verdict
from tests.null.daemon_app import queue_in
from tests.null.test_candidates import CPU

RMSNORM = Workload(op="rmsnorm", dims=(("M", 1), ("d", 4096)), dtype="bf16")


# --- queue ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> Jobs:
    return queue_in(tmp_path)


def added(queue: Jobs, *asked: Any, **more: Any) -> QueuedJob:
    made = queue.add(*asked, **more)
    assert made is not None
    return made


def test_a_workload_is_queued_once_for_any_number_of_misses(queue: Jobs) -> None:
    first = added(queue, ATTN, "miss", "", calls=3)
    again = added(queue, ATTN.at(L=5000), "miss", "", calls=4)  # the same bucket
    other = added(queue, ATTN.at(L=64), "miss", "", calls=1)
    assert (again.id, again.calls) == (first.id, 7)
    assert other.id != first.id


def test_other_numbers_of_threads_are_other_jobs(queue: Jobs) -> None:
    own, other = (added(queue, ATTN, "miss", "", calls=3, threads=threads) for threads in (0, 1))
    assert own.id != other.id
    again = added(queue, ATTN, "miss", "", calls=4, threads=1)
    assert (again.id, again.calls, again.threads) == (other.id, 7, 1)


def test_requests_go_first_then_stale_then_the_most_missed(queue: Jobs) -> None:
    rare = queue.add(ATTN.at(L=64), "miss", "", calls=1)
    often = queue.add(ATTN, "miss", "", calls=9)
    stale = queue.add(RMSNORM, "stale", "torch changed")
    asked = queue.add(RMSNORM.at(M=8), "asked", "")
    assert [j.id for j in queue.all()] == [j.id for j in (asked, stale, often, rare) if j]


def test_a_request_for_a_queued_miss_moves_it_forward(queue: Jobs) -> None:
    queue.add(RMSNORM, "stale", "torch changed")
    missed = added(queue, ATTN, "miss", "", calls=9)
    queue.add(ATTN, "asked", "please")
    first = queue.all()[0]
    assert (first.id, first.source, first.calls) == (missed.id, "asked", 9)


def test_the_queue_outlives_the_daemon_and_running_jobs_are_queued_again(tmp_path: Path) -> None:
    queue = queue_in(tmp_path)
    made = added(queue, ATTN, "asked", "why not")
    queue._put(dataclasses.replace(made, state="running"))
    again = queue_in(tmp_path).all()
    assert [(j.id, j.state, j.workload) for j in again] == [(made.id, "queued", ATTN)]


def test_a_queue_that_cannot_be_read_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text('[{"id": "x"}]')
    queue = queue_in(tmp_path)
    assert queue.all() == []
    assert queue.add(ATTN, "asked", "") is not None


def test_a_full_queue_refuses(queue: Jobs) -> None:
    for number in range(jobs.MOST_OPEN):
        queue.add(RMSNORM.at(d=number + 1), "miss", "")
    with pytest.raises(Full):
        queue.add(ATTN, "asked", "")


def test_a_miss_that_could_not_be_decided_is_not_tried_again_at_once(queue: Jobs) -> None:
    made = added(queue, ATTN, "miss", "")
    queue._end(made, "undecided", "too noisy")
    assert queue.add(ATTN, "miss", "") is None
    assert queue.add(ATTN, "asked", "") is not None


def test_a_device_in_use_keeps_the_job_waiting(queue: Jobs) -> None:
    made = added(queue, ATTN, "asked", "")
    queue._put(dataclasses.replace(made, state="running"))
    queue._settle(queue._jobs[made.id], None, {"kind": "InUseError", "why": "held by pid 7"}, 1)
    assert queue._jobs[made.id].state == "queued"
    queue._settle(queue._jobs[made.id], None, {"kind": "UsageError", "what": "no such op", "why": ""}, 1)
    assert (queue._jobs[made.id].state, queue._jobs[made.id].note) == ("failed", "no such op")


def test_a_broken_environment_keeps_the_job_waiting_with_the_reason(
    queue: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now)
    monkeypatch.setattr(queue.meter, "why", lambda _: "")
    made = added(queue, ATTN, "miss", "called")
    problem = {"kind": "EnvironmentFault", "what": "the environment is broken: X", "why": "ImportError"}
    queue._settle(queue._jobs[made.id], None, problem, 1)
    waits = queue._jobs[made.id]
    assert (waits.state, waits.note) == ("queued", "the environment is broken: X: ImportError")
    assert queue._why_held("cpu") == "the environment is broken: X"
    now += jobs.BROKEN_AGAIN_S
    assert queue._why_held("cpu") == "", "the job must be tried again"


# --- idleness ---------------------------------------------------------------------------------------------------------


def test_our_own_work_does_not_count_as_others() -> None:
    before = CpuReading(at_s=10.0, busy_s=100.0, own_s=50.0)
    assert idle.others(before, CpuReading(at_s=11.0, busy_s=102.0, own_s=52.0)) == 0.0
    assert idle.others(before, CpuReading(at_s=12.0, busy_s=102.0, own_s=51.0)) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 4), st.floats(-5, 5)), max_size=20))
def test_a_meter_stays_within_the_number_of_cores(steps: list[tuple[float, float, float]]) -> None:
    meter, now = BusyMeter(cores=4), CpuReading(at_s=0.0, busy_s=0.0, own_s=0.0)
    for seconds, cores, own in steps:
        now = CpuReading(at_s=now.at_s + seconds, busy_s=now.busy_s + cores * seconds, own_s=now.own_s + own)
        assert -1e-9 <= meter.take(now) <= 4 + 5 / 0.01  # a child's end can move its time to others for one reading


def test_a_meter_starts_busy_and_falls() -> None:
    meter = BusyMeter(cores=2)
    found = [meter.take(CpuReading(at_s=float(n), busy_s=0.0, own_s=0.0)) for n in range(20)]
    assert found[0] == 2.0
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.1


def test_the_kernels_figures_are_read() -> None:
    one, two = idle.read(0.0), idle.read(1.0)
    assert two.busy_s >= one.busy_s > 0
    assert two.own_s >= one.own_s > 0


# --- validity of decisions -------------------------------------------------------------------------------------------


def test_a_rate_that_moved_far_enough_changes_knobs_and_a_little_does_not() -> None:
    w = Workload(op="rmsnorm", dims=(("M", 64), ("d", 4096)), dtype="bf16")

    def device(fork_join_s: float) -> Fingerprint:
        rate = Rate(value=fork_join_s, unit="s", spread=0.0, source="the test")
        return dataclasses.replace(CPU, rates={"fork_join_s@2": rate})

    arm = way_of(registry.find("rmsnorm", "cpp:rmsnorm"), w, device(2e-6)).arm
    decision: Any = SimpleNamespace(op="rmsnorm", workload=w, arm=arm)
    assert not tuner.has_other_knobs(decision, device(2.1e-6))
    assert tuner.has_other_knobs(decision, device(1.0))


def test_decisions_with_other_knobs_after_drift_are_raced_again_and_keep_serving(ledger: Ledger) -> None:
    made = [record(ledger, f"{b}", workload=ATTN.at(B=b)) for b in (1, 2, 4)]
    found = {"device": "cpu", "unit": "", "fingerprint": {}, "hw_id": FP.hw_id, "env_id": "", "mode": made[0].mode}
    found |= {
        "moved": {},
        "lost": [made[0].id],
        "stale": {str(made[0].id): "its source was edited"},
        "other_knobs": {str(made[1].id): "it drifted"},
    }
    asked: list[bool] = []
    queued: list[tuple[str, str]] = []

    class Child:
        lost: dict[int, str] = {}

        async def examine(self, *, rates: bool) -> list[dict[str, Any]]:
            asked.append(rates)
            return [found]

        def add(self, w: Workload, source: str, why: str, *, device: str, threads: int) -> None:
            assert threads == 0
            queued.append((w.bucket, why))

    hub: Any = SimpleNamespace(jobs=Child(), options=Options(), view=View(hw_id=FP.hw_id, served=ledger.serving()))

    async def reload() -> None:
        hub.view = dataclasses.replace(hub.view, stale=hub.facts.stale)

    hub.reload, hub.learn = reload, lambda facts: setattr(hub, "facts", facts)
    asyncio.run(upkeep.examine(hub, rates=True))
    assert asked == [True]
    assert queued == [(made[0].bucket, "its source was edited"), (made[1].bucket, "it drifted")]
    assert set(hub.view.stale) == {str(made[0].id)}
    assert hub.jobs.lost == {made[0].id: "cpu"}, "a stale winner must first be proven again"


# --- writer -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(home=tmp_path / "home", alone=True)


def writing(
    ledger: Ledger, story: Callable[[Writer], Awaitable[None]], committed: Callable[[int, bool], None] = lambda *_: None
) -> None:
    async def run() -> None:
        writer = Writer(ledger, lambda: ledger, committed)
        try:
            await story(writer)
        finally:
            writer.close()

    asyncio.run(run())


def test_writes_that_wait_share_a_commit(ledger: Ledger) -> None:
    groups: list[int] = []

    async def story(writer: Writer) -> None:
        go = threading.Event()
        first = writer.submit(lambda _: go.wait())
        waiting = [writer.submit(lambda led, n=n: led.write(Spend(key=f"key {n}", amount=0.001))) for n in range(20)]
        go.set()
        assert all(await asyncio.gather(first, *waiting))

    writing(ledger, story, lambda writes, _: groups.append(writes))
    assert groups == [1, 20]


def test_a_write_that_is_refused_changes_nothing_and_takes_no_other_with_it(ledger: Ledger) -> None:
    def work(led: Ledger) -> Any:
        led.write(Spend(key="kept?", amount=0.001))
        raise LedgerError("refused")

    found = ledger.together(
        [
            lambda: record(ledger, "one"),
            lambda: work(ledger),
            lambda: ledger.write(Spend(key=budget_key("hw", ATTN), amount=0.002)),
        ]
    )
    assert found[0].id == 1 and found[2] is True
    assert isinstance(found[1], LedgerError)
    assert ledger.spent("kept?") == 0.0
    assert ledger.decision(1).state == "promoted"


def test_a_write_is_published_before_it_is_acknowledged(ledger: Ledger) -> None:
    async def story(writer: Writer) -> None:
        made = await writer.submit(record)
        assert f'"id":{made.id}' in (ledger.home / "decisions.json").read_text()

    writing(ledger, story)


def test_no_caller_waits_for_ever_after_any_failure(ledger: Ledger) -> None:
    async def story(writer: Writer) -> None:
        with pytest.raises(ZeroDivisionError):
            await writer.submit(lambda led: 1 // 0)
        assert await writer.submit(lambda led: 7) == 7
        assert await writer.submit(lambda led: 8, alone=True) == 8

    writing(ledger, story)


class Later:
    """The clock of an event loop, which the test advances."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Any, *values: Any) -> Any:
        self.calls.append([self.now + delay_s, lambda: call(*values)])
        entry = self.calls[-1]
        return SimpleNamespace(cancel=lambda: self.calls.remove(entry) if entry in self.calls else None)

    def pass_(self, seconds: float) -> None:
        until = self.now + seconds
        while due := sorted(c for c in self.calls if c[0] <= until):
            self.calls.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = until


class Gathered:
    """Gather writes as in an event loop; `groups` lists the groups that were handed over."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.loop = Later()
        self._gathering = _Gathering(lambda items: self.groups.append(len(items)))

    def come(self, count: int) -> None:
        for _ in range(count):
            self._gathering.add(_Item(work=lambda _: None, future=None, alone=False), self.loop)  # type: ignore[arg-type]

    def settle(self) -> None:
        future = SimpleNamespace(done=lambda: True, get_loop=lambda: self.loop)
        self._gathering.settle([(future, None)] * self.groups[-1])


def test_a_lone_write_does_not_wait() -> None:
    it = Gathered()
    for _ in range(3):
        it.come(1)
        it.settle()
    assert it.groups == [1, 1, 1]


def test_writers_that_write_repeatedly_form_one_group() -> None:
    it = Gathered()
    it.come(8)
    assert it.groups == [1], "the first write must not wait"
    it.settle()
    it.loop.pass_(1.0)
    assert it.groups == [1, 7]
    it.come(1)
    it.settle()  # eight are at it by now
    it.come(6)
    assert it.groups == [1, 7]
    it.come(1)
    assert it.groups == [1, 7, 8]


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 0.002)), min_size=1, max_size=40))
def test_a_write_waits_for_others_up_to_the_limit(steps: list[tuple[int, float]]) -> None:
    it = Gathered()
    it.come(30)
    it.settle()
    it.loop.pass_(1.0)
    it.settle()
    before, began = len(it.groups), it.loop.now
    for count, seconds in steps:
        it.come(count)
        it.loop.pass_(seconds)
        if len(it.groups) > before:
            break
    else:
        it.loop.pass_(began + MOST_LINGER_S + 0.002 - it.loop.now)
    assert len(it.groups) > before
    assert it.loop.now - began <= MOST_LINGER_S + 0.004


def test_writes_beyond_the_limit_are_refused(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.daemon.writer.MOST_WAITING", 3)

    async def story(writer: Writer) -> None:
        held, go = threading.Event(), threading.Event()
        first = writer.submit(lambda _: (held.set(), go.wait()))
        held.wait()
        waiting = [writer.submit(lambda _: None) for _ in range(3)]
        assert writer.waiting == 3
        with pytest.raises(Busy, match="busy"):
            writer.submit(lambda _: None)
        go.set()
        assert (await asyncio.gather(first, *waiting))[1:] == [None, None, None]
        assert await writer.submit(lambda _: 5) == 5

    writing(ledger, story)


def test_an_answer_is_sent_in_one_piece_before_its_connection_is_closed() -> None:
    sent: list[Any] = []
    turns: list[Any] = []
    under = SimpleNamespace(
        write=sent.append,
        close=lambda: sent.append("closed"),
        abort=lambda: sent.append("aborted"),
        get_write_buffer_size=lambda: 0,
        **dict.fromkeys(("get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_protocol"), print),
    )
    line = OnePiece(under, SimpleNamespace(call_soon=turns.append))  # type: ignore[arg-type]
    line.write(b"head ")
    line.write(b"body")
    assert sent == []
    turns.pop()()
    assert sent == [b"head body"]
    line.write(b"last")
    line.close()
    turns.pop()()
    assert sent[1:] == [b"last", "closed"]
    line.write(b"never")
    line.abort()
    turns.pop()()
    assert sent[3:] == ["aborted"]


def test_faults_that_wait_for_a_daemon_are_few_and_each_once(tmp_path: Path, ledger: Ledger) -> None:
    decision = record(ledger)
    fault = Fault(cause="raised", reason="", decision=decision, workload="", evidence={}, seen_at="")
    waiting = Handover(tmp_path)
    for _ in range(3):
        waiting.fault(fault)
    assert len(waiting._faults) == 1
    for number in range(2 * MOST_FAULTS):
        waiting.fault(dataclasses.replace(fault, decision=dataclasses.replace(decision, id=number)))
    assert len(waiting._faults) == MOST_FAULTS


def test_a_command_comes_back_as_it_was_sent() -> None:
    sent = commands.SaveParity(hw_id="hw", workload=ATTN, arm=CPP, parity=FAILED)  # its evidence contains a NaN
    command, leases = commands.decode(commands.encode(sent, {"hw": 3}))
    assert leases == {"hw": 3}
    assert isinstance(command, commands.SaveParity)
    assert command.parity.evidence["got"] == "nan"  # type: ignore[union-attr]
    assert (command.workload, command.arm) == (ATTN, CPP)


def test_commands_and_answers_of_an_earlier_version_are_understood() -> None:
    names = "adopt close_trial demote import open_trial pin promote quarantine record release renew save_aa save_parity"
    assert set(commands.BY_CALL) == {*names.split(), "spend", "take_over", "unpin"}
    sent = {"call": "demote", "decision_id": 7, "reason": "x", "candidate": None}
    assert commands.decode({"command": sent, "leases": {}}) == (Demote(decision_id=7, reason="x"), {})
    strike = {"arm": to_json(CPP), "op": "attn", "strikes": 1, "reason": ""}
    _, strikes = commands.result_of(TakeOver(hw_id="hw", holder="it"), [5, [strike]])
    assert strikes[0].arm == CPP
    imported = commands.result_of(
        commands.Import(document={}, hw_id="hw"), {"served": [1], "waiting": [], "kept": [[2, "x"]]}
    )
    assert (imported.served, imported.kept) == ((1,), ((2, "x"),))
    assert commands.result_of(Spend(key="k", amount=1.0), True) is True


# --- events -----------------------------------------------------------------------------------------------------------


def test_a_reader_that_reconnects_gets_the_missed_events() -> None:
    async def story() -> list[bytes]:
        events = Events()
        for number in range(3):
            events.tell("epoch", {"epoch": number})
        line = events.follow(after=1)
        found = [await anext(line) for _ in range(3)]
        await line.aclose()  # type: ignore[attr-defined]
        return found

    found = asyncio.run(story())
    assert [b"id: 2" in found[1], b"id: 3" in found[2]] == [True, True]


def test_a_reader_that_falls_behind_is_disconnected() -> None:
    async def story() -> tuple[int, list[bytes]]:
        events = Events()
        line = events.follow()
        await anext(line)
        for number in range(BEHIND + 10):
            events.tell("job", number)
        return events.readers, [block async for block in line]

    readers, rest = asyncio.run(story())
    assert readers == 0
    assert rest == []


def test_stopping_closes_every_connection() -> None:
    async def story() -> list[bytes]:
        events = Events()
        line = events.follow()
        await anext(line)
        events.close()
        return [block async for block in line]

    assert asyncio.run(story()) == []


# --- what serves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-8b", "gemma3-1b", "qwen3-1.7b"])
def test_the_bucket_of_a_key_is_the_workloads_own(model: str) -> None:
    for batch in (1, 3, 40):
        for named in step(models.load(model), batch=batch, context=5000):
            w = named.workload
            assert bucket_of(w.key) == (w.bucket, dict(w.dims).get("L", 0))


@given(st.text(max_size=60))
def test_any_text_has_some_bucket(text: str) -> None:
    bucket, length = bucket_of(text)
    assert isinstance(bucket, str) and length >= 0


def test_a_crossover_is_drawn_where_the_winner_changes(ledger: Ledger) -> None:
    low = record(ledger, "low", workload=ATTN.at(L=4097), length_range=(4097, 5999))
    other = dataclasses.replace(CPP, candidate="x")
    high = record(ledger, "high", workload=ATTN, length_range=(6000, 8192), arm=other, parities=[(other, PASSED)])
    found = charts.times([low, high], {}, "L")
    assert found["crossovers"] == [{"x": 6000.0, "from": "cpp:attn", "to": "x", "where": "from 6000 on"}]
    assert found["roofline"] is None


def test_a_crossover_is_between_served_arms_and_shows_its_known_place(ledger: Ledger) -> None:
    first, near, far = (record(ledger, f"{b}", workload=ATTN.at(B=b)) for b in (1, 2, 8))
    assert charts.times([first, near, far], {}, "B")["crossovers"] == []
    (found,) = charts.times([first, near], {}, "B", {str(near.id): "edited"})["crossovers"]
    assert (found["from"], found["to"], found["where"]) == ("cpp:attn", near.baseline.candidate, "from 2 on")
    (found,) = charts.times([near, far], {}, "B", {str(far.id): "edited"})["crossovers"]
    assert (found["x"], found["where"]) == (4.0, "between 2 and 8")


def test_a_race_that_ended_before_timing_is_not_shown(ledger: Ledger) -> None:
    raced = record(ledger, "raced")
    nothing = dataclasses.replace(verdict(), outcome="undecided", timings={}, effect=None)
    record(ledger, "not", workload=ATTN.at(B=2), verdict=nothing, state="kept", arm=BASELINE)
    assert [d.id for d in shown.last_races(ledger)] == [raced.id]


def test_a_speedup_is_shown_only_for_serving_decisions(ledger: Ledger) -> None:
    made = [record(ledger, f"{b}", workload=ATTN.at(B=b)) for b in (1, 2, 4)]
    view = View(hw_id=FP.hw_id, served=ledger.serving())
    assert view.speedups() == {"attn": 2.0}
    ledger.write(Demote(decision_id=made[0].id, reason="wrong"))
    stale = {str(made[1].id): "its source was edited", str(made[2].id): "its source was edited"}
    view = View(hw_id=FP.hw_id, served=ledger.serving(), stale=stale)
    assert view.speedups() == {}
    (row,) = shown.by_op(view)
    assert (row.speedup, row.floor, row.stale, row.off) == (None, None, 2, 1)


def test_the_roofline_is_the_time_to_read_the_operands() -> None:
    v = dataclasses.replace(verdict(), read_bytes_per_s=2e10)
    assert charts.floor_us(v, 2_000_000) == pytest.approx(100.0)
    assert charts.floor_us(verdict(), 2_000_000) is None


def test_an_edited_kernel_changes_the_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "cpu" / "one.cpp"
    kernel.parent.mkdir()
    kernel.write_text("1")
    monkeypatch.setattr(upkeep.resources, "kernels", lambda: tmp_path)
    before = upkeep.software()
    kernel.write_text("12")
    assert upkeep.software() != before


# --- sockets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:80", "192.168.1.2:80", "example.com:80", "127.0.0.1:x", "127.0.0.1", ""])
def test_only_loopback_is_listened_on(address: str) -> None:
    with pytest.raises(UsageError):
        bind.tcp_socket(address)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(AutoselError, match="accessible to other users"):
        bind.private_folder(folder)


def test_a_home_with_a_long_name_has_a_socket_too(tmp_path: Path) -> None:
    from autosel.client import connect

    path = tmp_path / ("x" * 120) / "run" / "daemon.sock"
    with bind.unix_socket(path) as listening, connect(path, 5.0) as line:
        other, _ = listening.accept()
        assert peers.of_unix(other)[1] > 0
        other.close()
        assert line.recv(1) == b""


def test_the_unit_starts_the_daemon_and_lets_it_write_its_home(tmp_path: Path) -> None:
    text = unit("/usr/bin/autosel serve", tmp_path)
    assert "ExecStart=/usr/bin/autosel serve\n" in text
    assert f'ReadWritePaths="{tmp_path}"' in text
    assert "Type=notify" in text and "NoNewPrivileges=yes" in text
