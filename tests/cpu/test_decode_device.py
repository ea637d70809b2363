"""Check that the peak memory of a run excludes the run before it."""

from __future__ import annotations

import torch

from autosel.decode.device import forget_peak, peak_memory

HELD = 256 << 20


def hold() -> None:
    torch.ones(HELD, dtype=torch.uint8)


def test_peak_memory_remains_after_a_free_and_until_it_is_reset() -> None:
    forget_peak("cpu")
    before = peak_memory("cpu")
    hold()
    assert peak_memory("cpu") >= before + HELD * 0.9
    forget_peak("cpu")
    assert peak_memory("cpu") <= before + HELD * 0.5
