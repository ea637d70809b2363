"""Weights in the layout of a candidate: made once per weight, found again by its identity, freed with it.

    prepare = Prepare(recipe, digest, threads)
    packed = prepare(w)                    # Packed: what the candidate reads, with bytes, seconds and version
    STORE.of(prepare, w)                   # Packed, or None: the candidate reads the weight itself

A candidate declares a `Layout`. `candidates.load` gives its function a `Reader`, which looks up a weight at each call.
Serving prepares a weight at its second call, so that a weight used for one call costs nothing. Races, proofs and decode
steps prepare their weights beforehand, by `Reader.prepare`.

A prepared weight is valid only while the weight is the same memory with the same version counter (PyTorch counts
in-place writes). A native candidate detects writes that PyTorch does not count (through `.data`, or by another
process): before each call it compares some units of the weight with the prepared ones.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autosel import settings
from autosel.devices.cpu import machine
from autosel.errors import AutoselError, BuildError, ParityError
from autosel.native.load import load_entry
from autosel.ops.contract import Op
from autosel.ops.stored import changes_of, tensors
from autosel.values import Layout, NativeRecipe, Prepared, PythonRecipe, Recipe
from autosel.workers import pages

log = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30  # memory that stays free
MOST_CHANGES = 3  # in-place changes of a weight, after which it is read plain: it is being trained
UNCOUNTED = "PyTorch counts no writes to tensors of its inference mode"
MOST_KNOWN = 4096  # weights that a reader remembers by their Python object

Key = tuple[Any, ...]
Versions = tuple[int, ...] | None  # None: PyTorch does not count writes to them
Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A weight as a candidate reads it. `operand` is bytes for a native candidate, else its function's result."""

    operand: Any
    layout: Layout
    bytes: int
    plain_bytes: int
    seconds: float

    @property
    def pays(self) -> bool:
        return self.bytes <= self.layout.worth * self.plain_bytes

    @property
    def saved_bytes(self) -> int:
        return self.plain_bytes - self.bytes


def total(packed: Sequence[Packed]) -> Prepared | None:
    """Return the sums over several weights; None for none."""
    if not packed:
        return None
    return Prepared(
        layout=packed[0].layout.name,
        version=packed[0].layout.version,
        bytes=sum(p.bytes for p in packed),
        plain_bytes=sum(p.plain_bytes for p in packed),
        seconds=sum(p.seconds for p in packed),
    )


class Prepare:
    """Function object that makes weights of one candidate's layout, by the functions that its layout names."""

    def __init__(self, layout: Layout, form: Key, threads: int, make: Any, compare: Any, *, native: bool) -> None:
        """Set the functions. `form` is what else determines the bytes besides the layout: the flags of the build."""
        self.layout, self.threads, self.make, self.compare, self.native = layout, threads, make, compare, native
        self.name: Key = (layout.name, layout.version, *form)

    @classmethod
    def of_artefact(cls, layout: Layout, flags: Sequence[str], digest: str, threads: int) -> Prepare:
        """Load the functions of a native layout. Raises BuildError."""
        make, compare = (load_entry(digest, name) for name in (layout.prepare, layout.compare))
        return cls(layout, tuple(flags), min(threads, 255), make, compare, native=True)

    def size(self, w: Any) -> int:
        """Return the bytes of the prepared weight; for a Python candidate, by its layout's share."""
        if not self.native:
            return round(self.layout.share * _nbytes(w))
        size = torch.zeros(1, dtype=torch.int64)
        self.make(*tensors(w), None, size, self.threads)
        return int(size)

    def __call__(self, w: Any, size: int = 0, allocate: Allocate | None = None) -> Packed:
        """Prepare a weight and compare the result with it. `size` is the result's, if known. Raises ParityError on a
        difference.
        """
        began = time.monotonic()
        operand = self._native(w, size, allocate or _on_large_pages) if self.native else self.make(w)
        if not self.native and self.compare is not None and not self.compare(operand, w):
            raise _other_weights(self.layout, "", w)
        return Packed(
            operand=operand,
            layout=self.layout,
            bytes=operand.nbytes if isinstance(operand, Tensor) else sum(t.nbytes for t in operand),
            plain_bytes=_nbytes(w),
            seconds=time.monotonic() - began,
        )

    def copy(self, packed: Packed, w: Any) -> Packed:
        """Prepare a weight that equals the one of `packed`: the bytes of a native layout are copied, which is faster
        than packing and comparing.
        """
        if not (self.native and isinstance(packed.operand, Tensor)):
            return self(w)
        began = time.monotonic()
        made = _on_large_pages(packed.bytes).copy_(packed.operand)
        return replace(packed, operand=made, seconds=time.monotonic() - began)

    def _native(self, w: Any, size: int, allocate: Allocate) -> Tensor:
        made, told = allocate(size or self.size(w)), torch.zeros(1, dtype=torch.int64)
        self.make(*tensors(w), made, told, self.threads)
        self.compare(made, *tensors(w), told, self.threads)
        if int(told):
            raise _other_weights(self.layout, f"{int(told)} units ", w)
        return made


