"""Check that the peak memory of a run excludes the run before it."""

from __future__ import annotations

import torch

from autosel import devices

CPU, HELD = devices.named(devices.HOST), 256 << 20


def hold() -> None:
    torch.ones(HELD, dtype=torch.uint8)


def test_peak_memory_remains_after_a_free_and_until_it_is_reset() -> None:
    CPU.forget_peak()
    before = CPU.peak_bytes()
    hold()
    assert CPU.peak_bytes() >= before + HELD * 0.9
    CPU.forget_peak()
    assert CPU.peak_bytes() <= before + HELD * 0.5
