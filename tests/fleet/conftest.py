"""Provide a server for the tests of a fleet, or skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.ledger import Ledger, open_ledger
from tests.fleet import postgres


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    pytest.importorskip("psycopg", reason="no psycopg: install the extra `fleet`")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL server on this machine (Debian: apt install postgresql)")
    with postgres.server() as made:
        yield made


@pytest.fixture
def own_server(server: postgres.Server) -> Iterator[postgres.Server]:
    """Provide a separate server, which a test may kill."""
    with postgres.server() as made:
        yield made


@pytest.fixture
def schema(server: postgres.Server) -> str:
    return server.schema()


@pytest.fixture
def url(server: postgres.Server, schema: str) -> str:
    return server.url(schema)


@pytest.fixture
def ledger(url: str, home: Path) -> Iterator[Ledger]:
    with open_ledger(url, home=home, alone=True) as made:
        yield made


@pytest.fixture
def shared_home(url: str, tmp_path: Path) -> Path:
    """Return a home whose config.toml names the server."""
    made = tmp_path / "shared"
    made.mkdir(mode=0o700)
    (made / "config.toml").write_text(f'db = "{url}"\n')
    return made
