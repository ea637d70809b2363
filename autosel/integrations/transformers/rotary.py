"""Prove and replace rotary embeddings: their frequencies, and the rotation that attention applies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from autosel.errors import BadArguments
from autosel.integrations.transformers.forward import with_globals
from autosel.integrations.transformers.proof import (
    Forward,
    Names,
    NotReplaceable,
    drawn_tensor,
    names_used,
    refuse_replaced,
    refuse_wrong_kernel,
    serving,
    undescribed,
    why_wrong,
)
from autosel.ops.contract import DTYPE_NAME, U32, UNIT

STATIC_ROPE = ("default", "linear", "llama3")  # kinds whose frequencies do not change with the position


def prove_frequencies(module: Any) -> Forward:
    """Keep cos and sin unchanged, and attach the positions and frequencies that they were made from."""
    refuse_replaced(module)
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    usable = {}
    for layer_type, kind in kinds.items():
        prefix = f"{layer_type}_" if layer_type else ""
        if kind in STATIC_ROPE and getattr(module, f"{prefix}attention_scaling", None) == 1.0:
            usable[layer_type] = f"{prefix}inv_freq"
    if not usable:
        raise NotReplaceable(f"its frequencies change with the position, or its scores are scaled ({', '.join(kinds)})")
    for layer_type, name in usable.items():
        _refuse_other_tables(module, layer_type, getattr(module, name))
    original = type(module).forward

    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = original(self, x, position_ids, *(() if layer_type is None else (layer_type,)))
        name = usable.get(layer_type or "")
        if name is not None and position_ids.dim() == 2 and not torch.compiler.is_compiling() and not undescribed(x):
            cos._autosel = (position_ids, getattr(self, name).float())  # half a model's buffers are halved too
        return cos, sin

    return forward


def _refuse_other_tables(module: Any, layer_type: str, inv_freq: Tensor) -> None:
    """Check that the module returns cos and sin of positions times frequencies, each twice in a row."""
    positions = torch.tensor([[0, 1, 200]])
    x = drawn_tensor(1, 3, 8, dtype=torch.float32)
    own = type(module).forward(module, x, positions, *((layer_type,) if layer_type else ()))
    angle = torch.cat((inv_freq, inv_freq)).double() * positions[..., None]
    # An angle in fp32 is off by a few roundings of itself; cos and sin by as much, and by one of their own.
    allowed = 4 * U32 * angle.abs() + 2 * UNIT[DTYPE_NAME[x.dtype]]
    alike = isinstance(own, tuple) and [getattr(t, "shape", None) for t in own] == [angle.shape] * 2
    if not alike or any(((t - e).abs() > allowed).any() for t, e in zip(own, (angle.cos(), angle.sin()), strict=True)):
        raise NotReplaceable(f"{type(module).__name__} returns something else than cos and sin, each for both halves")


def prove_rotation(module: Any) -> Names:
    refuse_replaced(module)
    own = names_used(module)["apply_rotary_pos_emb"]
    head, served = int(module.head_dim), serving("rope")
    inputs = _refuse_other_rotation(module, own, head, head)
    partly = False  # rotating the first part of a head
    with suppress(Exception):
        _refuse_other_rotation(module, own, head, head // 2)
        partly = True
    refuse_wrong_kernel("rope", inputs, *served(*inputs.values()))

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        mark = getattr(cos, "_autosel", None)
        if mark is not None and not more and not named and not undescribed(q, k) and _fits(q, k, mark, partly):
            with suppress(BadArguments):
                return _rotated(served, q, k, *mark)
        made: tuple[Tensor, Tensor] = own(q, k, cos, sin, *more, **named)
        return made

    names = {"apply_rotary_pos_emb": rotate}
    with_globals(type(module).forward, names)  # or a decorator is in the way
    return names


def _refuse_other_rotation(module: Any, own: Forward, head: int, turned: int) -> dict[str, Any]:
    """Return inputs of the op, for heads of which the first `turned` elements are rotated."""
    config, dtype = module.config, next(module.parameters()).dtype
    hq, hkv = int(config.num_attention_heads), int(config.num_key_value_heads)
    q, k = drawn_tensor(1, 3, hq, head, dtype=dtype), drawn_tensor(1, 3, hkv, head, dtype=dtype, seed=2)
    positions = torch.tensor([[0, 1, 1000]])
    inv_freq = 10_000.0 ** -(torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angle = positions[..., None].float() * inv_freq
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angle.cos(), angle.sin()))
    inputs = {"q": q[0], "k": k[0], "positions": positions[0], "inv_freq": inv_freq, "style": 0}
    theirs = [t.transpose(1, 2)[0].contiguous() for t in own(q.transpose(1, 2), k.transpose(1, 2), cos, sin)]
    wrong = why_wrong("rope", inputs, *theirs)
    if wrong:
        raise NotReplaceable(f"{type(module).__name__} does not rotate halves ({wrong})")
    return inputs


def _fits(q: Tensor, k: Tensor, mark: tuple[Tensor, Tensor], partly: bool) -> bool:
    """Return True if the heads [B,H,S,D] are those of the positions, and are rotated as was proven."""
    positions, inv_freq = mark
    if q.dim() != 4 or k.dim() != 4 or positions.shape[0] not in (1, q.shape[0]) or positions.shape[1] != q.shape[2]:
        return False
    turned = 2 * inv_freq.shape[0]
    return q.shape[2:] == k.shape[2:] and (turned == q.shape[3] or (partly and turned < q.shape[3]))


def _rotated(
    served: Callable[..., Any], q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B,Hq,S,D] and k, as views of [B,S,H,D] if that is their layout."""
    b, hq, s, d = q.shape
    rows = positions.expand(b, s).reshape(-1)
    tokens = (t.transpose(1, 2).reshape(b * s, t.shape[1], d) for t in (q, k))
    q_out, k_out = served(*tokens, rows, inv_freq, 0)
    return q_out.view(b, s, hq, d).transpose(1, 2), k_out.view(b, s, -1, d).transpose(1, 2)
