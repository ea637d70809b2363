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

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor, dequantised and rounded once. Raises BadConfig."""
        if not self.entries[name].packed:
            self.tensors.read_into(name, out)
            return
        n, k = out.shape
        codes = empty(find_weight_format(self.scheme.codes), n, k, dtype=out.dtype)
        self._read_codes(name, codes)
        out.copy_(codes.dequantised(out.dtype))
        if not out.isfinite().all():
            self._refuse(self._scale_of(name), f"makes weights that are not finite in {out.dtype}")

    def _read_codes(self, name: str, out: Weight) -> None:
        n, k = out.shape
        if self.entries[name].shape != (n, k):
            self._refuse(name, f"is {list(self.entries[name].shape)}, config.json says {[n, k]}")
        codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
        self._raw(name, codes, E4M3)
        if codes.float().isnan().any():
            self._refuse(name, "contains NaN")
        out.codes.copy_(codes)
        put_scales(out, self._scales(name, n, k), None)

    def _scales(self, name: str, n: int, k: int) -> Tensor:
        """Return the scales of each row, [N, 1] or [N, groups]."""
        at = self._scale_of(name)
        found, groups = self._numbers(at), -(-k // self.scheme.group) if self.scheme.group else 1
        blocks = -(-n // self.scheme.rows) if self.scheme.rows else 1
        if found.numel() != blocks * groups or (self.scheme.group and tuple(found.shape) != (blocks, groups)):
            self._refuse(at, f"has {list(found.shape)} scales, {[blocks, groups]} are expected")
        return found.view(blocks, groups).repeat_interleave(self.scheme.rows or n, 0)[:n]

    def _scale_of(self, name: str) -> str:
        base = name.removesuffix(".weight")
        return base + (INVERSE if base + INVERSE in self.tensors.entries else SCALE)


def open_float8(tensors: Tensors, scheme: Scheme) -> Float8:
    """Return the tensors by the names of matrices."""
    entries: Mapping[str, StoredMatrix] = {
        name: StoredMatrix(shape=e.shape, packed=e.dtype == E4M3)
        for name, e in tensors.entries.items()
        if not name.endswith((SCALE, INVERSE, UNUSED))
    }
    return Float8(tensors=tensors, scheme=scheme, entries=entries)
