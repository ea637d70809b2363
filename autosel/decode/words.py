"""Codes in words of 32 bits, and the exact weights of codes with scales and zero points."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of each int32 word [R, C], the lowest bits first: int32 [R, C * codes of a word]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words [R, words] of unsigned codes [R, C], the lowest bits first; rows are filled up with zeros."""
    per = WORD_BITS // bits
    whole = torch.nn.functional.pad(codes.int(), (0, -codes.shape[1] % per)).unflatten(1, (-1, per))
    words: Tensor = (whole << torch.arange(0, WORD_BITS, bits, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return words


def exact(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return scale * (code - zero) in float64, which holds it exactly: codes [N, K], zeros and scales [N, groups].

    `groups` [K] is the group of each column.
    """
    return scales.double()[:, groups] * (codes - zeros[:, groups])
