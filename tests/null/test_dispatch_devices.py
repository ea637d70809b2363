"""Test the decisions for tensors of a GPU: its identity, the messages without one, and the time of the query."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel import dispatch
from autosel.dispatch import devices
from autosel.errors import UsageError
from autosel.fingerprint import nvml
from autosel.ops import OPS


@pytest.mark.parametrize(
    "trouble",
    [UsageError("NVML does not answer", why="version", todo="install it"), AttributeError("no deviceGetAttribute")],
)
def test_an_unidentified_gpu_is_served_by_the_baseline_and_reported_once(
    trouble: Exception, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(ordinal: int) -> nvml.Readings:
        raise trouble

    monkeypatch.setattr(nvml, "read", read)
    devices._gpu.cache_clear()
    with dispatch.use(home) as board:
        for _ in range(2):
            found = board.resolution(OPS["rmsnorm"], OPS["rmsnorm"].workload("fp32", {"M": 1, "d": 32}), "cuda:0")
            board._read()
    assert found.decision is None
    (said,) = (r.getMessage() for r in caplog.records if "cannot be identified" in r.getMessage())
    assert all(part in said for part in str(trouble).splitlines()) and "cuda:0" in said
