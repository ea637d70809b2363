"""Each format's weights against scalar code that follows the layout byte by byte, and against the gguf package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autosel.decode.dequantise import DEQUANTISED, dequantise
from tests import engines
from tests.ggufs import FORMATS

SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}  # bytes at which fp16 begins
F = np.float32


def blocks(name: str, count: int = 200) -> Tensor:
    """Random blocks with finite scales of all sizes: zero, subnormal, largest, of either sign."""
    generator = torch.Generator().manual_seed(FORMATS[name][0])
    found = torch.randint(256, (count, FORMATS[name][2]), generator=generator, dtype=torch.uint8)
    hard = torch.tensor([0.0, -0.0, 2.0**-24, 65504.0, -65504.0, 1 / 3], dtype=torch.float16).view(torch.uint8)
    for at in SCALES.get(name, ()):
        found[:, at + 1] &= 0xBF  # no exponent of all ones
        found[2:8, at : at + 2] = hard.view(6, 2)
    found[0], found[1] = 0, 255
    for at in SCALES.get(name, ()):
        found[1, at + 1] = 0xBB
    return found


def half(b: bytes, at: int) -> Any:
    return F(np.frombuffer(b[at : at + 2], np.float16)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(b: bytes) -> list[Any]:
    return [half(b, 0) * F((b[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q4_1(b: bytes) -> list[Any]:
    return [half(b, 0) * F(b[4 + i % 16] >> 4 * (i // 16) & 15) + half(b, 2) for i in range(32)]


def q8_0(b: bytes) -> list[Any]:
    return [half(b, 0) * F(signed(b[2 + i])) for i in range(32)]


def q4_k(b: bytes) -> list[Any]:
    packed, found = b[4:16], []
    for i in range(256):
        group = i // 32
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        code = b[16 + 32 * (group // 2) + i % 32] >> 4 * (group % 2) & 15
        found.append(half(b, 0) * F(scale) * F(code) - half(b, 2) * F(minimum))
    return found


def q6_k(b: bytes) -> list[Any]:
    found = []
    for i in range(256):
        part, quarter, j = i // 128, i % 128 // 32, i % 32
        low = b[64 * part + 32 * (quarter % 2) + j] >> 4 * (quarter // 2) & 15
        high = b[128 + 32 * part + j] >> 2 * quarter & 3
        found.append(half(b, 208) * F(signed(b[192 + i // 16])) * F((low | high << 4) - 32))
    return found


SCALAR: dict[str, Callable[[bytes], list[Any]]] = {
    "F32": lambda b: [np.frombuffer(b, np.float32)[0]],
    "F16": lambda b: [half(b, 0)],
    "BF16": lambda b: [np.frombuffer(b"\0\0" + b, np.float32)[0]],
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}


def bits(found: Any) -> Any:
    """Return the bits of fp32 numbers, with one pattern for all that are not numbers."""
    numbers = np.ascontiguousarray(found, np.float32)
    return np.where(np.isnan(numbers), 0x7FC00000, numbers.view(np.uint32).astype(np.int64))


def test_every_format_is_tested() -> None:
    assert SCALAR.keys() == DEQUANTISED.keys() <= FORMATS.keys()


@pytest.mark.parametrize("name", SCALAR)
def test_weights_are_those_of_scalar_code_bit_for_bit(name: str) -> None:
    found = blocks(name, 40)
    expected = np.array([SCALAR[name](bytes(block.tolist())) for block in found], np.float32)
    assert np.array_equal(bits(dequantise(name, found).numpy()), bits(expected))


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_is_no_number_reaches_the_weights(name: str) -> None:
    for at in SCALES[name]:
        for number in (float("nan"), float("inf")):
            found = torch.ones(1, FORMATS[name][2], dtype=torch.uint8)
            found[0, at : at + 2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
            assert not dequantise(name, found).isfinite().any()


@pytest.mark.skipif(bool(engines.missing("gguf")), reason=engines.missing("gguf"))
@pytest.mark.parametrize("name", SCALAR)
def test_weights_are_those_of_the_gguf_package_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(engines.ENGINES / "gguf"), str(engines.FETCHED.parent)])
    from gguf import GGMLQuantizationType, quants

    found = blocks(name, 500)
    with np.errstate(all="ignore"):
        theirs = quants.dequantize(found.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(bits(dequantise(name, found).numpy()), bits(theirs))
