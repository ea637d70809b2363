"""Operands that consist of several tensors (a weight or a cache in a format), and the tensors inside any operand.

Code that copies, guards, poisons or sends operands gets their tensors here: "w", or "w.codes" and "w.scales".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

KINDS: dict[str, Any] = {}  # the classes of operands in a format, by KIND


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Operand that an op takes instead of a tensor of `shape`. Its tensors may be written, as a tensor may."""

    KIND: ClassVar[str]

    def __init_subclass__(cls) -> None:
        KINDS[cls.KIND] = cls

    format: Any
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def dtype(self) -> str:
        """Return the format's name, which replaces the dtype in a call's key."""
        return str(self.format.name)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Return its tensors by name."""
        named = {"codes": self.codes, "scales": self.scales}
        return named if self.zeros is None else {**named, "zeros": self.zeros}

    def map(self, change: Callable[[Tensor], Any]) -> Self:
        """Return a copy with each tensor changed, and the same shape."""
        return replace(self, **{name: change(part) for name, part in self.parts().items()})

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda part: part.to(device))

    def cpu(self) -> Self:
        return self.to("cpu")

    def clone(self) -> Self:
        return self.map(torch.clone)


# --- the tensors inside -----------------------------------------------------------------------------------------------


def leaves(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return every tensor inside the arguments, by the names of argument and part."""
    return dict(_leaves(inputs))


def _leaves(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Stored):
            for part, tensor in value.parts().items():
                yield f"{name}.{part}", tensor


def argument_of(leaf: str) -> str:
    """Return the argument that a leaf belongs to."""
    return leaf.partition(".")[0]


def tensors(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors of one argument; none for a scalar or None."""
    return tuple(leaves({"": value}).values())


def changes_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None if PyTorch does not count (made under inference mode, even
    if its data was replaced since).
    """
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the argument with each tensor changed; other values unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    return value.map(change) if isinstance(value, Stored) else value


# --- sending ----------------------------------------------------------------------------------------------------------


def sent(name: str, value: Any, refs: Mapping[str, Any]) -> Any:
    """Return an argument as JSON. `refs` has the reference of each leaf: alone for a tensor, else with format and
    shape.
    """
    if isinstance(value, Tensor):
        return refs[name]
    if not isinstance(value, Stored):
        return value
    parts = {part: refs[f"{name}.{part}"] for part in value.parts()}
    return {"kind": value.KIND, "format": value.format.name, "shape": list(value.shape), "parts": parts}


def received(value: Any, tensor: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return the argument from its JSON; `tensor` maps a reference to its tensor."""
    if not isinstance(value, Mapping):
        return value
    if "parts" not in value:
        return tensor(value)
    kind = KINDS[value["kind"]]
    parts = {name: tensor(ref) for name, ref in value["parts"].items()}
    return kind.of(value["format"], shape=value["shape"], **parts)


def references(value: Any) -> list[Mapping[str, Any]]:
    """Return the references in an argument's JSON."""
    if not isinstance(value, Mapping):
        return []
    return list(value["parts"].values()) if "parts" in value else [value]
