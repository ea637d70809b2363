"""Test the line that a plug-in logs at the start of an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosel.dispatch import served
from autosel.integrations import plugged
from autosel.ledger.key import at_threads, current_mode
from autosel.values import PythonRecipe
from tests.null.test_dispatch import W, decision, publish, python_arm

MINE = python_arm("user:mine", PythonRecipe(target="autosel.ops.eager:swiglu"))


@pytest.fixture
def home(home: Path) -> Iterator[Path]:
    home.mkdir()
    yield home
    served.name_engine("")


def said(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, logger="vllm.autosel"):
        plugged.announce("vLLM", "vllm.autosel")
    (line,) = (r.getMessage() for r in caplog.records if r.name == "vllm.autosel")
    return line


def test_the_line_counts_decisions_for_this_process_and_for_other_numbers_of_threads(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads, mode = torch.get_num_threads() + 6, current_mode()
    publish(home, [decision(W, MINE), decision(W, MINE, mode=at_threads(mode, threads), id=42)])
    assert said(caplog).endswith(f": decided for {mode}: rmsnorm 1; 1 decisions for {threads} threads")
    assert served.engine().startswith("vLLM")


def test_a_home_that_cannot_be_read_is_named_and_the_engine_starts(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "decisions.json").write_text("no snapshot")
    assert "cannot be told: " in said(caplog)
