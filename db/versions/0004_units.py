"""Units: which of several equal devices of a machine a lease, or a trial, is of. On a server: what only an
administrator may decide, which is by hand, without a race.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for table in ("leases", "trials"):
        op.add_column(table, sa.Column("unit", sa.Text, nullable=False, server_default=""))
    if op.get_bind().dialect.name != "sqlite":
        refuse_by_hand()


def refuse_by_hand() -> None:
    """Whoever may end a quarantine is an administrator. Of all others a decision must follow from a race or lead back
    to the baseline, and what an administrator has pinned gives way only to the baseline."""
    op.execute(_MAY)
    op.execute(_DECIDES)
    op.execute(
        "CREATE TRIGGER decisions_by_hand BEFORE INSERT ON decisions FOR EACH ROW EXECUTE FUNCTION autosel_decides()"
    )
    op.execute(_DISPLACES)
    op.execute(
        "CREATE TRIGGER serving_by_hand BEFORE UPDATE OR DELETE ON serving "
        "FOR EACH ROW EXECUTE FUNCTION autosel_displaces()"
    )


_MAY = """
CREATE FUNCTION autosel_is_admin(place name) RETURNS boolean LANGUAGE sql STABLE AS
$$ SELECT has_table_privilege(format('%I.releases', place), 'INSERT') $$
"""

_DECIDES = """
CREATE FUNCTION autosel_decides() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE fine boolean;
BEGIN
    IF autosel_is_admin(TG_TABLE_SCHEMA) THEN RETURN NEW; END IF;
    fine := CASE NEW.state
        WHEN 'demoted' THEN NEW.arm_id = NEW.baseline_id
        WHEN 'quarantined' THEN NEW.arm_id = NEW.baseline_id
        WHEN 'promoted' THEN EXISTS (
            SELECT FROM verdicts v JOIN candidates c ON c.id = NEW.arm_id
            WHERE v.id = NEW.verdict_id AND v.race_id = NEW.race_id
              AND CASE WHEN v.outcome = 'promote' THEN v.document::json ->> 'winner' = c.name END
        ) AND NOT EXISTS (SELECT FROM decisions d WHERE d.key = NEW.key AND d.race_id = NEW.race_id)
        WHEN 'kept' THEN NEW.arm_id = NEW.baseline_id OR EXISTS (
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

_DISPLACES = """
CREATE FUNCTION autosel_displaces() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE now_is text;
BEGIN
    IF NOT autosel_is_admin(TG_TABLE_SCHEMA)
        AND (SELECT state FROM decisions WHERE id = OLD.decision_id) = 'pinned'
    THEN
        now_is := 'removed';
        IF TG_OP = 'UPDATE' THEN SELECT state INTO now_is FROM decisions WHERE id = NEW.decision_id; END IF;
        IF now_is NOT IN ('demoted', 'quarantined') THEN
            RAISE EXCEPTION 'what is pinned can be %, by an administrator', now_is USING ERRCODE = '42501';
        END IF;
    END IF;
    IF TG_OP = 'UPDATE' THEN RETURN NEW; END IF;
    RETURN OLD;
END $$
"""