def _other_weights(layout: Layout, what: str, w: Any) -> ParityError:
    return ParityError(
        "prepared weights differ from the weights",
        why=f"{what}of a matrix {tuple(w.shape)} differ in {layout.name}, version {layout.version}",
        todo="report this; until then serve another candidate: autosel decide N --demote",
    )


def _on_large_pages(size: int) -> Tensor:
    if size >= pages.LARGE_PAGE_BYTES:
        return pages.empty((size,), torch.uint8)
    made = torch.empty(size + 64, dtype=torch.uint8)
    start = -made.data_ptr() % 64
    return made[start : start + size]


# --- the store -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """State of one weight. `why` is the reason if it is read plain."""

    memory: tuple[StorageWeakRef, ...]
    versions: Versions
    packed: Packed | None = None
    why: str = ""
    changes: int = 0

    @property
    def dead(self) -> bool:
        return any(ref.expired() for ref in self.memory)


class Store:
    """All prepared weights of this process, shared by its threads.

    It never evicts one weight for another: a decode step reads all weights in turn, so each would be gone before its
    next call. Once memory or the limit is used up, further weights are read plain.
    """

    def __init__(self) -> None:
        self.kept: dict[Key, _Kept] = {}
        self.epoch = 0  # changes when something was removed
        self._paused = False
        self._lock = threading.RLock()

    def of(self, prepare: Prepare, w: Any, *, now: bool = False) -> Packed | None:
        """Return the prepared weight; None at its first call, and if preparation does not pay.

        `now` prepares at the first call; the caller then guarantees that PyTorch counts all writes to the weight.
        """
        versions = _versions(w)
        with self._lock:
            kept = self._found(prepare, w)
            if kept is None:
                self.sweep()
                why = "" if versions is not None or now else UNCOUNTED
                kept = _Kept(memory=_memory(w), versions=versions, why=why)
                self._keep(prepare, w, kept)
                if not now:
                    return None
            elif now and kept.why == UNCOUNTED:
                kept.why = ""
            if kept.versions != versions:
                self._changed(kept, versions)
            elif kept.packed is None and not kept.why and not self._paused:
                self._prepare(prepare, w, kept)
            pays = kept.packed is not None and kept.packed.pays and not self._paused
            return kept.packed if pays else None

    def prepare(
        self, prepare: Prepare, w: Any, size: int = 0, allocate: Allocate | None = None, like: Packed | None = None
    ) -> Packed:
        """Prepare a weight now, also if it does not pay; the caller checks memory. `like`: an equal weight's, to copy.
        Raises ParityError.
        """
        versions = _versions(w)
        with self._lock:
            self.sweep()
            kept = self._found(prepare, w)
            if kept is None or kept.packed is None or kept.versions != versions:
                packed = prepare(w, size, allocate) if like is None else prepare.copy(like, w)
                kept = _Kept(memory=_memory(w), versions=versions, packed=packed)
                self._keep(prepare, w, kept)
            assert kept.packed is not None
            return kept.packed

    def peek(self, prepare: Prepare, w: Any) -> Packed | None:
        """Return what the next call with this weight reads, without preparing it."""
        with self._lock:
            kept = self._found(prepare, w)
            good = kept is not None and kept.packed is not None and kept.packed.pays and kept.versions == _versions(w)
            return kept.packed if kept is not None and good and not self._paused else None

    @contextmanager
    def paused(self, on: bool = True) -> Iterator[None]:
        """Make every candidate read plain weights in this context, except those that `prepare` has prepared."""
        before, self._paused = self._paused, on or self._paused
        self.epoch += 1
        try:
            yield
        finally:
            self._paused = before
            self.epoch += 1

    def forget(self, weights: Sequence[Any]) -> None:
        """Drop these weights in every layout; a call that reads one keeps its bytes until it ends."""
        own = {_identity(w) for w in weights}
        with self._lock:
            self._drop([key for key in self.kept if key[1] in own])

    def sweep(self) -> None:
        """Drop entries of weights that no longer exist."""
        with self._lock:
            self._drop([key for key, kept in self.kept.items() if kept.dead])

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(k.packed.bytes for k in self.kept.values() if k.packed is not None)

    def told(self, prepare: Prepare) -> str:
        """Describe the weights that are prepared in this layout, and why the others are not."""
        with self._lock:
            mine = [kept for key, kept in self.kept.items() if key[0] == prepare.name]
        made = total([k.packed for k in mine if k.packed is not None and k.packed.pays])
        left: dict[str, int] = {}
        for kept in mine:
            if why := kept.why:
                left[why] = left.get(why, 0) + 1
        layout = f"{prepare.layout.name}, version {prepare.layout.version}"
        text = made.told if made else f"{layout}: no weight is prepared before its second call"
        return "; ".join([text, *(f"{count} read plain: {why}" for why, count in left.items())])

    def _found(self, prepare: Prepare, w: Any) -> _Kept | None:
        kept = self.kept.get((prepare.name, _identity(w)))
        return None if kept is None or kept.dead else kept

    def _keep(self, prepare: Prepare, w: Any, kept: _Kept) -> None:
        self.kept[prepare.name, _identity(w)] = kept

    def _changed(self, kept: _Kept, versions: Versions) -> None:
        """Drop the prepared copy of a weight that was written to."""
        kept.packed, kept.versions, kept.changes = None, versions, kept.changes + 1
        self.epoch += 1
        if kept.changes >= MOST_CHANGES:
            kept.why = f"written to {kept.changes} times"

    def _prepare(self, prepare: Prepare, w: Any, kept: _Kept) -> None:
        try:
            size = prepare.size(w)
            kept.why = self._refusal(prepare.layout, size, _nbytes(w))
            if not kept.why:
                kept.packed = prepare(w, size)
        except (AutoselError, ValueError, RuntimeError, MemoryError, OSError) as error:
            kept.why = (str(error) or type(error).__name__).splitlines()[0]
            log.warning("a weight cannot be prepared, so it is read plain: %s", kept.why)

    def _refusal(self, layout: Layout, size: int, plain: int) -> str:
        if size > layout.worth * plain:
            return f"{layout.name} needs {size / plain:.0%} of the weight's bytes; at most {layout.worth:.0%} pays"
        limit = settings.get("layout_gb")
        if limit is not None and self.bytes + size > limit * 1e9:
            return f"the limit is reached: AUTOSEL_LAYOUT_GB is {limit:g}"
        free = machine.free_memory() - RESERVE_BYTES
        return "" if size <= free else f"{size / 2**30:.2f} GiB more would leave less than 1 GiB of memory"

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self.kept[key]
        self.epoch += bool(keys)


