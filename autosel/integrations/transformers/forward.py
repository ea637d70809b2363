"""Copy the forward of an attention class, so that it reads other globals for one module only."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from autosel.integrations.transformers.cache import make_room
from autosel.integrations.transformers.proof import PROVEN_ON, Forward, Names, NotReplaceable

CACHE_NAMES = ("cache", "past_key_values")  # names of the cache among attention's arguments: since 5.24, and before


def around_attention(original: Forward, names: Names) -> Forward:
    replaced = with_globals(original, names)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(states, Tensor) or states.device != getattr(self, PROVEN_ON, None):
            return original(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
            make_room(cache, getattr(self, "layer_idx", None))
        return replaced(self, *args, **kwargs)

    return forward


def with_globals(function: Any, names: Names) -> Forward:
    """Return a copy of `function` that reads `names` instead of its module's globals; its module and other models keep
    theirs.

    Decorators of transformers around it are copied too, each around the copy. Raises NotReplaceable for others.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        there = {**function.__globals__, **names}
        there.pop("__name__")  # otherwise torch.compile would read the globals of the module with this name
        return _copied(function, there, function.__closure__)
    written_in = getattr(function, "__globals__", {}).get("__name__", "another kind")  # `wraps` hides it in __module__
    if not isinstance(function, types.FunctionType) or not written_in.startswith("transformers."):
        raise NotReplaceable(f"{inner.__qualname__} is wrapped by a decorator of {written_in}, not of transformers")
    cells = function.__closure__ or ()
    if sum(_holds(cell, inner) for cell in cells) != 1:
        raise NotReplaceable(
            f"{inner.__qualname__} is wrapped by a decorator of {written_in} that does not hold it directly"
        )
    copied = with_globals(inner, names)
    closure = tuple(types.CellType(copied) if _holds(cell, inner) else cell for cell in cells)
    return _copied(function, function.__globals__, closure, __wrapped__=copied)


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _copied(
    function: Any, names: dict[str, Any], closure: tuple[types.CellType, ...] | None, **attributes: Any
) -> Forward:
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({**function.__dict__, **attributes})
    return made
