"""Ops that process each row separately: rmsnorm, add_rmsnorm, rope, swiglu, geglu, kv_append."""

from __future__ import annotations

from autosel.candidates.cuda.base import CudaKernel
from autosel.knobs.gpu import rows

KERNELS = (
    CudaKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, knob_args=("threads", "grid")),
    CudaKernel("add_rmsnorm", "add_rmsnorm", formula=rows.rmsnorm, knob_args=("threads", "grid")),
    CudaKernel("rope", "rope", formula=rows.rope, knob_args=("threads", "grid")),
    CudaKernel("swiglu", "swiglu", formula=rows.gated, knob_args=("grid",)),
    CudaKernel("geglu", "geglu", formula=rows.gated, knob_args=("grid",)),
    CudaKernel("kv_append", "kv_append", formula=rows.kv_append, knob_args=("grid",)),
)
