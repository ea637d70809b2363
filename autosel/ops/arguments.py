"""Check an op's arguments and bind the letters of its shapes: `x[M,K]`, `w[N,K]` gives {M, K, N}."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from autosel.errors import BadArguments
from autosel.formats import PLAIN
from autosel.ops.cached import DIMS, Cached
from autosel.ops.codes import TORCH_DTYPE
from autosel.ops.contract import DTYPE, DTYPE_NAME, Inputs
from autosel.ops.stored import Stored
from autosel.ops.weight import Weight
from autosel.values import DTypeName

S = TypeVar("S", bound=Stored)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Binder:
    """Checker of an op's tensors, one by one; the first use of a letter binds it, later uses must agree."""

    def __init__(self, op: str, inputs: Inputs) -> None:
        self.op, self.inputs = op, inputs
        self.dims: dict[str, int] = {}
        self.bound_by: dict[str, str] = {}
        self.dtype: torch.dtype | None = None
        self.first: tuple[str, torch.device] | None = None  # name and device of the first tensor

    @property
    def dtype_name(self) -> DTypeName:
        assert self.dtype is not None
        return DTYPE_NAME[self.dtype]

    def floats(self, name: str, shape: str) -> Tensor:
        """Return a tensor in the workload's dtype. Raises BadArguments that names it."""
        tensor = self._tensor(name, shape)
        if tensor.dtype not in FLOATS:
            raise BadArguments(f"{self.op}: {name} is {tensor.dtype}", why="it must be bfloat16, float16 or float32")
        if self.dtype is None:
            self.dtype = tensor.dtype
        elif tensor.dtype != self.dtype:
            raise BadArguments(f"{self.op}: {name} is {tensor.dtype}, the arguments before it are {self.dtype}")
        return tensor

    def optional(self, name: str, shape: str) -> Tensor | None:
        return None if self.inputs.get(name) is None else self.floats(name, shape)

    def exactly(self, name: str, shape: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of one fixed dtype (lengths, positions, tables)."""
        tensor = self._tensor(name, shape)
        if tensor.dtype != dtype:
            raise BadArguments(f"{self.op}: {name} is {tensor.dtype}, expected {dtype}")
        return tensor

    def weight(self, name: str, shape: str) -> str:
        """Return a matrix's format: plain for a tensor in the workload's dtype, else the `Weight`'s.

        Raises BadArguments for parts that do not fit the format.
        """
        w = self._stored(name, shape, Weight)
        if w is None:
            return PLAIN
        given = w.parts()
        for part in w.format.parts:
            self._part(
                f"{name}.{part.name}", given.pop(part.name, None), part.dtype, part.shape(*w.shape), w.format.name
            )
        if given:
            raise self.fail(f"{name}.{next(iter(given))}", f"is given, which {w.format.name} has not")
        return w.format.name

    def cache(self, name: str, shape: str) -> str:
        """Return the format of keys or values: plain for a tensor in the workload's dtype, else the `Cached`'s.

        Raises BadArguments for parts that do not fit the format.
        """
        c = self._stored(name, shape, Cached)
        if c is None:
            return PLAIN
        sizes = tuple(c.shape)
        scales = c.format.scales_shape(dict(zip(DIMS, sizes, strict=True)))
        self._part(f"{name}.codes", c.codes, c.format.dtype, sizes, c.format.name)
        self._part(f"{name}.scales", c.scales, c.format.scale, scales, c.format.name)
        return c.format.name

    def one_format(self, *names: str) -> str:
        """Return the common format of checked operands. Raises BadArguments if they differ."""
        found = {name: getattr(self.inputs[name], "format", None) for name in names}
        spelled = {name: f.name if f else PLAIN for name, f in found.items()}
        if len(set(spelled.values())) > 1:
            told = ", ".join(f"{name} is {format_}" for name, format_ in spelled.items())
            raise BadArguments(f"{self.op}: {told}", why="operands that are used together have one format")
        return spelled[names[0]]

    def _stored(self, name: str, shape: str, kind: type[S]) -> S | None:
        """Return an operand in a format, with its shape bound; None for a plain tensor, which is checked."""
        w = self.inputs.get(name)
        if isinstance(w, Tensor) and w.itemsize == 1:
            todo = f"pass autosel.{kind.__name__}.of(format, codes={name}, scales=...)"
            raise self.fail(name, f"is {w.dtype}: codes without their scales", todo=todo)
        if not isinstance(w, kind):
            self.floats(name, shape)
            return None
        letters, sizes = shape.split(), tuple(w.shape)
        expected = f"[{','.join(letters)}]"
        if len(sizes) != len(letters):
            raise self.fail(name, f"has shape {sizes}, expected {expected}")
        for letter, size in zip(letters, sizes, strict=True):
            self._bind(name, letter, size, sizes, expected)
        return w

    def _part(self, name: str, tensor: Any, dtype_name: str | None, shape: tuple[int, ...], format_: str) -> None:
        if not isinstance(tensor, Tensor):
            raise self.fail(name, f"is {type(tensor).__name__}; {format_} has {name.rpartition('.')[2]}")
        self._place(name, tensor)
        own = self.dtype if dtype_name is None else TORCH_DTYPE.get(dtype_name) or DTYPE[dtype_name]
        dtype = own or torch.bfloat16  # x, which is bound first, has the workload's
        if tensor.dtype != dtype:
            raise self.fail(name, f"is {tensor.dtype}, {format_} has {dtype}")
        if tuple(tensor.shape) != shape:
            raise self.fail(name, f"has shape {tuple(tensor.shape)}, expected {shape} for {format_}")
        self._contiguous(name, tensor)

    def number(self, name: str, default: float, *, low: float = float("-inf")) -> Any:
        value = self.inputs.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
            least = f" of at least {low:g}" if low > float("-inf") else ""
            raise BadArguments(f"{self.op}: {name} is {value!r}, expected a number{least}")
        return value

    def among(self, name: str, default: int, known: tuple[int, ...]) -> int:
        value = self.number(name, default)
        if value not in known:
            raise BadArguments(f"{self.op}: {name} is {value!r}", why=f"one of {', '.join(map(str, known))}")
        return int(value)

    def fail(self, name: str, problem: str, todo: str = "") -> BadArguments:
        return BadArguments(f"{self.op}: {name} {problem}", todo=todo)

    def _tensor(self, name: str, shape: str) -> Tensor:
        tensor = self.inputs.get(name)
        letters = shape.split()
        expected = f"[{','.join(letters)}]"
        if not isinstance(tensor, Tensor):
            raise BadArguments(f"{self.op}: {name} is {type(tensor).__name__}, expected a tensor {expected}")
        self._place(name, tensor)
        if tensor.dim() != len(letters):
            raise BadArguments(f"{self.op}: {name} has shape {tuple(tensor.shape)}, expected {expected}")
        self._contiguous(name, tensor)
        for letter, size in zip(letters, tensor.shape, strict=True):
            self._bind(name, letter, size, tuple(tensor.shape), expected)
        return tensor

    def _place(self, name: str, tensor: Tensor) -> None:
        where, at = self.first = self.first or (name, tensor.device)
        if tensor.device != at:
            raise self.fail(name, f"is on {tensor.device}, {where} on {at}", todo=f"move it: {name}.to({str(at)!r})")

    def _contiguous(self, name: str, tensor: Tensor) -> None:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise self.fail(name, "is not contiguous in its last dimension", todo=f"pass {name}.contiguous()")

    def _bind(self, name: str, letter: str, size: int, shape: tuple[int, ...], expected: str) -> None:
        known = self.dims.setdefault(letter, size)
        by = self.bound_by.setdefault(letter, name)
        if size != known:
            raise BadArguments(
                f"{self.op}: {name} has shape {shape}, expected {expected} with {letter} = {known}",
                why=f"{letter} = {known} by {by}",
            )
        if size < 1:
            raise BadArguments(f"{self.op}: {name} has shape {shape}; {letter} must be at least 1")


def need_multiple(binder: Binder, big: str, small: str) -> None:
    """Refuse query heads that are not a multiple of KV heads."""
    if binder.dims[big] % binder.dims[small]:
        raise BadArguments(
            f"{binder.op}: {big} = {binder.dims[big]} is no multiple of {small} = {binder.dims[small]}",
            why="each KV head serves the same number of query heads",
        )
