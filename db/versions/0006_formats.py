"""Ops on fp8 operands are formats of linear and attn: their rows take the keys that these have now.

`autosel/ledger/former.py` says how. Rows of all other ops stay as they are, byte for byte.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import sqlalchemy as sa
from alembic import op

from autosel.formats import FORMER_OPS
from autosel.ledger.former import modern, modern_key
from autosel.values import Arm, digest, from_json

revision = "0006"
down_revision = "0005"

OPS = tuple(FORMER_OPS)
CHANGED = ("workloads", "candidates", "parities", "races", "verdicts", "decisions", "trials", "quarantines", "debits")


def upgrade() -> None:
    with history_open():
        races()
        verdicts()
        candidates()
        keys()


@contextmanager
def history_open() -> Iterator[None]:
    """History is append only for all code but this."""
    bind = op.get_bind()
    if bind.dialect.name != "sqlite":
        for table in (*CHANGED, "serving"):
            op.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        yield
        for table in (*CHANGED, "serving"):
            op.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
        return
    names = ", ".join(f"'{table}_no_update'" for table in CHANGED)
    query = f"SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND name IN ({names})"  # noqa: S608 (our names)
    held = bind.execute(sa.text(query)).all()
    for trigger in held:
        op.execute(f"DROP TRIGGER {trigger.name}")
    yield
    for trigger in held:
        op.execute(trigger.sql)


def _rows(query: str, **values: object) -> list[sa.Row]:
    found = sa.text(query).bindparams(sa.bindparam("ops", expanding=True, value=list(OPS)))
    return list(op.get_bind().execute(found, values))


def _set(table: str, row_id: int, **values: object) -> None:
    columns = ", ".join(f"{name} = :{name}" for name in values)
    statement = sa.text(f"UPDATE {table} SET {columns} WHERE id = :row_id")  # noqa: S608 (names of our own)
    op.get_bind().execute(statement, {**values, "row_id": row_id})


def _text(document: object) -> str:
    """As the ledger writes documents (autosel/ledger/rows.py)."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def races() -> None:
    for row in _rows(
        "SELECT races.id, races.document, workloads.op FROM races JOIN workloads ON workloads.id = races.workload_id "
        "WHERE workloads.op IN :ops"
    ):
        document = _text(modern(json.loads(zlib.decompress(row.document)), row.op)).encode()
        _set("races", row.id, document=zlib.compress(document, 6), digest=sha256(document).hexdigest())


def verdicts() -> None:
    for row in _rows(
        "SELECT DISTINCT verdicts.id, verdicts.document, decisions.op FROM verdicts "
        "JOIN decisions ON decisions.verdict_id = verdicts.id WHERE decisions.op IN :ops"
    ):
        _set("verdicts", row.id, document=_text(modern(json.loads(row.document), row.op)))


def candidates() -> None:
    """Every arm that was decided about, proven, tried or held for one of these ops."""
    for row in _rows(
        "SELECT candidates.id, candidates.document, of_op.op FROM candidates JOIN ("
        "SELECT arm_id AS id, op FROM decisions UNION SELECT baseline_id, op FROM decisions "
        "UNION SELECT parities.candidate_id, workloads.op FROM parities "
        "JOIN workloads ON workloads.id = parities.workload_id "
        "UNION SELECT candidate_id, op FROM trials UNION SELECT candidate_id, op FROM quarantines"
        ") AS of_op ON of_op.id = candidates.id WHERE of_op.op IN :ops"
    ):
        document = modern(json.loads(row.document), row.op)
        made = digest(from_json(Arm, document))
        _set("candidates", row.id, name=document["candidate"], document=_text(document), document_digest=made)


def keys() -> None:
    bind = op.get_bind()
    for row in _rows("SELECT * FROM workloads WHERE op IN :ops"):
        document = modern(json.loads(row.document))
        found = {"key": modern_key(row.key), "bucket": modern_key(row.bucket), "op": document["op"]}
        _set("workloads", row.id, document=_text(document), **found)
    for row in _rows("SELECT id, key, bucket, op FROM decisions WHERE op IN :ops"):
        _set("decisions", row.id, key=modern_key(row.key), bucket=modern_key(row.bucket), op=FORMER_OPS[row.op].op)
    for table in ("trials", "quarantines"):
        for row in _rows(f"SELECT id, op FROM {table} WHERE op IN :ops"):  # noqa: S608 (the two above)
            _set(table, row.id, op=FORMER_OPS[row.op].op)
    for table, column in (("parities", "scope"), ("debits", "key")):
        for row in bind.execute(sa.text(f"SELECT id, {column} AS key FROM {table}")).all():  # noqa: S608 (as above)
            if modern_key(row.key) != row.key:
                _set(table, row.id, **{column: modern_key(row.key)})
    for row in bind.execute(sa.text("SELECT key FROM serving")).all():
        if modern_key(row.key) != row.key:
            changed = {"old": row.key, "new": modern_key(row.key)}
            bind.execute(sa.text("UPDATE serving SET key = :new WHERE key = :old"), changed)
