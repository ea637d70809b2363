"""Prove attention, and serve the calls that the ops describe; others go to the model's own implementation."""

from __future__ import annotations

import copy
import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from autosel.errors import BadArguments
from autosel.integrations.transformers.forward import with_globals
from autosel.integrations.transformers.masks import by_spans, look
from autosel.integrations.transformers.proof import (
    Forward,
    Names,
    NotReplaceable,
    deciding,
    drawn_tensor,
    names_used,
    needs_own_code,
    refuse_replaced,
    refuse_wrong_kernel,
    why_wrong,
)

# Arguments that no form of transformers' attention reads, or that a mask of one query already expresses.
UNREAD = {"position_ids", "cache_position", "use_cache", "return_dict", "labels", "num_items_in_batch", "seq_idx"}
UNREAD |= {"output_hidden_states", "output_router_logits", "logits_to_keep"}
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # only FlashAttention reads them


def prove_attention(module: Any) -> Names:
    """Check that the module's own eager form computes the op, and that the kernel that serves the op is correct."""
    refuse_replaced(module)
    if not getattr(module, "is_causal", False):
        raise NotReplaceable("it is not causal")
    used, dtype = names_used(module), next(module.parameters()).dtype
    eager = [name for name in used if name.endswith("eager_attention_forward")]
    if len(eager) != 1:
        raise NotReplaceable(f"{type(module).__name__} has {len(eager)} eager forms to compare with, not one")
    q, k, v, rest = _heads_of(module)
    more = {"softcap": rest["softcap"]} if rest["softcap"] else {}
    own, _ = used[eager[0]](module, q, k, v, None, scaling=module.scaling, dropout=0.0, **more)
    wrong = why_wrong("attn", {"q": q, "k": k, "v": v, **rest}, own.transpose(1, 2).contiguous())
    if wrong:
        raise NotReplaceable(f"{type(module).__name__} computes something else than attention ({wrong})")
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), **rest}
    refuse_wrong_kernel("attn", inputs, deciding("attn")(*inputs.values()))
    asking = functools.partial(_attend, used[eager[0]], "eager")
    names = {eager[0]: asking, "ALL_ATTENTION_FUNCTIONS": _asking(used["ALL_ATTENTION_FUNCTIONS"])}
    with_globals(type(module).forward, names)  # or a decorator is in the way
    return names


def _heads_of(module: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return q, k, v of one query over 20 keys in the module's heads, fp32, and the op's other arguments."""
    config, head = module.config, int(module.head_dim)
    q = drawn_tensor(1, int(config.num_attention_heads), 1, head, dtype=torch.float32)
    k, v = (drawn_tensor(1, int(config.num_key_value_heads), 20, head, dtype=torch.float32, seed=s) for s in (2, 3))
    cap = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
    return q, k, v, {"lengths": None, "max_len": 20, "scale": module.scaling, "window": 0, "softcap": cap}


def _asking(registry: Any) -> Any:
    """Return a copy of a registry of attention functions in which those that compute the op use the decision."""
    made = copy.copy(registry)
    kind: Any = type(registry)
    made.__class__ = _asking_kind(kind)
    return made


@functools.cache
def _asking_kind(kind: Any) -> Any:
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class Asking(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            theirs = super().__getitem__(name)
            if theirs is sdpa_attention_forward:
                return functools.partial(_attend, theirs, "sdpa")
            return functools.partial(_attend, theirs, "flash") if theirs is flash_attention_forward else theirs

    return Asking


def _attend(
    theirs: Forward,
    form: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *more: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Serve q [B,Hq,S,D], k and v [B,Hkv,L,D] -> o [B,S,Hq,D], or call `theirs`: the model's own, of a form of eager,
    sdpa and flash."""
    made = None
    if not more and not needs_own_code(module, query, key, value):
        with suppress(BadArguments):
            made = _served_attention(form, module, query, key, value, attention_mask, **named)
    if made is not None:
        return made.transpose(1, 2).contiguous(), None
    found: tuple[Tensor, Tensor | None] = theirs(module, query, key, value, attention_mask, *more, **named)
    return found


def _served_attention(
    form: str,
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **named: Any,
) -> Tensor | None:
    """Return None for calls that the ops do not describe. Eager and sdpa have their windows in the mask, flash as an
    argument."""
    s, keys, scale, cap = q.shape[2], k.shape[2], scaling or 0.0, softcap or 0.0
    known = UNREAD if form == "flash" else UNREAD | PACKED
    if dropout or any(named[n] is not None and named[n] is not False for n in named if n not in known):
        return None
    if (form == "flash" and (sliding_window or keys) < keys) or (form == "sdpa" and cap):
        return None
    if s == 1 and mask is None:
        made: Tensor = deciding("attn")(q, k, v, None, keys, scale, 0, cap)
        return made
    # for prompts, sdpa has no mask where a causal one would do
    readable = form == "eager" or (form == "sdpa" and s == 1)
    seen = look(mask, module) if readable and mask is not None and mask.shape[-1] == keys else None
    if s == 1:
        return by_spans(q, k, v, seen.spans, scale, cap) if seen and seen.spans else None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if s == keys and (seen.causal if seen else form == "sdpa" and mask is None and causal):
        prompt: Tensor = deciding("prefill_attn")(q, k, v, scale, 0, cap)
        return prompt
    return None
