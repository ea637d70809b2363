"""Every op as ordinary eager PyTorch: the baseline that a candidate must beat, as fast as eager reasonably can be.

Each function takes its op's arguments in order, then its outputs: None allocates and returns, a tensor is written and
returned. A PyTorch call without out= is followed by a copy, as in a model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend

# ATen, sdp_utils.cpp: the widest head and the dtypes that its flash attention takes
FLASH_HEAD, HALVES = 256, (torch.bfloat16, torch.float16)
ACTIVATION = (F.silu, F.gelu, lambda g: F.gelu(g, approximate="tanh"))


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    if y is None:
        made = F.linear(x, w, bias)
        return made if residual is None else made.add_(residual)
    if bias is None:
        torch.mm(x, w.t(), out=y)
    else:
        torch.addmm(bias, x, w.t(), out=y)
    return y if residual is None else y.add_(residual)


# --- attention --------------------------------------------------------------------------------------------------------


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    o: Tensor | None = None,
) -> Tensor:
    """Call SDPA over the part of the cache in use, with a mask only if needed."""
    s = q.shape[2]
    first = max(0, max_len - s - window + 1) if window and lengths is None else 0
    k, v = k[:, :, first:max_len], v[:, :, first:max_len]
    mask = _mask(s, k, lengths, window)
    return _written(_attend(q, k, v, mask, scale, softcap), o)


def attn_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    o: Tensor | None = None,
) -> Tensor:
    """Decode (S = 1) with a KV head's query heads as its queries: K and V are read once, not once per query head."""
    b, hq, s, d = q.shape
    hkv = k.shape[1]
    assert s == 1, "packing more than one position would mix their masks"
    packed = q.reshape(b, hkv, hq // hkv, d)
    first = max(0, max_len - window) if window and lengths is None else 0
    k, v = k[:, :, first:max_len], v[:, :, first:max_len]
    made = _attend(packed, k, v, _mask(1, k, lengths, window), scale, softcap)
    return _written(made.reshape(q.shape), o)


def paged_attn(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    o: Tensor | None = None,
) -> Tensor:
    """Gather the pages in use, then attend to them: PyTorch has no paged kernel for CPUs."""
    page = k_pages.shape[1]
    table = block_table[:, : -(-max_len // page)]
    # Entries beyond a row's length may have any value. They are replaced by one of the row's own pages, because a mask
    # does not remove NaN of another sequence's page. A row without keys has no page; its result is set to zero.
    used = torch.arange(table.shape[1], device=table.device) * page < lengths[:, None]
    table = torch.where(used, table, table[:, :1]).clamp(0, k_pages.shape[0] - 1)
    k, v = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (k_pages, v_pages))
    return attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def prefill_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, o: Tensor | None = None
) -> Tensor:
    s = q.shape[2]
    if softcap or (window and window < s):
        return _written(_attend(q, k, v, _mask(s, k, None, window), scale, softcap), o)
    return _written(sdpa(q, k, v, causal=True, scale=scale), o)


def kv_append(
    k: Tensor, v: Tensor, positions: Tensor, block_table: Tensor | None, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor]:
    b, s = k.shape[0], k.shape[2]
    position = positions[:, None].long() + torch.arange(s, device=k.device)
    if block_table is None:
        row = torch.arange(b, device=k.device)[:, None]
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.transpose(1, 2)[row, position] = new.transpose(1, 2)
        return k_cache, v_cache
    page = k_cache.shape[1]
    found = block_table.long().gather(1, position // page)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[found, position % page] = new.transpose(1, 2)
    return k_cache, v_cache


def _mask(s: int, k: Tensor, lengths: Tensor | None, window: int) -> Tensor | None:
    """Return bool [B or 1, 1, S, keys], or None if every query sees every key."""
    keys = k.shape[2]
    key = torch.arange(keys, device=k.device)
    if lengths is None:
        if s == 1 and not (window and window < keys):
            return None
        last = torch.arange(keys - s, keys, device=k.device)[None, :, None]
    else:
        last = (lengths[:, None].long() - s + torch.arange(s, device=k.device))[..., None]
    seen = key <= last
    if window:
        seen &= key > last - window
    return seen[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    if softcap:
        return _matmul_attend(q, k, v, mask, scale, softcap)
    made = sdpa(q, k, v, mask=mask, scale=scale)
    return made if mask is None else _silence(made, mask)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 0.0
) -> Tensor:
    """Call PyTorch's attention in its fastest correct way: q [B,Hq,S,D], k and v [B,Hkv,L,D], scale 0: 1 / sqrt(D).

    mask is bool [B or 1,1,S,L], True where a key is seen. On a GPU the caller must avoid two problems. First, PyTorch
    passes a boolean mask to cuDNN, which it prefers on Hopper, as -65504 instead of -inf (ATen, attention.cpp,
    `convert_boolean_attn_mask_cudnn`), so masked keys count if scores are larger. The lowest number of the dtype avoids
    that; fp16 has none lower, and runs without cuDNN. Second, some of its fused kernels do not support query heads that
    share a KV head: if no other is left, it multiplies matrices, with every score in memory. transformers avoids that
    (5.23: `pack_gqa`, `repeat_kv`), and so does this function.
    """
    return (_on_gpu if q.is_cuda else _sdpa)(q, k, v, mask, causal, scale)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    if mask is None:
        return _grouped(q, k, v, None, causal, scale)
    if q.dtype != torch.float16:
        hidden = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype, device=mask.device)
        return _grouped(q, k, v, torch.where(mask, torch.zeros_like(hidden), hidden), causal, scale)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return _grouped(q, k, v, mask, causal, scale)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Call SDPA as is, unless it would multiply matrices.

    Then the group of a KV head becomes queries of that head; for more than one position, whose masks differ, K and V
    are repeated.
    """
    (b, hq, s, d), hkv = q.shape, k.shape[1]
    flash = mask is None and d <= FLASH_HEAD and q.dtype in HALVES  # accepts groups without a query
    if hq == hkv or flash or not _multiplies_matrices(q, k, v, mask, causal, scale):
        return _sdpa(q, k, v, mask, causal, scale)
    if s == 1:
        return _sdpa(q.reshape(b, hkv, -1, d), k, v, mask, causal, scale).reshape(q.shape)
    k, v = (t.repeat_interleave(hq // hkv, 1) for t in (k, v))
    return _sdpa(q, k, v, mask, causal, scale)


def _multiplies_matrices(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> bool:
    chosen = torch._fused_sdp_choice(q, k, v, mask, is_causal=causal, scale=scale or None, enable_gqa=True)
    return bool(chosen == SDPBackend.MATH.value)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale or None, enable_gqa=q.shape[1] != k.shape[1]
    )


def _matmul_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Compute attention with softcap, which SDPA lacks.

    Scores are fp32: stored in bf16 they would change a probability by some per cent.
    """
    b, hq, s, d = q.shape
    hkv = k.shape[1]
    scores = torch.matmul(q.reshape(b, hkv, -1, d).float(), k.float().transpose(-1, -2)).mul_(scale or d**-0.5)
    scores = torch.tanh(scores.div_(softcap)).mul_(softcap).view(b, hq, s, -1)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    p = scores.softmax(-1).to(v.dtype)
    if mask is not None:
        p = _silence(p, mask)  # before the product too: a NaN row reaches its neighbours through the tiles of AMX
    made = torch.matmul(p.view(b, hkv, -1, k.shape[2]), v).view(b, hq, s, d)
    return made if mask is None else _silence(made, mask)


def _silence(o: Tensor, mask: Tensor) -> Tensor:
    """Give zeros for a query that sees nothing, not the NaN of an empty softmax."""
    return o.masked_fill_(~mask.any(-1, keepdim=True), 0.0)


def _written(made: Tensor, out: Tensor | None) -> Tensor:
    return made if out is None else out.copy_(made)


# --- rows -------------------------------------------------------------------------------------------------------------


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    width = (x.shape[-1],)
    if not offset:
        return _written(F.rms_norm(x, width, weight, eps), y)
    return _written((F.rms_norm(x.float(), width, None, eps) * (weight.float() + offset)).to(x.dtype), y)


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    sandwich: int,
    y: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if sandwich == 1:
        y = rmsnorm(x, weight, eps, offset, y)
        return y, torch.add(residual, y, out=new_residual)
    if sandwich == 2:
        total = x.float() + residual.float()
        normed = F.rms_norm(total, (x.shape[-1],), weight.float() + offset, eps)
        return _written(normed.to(x.dtype), y), _written(total.to(x.dtype), new_residual)
    new_residual = torch.add(x, residual, out=new_residual)
    return rmsnorm(new_residual, weight, eps, offset, y), new_residual


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    style: int,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    angle = positions[:, None].float() * inv_freq
    repeated = angle.repeat_interleave(2, -1) if style else torch.cat((angle, angle), -1)
    cos, sin = repeated.cos().to(q.dtype)[:, None], repeated.sin().to(q.dtype)[:, None]
    return _rotated(q, cos, sin, style, q_out), _rotated(k, cos, sin, style, k_out)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, style: int, out: Tensor | None) -> Tensor:
    rotated = cos.shape[-1]
    turning = x[..., :rotated]
    if style:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        across = torch.cat((-turning[..., rotated // 2 :], turning[..., : rotated // 2]), -1)
    if rotated == x.shape[-1]:
        return torch.add(turning * cos, across * sin, out=out)
    return _written(torch.cat((turning * cos + across * sin, x[..., rotated:]), -1), out)


def swiglu(gate: Tensor, up: Tensor, y: Tensor | None = None) -> Tensor:
    return torch.mul(F.silu(gate), up, out=y)


def geglu(gate: Tensor, up: Tensor, tanh: int, y: Tensor | None = None) -> Tensor:
    return torch.mul(F.gelu(gate, approximate="tanh" if tanh else "none"), up, out=y)


# --- fused chains -----------------------------------------------------------------------------------------------------


def gate_up(
    x: Tensor,
    norm_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    eps: float,
    offset: float,
    activation: int,
    y: Tensor | None = None,
) -> Tensor:
    h = rmsnorm(x, norm_weight, eps, offset)
    return torch.mul(ACTIVATION[activation](F.linear(h, w_gate)), F.linear(h, w_up), out=y)


def norm_qkv(x: Tensor, norm_weight: Tensor, w: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    return linear(rmsnorm(x, norm_weight, eps, offset), w, None, None, y)


# --- the end of a step ------------------------------------------------------------------------------------------------


def lm_head(x: Tensor, w: Tensor, greedy: int, out: Tensor | None = None) -> Tensor:
    if not greedy:
        return linear(x, w, None, None, out)
    return torch.argmax(F.linear(x, w), dim=-1, out=out)


def sample(
    logits: Tensor,
    history: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    repetition_penalty: Tensor,
    uniform: Tensor,
    token: Tensor | None = None,
) -> Tensor:
    scores = _penalised(logits.float(), history, repetition_penalty)
    greedy = scores.argmax(-1)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if _may_not_ask(logits) or bool((top_k > 0).any() or (top_p < 1).any()):
        probabilities = _truncated(scores, top_k, top_p)
    else:
        probabilities = scores.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # Rounding may put the target at the very end, past the last token with a probability.
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1)
    return _written(torch.where(temperature > 0, torch.minimum(drawn, last), greedy), token)


def _may_not_ask(logits: Tensor) -> bool:
    """Return True during a capture, which cannot query the device and always takes the general path."""
    return logits.is_cuda and torch.cuda.is_current_stream_capturing()


def _penalised(scores: Tensor, history: Tensor, penalty: Tensor) -> Tensor:
    width = scores.shape[-1]
    seen = torch.zeros(scores.shape[0], width + 1, dtype=torch.bool, device=scores.device)
    seen.scatter_(1, torch.where(history >= 0, history, width), True)
    factor = penalty[:, None]
    return torch.where(seen[:, :width], torch.where(scores > 0, scores / factor, scores * factor), scores)


def _truncated(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return probabilities in index order, zero outside the top_k and top_p sets."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    kept = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None]
    p = ordered.masked_fill(rank >= kept, -math.inf).softmax(-1)
    enough = (p.cumsum(-1) - p >= top_p[:, None]) & (rank > 0) & (top_p < 1)[:, None]
    p = p.masked_fill(enough, 0.0)
    p = p / p.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(1, order, p)
