"""swiglu    y = silu(gate) * up, silu(g) = g / (1 + exp(-g))          gate, up [M,I] -> y[M,I]

bytes     3 M I b (b = bytes an element)      FLOPs   5 M I
roofline  M=1, I=14336, bf16 on an H200 (4.3 TB/s estimated): 86 KB, 20 ns; alone, the launch is the whole cost (2-3
          us); in the epilogue of gate_up it is free
knobs     threads (knobs/gpu/rows.py): one 16-byte vector a thread
source    -
status    compiled and interpreted; not yet run on silicon
"""

from autosel.triton_kernels.gated import gated


def swiglu(gate, up, y=None, *, threads=256):
    return gated(gate, up, y, 0, threads)
