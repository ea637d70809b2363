"""Codes in words of 32 bits, and the exact weights of codes with scales and zero points."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of each int32 word [R, C], the lowest bits first: int32 [R, C * codes of a word]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def exact(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return scale * (code - zero) in float64, which holds it exactly: codes [N, K], zeros and scales [N, groups].

    `groups` [K] is the group of each column.
    """
    return scales.double()[:, groups] * (codes - zeros[:, groups])
