"""Write an op's signature as source text, from which callers' functions are generated.

They have a fixed number of arguments, because `*args` costs several times the lookup that it would save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from autosel import devices
from autosel.candidates.convention import defined, pure_outputs
from autosel.errors import BadArguments
from autosel.ops.contract import Op

# The longest context of a call that does not give one: the capacity of the cache.
_ROOM = {
    "attn": "k.shape[2]",
    "paged_attn": "block_table.shape[1] * k_pages.shape[1]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionText:
    """Hold parts of a function's text."""

    name: str
    parameters: str  # q, k, v, lengths=None, max_len=None, scale=0.0, ..., out=None
    names: str  # the same without defaults: the call
    fill: tuple[str, ...]  # lines that fill in missing arguments
    key: str  # a tuple that is equal for calls of one workload


@cache
def signature(op: Op) -> FunctionText:
    names = [a.name for a in op.args]
    outputs = pure_outputs(op)
    room = _ROOM.get(op.name)
    fill = (f"if max_len is None: max_len = {room}",) if room else ()
    return FunctionText(
        name=op.name,
        parameters=", ".join([*_with_defaults(op), *(f"{o}=None" for o in outputs)]),
        names=", ".join([*names, *outputs]),
        fill=fill,
        key=f"({', '.join(_key_parts(op))},)",
    )


def _with_defaults(op: Op) -> list[str]:
    """Return parameters with the defaults of the op's table; in Python only a trailing run of them can be omitted."""
    texts: list[str] = []
    optional = True
    for arg in reversed(op.args):
        given = arg.default is not None or arg.kind == "optional" or (arg.name == "max_len" and op.name in _ROOM)
        optional = optional and given
        texts.append(f"{arg.name}={arg.default!r}" if optional else arg.name)
    return texts[::-1]


def _key_parts(op: Op) -> list[str]:
    """Key the shapes and dtypes of every tensor, the scalars that are traits, and the length by its power of two.

    Strides are not included: the contract leaves leading strides free, and a kernel refuses a strided last dimension.
    The device is included only if tensors can be on more than one.
    """
    parts: list[str] = [f"{_first_tensor(op)}.device"] if several_devices() else []
    for arg in op.args:
        n = arg.name
        if arg.kind in ("tensor", "weight", "cache"):  # the dtype of a weight in a format is the format's name
            parts += [f"{n}.shape", f"{n}.dtype"]
        elif arg.kind == "optional":
            parts.append(f"None if {n} is None else ({n}.shape, {n}.dtype)")
        elif n == "max_len":
            parts.append("(max_len - 1).bit_length()")
        elif n in op.trait_defaults:
            parts.append(n)
    return parts


def several_devices() -> bool:
    import torch

    # PyTorch's build, because a process that asks a driver cannot fork afterwards
    return torch.accelerator.current_accelerator() is not None


def _first_tensor(op: Op) -> str:
    return next(a.name for a in op.args if a.kind == "tensor")


def place_of(op: Op, inputs: Mapping[str, Any]) -> str:
    """Return the place of the first tensor (autosel/devices); its op has checked that all are on one
    device."""
    return devices.place_of(inputs[_first_tensor(op)])


def inputs_of(op: Op, like: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, with defaults filled in. Raises BadArguments if they do not fit the signature."""
    s = signature(op)
    lines = [f"def {s.name}({s.parameters}):", *(f"    {line}" for line in s.fill)]
    lines.append(f"    return dict({', '.join(f'{a.name}={a.name}' for a in op.args)})")
    collect: Callable[..., dict[str, Any]] = defined(s.name, lines, {})
    try:
        return collect(**like) if isinstance(like, Mapping) else collect(*like)
    except (TypeError, AttributeError, IndexError) as error:
        raise BadArguments(
            f"these are not arguments of {op.name}", why=str(error), todo=f"{op.name}({s.parameters})"
        ) from error
