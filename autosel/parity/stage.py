"""Place operands in shared memory, with guards around them that a candidate must not change.

Each tensor has at least 64 KiB of guard on each side. Guards, the gaps between rows of a strided tensor, and outputs
are filled before a call. There are two fillings: "none", bytes 0xFF, which are NaN in every float and -1 in every
integer; and "some", random bytes that are small finite floats. Elements of an output that a candidate does not write
differ between the two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import DTYPE, Inputs, Op
from autosel.ops.stored import argument_of, leaves, sent
from autosel.values import Workload, to_json
from autosel.workers.arena import ALIGN_BYTES, Arena, Ref, contiguous

GUARD_BYTES = 64 << 10
FAR = (1 << 31) + 1  # elements: an odd number beyond the reach of an int32 index
FAR_GUARD_BYTES = 4 << 10  # around each row of a tensor with rows that far apart; the memory between is never touched
Filling = Literal["none", "some"]
_NONE = b"\xff" * GUARD_BYTES
# High bits cleared: exponents stay far from all ones, so every float pattern is finite and below 2 in magnitude.
_SOME = random.Random(20).randbytes(1 << 20).translate(bytes(byte & 63 for byte in range(256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that the candidate must not change and has changed. `check` is "inputs" or "guards"."""

    check: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The place of one tensor. `name`: the argument, and the part if it has several tensors ("w.codes")."""

    name: str
    ref: Ref
    role: Literal["in", "inout", "out"]
    start: int
    end: int

    @property
    def argument(self) -> str:
        return argument_of(self.name)

    @property
    def dense(self) -> bool:
        return math.prod(self.ref.shape) * self.ref.span == 0 or math.prod(self.ref.shape) == self.ref.span

    @property
    def parts(self) -> tuple[tuple[int, int, Ref], ...]:
        """Return (start, end, tensor inside) of each part of memory that is filled and checked.

        There is one part, or one for each row if gigabytes are between rows.
        """
        if self.ref.span <= FAR:
            return ((self.start, self.end, self.ref),)
        itemsize = getattr(torch, self.ref.dtype).itemsize
        rows = []
        for i in range(self.ref.shape[0]):
            at = self.ref.offset + i * self.ref.strides[0] * itemsize
            row = replace(self.ref, offset=at, shape=self.ref.shape[1:], strides=self.ref.strides[1:])
            rows.append((at - FAR_GUARD_BYTES, at + row.span * itemsize + FAR_GUARD_BYTES, row))
        return tuple(rows)


@dataclass(slots=True, kw_only=True)
class Placed:
    """One set of operands and their outputs in an arena."""

    op: Op
    workload: Workload
    inputs: Inputs
    arena: Arena
    pieces: tuple[Piece, ...]
    filling: Filling = "none"
    written: set[str] = field(default_factory=set)

    # --- writing ----------------------------------------------------------------------------------------------------

    def fill(self, filling: Filling, *, keep: Sequence[str] = ()) -> None:
        """Write the filling to guards, gaps and outputs, and the values to inputs.

        `keep`: arguments whose values are not written again if they are in place.
        """
        self.filling, values = filling, leaves(self.inputs)
        for start, end, _ in self._guards():
            self._fill(start, end)
        for piece in self.pieces:
            if piece.role == "out" or not piece.dense:
                for start, end, _ in piece.parts:
                    self._fill(start, end)
            if piece.role != "out" and not (piece.argument in keep and piece.name in self.written and piece.dense):
                writable(self.arena.tensor(piece.ref)).copy_(writable(values[piece.name]))
                self.written.add(piece.name)

    def renew(self, inputs: Inputs) -> None:
        """Set other values, of the same shapes and strides, for the same places. The next `fill` writes them."""
        changed = {n for n, v in inputs.items() if v is not self.inputs.get(n)}
        self.inputs = inputs
        self.written = {name for name in self.written if argument_of(name) not in changed}

    def _fill(self, start: int, end: int) -> None:
        self.arena.memory[start:end] = self._expected(start, end)

    # --- requests ---------------------------------------------------------------------------------------------------

    def arguments(self) -> list[Any]:
        places = {p.name: to_json(p.ref) for p in self.pieces if p.role != "out"}
        return [sent(a.name, self.inputs[a.name], places) for a in self.op.args]

    def places(self) -> list[Any]:
        """Return references to the outputs that are not also inputs, in order."""
        return [to_json(p.ref) for p in self.pieces if p.role == "out"]

    # --- after a call -----------------------------------------------------------------------------------------------

    def results(self) -> tuple[Tensor, ...]:
        """Return copies of all outputs in the op's order, including inout ones."""
        return tuple(self.arena.tensor(piece.ref).clone() for piece in self._outputs())

    def damage(self, *, skip: Sequence[str] = ()) -> Damage | None:
        """Return the first forbidden change, or None. Inputs in `skip` are not compared."""
        for piece in self.pieces:
            if piece.role == "in" and piece.argument not in skip:
                found = self._changed_input(piece)
                if found is not None:
                    return found
        for start, end, where in self._guards():
            found = self._changed_guard(self.arena.memory[start:end], self._expected(start, end), where)
            if found is not None:
                return found
        for piece in self.pieces:
            if not piece.dense:
                found = self._changed_gap(piece)
                if found is not None:
                    return found
        return None

    def unwritten(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[str, int] | None:
        """Return an output and the number of its elements that still hold the filling, or None.

        `before` are the results with the filling "none", `after` those with "some".
        """
        for piece, one, other in zip(self._outputs(), before, after, strict=True):
            if piece.role == "inout" or not one.numel():
                continue
            expected = strided(bytearray(_some(piece.start, piece.end)), piece.ref)
            untouched = bits(one) == -1
            left = untouched & (bits(other) == bits(expected))
            # A candidate that reads outside its operands may give NaN, then a few equal bytes by chance: require all.
            if left.any() and torch.equal(left, untouched):
                return piece.name, int(left.sum())
        return None

    def _outputs(self) -> list[Piece]:
        by_name = {p.name: p for p in self.pieces if p.role != "in"}
        return [by_name[name] for name in self.op.output_names]

    def _changed_input(self, piece: Piece) -> Damage | None:
        now, was = self.arena.tensor(piece.ref), leaves(self.inputs)[piece.name]
        if torch.equal(bits(now), bits(was)):
            return None
        changed = bits(now) != bits(was)
        where = tuple(int(i) for i in changed.nonzero()[0])
        before, after = was[where].item(), now[where].item()
        return Damage(
            check="inputs",
            reason=f"the candidate changed its input {piece.name} at {list(where)} from {before} to {after}",
            evidence={"input": piece.name, "index": list(where), "elements": int(changed.sum())},
        )

    def _changed_guard(self, now: bytes, expected: bytes, where: Callable[[int], str]) -> Damage | None:
        if now == expected:
            return None
        changed = [i for i, (a, b) in enumerate(zip(now, expected, strict=True)) if a != b]
        place = where(changed[0])
        return Damage(
            check="guards",
            reason=f"the candidate wrote outside its outputs: {place}",
            evidence={"where": place, "bytes": len(changed)},
        )

    def _changed_gap(self, piece: Piece) -> Damage | None:
        for start, end, inside in piece.parts:
            expected = bytearray(self._expected(start, end))
            writable(strided(expected, inside, inside.offset - start)).copy_(writable(self.arena.tensor(inside)))
            now = self.arena.memory[start:end]
            found = self._changed_guard(now, bytes(expected), lambda _: f"in the gap around a row of {piece.name}")
            if found is not None:
                return found
        return None

    def _expected(self, start: int, end: int) -> bytes:
        if self.filling == "some":
            return _some(start, end)
        return _NONE if end - start == len(_NONE) else b"\xff" * (end - start)

    def _guards(self) -> Iterator[tuple[int, int, Callable[[int], str]]]:
        """Yield (start, end, function that describes the place of a byte) of every guard."""
        for piece in self.pieces:
            yield piece.start - GUARD_BYTES, piece.start, _words("before", piece, GUARD_BYTES)
            yield piece.end, piece.end + GUARD_BYTES, _words("after", piece, 0)


def place(
    arena: Arena,
    op: Op,
    w: Workload,
    inputs: Inputs,
    *,
    gap: int = 0,
    share: Placed | None = None,
    strides: Mapping[str, Sequence[int]] | None = None,
) -> Placed:
    """Reserve memory for operands and outputs in an arena; return their placement.

    `gap`: elements between the rows of outputs (0: contiguous). `share`: another placement whose streamed operands are
    used again. `strides`: strides of inputs that replace their own.
    """
    strides = strides or {}
    roles = {a.name: a.role for a in op.args}
    shared = {p.name: p for p in share.pieces if roles.get(p.argument) == "streamed"} if share else {}
    pieces, known = list[Piece](), dict[int, Piece]()
    for name, value in leaves(inputs).items():
        if name not in shared:
            # Keep the tensor's offset from an aligned address: kernels must not assume alignment.
            shift = int(value.storage_offset()) * value.itemsize % ALIGN_BYTES
            role: Literal["in", "inout"] = "inout" if roles[argument_of(name)] == "inout" else "in"
            steps = strides.get(name, value.stride())
            piece = known.get(id(value)) if role == "in" else None  # one tensor for two arguments
            piece = piece or _piece(arena, name, role, value.shape, value.dtype, steps, shift)
            pieces.append(replace(piece, name=name))
            known[id(value)] = piece
    for spec in op.outputs(w):
        if roles.get(spec.name) == "inout":
            continue
        dtype = torch.int64 if spec.dtype == "int64" else DTYPE[spec.dtype]
        row = (*spec.shape[:-1], spec.shape[-1] + gap) if spec.shape else ()
        pieces.append(_piece(arena, spec.name, "out", spec.shape, dtype, contiguous(row), 0))
    placed = Placed(op=op, workload=w, inputs=inputs, arena=arena, pieces=(*pieces, *shared.values()))
    placed.written |= set(shared)
    return placed


def _piece(
    arena: Arena,
    name: str,
    role: Literal["in", "inout", "out"],
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int],
    shift_bytes: int,
) -> Piece:
    arena.reserve(GUARD_BYTES)
    ref = arena.empty(shape, dtype, strides, shift_bytes=shift_bytes)
    end = ref.offset + ref.span * dtype.itemsize
    arena.reserve(GUARD_BYTES, align_bytes=1)
    return Piece(name=name, ref=ref, role=role, start=ref.offset, end=end)


