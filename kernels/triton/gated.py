"""Compute act(gate) * up elementwise: shared by swiglu and geglu. Defines no op."""

import triton
import triton.language as tl

from autosel.triton_kernels.common import activate, empty, refuse, together

VECTOR_BYTES = 16


@triton.jit
def _gated(gate, up, y, I, stride_g, stride_u, stride_y, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    g = tl.load(gate + row * stride_g + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * stride_y + at, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=inside)


def gated(gate, up, y, kind, threads):
    if y is None:
        y = empty(gate.shape, gate)
    together(gate, up, y)
    (m, width), block = gate.shape, threads * VECTOR_BYTES // gate.element_size()
    if not gate.shape == up.shape == y.shape or not gate.dtype == up.dtype == y.dtype:
        refuse("gate, up and y must have one shape and dtype")
    _gated[(m, triton.cdiv(width, block))](
        gate, up, y, width, gate.stride(0), up.stride(0), y.stride(0), KIND=kind, BLOCK=block, num_warps=threads // 32,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y
