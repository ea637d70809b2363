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
def test_outside_data_is_answered_or_refused_with_a_message(name: str, folder: Path) -> None:
    parser, before = PARSERS[name], len(os.listdir("/proc/self/fd"))
    feed(parser, folder, EXAMPLES.get(name, MOST))
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "files stay open"
