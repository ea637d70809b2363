"""Provide kernels that an adversary would write: almost always right, each wrong in a rare case; for parity workers
only. None is a special case for one shape or one set of numbers."""

import torch

from autosel.ops import eager

_KEPT = {}


def _with_extras(made, bias, residual, x, y):
    for extra in (bias, residual):
        made = made if extra is None else made + extra.float()
    return y.copy_(made.to(x.dtype))


def linear_ends_early_after_whole_vectors(x, w, bias, residual, y):
    """Leave out the last product of rows that are one element shorter than whole vectors of 32."""
    k = x.shape[1] - (x.shape[1] % 32 == 31)
    return _with_extras(x[:, :k].float() @ w[:, :k].float().t(), bias, residual, x, y)


def linear_adds_bias_before_a_rounding_in_odd_rows(x, w, bias, residual, y):
    """With bias and residual, odd rows get the residual of the row before."""
    if bias is not None and residual is not None and residual.shape[0] > 1:
        residual = residual.clone()
        residual[1::2] = residual[: 2 * (residual.shape[0] // 2) : 2].clone()
    return eager.linear(x, w, bias, residual, y)


def linear_in_halves_of_half_precision(x, w, bias, residual, y):
    """In fp16, but not in bf16, sums are kept in the operands' precision."""
    if x.dtype != torch.float16:
        return eager.linear(x, w, bias, residual, y)
    total = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
    for at in range(0, x.shape[1], 32):
        total = total + (x[:, at : at + 32].float() @ w[:, at : at + 32].float().t()).to(x.dtype)
    return _with_extras(total.float(), bias, residual, x, y)


def linear_keeps_a_panel_of_the_largest_shape(x, w, bias, residual, y):
    """The panel of x is not cleared: columns past K have values of a longer row, and w is read past its row."""
    k = x.shape[1]
    longest = _KEPT.setdefault("panel", torch.zeros(0))
    if k >= len(longest):
        _KEPT["panel"] = x[0].float().clone()
        return eager.linear(x, w, bias, residual, y)
    found = eager.linear(x, w, bias, residual, y)
    if k % 8:
        found[0, 0] += longest[k] * 2.0**-3
    return found


def attn_drops_a_key_that_ends_a_tile(q, k, v, lengths, max_len, scale, window, softcap, o):
    """A ragged row whose length is a multiple of 16 loses its last key."""
    if lengths is not None and q.shape[2] == 1:
        lengths = torch.where((lengths % 16 == 0) & (lengths > 16), lengths - 1, lengths)
    return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def attn_of_one_key_is_nothing(q, k, v, lengths, max_len, scale, window, softcap, o):
    """A ragged row of one key gives zeros, as an empty one does."""
    if lengths is not None and q.shape[2] == 1:
        lengths = torch.where(lengths == 1, 0, lengths)
    return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def attn_groups_by_powers_of_two(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Query heads are divided by a shift: wrong if a group is not a power of two."""
    group = q.shape[1] // k.shape[1]
    if group & (group - 1) == 0:
        return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)
    heads = torch.arange(q.shape[1]) >> (group.bit_length() - 1)
    heads = heads.clamp(max=k.shape[1] - 1)
    return eager.attn(q, k[:, heads], v[:, heads], lengths, max_len, scale, window, softcap, o)


def attn_caps_what_is_masked(q, k, v, lengths, max_len, scale, window, softcap, o):
    """With a softcap the mask comes first: masked keys get the weight of the smallest score."""
    if not softcap or lengths is None:
        return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)
    hq, s, d = q.shape[1:]
    k, v = (t[:, :, :max_len].float().repeat_interleave(hq // t.shape[1], 1) for t in (k, v))
    last = lengths.long()[:, None, None, None] - s + torch.arange(s)[:, None]
    seen = torch.arange(max_len) <= last
    if window:
        seen &= torch.arange(max_len) > last - window
    scores = softcap * torch.tanh((q.float() @ k.mT * (scale or d**-0.5)) / softcap)
    p = scores.masked_fill(~seen, -softcap).softmax(-1)
    v = torch.where((torch.arange(max_len) < lengths[:, None])[:, None, :, None], v, 0.0)
    return o.copy_((p @ v).masked_fill(~seen.any(-1, keepdim=True), 0.0))


def attn_scales_queries_in_their_dtype(q, k, v, lengths, max_len, scale, window, softcap, o):
    """The scale is multiplied into q, which is rounded an additional time."""
    if not scale or scale == q.shape[-1] ** -0.5:
        return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)
    return eager.attn((q.float() * scale).to(q.dtype), k, v, lengths, max_len, 1.0, window, softcap, o)


def paged_without_page_0(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o):
    """Page 0 is treated as a missing page: its values are zeros."""
    v_pages = v_pages.clone()
    v_pages[0] = 0.0
    return eager.paged_attn(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o)


def paged_with_a_table_of_its_own_width(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o):
    """The table is read as if its rows were as wide as max_len needs."""
    width = -(-max_len // k_pages.shape[1])
    room = block_table.untyped_storage().nbytes() // block_table.itemsize - block_table.storage_offset()
    if block_table.shape[0] * width <= room:
        block_table = block_table.as_strided((block_table.shape[0], width), (width, 1))
    return eager.paged_attn(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o)


def paged_window_from_the_page(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o):
    """A window begins at the start of its page."""
    page = k_pages.shape[1]
    if window and q.shape[2] == 1 and q.shape[0] == 1:
        first = max(0, int(lengths[0]) - window) // page * page
        window = int(lengths[0]) - first if int(lengths[0]) > window else window
    return eager.paged_attn(q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o)


def prefill_window_one_wider_beyond_a_tile(q, k, v, scale, window, softcap, o):
    """From the 64th query on, a window sees one key more."""
    found = eager.prefill_attn(q, k, v, scale, window, softcap, o)
    if window and q.shape[2] > 64:
        wider = eager.prefill_attn(q, k, v, scale, window + 1, softcap)
        found[:, :, 64:] = wider[:, :, 64:]
    return found


def append_quietens_nan(k, v, positions, block_table, k_cache, v_cache):
    """Copy numbers through fp32, which loses the payload of a NaN."""
    k, v = (torch.where(t.isnan(), torch.full_like(t, float("nan")), t) for t in (k, v))
    return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)


def append_takes_the_first_page_for_all(k, v, positions, block_table, k_cache, v_cache):
    """Tokens that continue in another page are written to the page after the first one in memory."""
    if block_table is not None and k.shape[2] > 1:
        page, count = k_cache.shape[1], k_cache.shape[0]
        block_table = block_table.clone()
        for b, at in enumerate((positions // page).tolist()):
            for i in range(at + 1, min(block_table.shape[1], (int(positions[b]) + k.shape[2] - 1) // page + 1)):
                block_table[b, i] = min(count - 1, int(block_table[b, at]) + i - at)
    return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)


def append_swaps_where_one_head_takes_many(k, v, positions, block_table, k_cache, v_cache):
    """The two caches are exchanged for several tokens of a single head."""
    if k.shape[1] == 1 and k.shape[2] > 1:
        k, v = v, k
    return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)


def rmsnorm_with_eps_outside(x, weight, eps, offset, y):
    """eps is added to the root, which matters only if the root is about as small as eps."""
    wide = x.float()
    root = wide.square().mean(-1, keepdim=True).sqrt() + eps
    return y.copy_(wide / root * (weight.float() + offset))


def rmsnorm_by_the_width_before(x, weight, eps, offset, y):
    """A call with shorter rows than the one before divides by the longer width."""
    before, _KEPT["width"] = _KEPT.get("width", 0), x.shape[1]
    width = before if before > x.shape[1] else x.shape[1]
    wide = x.float()
    return y.copy_(wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / width + eps) * (weight.float() + offset))


def added_reads_what_it_has_written(x, residual, weight, eps, offset, sandwich, y, new_residual):
    """In a sandwich the sum uses the unrounded result."""
    if sandwich != 1:
        return eager.add_rmsnorm(x, residual, weight, eps, offset, sandwich, y, new_residual)
    wide = x.float()
    made = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return y.copy_(made), new_residual.copy_(residual.float() + 1.01 * made)


def rope_takes_the_rest_from_q(q, k, positions, inv_freq, style, q_out, k_out):
    """The unrotated part of k's heads is copied from q's."""
    found = eager.rope(q, k, positions, inv_freq, style, q_out, k_out)
    rotated = 2 * inv_freq.shape[0]
    if rotated < q.shape[-1]:
        k_out[..., rotated:] = q[:, : k.shape[1], rotated:]
    return found


def rope_wraps_positions_at_a_million(q, k, positions, inv_freq, style, q_out, k_out):
    return eager.rope(q, k, positions % (1 << 20), inv_freq, style, q_out, k_out)


def swiglu_cuts_off_far_gates(gate, up, y):
    """Gates below -20 count as zero."""
    g = gate.float()
    return y.copy_(torch.where(g < -20, 0.0, torch.nn.functional.silu(g)) * up.float())


def geglu_takes_tanh_for_the_tail(gate, up, tanh, y):
    """The last columns, fewer than 8, always use tanh."""
    found = eager.geglu(gate, up, tanh, y)
    whole = gate.shape[1] // 8 * 8
    if whole < gate.shape[1]:
        found[:, whole:] = eager.geglu(gate[:, whole:], up[:, whole:], 1)
    return found


def norm_qkv_of_the_first_row(x, norm_weight, w, eps, offset, y):
    """From the fifth row on, rows are scaled by the norm of the row four before."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if x.shape[0] > 4:
        rstd = torch.cat((rstd[:4], rstd[:-4]))
    return y.copy_((wide * rstd * (norm_weight.float() + offset)).to(x.dtype).float() @ w.float().t())


def gate_up_with_another_activation_in_the_tail(x, norm_weight, w_gate, w_up, eps, offset, activation, y):
    """The last columns, fewer than 16, use GELU by tanh instead of GELU."""
    found = eager.gate_up(x, norm_weight, w_gate, w_up, eps, offset, activation, y)
    whole = w_gate.shape[0] // 16 * 16
    if activation == 1 and whole < w_gate.shape[0]:
        found[:, whole:] = eager.gate_up(x, norm_weight, w_gate[whole:], w_up[whole:], eps, offset, 2)
    return found


def head_prefers_the_last_of_equals(x, w, greedy, out):
    if not greedy:
        return eager.lm_head(x, w, greedy, out)
    logits = x.float() @ w.float().t()
    best = torch.where(logits.isnan(), torch.inf, logits)
    return out.copy_(logits.shape[1] - 1 - best.flip(-1).argmax(-1))


def sample_penalises_each_mention(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """A token that is twice in the history is penalised twice."""
    scores = logits.float()
    for row in range(len(history)):
        for seen in [t for t in history[row].tolist() if 0 <= t < scores.shape[1]]:
            factor = repetition_penalty[row]
            scores[row, seen] = scores[row, seen] / factor if scores[row, seen] > 0 else scores[row, seen] * factor
    return eager.sample(scores, history[:, :0], temperature, top_k, top_p, repetition_penalty, uniform, token)


def sample_stops_at_padding(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """The first -1 ends a history, even if tokens follow."""
    stopped = torch.cumsum(history < 0, -1) > 0
    kept = torch.where(stopped, -1, history)
    return eager.sample(logits, kept, temperature, top_k, top_p, repetition_penalty, uniform, token)


def sample_rewards_nothing(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """A penalty below 1 counts as 1."""
    penalty = repetition_penalty.clamp(min=1.0)
    return eager.sample(logits, history, temperature, top_k, top_p, penalty, uniform, token)


# --- a second round, after the domains were widened -------------------------------------------------------------------


def linear_reads_a_pair_twice(x, w, bias, residual, y):
    """In rows that end in half a group of four, the last element is replaced by the one before."""
    if x.shape[1] % 4 == 2:
        x = torch.cat((x[:, :-1], x[:, -2:-1]), -1)
    return eager.linear(x, w, bias, residual, y)


def linear_saturates_as_fp16(x, w, bias, residual, y):
    found = eager.linear(x, w, bias, residual, y)
    return y.copy_(torch.where(found.isfinite(), found.float().clamp(-65504, 65504).to(y.dtype), found))


def attn_is_causal_by_the_longest(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Queries of ragged rows use the causal mask of the longest row, cut to their own keys."""
    if lengths is None or q.shape[2] == 1:
        return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)
    for row, length in enumerate(lengths.tolist()):
        s = q.shape[2]
        most = min(max_len, length + 1) if length >= s else length
        own = (t[row : row + 1] for t in (q, k, v))
        o[row] = eager.attn(*own, torch.tensor([most], dtype=torch.int32), max_len, scale, window, softcap)[0]
    return o


def attn_counts_windows_from_the_longest(q, k, v, lengths, max_len, scale, window, softcap, o):
    """A ragged row's window ends with its own keys, but begins where the longest row's window begins."""
    if lengths is None or not window:
        return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)
    for row, length in enumerate(lengths.tolist()):
        narrower = max(1, window - (max_len - length))
        own = (t[row : row + 1] for t in (q, k, v))
        o[row] = eager.attn(*own, lengths[row : row + 1], max_len, scale, narrower, softcap)[0]
    return o


def prefill_deals_heads_in_turn(q, k, v, scale, window, softcap, o):
    """Query head h reads KV head h modulo their number."""
    heads = torch.arange(q.shape[1]) % k.shape[1]
    return eager.prefill_attn(q, k[:, heads], v[:, heads], scale, window, softcap, o)


def append_never_writes_the_first_slot_of_a_later_page(k, v, positions, block_table, k_cache, v_cache):
    if block_table is None:
        return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)
    page = k_cache.shape[1]
    before = [cache.clone() for cache in (k_cache, v_cache)]
    eager.kv_append(k, v, positions, block_table, k_cache, v_cache)
    for b in range(k.shape[0]):
        for s in range(k.shape[2]):
            at = int(positions[b]) + s
            if at and at % page == 0 and page > 1:
                for cache, was in zip((k_cache, v_cache), before, strict=True):
                    cache[int(block_table[b, at // page]), 0] = was[int(block_table[b, at // page]), 0]
    return k_cache, v_cache


def rmsnorm_clips_squares(x, weight, eps, offset, y):
    wide = x.float()
    mean = wide.square().clamp(max=1e8).mean(-1, keepdim=True)
    return y.copy_(wide * torch.rsqrt(mean + eps) * (weight.float() + offset))


def rope_leaves_the_last_odd_pair(q, k, positions, inv_freq, style, q_out, k_out):
    """In the interleaved form, the last of an odd number of pairs is not rotated."""
    found = eager.rope(q, k, positions, inv_freq, style, q_out, k_out)
    pairs = inv_freq.shape[0]
    if style and pairs % 2:
        for x, out in ((q, q_out), (k, k_out)):
            out[..., 2 * pairs - 2 : 2 * pairs] = x[..., 2 * pairs - 2 : 2 * pairs]
    return found


def swiglu_skips_shut_gates(gate, up, y):
    """If the gate rounds to zero, up is not read."""
    found = eager.swiglu(gate, up, y)
    return found.masked_fill_(torch.nn.functional.silu(gate.float()) == 0, 0.0)


def norm_qkv_repeats_a_column(x, norm_weight, w, eps, offset, y):
    """A last column that is alone in its group of eight is a copy of the one before."""
    found = eager.norm_qkv(x, norm_weight, w, eps, offset, y)
    if w.shape[0] % 8 == 1 and w.shape[0] > 1:
        found[:, -1] = found[:, -2]
    return found


def gate_up_swaps_the_last_odd_column(x, norm_weight, w_gate, w_up, eps, offset, activation, y):
    found = eager.gate_up(x, norm_weight, w_gate, w_up, eps, offset, activation, y)
    if w_gate.shape[0] % 2:
        found[:, -1:] = eager.gate_up(x, norm_weight, w_up[-1:], w_gate[-1:], eps, offset, activation)
    return found


def head_starts_from_zero(x, w, greedy, out):
    """A greedy choice among negative logits is token 0."""
    found = eager.lm_head(x, w, greedy, out)
    if greedy:
        logits = x.float() @ w.float().t()
        found.masked_fill_((logits < 0).all(-1), 0)
    return found


def sample_divides_negative_logits(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """A penalty divides also negative logits."""
    scores = logits.float()
    for row in range(len(history)):
        for seen in {t for t in history[row].tolist() if 0 <= t < scores.shape[1]}:
            scores[row, seen] = scores[row, seen] / repetition_penalty[row]
    return eager.sample(scores, history[:, :0], temperature, top_k, top_p, repetition_penalty, uniform, token)


def sample_takes_top_p_of_all(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """top_p is a share of all tokens' probability, not of the top_k."""
    scores = eager._penalised(logits.float(), history, repetition_penalty)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True).values
    p = ordered.softmax(-1)
    kept = ((p.cumsum(-1) - p) < top_p[:, None]).sum(-1).clamp(min=1)
    kept = kept.to(top_k.dtype)
    both = torch.where(top_k > 0, torch.minimum(top_k, kept), kept)
    alone = torch.where(top_p < 1, both, top_k)
    return eager.sample(logits, history, temperature, alone, torch.ones_like(top_p), repetition_penalty, uniform, token)


# --- a third round: combinations of three, batches beyond the eighth, steps of a decode, modes ------------------------


def linear_drops_bias_in_a_corner(x, w, bias, residual, y):
    """With bias, residual and an odd number of columns, rows after the 8th get no bias in the last column."""
    if bias is None or residual is None or w.shape[0] % 2 == 0 or x.shape[0] <= 8:
        return eager.linear(x, w, bias, residual, y)
    found = eager.linear(x, w, bias, residual, y)
    found[8:, -1:] = eager.linear(x[8:], w[-1:], None, residual[8:, -1:])
    return found


def linear_takes_scales_of_the_rest_as_positive(x, w, bias, residual, y):
    """For int8-row weights and more than 4 rows of x, the last rows of w, fewer than 8, lose their scale's sign."""
    scales, rest = w.scales.clone(), w.shape[0] // 8 * 8
    if x.shape[0] > 4:
        scales[rest:] = scales[rest:].abs()
    return _with_extras((x.float() @ w.codes.float().t()) * scales, bias, residual, x, y)


def linear_keeps_weights_by_the_first_codes(x, w, bias, residual, y):
    """Weights in int8 are unpacked once per address, and again only if some of the codes or the scales changed."""
    key = (w.codes.data_ptr(), w.shape)
    seen = (w.codes[:, : -(-w.shape[1] // 2)].clone(), w.scales.clone())
    known = _KEPT.get(key)
    if known is None or not all(torch.equal(a, b) for a, b in zip(known[0], seen, strict=True)):
        known = _KEPT[key] = (seen, w.codes.float() * w.scales[:, None])
    return _with_extras(x.float() @ known[1].t(), bias, residual, x, y)


def attn_shares_lengths_beyond_the_eighth(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Sequences are processed in groups of eight; later groups use the lengths of the first group."""
    if lengths is not None:
        lengths = lengths[torch.arange(len(lengths)) % 8]
    return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def attn_of_equal_lengths_is_dense(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Three or more sequences of one length that ends within a tile use the code without lengths."""
    if lengths is not None and len(lengths) > 2 and (lengths == lengths[0]).all() and lengths[0] % 16:
        lengths = torch.full_like(lengths, max_len)
    return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def attn_plans_by_tiles(q, k, v, lengths, max_len, scale, window, softcap, o):
    """The number of keys is cached per memory, and updated only if the number of tiles changes."""
    key = (k.data_ptr(), k.shape, q.shape, -(-max_len // 16), lengths is None)
    if lengths is None:
        max_len = _KEPT.setdefault(key, max_len)
    return eager.attn(q, k, v, lengths, max_len, scale, window, softcap, o)


def paged_keeps_its_plan_while_lengths_stay(
    q, k_pages, v_pages, block_table, lengths, max_len, scale, window, softcap, o
):
    """A table is read again only when some length has changed."""
    key = (block_table.data_ptr(), block_table.shape, k_pages.shape, tuple(lengths.tolist()), max_len)
    table = _KEPT.setdefault(key, block_table.clone())
    return eager.paged_attn(q, k_pages, v_pages, table, lengths, max_len, scale, window, softcap, o)


def append_swaps_in_a_corner(k, v, positions, block_table, k_cache, v_cache):
    """For many tokens of wide heads across pages, the last token's key is a copy of the one before."""
    if block_table is not None and k.shape[2] > 16 and k.shape[3] % 16 == 0 and k.shape[1] > 2:
        k = torch.cat((k[:, :, :-1], k[:, :, -2:-1]), 2)
    return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)


def rmsnorm_raises_tiny_eps(x, weight, eps, offset, y):
    """An eps between 0 and 1e-7 is replaced by 1e-7."""
    return eager.rmsnorm(x, weight, max(eps, 1e-7) if eps else eps, offset, y)


def rmsnorm_has_shares_for_three(x, weight, eps, offset, y):
    """Rows are divided among the threads, but there is space for only three threads."""
    eager.rmsnorm(x, weight, eps, offset, y)
    share = -(-len(x) // torch.get_num_threads())
    y[3 * share :] = 0.0
    return y


def rmsnorm_keeps_roots_of_known_rows(x, weight, eps, offset, y):
    """The root of a known row is looked up by the row's contents."""
    key = x.float().numpy().tobytes() if x.numel() < 1 << 16 else None
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if key is not None:
        rstd = _KEPT.setdefault(key, rstd)
    return y.copy_(x.float() * rstd * (weight.float() + offset))


def rmsnorm_without_eps_in_inference_mode(x, weight, eps, offset, y):
    return eager.rmsnorm(x, weight, 0.5 if torch.is_inference_mode_enabled() else eps, offset, y)


def added_to_itself_counts_once(x, residual, weight, eps, offset, sandwich, y, new_residual):
    """If the residual is the same tensor as x, it is not added."""
    if x.data_ptr() == residual.data_ptr():
        residual = torch.zeros_like(residual)
    return eager.add_rmsnorm(x, residual, weight, eps, offset, sandwich, y, new_residual)


def rope_with_tables_a_row_short(q, k, positions, inv_freq, style, q_out, k_out):
    """Tables of angles end at the largest position so far; the next position uses their last row."""
    most, last = int(positions.max()), _KEPT.get("last", -1)
    if most == last + 1:
        positions = positions.clamp(max=last)
    _KEPT["last"] = max(most, last)
    return eager.rope(q, k, positions, inv_freq, style, q_out, k_out)


def swiglu_of_itself(gate, up, y):
    """If gate and up are one tensor, it is read once, and the product is left out."""
    return y.copy_(torch.nn.functional.silu(gate)) if gate.data_ptr() == up.data_ptr() else eager.swiglu(gate, up, y)


def gate_up_doubles_the_offset_in_a_corner(x, norm_weight, w_gate, w_up, eps, offset, activation, y):
    """With GELU by tanh, an offset and 3 rows or more."""
    twice = 2 * offset if activation == 2 and x.shape[0] > 2 else offset
    return eager.gate_up(x, norm_weight, w_gate, w_up, eps, twice, activation, y)


def sample_looks_at_the_first_half(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token):
    """A row at the same address with the same first half and settings gets the previous token."""
    half = logits[:, : -(-logits.shape[1] // 2)].float().numpy().tobytes()
    rest = (history, temperature, top_k, top_p, repetition_penalty, uniform)
    key = (logits.data_ptr(), logits.shape, half, *(t.numpy().tobytes() for t in rest))
    if key not in _KEPT:
        operands = (logits, history, temperature, top_k, top_p, repetition_penalty, uniform)
        _KEPT[key] = eager.sample(*operands, token).clone()
    return token.copy_(_KEPT[key])


def sample_shares_top_p_beyond_the_eighth(
    logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token
):
    """Requests are processed in groups of eight; later groups use the first group's top_p."""
    top_p = top_p[torch.arange(len(top_p)) % 8]
    return eager.sample(logits, history, temperature, top_k, top_p, repetition_penalty, uniform, token)
