"""A checkpoint of GPTQ or AWQ as named tensors: `x.weight` stands for its packed parts.

Both store a matrix [N, K] transposed, in words of 32 bits, with unsigned codes q and zero points z; a weight is
s (q - z), and s is fp16.

    GPTQ   `qweight` [K / 8, N]: 8 codes of a column, the first in the lowest bits; `g_idx` [K] is the group of a column
    AWQ    `qweight` [K, N / 8]: nibble i of a word is output 8 j + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    both   `qzeros` [groups, N / 8], in words along N, in AWQ with the same order; `scales` [groups, N]

GPTQ of version 1 stores z - 1. A zero point of 0 is then stored as 15, or as a borrow from its neighbour: libraries
disagree, so it is refused.

Codes in groups of neighbours, or with a scale per row, are read as weight formats: the symmetric ones if every zero
point is half of the range, else those with zero points. Others are dequantised, exactly, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel.decode.compressed import InScheme, StoredMatrix, dtype_name, put_scales, words_shape
from autosel.decode.safetensors import Tensors
from autosel.decode.words import WORD_BITS, exact, unpacked
from autosel.models.quantised import Scheme
from autosel.ops.weight import BLOCK, Weight

CODES, ZEROS, SCALES, ORDER, BIAS = ".qweight", ".qzeros", ".scales", ".g_idx", ".bias"
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds output 8 j + i
BIAS_BYTES = 1 << 20  # of an output: more are no bias


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(InScheme):
    """Tensors of a GPTQ or AWQ checkpoint. A layer that was left out is read as it is, where weights are
    dequantised."""

    def _dequantise(self, name: str, out: Tensor) -> None:
        base = name.removesuffix(".weight")
        zeros, scales, groups = self._zeros(base), self._scales(base), self._groups(base)
        for rows, codes in self._rows(base):
            out[rows] = exact(codes, zeros[:, rows].T, scales[:, rows].T, groups).to(out.dtype)

    def _read_codes(self, name: str, out: Weight) -> None:
        """Read codes and scales, and zero points, which must be half of the range if the format has none.

        Raises BadConfig.
        """
        if not self.entries[name].packed:
            self._refuse(name, "is no code, unlike other layers. --format plain dequantises those")
        self._refuse_shape(name, out.shape)
        base, half, k = name.removesuffix(".weight"), 1 << self.scheme.bits - 1, out.shape[1]
        zeros = self._zeros(base)
        if not self.scheme.zeros and not bool((zeros == half).all()):
            other = int(zeros[zeros != half][0])
            self._refuse(base + ZEROS, f"has the zero point {other}; {half} is expected. --format plain dequantises")
        if not torch.equal(self._groups(base), self._neighbours(k)):
            self._refuse(base + ORDER, "puts columns into other groups. --format plain dequantises")
        if not put_scales(out, self._scales(base).T, zeros.T if self.scheme.zeros else None):
            self._refuse(
                base + SCALES, f"is not exact in {dtype_name(out.scales.dtype)}. Use --dtype fp16, or --format plain"
            )
        for rows, codes in self._rows(base):
            if self.scheme.bits == 8:
                out.codes[rows] = (codes - half).to(torch.int8)
                continue
            whole = torch.nn.functional.pad(codes, (0, -k % 2), value=half).to(torch.uint8).unflatten(1, (-1, 2))
            out.codes[rows, : whole.shape[1]] = whole[..., 0] | whole[..., 1] << 4

    # --- parts -------------------------------------------------------------------------------------------------------

    def _rows(self, base: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield some outputs and their codes [n, K], as int32."""
        n, k = self.entries[f"{base}.weight"].shape
        words = self._words(base + CODES, *((k, n // self._per) if self._awq else (k // self._per, n)))
        each = max(1, BLOCK // k // self._per) * self._per
        for first in range(0, n, each):
            rows = slice(first, min(n, first + each))
            if self._awq:
                columns = slice(first // self._per, rows.stop // self._per)
                yield rows, self._along_outputs(words[:, columns]).T
            else:
                yield rows, unpacked(words[:, rows].T, self.scheme.bits)

    def _zeros(self, base: str) -> Tensor:
        """Return the zero points [groups, N]. Raises BadConfig for one that versions of GPTQ read differently."""
        n, k = self.entries[f"{base}.weight"].shape
        found = self._along_outputs(self._words(base + ZEROS, self._groups_in(k), n // self._per))
        if not self.scheme.less_one:
            return found
        most = (1 << self.scheme.bits) - 1
        if bool((found == most).any()):
            self._refuse(base + ZEROS, f"has the zero point 0, stored as {most}: versions of GPTQ read it differently")
        return found + 1

    def _scales(self, base: str) -> Tensor:
        """Return the scales [groups, N]."""
        n, k = self.entries[f"{base}.weight"].shape
        return self._numbers(base + SCALES, (self._groups_in(k), n))

    def _groups(self, base: str) -> Tensor:
        """Return the group of each column, int64 [K]."""
        k = self.entries[f"{base}.weight"].shape[1]
        if self._awq or base + ORDER not in self.tensors.entries:
            return self._neighbours(k)
        return self._order(base + ORDER, k)

    def _along_outputs(self, words: Tensor) -> Tensor:
        """Return codes [R, N] of words [R, N / codes of a word]."""
        found = unpacked(words, self.scheme.bits)
        return found.unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1) if self._awq else found

    @property
    def _awq(self) -> bool:
        return self.scheme.method == "awq"

    @property
    def _per(self) -> int:
        return WORD_BITS // self.scheme.bits


def open_packed_rows(tensors: Tensors, scheme: Scheme) -> PackedRows:
    """Return the tensors by the names of matrices. Only headers and biases are read. Raises BadConfig."""
    bases = [name.removesuffix(CODES) for name in tensors.entries if name.endswith(CODES)]
    hidden = {base + part for base in bases for part in (CODES, ZEROS, SCALES, ORDER)}
    hidden |= {base + BIAS for base in bases if _is_zero(tensors, base + BIAS)}  # GPTQ writes one for every layer
    entries = {n: StoredMatrix(shape=e.shape, packed=False) for n, e in tensors.entries.items() if n not in hidden}
    per = WORD_BITS // scheme.bits
    for base in bases:
        first, second = words_shape(tensors, base + CODES)
        shape = (second * per, first) if scheme.method == "awq" else (second, first * per)
        entries[f"{base}.weight"] = StoredMatrix(shape=shape, packed=True)
    return PackedRows(tensors=tensors, scheme=scheme, entries=entries)


def _is_zero(tensors: Tensors, name: str) -> bool:
    entry = tensors.entries.get(name)
    if entry is None or entry.size > BIAS_BYTES:
        return False
    found = torch.empty(entry.size, dtype=torch.uint8)
    tensors.read_raw(name, found)
    return not bool(found.any())
