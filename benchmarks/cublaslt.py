"""Compute a product with the first choice of cuBLASLt's heuristics, through PyTorch's preferred-library setting.

By default PyTorch calls cuBLAS for most products, so the baseline `linear` does not cover cuBLASLt.
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
OPS = ("linear", "lm_head")  # plain products: libraries do not cover the rest of a fused op


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    from autosel.ops import eager

    with _preferred():
        return eager.linear(x, w, bias, residual, y)


def lm_head(x: Tensor, w: Tensor, greedy: int, out: Tensor | None = None) -> Tensor:
    from autosel.ops import eager

    with _preferred():
        return eager.lm_head(x, w, greedy, out)


@contextmanager
def _preferred() -> Iterator[None]:
    """Prefer cuBLASLt, then restore the previous preference.

    PyTorch reads the preference at launch, so a captured graph keeps the library.
    """
    from torch.backends.cuda import preferred_blas_library

    before = preferred_blas_library()
    preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        preferred_blas_library(before)


def by_cublaslt(w: Workload, fp: Fingerprint) -> dict[str, Entrant]:
    """Return cuBLASLt's arm by name for a product on a GPU; else nothing."""
    from autosel.race.contest import Entrant

    if fp.kind != "cuda" or w.op not in OPS or w.dtype not in DTYPES or w.trait("greedy", 0):
        return {}
    name, recipe = f"torch:{w.op}@cublaslt", PythonRecipe(target=f"{__name__}:{w.op}")
    return {name: Entrant(candidate=name, op=w.op, recipe=recipe, digest="", knobs={}, writes_out=True)}
