"""Decisions whose arm was proven again after a change, and not raced again yet, say what has changed. On a server such
a decision follows the one that it renews: same key, state, candidate and race.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("decisions", sa.Column("stale", sa.Text, nullable=False, server_default=""))
    if op.get_bind().dialect.name != "sqlite":
        op.execute(_DECIDES)


_DECIDES = """
CREATE OR REPLACE FUNCTION autosel_decides() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE fine boolean;
BEGIN
    IF autosel_is_admin(TG_TABLE_SCHEMA) THEN RETURN NEW; END IF;
    fine := CASE
        WHEN NEW.state = 'demoted' THEN NEW.arm_id = NEW.baseline_id
        WHEN NEW.state = 'quarantined' THEN NEW.arm_id = NEW.baseline_id
        WHEN NEW.stale <> '' THEN NEW.state IN ('promoted', 'kept') AND EXISTS (
            SELECT FROM serving s JOIN decisions d ON d.id = s.decision_id
            JOIN candidates a ON a.id = d.arm_id JOIN candidates c ON c.id = NEW.arm_id
            WHERE s.key = NEW.key AND d.id = NEW.previous_id AND d.state = NEW.state AND a.name = c.name
              AND d.race_id IS NOT DISTINCT FROM NEW.race_id AND d.verdict_id IS NOT DISTINCT FROM NEW.verdict_id
        )
        WHEN NEW.state = 'promoted' THEN EXISTS (
            SELECT FROM verdicts v JOIN candidates c ON c.id = NEW.arm_id
            WHERE v.id = NEW.verdict_id AND v.race_id = NEW.race_id
              AND CASE WHEN v.outcome = 'promote' THEN v.document::json ->> 'winner' = c.name END
        ) AND NOT EXISTS (SELECT FROM decisions d WHERE d.key = NEW.key AND d.race_id = NEW.race_id)
        WHEN NEW.state = 'kept' THEN NEW.arm_id = NEW.baseline_id OR EXISTS (
            SELECT FROM decisions d JOIN candidates a ON a.id = d.arm_id JOIN candidates c ON c.id = NEW.arm_id
            WHERE (d.hw_id, d.mode, d.bucket, a.digest) = (NEW.hw_id, NEW.mode, NEW.bucket, c.digest)
        )
        ELSE false
    END;
    IF NOT coalesce(fine, false) THEN
        RAISE EXCEPTION 'a decision % by hand is an administrator''s', NEW.state USING ERRCODE = '42501';
    END IF;
    RETURN NEW;
END $$
"""
