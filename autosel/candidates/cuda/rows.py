"""Ops that process each row separately: rmsnorm, add_rmsnorm, rope, swiglu, geglu, kv_append, sample."""

from __future__ import annotations

from autosel.candidates.cuda.base import CudaKernel
from autosel.knobs.gpu import rows, sampling
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

TOKENS_MOST = 1 << 20  # kernels/cuda/sample.cu keeps a bit per token in shared memory
ROOM_BYTES = 40 << 10  # shared memory for everything else


def _sample_limits(w: Workload, f: GpuFacts) -> str:
    need = ROOM_BYTES + w["V"] // 8
    if w["V"] > TOKENS_MOST or need > f.smem_per_cta:
        return f"a vocabulary of {w['V']} tokens needs {need} bytes of shared memory; a CTA has {f.smem_per_cta}"
    return "" if w["B"] <= 65_535 else f"B = {w['B']} is above 65535: a grid's limit"


KERNELS = (
    CudaKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, knob_args=("threads", "grid")),
    CudaKernel("add_rmsnorm", "add_rmsnorm", formula=rows.rmsnorm, knob_args=("threads", "grid")),
    CudaKernel("rope", "rope", formula=rows.rope, knob_args=("threads", "grid")),
    CudaKernel("swiglu", "swiglu", formula=rows.gated, knob_args=("grid",)),
    CudaKernel("geglu", "geglu", formula=rows.gated, knob_args=("grid",)),
    CudaKernel("kv_append", "kv_append", formula=rows.kv_append, knob_args=("grid",)),
    CudaKernel("sample", "sample", formula=sampling.sample, knob_args=("ctas_per_row",), limits=_sample_limits),
)
