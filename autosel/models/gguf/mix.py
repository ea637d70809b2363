"""The weight format that each matrix of a GGUF file is read as, from the formats of its tensors.

Files mix formats: a "Q4_K_M" file has some projections and the output head in Q6_K. A matrix of autosel's may join
tensors (query, key and value projections), and gate and up share a format. Joined tensors in different formats are read
as a format that holds both without rounding, if there is one, else dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autosel.formats import PLAIN
from autosel.models.gguf.file import GgufFile

# The block formats that a weight format holds as they are, smaller formats first.
HELD: Mapping[str, frozenset[str]] = {
    "q4_0": frozenset({"Q4_0"}),
    "q4_k": frozenset({"Q4_K"}),
    "q4_1": frozenset({"Q4_1"}),
    "q6_k": frozenset({"Q6_K"}),
    "q6_k-m": frozenset({"Q4_K", "Q6_K"}),
    "q8_0": frozenset({"Q8_0", "Q4_0"}),
}
FLOATS = frozenset({"F32", "F16", "BF16"})
TOGETHER: Mapping[str, tuple[str, ...]] = {  # matrices in one format -> tensors of a layer
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def read_as(file: GgufFile, layers: int) -> dict[str, str]:
    """Return the name of the weight format of each matrix, by autosel's name."""
    return dict(_each(file, layers))


def dequantised(file: GgufFile, layers: int) -> bool:
    """Return True if a matrix of codes is not read as it is."""
    as_plain = {name for name, format_ in _each(file, layers) if format_ == PLAIN}
    return any(not blocks <= FLOATS for names, blocks in _blocks(file, layers) if set(names) & as_plain)


def most_frequent(formats: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the format of most matrices of layers, and the others with theirs."""
    of_layers = [format_ for name, format_ in formats.items() if "." in name]
    most = max(dict.fromkeys(of_layers), key=of_layers.count, default=PLAIN)
    return most, tuple((name, format_) for name, format_ in formats.items() if format_ != most)


def _each(file: GgufFile, layers: int) -> Iterator[tuple[str, str]]:
    for names, blocks in _blocks(file, layers):
        found = next((name for name, held in HELD.items() if blocks <= held), PLAIN)
        for name in names:
            yield name, found


def _blocks(file: GgufFile, layers: int) -> Iterator[tuple[Sequence[str], frozenset[str]]]:
    """Yield matrices that share a format, with the block formats of their tensors."""
    groups: dict[tuple[str, ...], tuple[str, ...]] = {("embedding",): ("token_embd",), ("head",): ("output",)}
    for i in range(layers):
        for names, tensors in TOGETHER.items():
            groups[tuple(f"{i}.{name}" for name in names.split())] = tuple(f"blk.{i}.{t}" for t in tensors)
    for matrices, tensors in groups.items():
        blocks = frozenset(file.tensors[f"{t}.weight"].block.name for t in tensors if f"{t}.weight" in file.tensors)
        if blocks:
            yield matrices, blocks