def far_strides(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return, for each tensor with gaps between rows, strides that put its first and last row FAR elements apart."""
    found = {}
    for name, value in leaves(inputs).items():
        if value.dim() > 1 and value.shape[0] > 1 and not value.is_contiguous():
            found[name] = (-(-FAR // (value.shape[0] - 1)), *value.stride()[1:])
    return found


def room_for(inputs: Inputs, strides: Mapping[str, Sequence[int]], outputs_bytes: int) -> int:
    """Return the bytes of an arena for one placement, guards included."""
    total, values = outputs_bytes, leaves(inputs)
    for name, value in values.items():
        steps = zip(value.shape, strides.get(name, value.stride()), strict=True)
        total += (1 + sum((n - 1) * step for n, step in steps)) * value.itemsize
    return total + 2 * (GUARD_BYTES + ALIGN_BYTES) * 4 * (max(len(values), len(inputs)) + 4)


def _words(side: str, piece: Piece, origin: int) -> Callable[[int], str]:
    return lambda byte: f"{abs(byte - origin) + (side == 'after')} bytes {side} {piece.name}"


def _some(start: int, end: int) -> bytes:
    """Return the random filling of bytes [start, end), which depends only on their place."""
    phase, count = start % len(_SOME), end - start
    if phase + count <= len(_SOME):
        return _SOME[phase : phase + count]
    return (_SOME * -(-(phase + count) // len(_SOME)))[phase : phase + count]


def strided(span: bytearray, ref: Ref, start: int = 0) -> Tensor:
    """Return bytes as a piece's tensor, which begins `start` bytes into them."""
    dtype = getattr(torch, ref.dtype)
    return torch.frombuffer(span, dtype=dtype, offset=start).as_strided(ref.shape, ref.strides)


def writable(tensor: Tensor) -> Tensor:
    """Return a view with each element once: dimensions of stride 0 are narrowed to size 1."""
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
