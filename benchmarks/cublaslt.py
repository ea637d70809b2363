"""A product by cuBLASLt: the first choice of its heuristics, as PyTorch asks for it when told to prefer that library.

Left to itself PyTorch calls cuBLAS for most products, whatever else is installed: its own `linear` is no cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autosel.values import Fingerprint, PythonRecipe, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from autosel.race.contest import Entrant

DTYPES = ("bf16", "fp16", "fp32")
OPS = ("linear", "lm_head")  # products alone: what else a fused op does is no library's


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    """The eager product with the other library."""
    from autosel.ops import eager

    with _preferred():
        return eager.linear(x, w, bias, residual, y)


def lm_head(x: Tensor, w: Tensor, greedy: int, out: Tensor | None = None) -> Tensor:
    from autosel.ops import eager

    with _preferred():
        return eager.lm_head(x, w, greedy, out)


@contextmanager
def _preferred() -> Iterator[None]:
    """What was preferred before is preferred again. The preference is read where a product is launched, so that a
    captured graph keeps the library."""
    from torch.backends.cuda import preferred_blas_library

    before = preferred_blas_library()
    preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        preferred_blas_library(before)


def by_cublaslt(w: Workload, fp: Fingerprint) -> dict[str, Entrant]:
    """Its arm by name, where there is one: a product on a GPU."""
    from autosel.race.contest import Entrant

    if fp.kind != "cuda" or w.op not in OPS or w.dtype not in DTYPES or w.trait("greedy", 0):
        return {}
    name, recipe = f"torch:{w.op}@cublaslt", PythonRecipe(target=f"{__name__}:{w.op}")
    return {name: Entrant(candidate=name, op=w.op, recipe=recipe, digest="", knobs={}, writes_out=True)}
