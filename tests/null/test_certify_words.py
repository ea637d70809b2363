"""Test the text of a certificate for people, on the terminal and on its page."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import Any

import pytest

from autosel.certify.audit import audit, document
from autosel.certify.certificate import Certificate
from autosel.certify.report import page
from autosel.certify.words import scored, speculated, suspected
from autosel.cli.certificate import summary
from autosel.decode.measure import _notes
from autosel.decode.run import Chosen
from tests.null.certificates import DRAFTED, certificate, decode_run
from tests.null.test_decode_quality import QUALITY


def said(made: Certificate) -> str:
    """Return the text on the terminal as one line."""
    text = summary(made, audit(made))
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_the_hosts_time_is_shown_in_addition_to_the_gpus() -> None:
    run = decode_run()
    host = {"optimised_host_ns": run.baseline_ns, "baseline_host_ns": run.baseline_ns}
    made = certificate(dataclasses.replace(run, timed_by="CUDA events", **host))
    told = f"timed by CUDA events; {made.host_ms:.4g} and {made.baseline_host_ms:.4g} ms until the host has the tokens"
    assert told in said(made) and "CUDA events" not in said(certificate(run))


def test_differing_tokens_are_counted_and_wrong_ones_listed_separately() -> None:
    words = said(certificate(decode_run(tokens_equal=47, tokens_open=2)))
    told = "47 of 50 tokens as the baseline's, 2 that the bound leaves open, 1 that it does not allow, logits at 0.20"
    assert "NOT verified" in words and told in words


def test_the_page_shows_the_quality_of_a_suspect_run_and_of_speculation() -> None:
    clean = certificate(decode_run(quality=QUALITY))
    better = dataclasses.replace(QUALITY, perplexity=10 * math.exp(-0.1), difference=-0.1, difference_error=0.001)
    suspect = certificate(decode_run(quality=better))
    drafted = certificate(decode_run(**DRAFTED))
    for made in (clean, suspect, drafted):
        shown = html.unescape(page(made, {}))
        for told in filter(None, (scored(made), suspected(made), speculated(made))):
            assert told in shown and told in said(made)
    assert '<li class="bad">SUSPECT: better than the reference' in page(suspect, {})
    assert "SUSPECT" not in page(clean, {}) and "speculation: 4 tokens drafted" in page(drafted, {})
    assert "speculation" not in page(clean, {}).partition("<details>")[0]


@pytest.mark.parametrize("changes", [{"prealloc": False}, {"speculate": 3, "advance": True}])
def test_audit_and_summary_report_ops_that_cannot_be_timed(changes: dict[str, Any]) -> None:
    run = decode_run(per_op=(), **changes)
    notes = _notes(run.plan, Chosen())
    made = certificate(dataclasses.replace(run, notes=notes))
    found = audit(made)
    assert found.rows == () and found.untimed and found.untimed_because.startswith("no op was timed separately: ")
    assert found.untimed_because in notes and f"note: {found.untimed_because}" in said(made)
    assert audit(certificate()).untimed_because == "" and document(found)["untimed_because"] == found.untimed_because
