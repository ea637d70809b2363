"""Run the long form of tests/null/test_parsers.py: more examples of every parser, and no growing memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as terms

from tests.null.parsers import PARSERS, empty_home, feed

EXAMPLES = {"import": 1_000, "fault": 1_000, "command line": 2_000}
MANY = 5_000
KEPT, TURNS = 200, 20
GROWTH_BYTES = 8 << 20
STORES = {"import"}  # imports stay in the ledger, and its newest decisions in memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with empty_home(tmp_path_factory.mktemp("parsers")) as made:
        yield made


@pytest.mark.parametrize("name", PARSERS)
def test_outside_data_is_answered_or_refused_with_a_message(name: str, folder: Path) -> None:
    feed(PARSERS[name], folder, EXAMPLES.get(name, MANY))


@pytest.mark.parametrize("name", sorted(set(PARSERS) - STORES))
def test_feeding_the_same_input_repeatedly_does_not_grow_memory(name: str, folder: Path) -> None:
    parser, kept = PARSERS[name], list[Any]()

    @terms(
        max_examples=KEPT,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    @given(parser.drawn)
    def keep(drawn: Any) -> None:
        kept.append(drawn)

    keep()
    sizes = []
    for _ in range(TURNS):
        for drawn in kept:
            parser.parse(drawn, folder)
        gc.collect()
        sizes.append((resident_bytes(), len(os.listdir("/proc/self/fd"))))
    (early, files), (late, files_then) = sizes[TURNS // 4], sizes[-1]
    assert late - early <= GROWTH_BYTES
    assert files_then <= files


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
