"""Test the ledger on a real PostgreSQL: the same as on SQLite, and a server's additions."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from autosel.errors import LedgerError
from autosel.ledger import Ledger, open_ledger, snapshot
from autosel.ledger import schema as t
from autosel.ledger.commands import Demote, Hold, Pin, Promote, Release, Renew, Unpin
from autosel.ledger.key import current_mode
from autosel.values import Decision
from tests.cpu import test_ledger as on_sqlite
from tests.cpu.daemons import cli, running
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, FP, PACKED, PASSED, record
from tests.fleet.postgres import Server
from tests.quiet import here

pytestmark = pytest.mark.fleet

SAME = [
    test
    for name, test in vars(on_sqlite).items()
    if name.startswith("test_") and set(inspect.signature(test).parameters) <= {"ledger", "home"}
    if not any(word in inspect.getsource(test) for word in ("sqlite3", "open_ledger("))
]


@pytest.mark.parametrize("test", SAME, ids=lambda test: test.__name__)
def test_the_ledger_works_as_on_sqlite(test: Callable[..., None], ledger: Ledger, home: Path) -> None:
    given = {"ledger": ledger, "home": home}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


def test_the_migrations_make_exactly_the_schema_the_code_uses(ledger: Ledger) -> None:
    with ledger.reading() as c:
        assert compare_metadata(MigrationContext.configure(c), t.METADATA) == []


def test_even_the_owner_cannot_change_history(ledger: Ledger, server: Server, schema: str) -> None:
    import psycopg

    record(ledger)
    with server.connect(schema) as line:
        for table in t.HISTORY:
            column = t.METADATA.tables[table].c[0].name
            for sql in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
                with pytest.raises(psycopg.errors.RaiseException, match="append only"):
                    line.execute(sql)


def test_a_ledger_of_a_newer_version_is_refused(ledger: Ledger, server: Server, schema: str, home: Path) -> None:
    with server.connect(schema) as line:
        line.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(LedgerError, match=r"newer autosel[\s\S]*9999"):
        open_ledger(server.url(schema), home=home, alone=True)


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def login(server: Server, schema: str) -> str:
    """Return a new login each time, because roles belong to the server, not to a database."""
    from psycopg import sql

    name = f'node "{schema}"'  # a name may contain any character
    with server.connect() as line:
        line.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    return name


def opened_as(server: Server, schema: str, login: str, home: Path) -> Ledger:
    return open_ledger(server.url(schema, login), home=home, alone=True)


def test_a_role_without_a_grant_reads_nothing(ledger: Ledger, server: Server, schema: str, login: str, home: Path):
    record(ledger)
    with pytest.raises(LedgerError, match="does not let this role"):
        opened_as(server, schema, login, home)


def test_a_reader_sees_everything_and_records_nothing(
    ledger: Ledger, server: Server, schema: str, login: str, tmp_path: Path
) -> None:
    made = record(ledger)
    ledger.grant("reader", login)
    with opened_as(server, schema, login, tmp_path / "reader") as reader:
        assert not reader.writable
        assert reader.history() == [made]
        assert reader.evidence(made.id).race is not None
        with pytest.raises(LedgerError, match="read-only"):
            record(reader, "two")
        with pytest.raises(LedgerError, match="read-only"):
            reader.grant("admin", login)


def test_a_tuner_records_and_an_admin_also_ends_quarantines(
    ledger: Ledger, server: Server, schema: str, login: str, tmp_path: Path
) -> None:
    ledger.grant("tuner", login)
    with opened_as(server, schema, login, tmp_path / "node") as node, node.lock(FP.hw_id):
        made = record(node)
        assert node.write(Demote(decision_id=made.id, reason="wrong once")).state == "demoted"
        held = node.write(Hold(arm=CPP, hw_id=FP.hw_id, op="attn", cause="kernel", reason="wrong"))
        with pytest.raises(LedgerError, match="does not let this role"):
            node.write(Release(quarantine_id=held, reason="I know better"))
        ledger.grant("admin", login)
        node.write(Release(quarantine_id=held, reason="I know better"))
        ledger.grant("reader", login)  # its changes are undone
        with pytest.raises(LedgerError, match="does not let this role"):
            record(node, "two")
    assert ledger.quarantined(FP.hw_id) == {}


def test_only_an_admin_decides_by_hand(ledger: Ledger, server: Server, schema: str, login: str, tmp_path: Path) -> None:
    ledger.grant("tuner", login)
    with opened_as(server, schema, login, tmp_path / "node") as node:
        raced = record(node)
        for by_hand in (
            lambda: node.write(Pin(decision_id=raced.id, reason="mine")),
            lambda: node.write(Promote(decision_id=raced.id, candidate=BASELINE.candidate, reason="it seems slower")),
            lambda: record(node, "without a race", race=None, verdict=None),
            lambda: record(node, "of another arm", arm=PACKED, parities=[(PACKED, PASSED)]),
            lambda: record(node, "kept, and never decided", state="kept", arm=PACKED, parities=[(PACKED, PASSED)]),
        ):
            with pytest.raises(LedgerError, match="does not let this role"):
                by_hand()
        down = node.write(Demote(decision_id=raced.id, reason="wrong once"))
        with pytest.raises(LedgerError, match="does not let this role"):
            node.write(Promote(decision_id=down.id, candidate=CPP.candidate, reason="it was a mistake"))
        assert record(node, "raced again").state == "promoted"
        pin = ledger.write(Pin(decision_id=raced.id, reason="an admin means it"))
        with pytest.raises(LedgerError, match="does not let this role"):
            node.write(Unpin(decision_id=pin.id, reason="I know better"))
        assert node.write(Demote(decision_id=pin.id, reason="wrong again")).state == "demoted"
    assert [d.state for d in ledger.history()] == ["demoted", "pinned", "promoted", "demoted", "promoted"]


def test_a_tuner_renews_only_decisions_that_it_has_proven_again(
    ledger: Ledger, server: Server, schema: str, login: str, tmp_path: Path
) -> None:
    ledger.grant("tuner", login)
    baseline = dataclasses.replace(BASELINE, digest="f" * 64)  # under another torch
    with opened_as(server, schema, login, tmp_path / "node") as node:
        raced = record(node)
        again = node.write(
            Renew(decision_id=raced.id, arm=CPP, baseline=baseline, parity=PASSED, why="torch is another")
        )
        assert again is not None and (again.state, again.stale) == ("promoted", "torch is another")
        assert [s.decision for s in node.serving()] == [again]
        with pytest.raises(LedgerError, match="does not let this role"):
            node.write(
                Renew(decision_id=again.id, arm=PACKED, baseline=baseline, parity=PASSED, why="another candidate's arm")
            )
        pin = ledger.write(Pin(decision_id=again.id, reason="an admin means it"))
        with pytest.raises(LedgerError, match="does not let this role"):
            node.write(Renew(decision_id=pin.id, arm=CPP, baseline=BASELINE, parity=PASSED, why="torch is another"))


def test_even_with_its_own_sql_a_tuner_cannot_serve_an_arm_without_a_race(
    ledger: Ledger, server: Server, schema: str, login: str
) -> None:
    import psycopg

    ledger.grant("tuner", login)
    first = record(ledger)
    record(ledger, "kept", state="kept", arm=BASELINE, workload=ATTN.at(B=2))
    pin = ledger.write(Pin(decision_id=first.id, reason="an admin means it"))
    columns = ", ".join(c.name for c in t.decisions.c if c.name not in ("id", "state", "arm_id", "idempotency_key"))
    copied = f"INSERT INTO decisions ({columns}, state, arm_id, idempotency_key) SELECT {columns}, %s, %s, 'x' "
    with server.connect(schema, login) as line:
        for state, arm in (("pinned", "arm_id"), ("promoted", "arm_id"), ("demoted", "arm_id")):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="by hand"):
                line.execute(copied.replace("%s, %s", f"'{state}', {arm}") + f"FROM decisions WHERE id = {first.id}")
        for sql in (
            f"UPDATE serving SET decision_id = {first.id} WHERE decision_id = {pin.id}",
            f"DELETE FROM serving WHERE decision_id = {pin.id}",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="pinned"):
                line.execute(sql)


def test_the_command_prints_the_grants_or_makes_them(
    ledger: Ledger, server: Server, schema: str, login: str, shared_home: Path
) -> None:
    said = cli(shared_home, "db", "grant", "reader", login, "--print")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("GRANT") == 3
    with server.connect(schema) as line:
        line.execute(said.stdout)
    assert cli(shared_home, "db", "grant", "tuner", login).returncode == 0
    with opened_as(server, schema, login, shared_home) as node:
        assert node.writable


# --- several processes ------------------------------------------------------------------------------------------------


def test_two_homes_of_one_machine_measure_a_device_one_at_a_time(ledger: Ledger, url: str, tmp_path: Path) -> None:
    with open_ledger(url, home=tmp_path / "other", alone=True) as other:
        with ledger.lock(FP.hw_id):
            with pytest.raises(LedgerError, match="in use by another process"), other.lock(FP.hw_id):
                pass
            with other.lock("another-device"):
                pass
        with other.lock(FP.hw_id):
            pass


def test_a_tuner_that_lost_its_lock_with_the_server_cannot_store_once_another_has_the_device(
    tmp_path: Path, own_server: Server
) -> None:
    url = own_server.url(own_server.schema())
    with open_ledger(url, home=tmp_path / "a", alone=True) as stale, stale.lock(FP.hw_id):
        own_server.kill()
        own_server.start()
        with open_ledger(url, home=tmp_path / "b", alone=True) as other, other.lock(FP.hw_id):
            with pytest.raises(LedgerError, match="another process has taken over this device"):
                record(stale, "stale")
            made = record(other, "fresh")
        assert [d.id for d in stale.history()] == [made.id]


# --- kill -9 ----------------------------------------------------------------------------------------------------------

WRITERS, KILLS = 4, 2


class Writer:
    """Record decisions repeatedly; after an error, wait for a signal and record the same decision again."""

    def __init__(self, url: str, home: Path, number: int) -> None:
        self.ledger, self.number = open_ledger(url, home=home, alone=True), number
        self.acknowledged: list[Decision] = []
        self.errors: list[Exception] = []
        self._told: Queue[str] = Queue()
        self._go_on = threading.Semaphore(0)
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        w, count = ATTN.at(B=self.number + 1), 0
        while not self._over:
            try:
                made = record(self.ledger, f"{self.number} {count}", workload=w, reason=f"{self.number} {count}")
                self.acknowledged.append(made)
                count += 1
                self._told.put("acknowledged")
            except Exception as error:
                self.errors.append(error)
                self._told.put("refused")
                self._go_on.acquire()

    def wait_for(self, what: str, count: int = 1) -> None:
        while count:
            count -= self._told.get(timeout=60) == what

    def go_on(self) -> None:
        self._go_on.release()

    def end(self) -> None:
        self._over = True
        self._go_on.release()
        self._thread.join()
        self.ledger.close()


def kill_under_load(folder: Path, server: Server, kills: int) -> int:
    """Return the number of acknowledged decisions; none may be lost, and an error must name the server."""
    url = server.url(server.schema())
    with open_ledger(url, home=folder, alone=True) as ledger:
        writers = [Writer(url, folder / str(number), number) for number in range(WRITERS)]
        try:
            for _ in range(kills):
                for writer in writers:
                    writer.wait_for("acknowledged", 5)
                server.kill()
                for writer in writers:
                    writer.wait_for("refused")
                server.start()
                for writer in writers:
                    writer.go_on()
            for writer in writers:
                writer.wait_for("acknowledged", 5)
        finally:
            for writer in writers:
                writer.end()
        stored = ledger.history()
    for writer in writers:
        assert {d.id: d for d in writer.acknowledged}.items() <= {d.id: d for d in stored}.items()
        told = {getattr(error, "what", repr(error)) for error in writer.errors}
        assert all("does not answer" in what for what in told), told
        own = [d.reason for d in stored if d.workload["B"] == writer.number + 1]
        assert len(own) == len(set(own)), "a repeated write is stored once"
    return sum(len(writer.acknowledged) for writer in writers)


def test_killed_under_load_the_server_loses_no_acknowledged_decision_and_writers_recover(
    tmp_path: Path, own_server: Server
) -> None:
    assert kill_under_load(tmp_path, own_server, KILLS) >= WRITERS * 5 * (KILLS + 1)


# --- news -------------------------------------------------------------------------------------------------------------


def test_a_decision_of_another_host_reaches_a_daemon_and_its_serving_processes(
    ledger: Ledger, shared_home: Path
) -> None:
    """Decide for the baseline, which needs no proof and so serves at once if a daemon listens."""

    def published() -> list[Decision]:
        found = snapshot.read(shared_home / snapshot.FILE)
        return [row.decision for row in found.rows] if found else []

    with running(shared_home, "--no-tune") as daemon, daemon.client() as ask:
        made = record(ledger, fp=here(), arm=BASELINE, state="kept", mode=current_mode())
        until = time.monotonic() + NEWS_S
        while [made.id] != [d["decision_id"] for d in ask.get("/v1/serving")["serving"]] or published() != [made]:
            assert time.monotonic() < until, "the daemon was not notified"


NEWS_S = 30.0  # the benchmark measures the goal of a second; this test only checks that it arrives
