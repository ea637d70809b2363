"""Run the long form of tests/fleet: fifty kills of the server under load. `-s` shows the acknowledged writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("psycopg", reason="no psycopg: install the extra `fleet`")

from tests.fleet import postgres
from tests.fleet.test_postgres import kill_under_load

KILLS = 50


@pytest.mark.skipif(postgres.programs() is None, reason="no PostgreSQL server (Debian: apt install postgresql)")
def test_killed_fifty_times_the_server_loses_no_acknowledged_decision(tmp_path: Path) -> None:
    with postgres.server() as server:
        acknowledged = kill_under_load(tmp_path, server, KILLS)
    sys.stderr.write(f"{KILLS} kills of the server, {acknowledged} decisions acknowledged, none lost\n")
