"""quack-kernels: CuTe kernels compiled at first use, for Hopper and later (signature: 0.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel, plain_norm

if TYPE_CHECKING:
    from torch import Tensor

QUACK = Library(
    distribution="quack-kernels", module="quack", least_version=(0, 3, 0), least_cc=(9, 0), compiles_s=200.0
)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from quack import rmsnorm as norm  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = norm(x, weight, eps=eps)
    return made


KERNELS = (
    LibraryKernel(
        "rmsnorm",
        "quack:rmsnorm",
        QUACK,
        backend="QUACK",
        limits=plain_norm,
        dtypes=("bf16", "fp16", "fp32"),
        writes_out=False,
    ),
)
