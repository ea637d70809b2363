"""The block formats of GGUF: a block of consecutive weights of a row takes a fixed number of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """One format: `weights` neighbours of a row are stored in `bytes` bytes."""

    name: str
    weights: int
    bytes: int


# By the number in a tensor's entry. Numbers that are missing belong to formats that llama.cpp removed.
BLOCKS: Mapping[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18),
    3: Block("Q4_1", 32, 20),
    6: Block("Q5_0", 32, 22),
    7: Block("Q5_1", 32, 24),
    8: Block("Q8_0", 32, 34),
    9: Block("Q8_1", 32, 40),
    10: Block("Q2_K", 256, 84),
    11: Block("Q3_K", 256, 110),
    12: Block("Q4_K", 256, 144),
    13: Block("Q5_K", 256, 176),
    14: Block("Q6_K", 256, 210),
    15: Block("Q8_K", 256, 292),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136),
    24: Block("I8", 1, 1),
    25: Block("I16", 1, 2),
    26: Block("I32", 1, 4),
    27: Block("I64", 1, 8),
    28: Block("F64", 1, 8),
    29: Block("IQ1_M", 256, 56),
    30: Block("BF16", 1, 2),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66),
    39: Block("MXFP4", 32, 17),
    40: Block("NVFP4", 64, 36),
    41: Block("Q1_0", 128, 18),
}
