"""A product by cuBLASLt: the first choice of its heuristics, as PyTorch asks for it when told to prefer that library.

Left to itself PyTorch calls cuBLAS for most products, whatever else is installed: its own `linear` is no cuBLASLt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.values import Fingerprint, PythonRecipe, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from autosel.race.contest import Entrant

NAME = "torch:linear@cublaslt"
DTYPES = ("bf16", "fp16", "fp32")


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    """The eager product with the other library; what was preferred before is preferred again. The preference is read
    where a product is launched, so that a captured graph keeps the library."""
    from torch.backends.cuda import preferred_blas_library

    from autosel.ops import eager

    before = preferred_blas_library()
    preferred_blas_library("cublaslt")
    try:
        return eager.linear(x, w, bias, residual, y)
    finally:
        preferred_blas_library(before)


def by_cublaslt(w: Workload, fp: Fingerprint) -> dict[str, Entrant]:
    """Its arm by name, where there is one: a product on a GPU."""
    from autosel.race.contest import Entrant

    if fp.kind != "cuda" or w.op != "linear" or w.dtype not in DTYPES:
        return {}
    recipe = PythonRecipe(target=f"{__name__}:linear")
    return {NAME: Entrant(candidate=NAME, op=w.op, recipe=recipe, digest="", knobs={}, writes_out=True)}
