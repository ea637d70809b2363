"""Provide right kernels that work in unusual ways, at least two an op: other orders of sums, other forms of the same
function, other blocks, threads and caches."""

import threading

import torch

LOG2E = 1.4426950408889634


def _with_extras(made, bias, residual, y):
    for extra in (bias, residual):
        made = made if extra is None else made + extra.to(made.dtype)
    return y.copy_(made.to(y.dtype))


def linear_split_k(x, w, bias, residual, y):
    """Four partial sums over K, added last."""
    parts = zip(x.float().chunk(4, -1), w.float().chunk(4, -1), strict=True)
    return _with_extras(torch.stack([a @ b.t() for a, b in parts]).sum(0), bias, residual, y)


def linear_kahan(x, w, bias, residual, y):
    total = torch.zeros(x.shape[0], w.shape[0])
    lost = torch.zeros_like(total)
    for a, b in zip(x.float().split(16, -1), w.float().split(16, -1), strict=True):
        step = a @ b.t() - lost
        more = total + step
        lost = torch.where(more.isfinite(), (more - total) - step, 0.0)
        total = more
    return _with_extras(total, bias, residual, y)


def _in_a_tree(terms):
    """Add neighbours, level by level: [..., K] to [..., 1]."""
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.cat((terms, torch.zeros_like(terms[..., :1])), -1)
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms


def linear_pairwise(x, w, bias, residual, y):
    """A tree of sums, each product rounded to fp32."""
    terms = x.float()[:, None] * w.float()
    return _with_extras(_in_a_tree(terms)[..., 0], bias, residual, y)


def linear_in_double(x, w, bias, residual, y):
    return _with_extras(x.double() @ w.double().t(), bias, residual, y)


