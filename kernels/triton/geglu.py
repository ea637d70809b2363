"""geglu     y = gelu(gate) * up; tanh 0: gelu(g) = g/2 (1 + erf(g / sqrt 2)), tanh 1: its approximation by tanh
          gate, up [M,I] -> y[M,I]

bytes     3 M I b (b = bytes an element)      FLOPs   10 M I
roofline  M=1, I=6912, bf16 on an H200 (4.3 TB/s estimated): 41 KB, 10 ns; alone, the launch is the whole cost (2-3 us);
          in the epilogue of gate_up it is free
knobs     threads (knobs/gpu/rows.py): one 16-byte vector a thread
source    -
status    compiled and interpreted; not yet run on silicon
"""

from autosel.triton_kernels.gated import gated


def geglu(gate, up, tanh, y=None, *, threads=256):
    return gated(gate, up, y, 2 if tanh else 1, threads)
