"""Weights of GGUF blocks in fp32, bit-equal to llama.cpp's and the gguf package's.

Codes are 4 to 8 bits and scales fp16, so d * q has at most 24 significant bits and is exact. A format with a minimum
(Q4_1, Q4_K) adds two exact numbers, which is rounded to fp32 once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autosel.ops.codes import CODES


def dequantise(name: str, blocks: Tensor) -> Tensor:
    """Return fp32 [n, weights] of bytes [n, bytes of a block] in a format of DEQUANTISED."""
    return DEQUANTISED[name](blocks)


def codes_of(name: str, blocks: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return codes [n, ...] and scales of bytes [n, bytes of a block], as a weight format that holds the block's format
    stores them: the same weights, exactly."""
    return CODES_OF[name, format](blocks)


def _of_q8_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[:, 2:].view(torch.int8), b[:, :2].contiguous().view(torch.float16)


def _of_q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return CODES["int4"].pack(_nibbles(b[:, 2:])), b[:, :2].contiguous().view(torch.float16)


def _q8_0_of_q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(b[:, 2:]).view(torch.int8) - 8, b[:, :2].contiguous().view(torch.float16)


def _of_q4_1(b: Tensor) -> tuple[Tensor, Tensor]:
    return CODES["uint4"].pack(_nibbles(b[:, 4:])), b[:, :4].contiguous().view(torch.float16)


def _of_q4_k(b: Tensor) -> tuple[Tensor, Tensor]:
    return CODES["q4_k"].pack(_four_bits(b)), torch.cat((b[:, :4], *_six_bits(b[:, 4:16])), 1)


def _of_q6_k(b: Tensor) -> tuple[Tensor, Tensor]:
    return CODES["q6_k"].pack(_signed_six(b)), b[:, 192:210]


def _minimums_of_q4_k(b: Tensor) -> tuple[Tensor, Tensor]:
    scales, minimums = _six_bits(b[:, 4:16])
    return CODES["q6_k"].pack(_four_bits(b)), torch.cat((scales.repeat_interleave(2, 1), minimums, b[:, :4]), 1)


def _minimums_of_q6_k(b: Tensor) -> tuple[Tensor, Tensor]:
    none = torch.zeros(len(b), 8, dtype=torch.uint8)
    return CODES["q6_k"].pack(_signed_six(b)), torch.cat((b[:, 192:208], none, b[:, 208:210], none[:, :2]), 1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def read(b: Tensor) -> Tensor:
        return b.contiguous().view(dtype).float()

    return read


def _q4_0(b: Tensor) -> Tensor:
    """Bytes: fp16 d; 16 of codes, w[i] in the low half of byte i, w[16 + i] in the high half. d * (q - 8)."""
    return _fp16(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    """Bytes: fp16 d, fp16 m; 16 of codes as in Q4_0. d * q + m."""
    return _fp16(b, 0) * _nibbles(b[:, 4:]).float() + _fp16(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    """Bytes: fp16 d; 32 of signed codes. d * q."""
    return _fp16(b, 0) * b[:, 2:].view(torch.int8).float()


def _q4_k(b: Tensor) -> Tensor:
    """Bytes: fp16 d, fp16 dmin; 12 of eight 6-bit scales and minimums; 128 of codes. d * scale * q - dmin * minimum.

    32 bytes of codes hold two groups of 32 weights: one in the low halves, the next in the high halves.
    """
    scales, minimums = _six_bits(b[:, 4:16])
    codes = _four_bits(b).float().unflatten(1, (8, 32))
    wide, low = _fp16(b, 0) * scales.float(), _fp16(b, 2) * minimums.float()
    found: Tensor = wide.unsqueeze(2) * codes - low.unsqueeze(2)
    return found.flatten(1)


def _four_bits(b: Tensor) -> Tensor:
    """Return the codes of Q4_K in order, uint8 [n, 256]."""
    return _nibbles(b[:, 16:].unflatten(1, (4, 32))).flatten(1)


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minimums of 12 bytes, uint8.

    Bytes 0-3 hold scales 0-3 in the low six bits, bytes 4-7 minimums 0-3; bytes 8-11 the low four bits of scales 4-7
    (low half) and of minimums 4-7 (high half), whose upper two bits are on top of bytes 0-3 and 4-7.
    """
    first, second, third = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales, minimums


def _q6_k(b: Tensor) -> Tensor:
    """Bytes: 128 of low halves, 64 of upper two bits, 16 of signed scales, fp16 d. d * scale * (q - 32).

    For each 128 weights, 64 bytes hold the low four bits (low halves first), 32 bytes the upper two (lowest first). A
    scale belongs to 16 weights.
    """
    codes = (_six(b).float() - 32).view(-1, 16, 16)
    scales = _fp16(b, 208) * b[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(2) * codes).flatten(1)


def _six(b: Tensor) -> Tensor:
    """Return the codes of Q6_K in order, uint8 [n, 256]."""
    low = _nibbles(b[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    packed = b[:, 128:192].unflatten(1, (2, 1, 32))
    high = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2)  # [n, 2, 4, 32]
    found: Tensor = (low | high << 4).flatten(1)
    return found


def _signed_six(b: Tensor) -> Tensor:
    """Return the codes of Q6_K minus 32, in two's complement of six bits."""
    return _six(b) ^ 32


def _fp16(b: Tensor, at: int) -> Tensor:
    """Return the fp16 number at this byte of each block, as fp32 [n, 1]."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(b: Tensor) -> Tensor:
    """Return the low halves of bytes [..., k], then the high halves, uint8 [..., 2 k]."""
    return torch.cat((b & 15, b >> 4), -1)


CODES_OF: Mapping[tuple[str, str], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    ("Q8_0", "q8_0"): _of_q8_0,
    ("Q4_0", "q4_0"): _of_q4_0,
    ("Q4_0", "q8_0"): _q8_0_of_q4_0,
    ("Q4_1", "q4_1"): _of_q4_1,
    ("Q4_K", "q4_k"): _of_q4_k,
    ("Q6_K", "q6_k"): _of_q6_k,
    ("Q4_K", "q6_k-m"): _minimums_of_q4_k,
    ("Q6_K", "q6_k-m"): _minimums_of_q6_k,
}


DEQUANTISED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
