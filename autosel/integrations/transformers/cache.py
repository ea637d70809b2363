"""Let the layers of a dynamic cache grow in place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def make_room(cache: Any, index: int | None) -> None:
    """Turn a plain dynamic layer of the cache into one that grows in place; others stay unchanged."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", ())
    if index is not None and index < len(layers) and type(layers[index]) is DynamicLayer:
        layers[index].__class__ = _growing()


@functools.cache
def _growing() -> type:
    """Return a layer class that grows in place. DynamicLayer copies all its keys and values at each step. This one
    appends, with room for an eighth more, as long as its contents are what it returned last: after a crop, a reordering
    or any other change it copies like its base class. References to older keys remain valid."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[misc]
        keys: Tensor
        values: Tensor
        room: tuple[Tensor, Tensor] | None = None
        last: tuple[Tensor, Tensor] | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            new = key_states, value_states
            if self.last is None or not self._goes_on(new):
                self.room = None
                self.last = super().update(key_states, value_states, *args, **kwargs)
                return self.last
            held, count = self.keys.shape[2], key_states.shape[2]
            if self.room is None or self.room[0].shape[2] < held + count:
                self.room = tuple(_with_room(t, held + count) for t in self.last)  # type: ignore[assignment]
            assert self.room is not None
            for room, states in zip(self.room, new, strict=True):
                room[:, :, held : held + count] = states
            self.keys, self.values = self.last = tuple(room[:, :, : held + count] for room in self.room)  # type: ignore[assignment]
            return self.keys, self.values

        def _goes_on(self, new: tuple[Tensor, Tensor]) -> bool:
            assert self.last is not None
            if self.keys is not self.last[0] or self.values is not self.last[1] or self.keys.dim() != 4:
                return False
            return not torch.compiler.is_compiling() and all(
                t.shape[:2] == held.shape[:2]
                and (t.shape[3], t.dtype, t.device) == (held.shape[3], held.dtype, held.device)
                and not (torch.is_grad_enabled() and (t.requires_grad or held.requires_grad))
                and held.is_inference() == torch.is_inference_mode_enabled()
                for t, held in zip(new, self.last, strict=True)
            )

    return GrowingLayer


LEAST_ROOM = 64  # tokens


def _with_room(held: Tensor, needed: int) -> Tensor:
    made = held.new_empty(*held.shape[:2], needed + max(LEAST_ROOM, needed // 8), held.shape[3])
    made[:, :, : held.shape[2]] = held
    return made
