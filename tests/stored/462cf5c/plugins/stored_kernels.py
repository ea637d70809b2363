"""The functions behind stored_candidates.py."""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F

calls = 0


def gemv_fp8(x, w, scale, bias, residual, y=None):
    """Multiply in fp32."""
    made = F.linear(x.float(), w.float()) * scale
    for extra in (bias, residual):
        if extra is not None:
            made = made + extra
    return made.to(x.dtype) if y is None else y.copy_(made)


def attn_decode_fp8(q, k, v, k_scale, v_scale, lengths, max_len, scale, window, softcap, o=None):
    """Compute all of it in fp32, with a mask in every case."""
    group, rows, wide = q.shape[1] // k.shape[1], q.shape[2], q.float()
    k, v = k[:, :, :max_len].float(), v[:, :, :max_len].float()
    k, v = ((x * s[:, None, None]).repeat_interleave(group, 1) for x, s in ((k, k_scale), (v, v_scale)))
    scores = wide @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ends = torch.full((q.shape[0],), max_len) if lengths is None else lengths.long()
    last = ends[:, None] - rows + torch.arange(rows) + 1
    at = torch.arange(max_len)
    seen = at < last[..., None]
    if window:
        seen &= at >= last[..., None] - window
    seen = seen[:, None]
    share = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    made = torch.where(seen.any(-1, keepdim=True), share @ v, 0.0)
    return made.to(q.dtype) if o is None else o.copy_(made)


def swiglu(gate, up, h=None):
    """Pass the proof, and end the process in a race."""
    global calls
    calls += 1
    if calls > 100 and any("race" in word for word in sys.argv):
        os.abort()
    made = F.silu(gate.float()).to(gate.dtype) * up
    return made if h is None else h.copy_(made)
