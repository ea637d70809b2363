"""A checkpoint with weights in e4m3 as named tensors: of compressed-tensors, and of the method `fp8`.

`x.weight` is F8_E4M3 [N, K]. Its scale multiplies: `weight_scale`, or `weight_scale_inv` in spite of that name; one
number, one per row [N] or [N, 1], or one per block of 128 x 128 [N / 128, K / 128], rounded up. A scale of several rows
is stored for each of them, in fp32. `input_scale`, of activations in 8 bits, is not used: they keep the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel.decode.compressed import SCALE, InScheme, StoredMatrix, put_scales
from autosel.decode.safetensors import Tensors
from autosel.formats import find_weight_format
from autosel.models.quantised import Scheme
from autosel.ops.weight import Weight, empty

E4M3 = "F8_E4M3"
INVERSE = ".weight_scale_inv"
UNUSED = ".input_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(InScheme):
    """Tensors of a checkpoint whose layers are in e4m3."""

    def _dequantise(self, name: str, out: Tensor) -> None:
        codes = empty(find_weight_format(self.scheme.codes), *out.shape, dtype=out.dtype)
        self._read_codes(name, codes)
        out.copy_(codes.dequantised(out.dtype))

    def _read_codes(self, name: str, out: Weight) -> None:
        self._refuse_shape(name, out.shape)
        n, k = out.shape
        codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
        self._raw(name, codes, E4M3)
        if codes.float().isnan().any():
            self._refuse(name, "contains NaN")
        out.codes.copy_(codes)
        put_scales(out, self._scales(name, n, k), None)

    def _scales(self, name: str, n: int, k: int) -> Tensor:
        """Return the scales of each row, [N, 1] or [N, groups]."""
        base = name.removesuffix(".weight")
        at = base + (INVERSE if base + INVERSE in self.tensors.entries else SCALE)
        found, groups = self._numbers(at), self._groups_in(k)
        blocks = -(-n // self.scheme.rows) if self.scheme.rows else 1
        if found.numel() != blocks * groups or (self.scheme.group and tuple(found.shape) != (blocks, groups)):
            self._refuse(at, f"has {list(found.shape)} scales, {[blocks, groups]} are expected")
        return found.view(blocks, groups).repeat_interleave(self.scheme.rows or n, 0)[:n]


def open_float8(tensors: Tensors, scheme: Scheme) -> Float8:
    """Return the tensors by the names of matrices."""
    entries: Mapping[str, StoredMatrix] = {
        name: StoredMatrix(shape=e.shape, packed=e.dtype == E4M3)
        for name, e in tensors.entries.items()
        if not name.endswith((SCALE, INVERSE, UNUSED))
    }
    return Float8(tensors=tensors, scheme=scheme, entries=entries)
