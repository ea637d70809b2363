"""What a certificate says of a run for people, on the terminal and on its page."""

from __future__ import annotations

from autosel.certify.audit import audit
from autosel.certify.certificate import Certificate
from autosel.cli.certificate import summary
from tests.null.certificates import certificate, decode_run


def said(made: Certificate) -> str:
    """On the terminal; its lines as one."""
    text = summary(made, audit(made))
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_tokens_that_differ_are_counted_and_those_that_may_not_are_told_apart() -> None:
    words = said(certificate(decode_run(tokens_equal=47, tokens_open=2)))
    told = "47 of 50 tokens as the baseline's, 2 that the bound leaves open, 1 that it does not allow, logits at 0.20"
    assert "NOT verified" in words and told in words
