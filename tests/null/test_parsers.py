"""Check that outside data is understood or refused with a message: short runs of every parser under Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.null.parsers import PARSERS, empty_home, feed

EXAMPLES = {"import": 25, "fault": 40, "command line": 60}
MOST = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with empty_home(tmp_path_factory.mktemp("parsers")) as made:
        yield made


@pytest.mark.parametrize("name", PARSERS)
def test_nothing_that_comes_in_gets_past_as_anything_but_an_answer_or_a_refusal_in_words(
    name: str, folder: Path
) -> None:
    parser, before = PARSERS[name], len(os.listdir("/proc/self/fd"))
    feed(parser, folder, EXAMPLES.get(name, MOST))
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "files stay open"
