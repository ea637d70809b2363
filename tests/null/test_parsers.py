"""Whatever comes in from outside is understood or refused in words: short runs of every parser under Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as terms
from hypothesis import strategies as st

from autosel import settings
from tests.null.parsers import PARSERS

EXAMPLES = {"import": 25, "fault": 40, "command line": 60}
MOST = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all; the home too, in which nothing is set."""
    made = tmp_path_factory.mktemp("parsers")
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        patch.delenv(name)
    patch.setenv("AUTOSEL_HOME", str(made))
    settings.read.cache_clear()
    yield made
    patch.undo()
    settings.read.cache_clear()


@pytest.mark.parametrize("name", PARSERS)
def test_nothing_that_comes_in_gets_past_as_anything_but_an_answer_or_a_refusal_in_words(
    name: str, folder: Path
) -> None:
    parser, before = PARSERS[name], len(os.listdir("/proc/self/fd"))

    @terms(max_examples=EXAMPLES.get(name, MOST), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        parser.parse(data.draw(parser.drawn), folder)

    fuzz()
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "files stay open"
