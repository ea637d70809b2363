"""Make `scaled_dot_product_attention` run decided kernels: `autosel.activate()`. `autosel.deactivate()` ends it.

This uses torch.nn.attention's registry of implementations, on the CPU, for calls that `attn` or `prefill_attn`
describes: one query position over all keys, or a causal square; no mask, no dropout, no gradient. All other calls and
undecided shapes go to PyTorch's own kernel.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch
from autosel.dispatch import Bound
from autosel.errors import BadArguments, UsageError
from autosel.integrations.engine_ops import needs_gradient
from autosel.values import length_bucket

NAME = "autosel"
TARGET = "_scaled_dot_product_flash_attention_for_cpu"
MOST_SHAPES = 1024


def activate() -> None:
    """Activate from now on, in this process. No effect if active. Raises UsageError if another implementation is
    active."""
    from torch.nn import attention

    now = attention.current_flash_attention_impl()
    if now == NAME:
        return
    if now is not None:
        raise UsageError(
            f"the attention implementation {now} is active",
            why="PyTorch has room for one",
            todo="torch.nn.attention.restore_flash_attention_impl(), then autosel.activate()",
        )
    attention.register_flash_attention_impl(NAME, register_fn=Handle)
    attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Restore PyTorch's own attention. No effect unless `activate` is in force."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()


class Handle:
    """Hold the override, as long as the registry contains it."""

    def __init__(self) -> None:
        self.own = torch.library.get_kernel(f"aten::{TARGET}", "CPU")
        self.bound: dict[tuple[Any, ...], Bound | None] = {}
        self.inside = threading.local()  # a kernel that calls SDPA gets PyTorch's
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # the registry exists for overriding
            warnings.simplefilter("ignore", UserWarning)
            self.library.impl(TARGET, self._call, "CPU", with_keyset=True, allow_override=True)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None

    def _call(
        self,
        keys: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        op = None
        if attn_mask is None and dropout_p == 0.0 and not getattr(self.inside, "now", False):
            op = _op(q, k, is_causal)
        decided = self._decided(op, q, k, v) if op and not needs_gradient(q, k, v) else None
        if decided is None:
            made = self.own.call_boxed(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
            return made[0], made[1]
        self.inside.now = True
        try:
            middle = (None, k.shape[2]) if op == "attn" else ()
            o: Tensor = decided(q, k, v, *middle, scale or 0.0)
        finally:
            self.inside.now = False
        # Only a backward pass reads the log-sum-exp, and none follows; NaN marks it as invalid.
        return o, q.new_full((q.shape[0], q.shape[1], q.shape[2]), torch.nan, dtype=torch.float32)

    def _decided(self, op: str, q: Tensor, k: Tensor, v: Tensor) -> Bound | None:
        """Return the decided kernel for these shapes, or None if there is none, if it is the baseline, or no longer
        serves."""
        key = (op, q.shape, k.shape[:2], length_bucket(k.shape[2]), v.shape[3], q.dtype, k.dtype, v.dtype)
        if key not in self.bound:
            if len(self.bound) >= MOST_SHAPES:
                self.bound.clear()
            try:
                self.bound[key] = dispatch.best(op, like=(q, k, v))
            except BadArguments:
                self.bound[key] = None
        found = self.bound[key]
        if found is None or found.beyond_baseline(k.shape[2]):
            return found
        found.elsewhere[0] += 1  # a call without a decision
        return None


def _op(q: Tensor, k: Tensor, is_causal: bool) -> str | None:
    """Choose the op. SDPA's causal mask is aligned to the first key: with one query it would hide all other keys."""
    if q.shape[2] == 1 and not is_causal:
        return "attn"
    return "prefill_attn" if is_causal and q.shape[2] == k.shape[2] else None