STORE = Store()


def _fresh_lock() -> None:
    """Replace the lock after a fork: a thread that the child does not have may hold it."""
    STORE._lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)


def _identity(w: Any) -> Key:
    """Return the memory of a weight and its arrangement there."""
    return tuple(
        (t.untyped_storage()._cdata, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors(w)
    )  # fmt: skip


def _memory(w: Any) -> tuple[StorageWeakRef, ...]:
    """Return weak references: while they are held, no other memory has the same identity."""
    return tuple(StorageWeakRef(t.untyped_storage()) for t in tensors(w))


def _versions(w: Any) -> Versions:
    found = [changes_of(t) for t in tensors(w)]
    return None if None in found else tuple(n for n in found if n is not None)


def _nbytes(w: Any) -> int:
    return sum(t.nbytes for t in tensors(w))


# --- readers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reader:
    """Lookup of prepared weights for one loaded candidate, which calls `of` at each call."""

    op: Op
    prepare_one: Prepare
    store: Store = field(default_factory=lambda: STORE)  # evaluated when it is made
    _known: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.prepare_one.layout

    def of(self, w: Any) -> Any:
        """Return what the candidate reads instead of a weight, or None."""
        known = self._known.get(id(w))
        if known is not None:
            ref, version, pointer, epoch, operand = known
            same = ref() is w and changes_of(w) == version
            if same and w.data_ptr() == pointer and epoch == self.store.epoch:
                return operand
        packed = self.store.of(self.prepare_one, w)
        if packed is None:
            return None
        self._remember(w, packed.operand)
        return packed.operand

    def prepare(self, arguments: Sequence[Any]) -> Prepared | None:
        """Prepare the weights of a call now, also if it does not pay."""
        return self.prepare_copies([arguments])

    def prepare_copies(self, calls: Sequence[Sequence[Any]]) -> Prepared | None:
        """Prepare the weights of several calls, equal values at different addresses; return the cost of one call's."""
        first: dict[str, Packed] = {}
        for arguments in calls:
            named = {a.name: value for a, value in zip(self.op.args, arguments, strict=False)}
            for name in self.layout.weights:
                made = self.store.prepare(self.prepare_one, named[name], like=first.get(name))
                first.setdefault(name, made)
                self._remember(named[name], made.operand)
        return total(list(first.values()))

    def ready(self, arguments: Sequence[Any]) -> None:
        """Prepare the weights of a call now if it pays, instead of at its second call."""
        for a, value in zip(self.op.args, arguments, strict=False):
            if a.name in self.layout.weights:
                self.store.of(self.prepare_one, value, now=True)

    def saved_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many bytes less than the weights a call with these arguments reads."""
        found = [self.store.peek(self.prepare_one, arguments[name]) for name in self.layout.weights]
        return sum(p.saved_bytes for p in found if p is not None) if all(found) else 0

    def told(self) -> str:
        return self.store.told(self.prepare_one)

    def _remember(self, w: Any, operand: Any) -> None:
        if not isinstance(w, Tensor):
            return
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        at, known = id(w), self._known
        ref = weakref.ref(w, lambda _: known.pop(at, None))
        known[at] = (ref, changes_of(w), w.data_ptr(), self.store.epoch, operand)


def reader(
    op: Op, recipe: Recipe, digest: str, threads: int, load_python: Callable[[PythonRecipe], Any]
) -> Reader | None:
    """Return the reader of a recipe's layout; None for a recipe without a layout. Raises BuildError."""
    layout = recipe.layout
    if layout is None:
        return None
    unknown = set(layout.weights) - {a.name for a in op.args if a.kind == "weight"}
    if unknown or not layout.weights:
        what = f"layout {layout.name} is for the weights {', '.join(layout.weights)}"
        raise BuildError(what, why=f"{op.name} has other weights")
    if isinstance(recipe, NativeRecipe):
        return Reader(op, Prepare.of_artefact(layout, recipe.flags, digest, threads))
    make = load_python(replace(recipe, target=layout.prepare))
    compare = load_python(replace(recipe, target=layout.compare)) if layout.compare else None
    return Reader(op, Prepare(layout, (recipe.target,), threads, make, compare, native=False))
