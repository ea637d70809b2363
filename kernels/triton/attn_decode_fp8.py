"""attn_decode_fp8  attention as in attn_decode.py, over K = k_scale[h'] k[b,h',j,:] and V = v_scale[h'] v[b,h',j,:]
                 q[B,Hq,S,D], k/v[B,Hkv,Lmax,D] e4m3, k_scale/v_scale[Hkv] fp32, lengths, max_len -> o[B,Hq,S,D]

bytes     2 Hkv D sum of lengths + 8 Hkv + 2 b B Hq S D (b = bytes an element of q)
FLOPs     4 Hq D S sum of lengths
roofline  Llama-3.1-8B, B=1, L=8192, bf16 q on an H200 (4.3 TB/s estimated): 16.8 MB, 3.9 us
knobs     knobs/gpu/attention.py, as for attn_decode, with one byte per element of a key
source    The kernel of attn_decode.py. Every e4m3 value is exact in q's dtype, in which the products are computed. The
          scale of K multiplies the scores and the scale of V the sums, both in fp32. Compute capability 8.9 and later
          convert with one instruction; Triton cannot convert e4m3 on older devices.
status    compiled and interpreted; not yet run on silicon
"""

import torch

from autosel.triton_kernels.attn_decode import launch
from autosel.triton_kernels.common import empty, exactly, refuse, together


def attn_decode_fp8(
    q, k, v, k_scale, v_scale, lengths, max_len, scale, window, softcap, o=None, *,
    tile=32, stages=2, warps=4, chunk=256, shared=99 << 10, arrival=True,
):  # fmt: skip
    (batch, hq, _, depth), hkv = q.shape, k.shape[1]
    if o is None:
        o = empty(q.shape, q)
    together(q, k, v, k_scale, v_scale, lengths, o)
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != depth or hq % hkv or o.shape != q.shape:
        refuse("attn_decode_fp8 takes q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], o[B,Hq,S,D], Hq a multiple of Hkv")
    if q.dtype != o.dtype or not k.dtype == v.dtype == torch.float8_e4m3fn or not 0 < max_len <= k.shape[2]:
        refuse(f"attn_decode_fp8 takes k and v in e4m3, o in q's dtype and max_len from 1 to {k.shape[2]}")
    exactly("k_scale", k_scale, (hkv,), torch.float32)
    exactly("v_scale", v_scale, (hkv,), torch.float32)
    if lengths is not None:
        exactly("lengths", lengths, (batch,), torch.int32)
    knobs = {"tile": tile, "stages": stages, "warps": warps, "chunk": chunk, "shared": shared, "arrival": arrival}
    return launch(q, k, v, k_scale, v_scale, lengths, max_len, scale, window, softcap, o, **knobs)
