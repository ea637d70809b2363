"""Test the ledger under kill -9, full disks, damage, other versions, other users and many processes at once."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from autosel import resources
from autosel.errors import LedgerError
from autosel.ledger import engine, migrate, open_ledger, rows, snapshot
from autosel.ledger import schema as t
from autosel.ledger.commands import SaveParity
from tests import drawn
from tests.cpu.killed import Bomb
from tests.cpu.test_ledger import ATTN, CPP, FP, PASSED, race, read_snapshot, record
from tests.forks import forked, result_of

# --- kill -9 ------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> bool:
    """Run `work` in a fork; return True if it finished, False if SIGKILL ended it; fail for any other end."""
    child = forked(work)
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode == 0


def test_a_kill_at_any_step_of_a_record_loses_no_acknowledged_decision_and_leaves_none_partial(home: Path) -> None:
    """Kill at a third of the statements, another third each day."""
    ledger = open_ledger(home=home)
    steps, kills = drawn.turn() % 3, 0
    while True:
        key = f"step-{steps}"

        def die_recording(key: str = key, fuse: int = steps) -> None:
            Bomb(fuse, ledger._database.engine)
            record(ledger, key)

        finished = in_child(die_recording)
        published = read_snapshot(home)  # complete in any case
        with ledger._database.reading() as c:
            stored = c.execute(sa.select(t.decisions.c.id).where(t.decisions.c.idempotency_key == key)).scalar()
        if stored is not None:
            evidence = ledger.evidence(stored)
            assert evidence.race is not None
            assert len(evidence.parities) == 2
            assert evidence.serves
        if finished:
            assert stored is not None
            assert published.rows[0].decision.id == stored
            break
        again = record(ledger, key)
        assert stored in (None, again.id), "the retry must be the same decision"
        assert read_snapshot(home).rows[0].decision == again
        steps, kills = steps + 3, kills + 1
    assert steps > 40, "too few statements were interrupted"
    ledger.check()
    assert len(ledger.history()) == kills + 1


def test_killed_at_any_step_of_its_creation_a_ledger_opens_the_next_time(home: Path) -> None:
    steps = 0
    while True:

        def die_creating(fuse: int = steps) -> None:
            Bomb(fuse)
            open_ledger(home=home)

        finished = in_child(die_creating)
        ledger = open_ledger(home=home)
        assert record(ledger).id == 1
        ledger.check()
        if finished:
            break
        shutil.rmtree(home)
        steps += 29  # not every statement, to save time
    assert steps > 40


def old_ledger(home: Path) -> None:
    """Restore the ledger of the first version, with a candidate on trial."""
    from alembic import command

    database = engine.Database(f"sqlite:///{home / 'ledger.db'}")
    home.mkdir(mode=0o700)
    (home / "ledger.db").touch(mode=0o600)
    config = migrate._config()
    with database.writing() as c:
        config.attributes["connection"] = c
        command.upgrade(config, "0001")
        arm = rows.put_arm(c, CPP)
        trial = (
            "INSERT INTO trials (candidate_id, hw_id, op, stage, created_at) VALUES (?, ?, 'attn', 'worker', 'then')"
        )
        c.exec_driver_sql(trial, (arm, FP.hw_id))


def test_killed_at_any_step_of_its_migration_a_ledger_is_the_old_one_or_the_new_one(home: Path, tmp_path: Path) -> None:
    old_ledger(tmp_path / "old")
    steps = 0
    while True:
        shutil.copytree(tmp_path / "old", home)

        def die_migrating(fuse: int = steps) -> None:
            Bomb(fuse)
            open_ledger(home=home)

        finished = in_child(die_migrating)
        with sqlite3.connect(home / "ledger.db") as raw:
            (revision,) = raw.execute("SELECT version_num FROM alembic_version").fetchone()
            columns = [row[1] for row in raw.execute("PRAGMA table_info(trials)")]
        raw.close()
        assert ("boot" in columns) == (revision == t.HEAD)
        with open_ledger(home=home) as ledger, ledger.lock(FP.hw_id) as struck:
            assert [(s.arm, s.strikes) for s in struck] == [(CPP, 1)], "the contents were lost"
        assert (home / f"ledger.db.before-{t.HEAD}").exists()
        shutil.rmtree(home)
        if finished:
            break
        steps += 11  # not every statement, to save time
    assert steps > 15


# --- a full disk --------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing_acknowledged_and_reading_continues(home: Path) -> None:
    ledger = open_ledger(home=home)
    record(ledger, "before")
    room = (home / "ledger.db").stat().st_size + 60_000

    def fill() -> tuple[list[int], list[str], list[int]]:
        acks: list[int] = []
        trouble: list[str] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with open_ledger(home=home) as own:
            for n in range(400):
                try:
                    acks.append(record(own, str(n)).id)
                except LedgerError as error:
                    trouble.append(str(error))
                if len(trouble) == 3:
                    break
            return acks, trouble, [d.id for d in own.history()]

    acks, trouble, seen = result_of(fill)
    assert len(acks) > 3
    assert len(trouble) == 3, "the limit was not reached"
    assert all("could not be written" in text and "free some space" in text for text in trouble)
    assert set(acks) <= set(seen), "reading must continue"
    again = open_ledger(home=home)
    again.check()
    assert set(acks) <= {d.id for d in again.history()}
    assert record(again, "after").id > max(acks)


def test_a_failed_snapshot_is_not_acknowledged_and_is_written_at_the_next_open(home: Path) -> None:
    ledger = open_ledger(home=home)
    for n in range(24):
        w = ATTN.at(B=n % 8 + 1, L=2048 << n // 8)
        record(ledger, str(n), workload=w, race=race(w))
    room = 33_000  # SQLite's shared index fits (32 KiB), the snapshot does not
    assert (home / snapshot.FILE).stat().st_size > room
    before = read_snapshot(home)
    with ledger._database.writing() as c:  # a change that is committed and not yet published
        c.execute(sa.delete(t.serving).where(t.serving.c.decision_id == 24))

    def publish() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(LedgerError) as refused:
            ledger.publish()
        return str(refused.value)

    assert "decisions.json" in result_of(publish)
    assert read_snapshot(home) == before, "the old snapshot must be complete"
    assert list(home.glob(".decisions*")) == []
    open_ledger(home=home)
    assert len(read_snapshot(home).rows) == 23


# --- damage and other versions ------------------------------------------------------------------------------------


DAMAGE = {
    "header": (slice(0, 64), bytes(64)),
    "page": (slice(3 * 4096, 4 * 4096), bytes(range(256)) * 16),
    "schema": (slice(100, 108), b"\xff" * 8),
    "cut": (slice(16 * 4096, None), b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_refused_and_unchanged_and_the_snapshot_serves(home: Path, damage: str) -> None:
    record(open_ledger(home=home))
    served = read_snapshot(home)
    data = bytearray((home / "ledger.db").read_bytes())
    place, content = DAMAGE[damage]
    data[place] = content
    (home / "ledger.db").write_bytes(data)
    with pytest.raises(LedgerError, match=r"is damaged[\s\S]*backup"):
        open_ledger(home=home)
    assert (home / "ledger.db").read_bytes() == data
    assert read_snapshot(home) == served


def test_another_programs_file_or_database_is_refused(home: Path) -> None:
    home.mkdir()
    (home / "ledger.db").write_text("not a database, whatever it is called\n" * 40)
    (home / "ledger.db").chmod(0o600)
    with pytest.raises(LedgerError, match="damaged"):
        open_ledger(home=home)
    (home / "ledger.db").unlink()
    with sqlite3.connect(home / "ledger.db") as raw:
        raw.execute("CREATE TABLE photos (id)")
    (home / "ledger.db").chmod(0o600)
    with pytest.raises(LedgerError, match=r"not a ledger[\s\S]*photos"):
        open_ledger(home=home)


def test_a_ledger_of_a_newer_version_is_refused_and_unchanged(home: Path) -> None:
    record(open_ledger(home=home))
    with sqlite3.connect(home / "ledger.db") as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    before = (home / "ledger.db").read_bytes()
    with pytest.raises(LedgerError, match=r"newer autosel[\s\S]*9999"):
        open_ledger(home=home)
    assert (home / "ledger.db").read_bytes() == before


def test_a_ledger_others_could_have_written_is_refused(home: Path) -> None:
    open_ledger(home=home).close()
    (home / "ledger.db").chmod(0o666)
    with pytest.raises(LedgerError, match="written by others"):
        open_ledger(home=home)


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "sqlite:///:memory:", "nosuchdb://host/x"])
def test_a_url_that_names_no_ledger_is_refused(url: str, home: Path) -> None:
    with pytest.raises(LedgerError):
        open_ledger(url, home=home)


def test_the_migrations_make_exactly_the_schema_the_code_uses(home: Path) -> None:
    ledger = open_ledger(home=home)
    with ledger._database.reading() as c:
        assert compare_metadata(MigrationContext.configure(c), t.METADATA) == []
        strict = c.exec_driver_sql("SELECT name FROM pragma_table_list WHERE strict = 1").scalars().all()
        triggers = c.exec_driver_sql("SELECT tbl_name FROM sqlite_master WHERE type = 'trigger'").scalars().all()
    assert set(strict) == set(t.METADATA.tables)
    assert sorted(triggers) == sorted(t.HISTORY * 2)
    assert ScriptDirectory(str(resources.migrations())).get_current_head() == t.HEAD


def test_the_database_has_the_documented_durability(home: Path) -> None:
    ledger = open_ledger(home=home)
    with ledger._database.writing() as c:
        wanted = {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "trusted_schema": 0,
            "wal_autocheckpoint": 0,
        }
        assert {name: c.exec_driver_sql(f"PRAGMA {name}").scalar() for name in wanted} == wanted
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "ledger.db").stat().st_mode & 0o777 == 0o600


def test_a_backup_is_a_whole_ledger(home: Path, tmp_path: Path) -> None:
    ledger = open_ledger(home=home)
    made = record(ledger)
    ledger.backup(tmp_path / "copy.db")
    record(ledger, "later")
    copy = open_ledger(f"sqlite:///{tmp_path / 'copy.db'}", home=tmp_path / "other")
    assert copy.history() == [made]
    copy.check()
    with pytest.raises(LedgerError, match="cannot write the backup"):
        ledger.backup(tmp_path / "no" / "such" / "folder.db")


def test_check_finds_a_dangling_reference(home: Path) -> None:
    ledger = open_ledger(home=home)
    record(ledger)
    with sqlite3.connect(home / "ledger.db") as raw:  # foreign keys are off here
        raw.execute("UPDATE serving SET decision_id = 99")
    raw.close()
    with pytest.raises(LedgerError, match="not there, first in serving"):
        ledger.check()


# --- many processes -----------------------------------------------------------------------------------------------


def test_a_locked_ledger_is_reported_after_a_bounded_wait(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(home=home)
    monkeypatch.setattr(engine, "BUSY_S", 0.05)
    with sqlite3.connect(home / "ledger.db", isolation_level=None) as raw:
        raw.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked by another process"):
            record(ledger)
        raw.execute("ROLLBACK")
    with ledger._database.writing():

        def write() -> str:
            with pytest.raises(LedgerError) as refused:
                record(ledger, "from the child")
            return str(refused.value)

        assert f"pid {os.getpid()} " in result_of(write)
    assert record(ledger).id == 1


def test_many_writers_lose_nothing_and_every_change_has_its_epoch(home: Path) -> None:
    ledger = open_ledger(home=home)

    def write(number: int) -> None:
        for n in range(15):
            w = record(ledger, f"{number}-{n}").workload
            ledger.write(SaveParity(hw_id=FP.hw_id, workload=w, arm=CPP, parity=PASSED))

    writers = [forked(partial(write, number)) for number in range(4)]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(ledger.history()) == 60
    (row,) = read_snapshot(home).rows
    assert (row.epoch, row.decision.id) == (60, 60)
    ledger.check()


def test_migrating_is_refused_without_the_migrations(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(migrate.resources, "migrations", lambda: tmp_path / "nothing")
    with pytest.raises(LedgerError, match="migrations are missing"):
        open_ledger(home=home)