def linear_backwards(x, w, bias, residual, y):
    """The last product first, the last rows of w first."""
    a, b = x.float().flip(-1), w.float().flip(-1)
    made = torch.empty(x.shape[0], w.shape[0])
    for start in range((w.shape[0] - 1) // 24 * 24, -1, -24):
        made[:, start : start + 24] = a @ b[start : start + 24].t()
    return _with_extras(made, bias, residual, y)


def linear_transposed(x, w, bias, residual, y):
    return _with_extras((w.float().contiguous() @ x.float().t().contiguous()).t(), bias, residual, y)


def linear_threads_per_call(x, w, bias, residual, y):
    """Two threads, started and joined in each call, each half of the columns."""
    made, middle = torch.empty(x.shape[0], w.shape[0]), w.shape[0] // 2

    def half(columns):
        made[:, columns] = x.float() @ w[columns].float().t()

    threads = [threading.Thread(target=half, args=(s,)) for s in (slice(0, middle), slice(middle, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _with_extras(made, bias, residual, y)


def linear_row_by_row(x, w, bias, residual):
    """Allocates its result, a dot product at a time."""
    wide = x.float()
    made = torch.stack([(wide * row.float()).sum(-1) for row in w], -1)
    return _with_extras(made, bias, residual, torch.empty(made.shape, dtype=x.dtype))


def _seen(ends, s, keys, window):
    query = (ends[:, None] - s + torch.arange(s))[:, None, :, None]
    seen = (keys <= query) & (query >= 0)
    return seen & (keys > query - window) if window else seen


def _scores(q, k, scale, softcap):
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _tile(q, k, v, ends, scale, window, softcap, start, end, dtype=torch.float32):
    """Return which keys from `start` to `end` are seen, their scores and their values."""
    seen = _seen(ends, q.shape[2], torch.arange(start, end), window)
    k, v = (t[:, :, start:end].to(dtype).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    v = torch.where(seen.any(-2)[..., None], v, 0.0)  # masked values may be anything
    return seen, _scores(q.to(dtype), k, scale, softcap).masked_fill(~seen, -torch.inf), v


def _online(q, k, v, ends, scale, window, softcap, tiles, exp=torch.exp, p_dtype=torch.float32):
    """The running maximum and sum of flash attention, over tiles of keys in this order; P is stored in `p_dtype`."""
    b, hq, s, d = q.shape
    peak, total, made = torch.full((b, hq, s, 1), -torch.inf), torch.zeros(b, hq, s, 1), torch.zeros(b, hq, s, d)
    for start, end in tiles:
        seen, scores, value = _tile(q, k, v, ends, scale, window, softcap, start, end)
        top = torch.maximum(peak, scores.amax(-1, keepdim=True))
        keep = torch.where(peak == -torch.inf, 0.0, exp(peak - top))
        p = torch.where(seen, exp(scores - top), 0.0)
        peak, total, made = top, total * keep + p.sum(-1, keepdim=True), made * keep + p.to(p_dtype).float() @ value
    return made / torch.where(total == 0, 1.0, total)


def _ends(q, lengths, most):
    return torch.full((q.shape[0],), most) if lengths is None else lengths.long()


def _tiles(most, size):
    return [(start, min(start + size, most)) for start in range(0, most, size)]


def _attn_by_tiles(size, reverse=False, exp=torch.exp):
    def kernel(q, k, v, lengths, max_len, scale, window, softcap, o):
        tiles = _tiles(max_len, size)
        tiles = tiles[::-1] if reverse else tiles
        return o.copy_(_online(q, k, v, _ends(q, lengths, max_len), scale, window, softcap, tiles, exp))

    return kernel


attn_tiles_of_7 = _attn_by_tiles(7)
attn_tiles_of_64_backwards = _attn_by_tiles(64, reverse=True)
attn_by_powers_of_two = _attn_by_tiles(48, exp=lambda x: torch.exp2(x * LOG2E))


def _attend(q, k, v, ends, scale, window, softcap, dtype):
    """Compute all scores at once, in `dtype`."""
    seen, scores, v = _tile(q, k, v, ends, scale, window, softcap, 0, k.shape[2], dtype)
    live = seen.any(-1, keepdim=True)
    p = torch.where(live, scores, 0.0).softmax(-1)
    return (p @ v).masked_fill(~live, 0.0)


def attn_in_double(q, k, v, lengths, max_len, scale, window, softcap, o):
    ends = _ends(q, lengths, max_len)
    return o.copy_(_attend(q, k[:, :, :max_len], v[:, :, :max_len], ends, scale, window, softcap, torch.float64))


def attn_head_by_head(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Each query head alone, the last first, on copies of its keys."""
    group, ends = q.shape[1] // k.shape[1], _ends(q, lengths, max_len)
    for head in reversed(range(q.shape[1])):
        near, value = (t[:, head // group : head // group + 1, :max_len].contiguous() for t in (k, v))
        o[:, head] = _attend(q[:, head : head + 1], near, value, ends, scale, window, softcap, torch.float32)[:, 0]
    return o


def attn_split_over_keys(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Compute three parts of the keys separately, and join them by their sums."""
    ends, parts = _ends(q, lengths, max_len), []
    for start, end in _tiles(max_len, max(1, -(-max_len // 3))):
        seen, scores, value = _tile(q, k, v, ends, scale, window, softcap, start, end)
        peak = scores.amax(-1, keepdim=True)
        p = torch.where(seen, (scores - peak).exp(), 0.0)
        parts.append((peak, p.sum(-1, keepdim=True), p @ value))
    top = torch.stack([peak for peak, _, _ in parts]).amax(0)
    share = [torch.where(peak == -torch.inf, 0.0, (peak - top).exp()) for peak, _, _ in parts]
    total = sum(a * t for a, (_, t, _) in zip(share, parts, strict=True))
    made = sum(a * m for a, (_, _, m) in zip(share, parts, strict=True))
    return o.copy_(made / torch.where(total == 0, 1.0, total))


def _gathered(pages, table, lengths, max_len):
    """Return [B, Hkv, keys, D]: the used pages one after the other, with page 0 for unused ones."""
    size = pages.shape[1]
    count = -(-max_len // size)
    used = torch.arange(count) * size < lengths[:, None]
    rows = pages[torch.where(used, table[:, :count], 0)].flatten(1, 2).transpose(1, 2)
    beyond = torch.arange(rows.shape[2]) >= lengths[:, None]
    return rows.masked_fill(beyond[:, None, :, None], 0.0)[:, :, :max_len]


def paged_by_pages(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o):
    """Gathered, then page by page, the last first."""
    k, v = (_gathered(pages, block_table, lengths, max_len) for pages in (k_pages, v_pages))
    tiles = _tiles(max_len, k_pages.shape[1])[::-1]
    return o.copy_(_online(q, k, v, lengths.long(), scale, window, softcap, tiles))


def paged_in_double(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap):
    k, v = (_gathered(pages, block_table, lengths, max_len) for pages in (k_pages, v_pages))
    return _attend(q, k, v, lengths.long(), scale, window, softcap, torch.float64).to(q.dtype)


def prefill_query_by_query(q, k, v, scale, window, softcap, o):
    """Each query on the keys before it, the last first."""
    for at in reversed(range(q.shape[2])):
        first = max(0, at + 1 - window) if window else 0
        ends = torch.full((q.shape[0],), at + 1 - first)
        some = (t[:, :, first : at + 1] for t in (k, v))
        o[:, :, at : at + 1] = _attend(q[:, :, at : at + 1], *some, ends, scale, 0, softcap, torch.float32)
    return o


def prefill_by_tiles(q, k, v, scale, window, softcap, o):
    ends = torch.full((q.shape[0],), q.shape[2])
    tiles = _tiles(q.shape[2], 24)[::-1]
    return o.copy_(_online(q, k, v, ends, scale, window, softcap, tiles, exp=lambda x: torch.exp2(x * LOG2E)))


def _slots(k, positions, block_table, cache):
    """(row or page, slot) of each new token, sequence by sequence."""
    for b in range(k.shape[0]):
        for s in range(k.shape[2]):
            slot = int(positions[b]) + s
            page = cache.shape[1]
            yield b, s, *((b, slot) if block_table is None else (int(block_table[b, slot // page]), slot % page))


def append_backwards(k, v, positions, block_table, k_cache, v_cache):
    """Token by token, the last first; v before k."""
    for b, s, outer, slot in reversed(list(_slots(k, positions, block_table, k_cache))):
        for cache, new in ((v_cache, v), (k_cache, k)):
            (cache[outer, :, slot] if block_table is None else cache[outer, slot]).copy_(new[b, :, s])
    return k_cache, v_cache


def append_as_bits(k, v, positions, block_table, k_cache, v_cache):
    """Copy bits as integers, head by head."""
    kind = {2: torch.int16, 4: torch.int32}[k.itemsize]
    for b, s, outer, slot in _slots(k, positions, block_table, k_cache):
        for cache, new in ((k_cache.view(kind), k.view(kind)), (v_cache.view(kind), v.view(kind))):
            for head in range(k.shape[1]):
                place = cache[outer, head, slot] if block_table is None else cache[outer, slot, head]
                place.copy_(new[b, head, s])
    return k_cache, v_cache


def _normalised(x, weight, offset, rstd):
    return x * rstd * (weight.to(x.dtype) + offset)


def rmsnorm_newton(x, weight, eps, offset, y):
    """Refine a 12-bit root, as an instruction gives it, by one Newton step; for infinity return 0 without a step."""
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True) + eps
    coarse = (torch.rsqrt(mean).view(torch.int32) & -2048).view(torch.float32)
    better = coarse * (1.5 - 0.5 * mean * coarse * coarse)
    return y.copy_(_normalised(wide, weight, offset, torch.where(mean == torch.inf, coarse, better)))


def rmsnorm_by_halves(x, weight, eps, offset, y):
    """Sums of neighbours, level by level."""
    wide = x.float()
    mean = _in_a_tree(wide.square()) / x.shape[-1]
    return y.copy_(_normalised(wide, weight, offset, 1 / torch.sqrt(mean + eps)))


def rmsnorm_element_of_a_vector(x, weight, eps, offset):
    """Allocate; divide by the norm instead of multiplying by its inverse, in double."""
    wide = x.double()
    norm = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).sqrt()
    return (wide / norm * (weight.double() + offset)).to(x.dtype)


def rmsnorm_flushing(x, weight, eps, offset, y):
    """Subnormals count as zero, in operands and result."""
    tiny = torch.finfo(x.dtype).smallest_normal
    x, weight = (torch.where(t.abs() < tiny, torch.zeros_like(t), t) for t in (x, weight))
    wide = x.float()
    made = _normalised(wide, weight, offset, torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(y.dtype)
    return y.copy_(torch.where(made.abs() < tiny, torch.zeros_like(made), made))


def _added(x, residual, weight, eps, offset, sandwich, dtype):
    if sandwich == 1:
        wide = x.to(dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = _normalised(wide, weight, offset, rstd).to(x.dtype)
        return y, (residual.to(dtype) + y.to(dtype)).to(x.dtype)
    total = x.to(dtype) + residual.to(dtype)
    new = total.to(x.dtype)
    wide = total if sandwich == 2 else new.to(dtype)
    return _normalised(wide, weight, offset, torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), new


def added_in_double(x, residual, weight, eps, offset, sandwich, y, new_residual):
    made, new = _added(x, residual, weight, eps, offset, sandwich, torch.float64)
    return y.copy_(made), new_residual.copy_(new)


def added_row_by_row(x, residual, weight, eps, offset, sandwich):
    """Allocates; one row after the other, from the last."""
    rows = [
        _added(x[i : i + 1], residual[i : i + 1], weight, eps, offset, sandwich, torch.float32)
        for i in reversed(range(x.shape[0]))
    ]
    return torch.cat([y for y, _ in rows[::-1]]), torch.cat([new for _, new in rows[::-1]])


_TABLES = {}


def _turned(x, cos, sin, style):
    rotated, wide = 2 * cos.shape[-1], x.to(cos.dtype)
    cos, sin = cos[:, None], sin[:, None]
    out = wide.clone()
    a, b = (wide[..., :rotated:2], wide[..., 1:rotated:2]) if style else wide[..., :rotated].chunk(2, -1)
    one, other = a * cos - b * sin, b * cos + a * sin
    if style:
        out[..., :rotated:2], out[..., 1:rotated:2] = one, other
    else:
        out[..., :rotated] = torch.cat((one, other), -1)
    return out


def rope_with_tables(q, k, positions, inv_freq, style, q_out, k_out):
    """Cache sines and cosines by position and frequencies."""
    key = (tuple(positions.tolist()), tuple(inv_freq.tolist()))
    if key not in _TABLES:
        if len(_TABLES) > 64:
            _TABLES.clear()
        angle = positions.double()[:, None] * inv_freq.double()
        _TABLES[key] = (angle.cos().float(), angle.sin().float())
    cos, sin = _TABLES[key]
    return q_out.copy_(_turned(q, cos, sin, style)), k_out.copy_(_turned(k, cos, sin, style))


def rope_in_double(q, k, positions, inv_freq, style):
    """Allocates; angles are brought below a turn first."""
    angle = torch.remainder(positions.double()[:, None] * inv_freq.double(), 2 * torch.pi)
    return tuple(_turned(x, angle.cos(), angle.sin(), style).to(x.dtype) for x in (q, k))


def swiglu_by_powers_of_two(gate, up, y):
    g = gate.float()
    return y.copy_(g / (1 + torch.exp2(-g * LOG2E)) * up.float())


def swiglu_in_double(gate, up):
    return (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(gate.dtype)


def swiglu_columns_backwards(gate, up, y):
    for at in range((gate.shape[1] - 1) // 40 * 40, -1, -40):
        g, u = (t[:, at : at + 40].float().contiguous() for t in (gate, up))
        y[:, at : at + 40] = torch.nn.functional.silu(g) * u
    return y


def _gelu(g, tanh):
    if tanh:
        return g * torch.sigmoid(2 * 0.7978845608028654 * (g + 0.044715 * g**3))
    return 0.5 * g * torch.erfc(-g * 0.5**0.5)


def geglu_by_other_functions(gate, up, tanh, y):
    """Use a sigmoid instead of tanh, and erfc instead of erf."""
    return y.copy_(_gelu(gate.double(), tanh) * up.double())


def geglu_row_by_row(gate, up, tanh, y):
    for i in reversed(range(gate.shape[0])):
        g = gate[i].float()
        y[i] = torch.nn.functional.gelu(g, approximate="tanh" if tanh else "none") * up[i].float()
    return y


def _unit(x, norm_weight, eps, offset, dtype=torch.float32):
    wide = x.to(dtype)
    return _normalised(wide, norm_weight, offset, torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


def norm_qkv_unrounded(x, norm_weight, w, eps, offset, y):
    """The normalised row is never rounded; sums in double."""
    return y.copy_(_unit(x, norm_weight, eps, offset, torch.float64) @ w.double().t())


def norm_qkv_in_parts(x, norm_weight, w, eps, offset, y):
    """Round the row as the eager op does; compute columns in blocks of 24, with sums in two halves."""
    h = _unit(x, norm_weight, eps, offset).to(x.dtype).float()
    for at in range(0, w.shape[0], 24):
        parts = zip(h.chunk(2, -1), w[at : at + 24].float().chunk(2, -1), strict=True)
        y[:, at : at + 24] = sum(a @ b.t() for a, b in parts)
    return y


_ACTIVATION = (
    torch.nn.functional.silu,
    torch.nn.functional.gelu,
    lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
)


def gate_up_as_one_product(x, norm_weight, w_gate, w_up, eps, offset, activation, y):
    """Multiply by one matrix of both weights, without a rounding in between."""
    both = _unit(x, norm_weight, eps, offset) @ torch.cat((w_gate, w_up)).float().t()
    gate, up = both.chunk(2, -1)
    return y.copy_(_ACTIVATION[activation](gate) * up)


def gate_up_interleaved(x, norm_weight, w_gate, w_up, eps, offset, activation):
    """Allocate; interleave the rows of both weights, in double."""
    both = torch.stack((w_gate, w_up), 1).flatten(0, 1).double()
    found = (_unit(x, norm_weight, eps, offset, torch.float64) @ both.t()).unflatten(-1, (-1, 2))
    return (_ACTIVATION[activation](found[..., 0]) * found[..., 1]).to(x.dtype)


def head_by_blocks(x, w, greedy, out):
    """Compute the vocabulary in blocks from the last; the first of equal logits wins."""
    best, at = torch.full((x.shape[0],), -torch.inf), torch.zeros(x.shape[0], dtype=torch.int64)
    for start in range((w.shape[0] - 1) // 40 * 40, -1, -40):
        logits = x.float() @ w[start : start + 40].float().t()
        if not greedy:
            out[:, start : start + 40] = logits
            continue
        value, index = logits.max(-1)
        better = (value >= best) | value.isnan()
        best, at = torch.where(better, value, best), torch.where(better, index + start, at)
    return out.copy_(at) if greedy else out


def head_in_double(x, w, greedy):
    logits = x.double() @ w.double().t()
    return logits.argmax(-1) if greedy else logits.to(x.dtype)


def _weights(scores, temperature, top_k, top_p):
    """Return the weights of the tokens of one row that may be drawn, in double."""
    width = scores.shape[0]
    scaled = scores.double() / (float(temperature) if temperature > 0 else 1.0)
    order = torch.sort(scaled, descending=True, stable=True).indices
    kept = order[: int(top_k)] if 0 < int(top_k) < width else order
    p = torch.softmax(scaled[kept], -1)
    if float(top_p) < 1:
        enough = int((p.cumsum(-1) < float(top_p)).sum()) + 1
        kept, p = kept[:enough], p[:enough]
    found = torch.zeros(width, dtype=torch.float64)
    found[kept] = p
    return found


def sample_row_by_row(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    for row in reversed(range(logits.shape[0])):
        scores, penalty = logits[row].float().clone(), float(repetition_penalty[row])
        for seen in {int(t) for t in history[row] if t >= 0}:
            scores[seen] = scores[seen] / penalty if scores[seen] > 0 else scores[seen] * penalty
        if not temperature[row] > 0:
            token[row] = scores.argmax()
            continue
        p = _weights(scores, temperature[row], top_k[row], top_p[row])
        reached = p.cumsum(-1)
        drawn = int((reached <= float(uniform[row]) * float(reached[-1])).sum())
        token[row] = min(drawn, int(p.nonzero()[-1]))
    return token


def sample_all_rows(logits, history, temperature, top_k, top_p, repetition_penalty, uniform):
    """Allocates; scores in double."""
    from autosel.ops import eager

    scores = eager._penalised(logits.double(), history, repetition_penalty.double())
    scores = torch.where(
        (temperature > 0)[:, None], scores / torch.where(temperature > 0, temperature, 1.0)[:, None], scores
    )
    p = torch.stack([_weights(s, torch.ones(()), k, t) for s, k, t in zip(scores, top_k, top_p, strict=True)])
    reached = p.cumsum(-1)
    drawn = (reached <= uniform.double()[:, None] * reached[:, -1:]).sum(-1)
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
    return torch.where(temperature > 0, torch.minimum(drawn, last), scores.argmax(-1))


ALLOCATING = (
    "linear_row_by_row", "paged_in_double", "rmsnorm_element_of_a_vector", "added_row_by_row", "rope_in_double",
    "swiglu_in_double", "gate_up_interleaved", "head_in_double", "sample_all_rows",
)  # fmt: skip
