"""A model's matrices in the lossless layout of 12 bits (kernels/cpu/packed.h), read by a thread team in their place.

    packed = pack(decoder.weights, fp)     # UsageError: no room beside the original, or nothing gained by it;
                                           # ParityError: some unit does not unpack to the same bits
    packed.of("0.gate")                    # its bytes, or None: a matrix that stays as it is
    packed.saved_bytes("0.gate")           # what a step needs to read less

They are made by the `prepare` of `cpp:gemv_packed`, and kept where single ops find them too (candidates/layouts.py).
The original stays: prefill, the baseline and every op by itself read it. What is packed is kept for as long as the
weights are, for all steps that are written; a run that needs the room takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autosel.candidates import registry
from autosel.candidates.layouts import RESERVE_BYTES, STORE, Packed, Prepare, total
from autosel.decode.pages import Arena, padded
from autosel.decode.run import Offer, Plan
from autosel.decode.weights import Weights, arena_bytes, free_memory, memory_need, reference_bytes
from autosel.errors import UsageError
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import facts
from autosel.native.compile import compile_source
from autosel.ops.stored import tensors
from autosel.values import Accepted, DTypeName, Fingerprint, Knobs, NativeRecipe, Prepared, Rejected, Support, Workload

CANDIDATE = "cpp:gemv_packed"  # whose layout it is
UNIT, ROWS = 128, 8  # a team shares a matrix in whole units and eights of rows
MOST_THREADS = 255  # of the kernels' team


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """The matrices of a model that are packed, by the name of the original."""

    matrices: Mapping[str, Packed]
    prepared: Prepared

    def of(self, name: str) -> Tensor | None:
        found = self.matrices.get(name)
        return None if found is None else found.operand

    def saved_bytes(self, *names: str) -> int:
        """What a step that reads these reads less."""
        return sum(self.matrices[name].saved_bytes for name in names if name in self.matrices)

    @property
    def plain_bytes(self) -> int:
        return self.prepared.plain_bytes

    @property
    def bytes(self) -> int:
        return self.prepared.bytes

    @property
    def told(self) -> str:
        sizes = f"{self.bytes / 1e9:.2f} GB beside {self.plain_bytes / 1e9:.2f}"
        return f"weights in 12 bits, without loss: {sizes} GB, packed in {self.prepared.seconds:.1f} s"


_KEPT = WeakTensorKeyDictionary()  # by the embedding of the weights: PackedWeights


def _key(weights: Weights) -> Tensor:
    """What lives as long as they do."""
    return tensors(weights.embedding)[0]


def layout_format() -> str:
    """Name layout and version, for the settings of an arm."""
    layout = registry.find("linear", CANDIDATE).layout
    assert layout is not None
    return f"{layout.name}, version {layout.version}"


def supports(dtype: DTypeName, fp: Fingerprint, weight: str = PLAIN) -> Support:
    """Has the device's team a kernel for them? Said without a look at the weights."""
    if fp.kind != "cpu":
        return Rejected(reason="packed weights are a thread team's, on a CPU")
    if weight != PLAIN:
        return Rejected(reason=f"only plain weights are packed, and these are {weight}")
    if dtype != "bf16":
        return Rejected(reason=f"only bf16 is packed, and this is {dtype}")
    isa = facts(fp).isa
    return Rejected(reason="the kernel needs AVX2, which this CPU lacks") if isa == "portable" else Accepted()


def pack(weights: Weights, fp: Fingerprint, *, to_come_bytes: int = 0) -> PackedWeights:
    """Packed once, then found again. `to_come_bytes` are not free: they are still to be taken by whoever asks.

    Raises UsageError, BuildError, ParityError.
    """
    if _key(weights) not in _KEPT:
        _KEPT[_key(weights)] = _pack(weights, fp, to_come_bytes + RESERVE_BYTES)
    found: PackedWeights = _KEPT[_key(weights)]
    return found


def offer(plan: Plan, weights: Weights, fp: Fingerprint) -> Offer:
    """Return the form that reads packed weights, where the team has a kernel for them; refused where there is no room
    beside the original and what the plan still takes. By the least that packed weights can take."""
    if isinstance(supports(plan.dtype, fp, plan.shape.weight), Rejected):
        return Offer()
    STORE.sweep()
    need = sum(w.nbytes // 4 * 3 for _, w in weights.matrices())
    free = free_memory("cpu") - RESERVE_BYTES - reference_bytes(plan)
    fits = _key(weights) in _KEPT or need <= free
    return Offer(forms=("packed",), refused={} if fits else {"packed": _no_room(need, free)})


def make_room(weights: Weights, plan: Plan) -> None:
    """For a run on these weights that needs the room of what an earlier one packed, for a team or for single ops."""
    STORE.sweep()
    if weights.device.type == "cpu" and free_memory("cpu") < memory_need(plan) - arena_bytes(plan.shape, plan.dtype):
        STORE.forget([w for _, w in weights.matrices()])
        _KEPT.pop(_key(weights), None)


def forget(weights: Weights) -> None:
    """Nobody reads them packed. Steps that do keep their bytes until they are gone; single ops pack theirs again."""
    if _key(weights) in _KEPT:
        STORE.forget([w for _, w in weights.matrices()])
        del _KEPT[_key(weights)]


def prepare_of(fp: Fingerprint) -> Prepare:
    """Return what packs a matrix on this device. Compiles on first use. Raises BuildError."""
    candidate, w = registry.find("linear", CANDIDATE), Workload(op="linear", dims=(), dtype="bf16")
    recipe = candidate.recipe(w, fp, Knobs())
    assert isinstance(recipe, NativeRecipe) and recipe.layout is not None
    built = compile_source(recipe.source, recipe.flags).digest
    return Prepare.of_artefact(recipe.layout, recipe.flags, built, min(facts(fp).cpus, MOST_THREADS))


def _no_room(need: int, free: int) -> str:
    have = f"{max(free, 0) / 2**30:.1f} GiB are to be had"
    return f"they would take {need / 2**30:.1f} GiB beside the original; {have}"


def _pack(weights: Weights, fp: Fingerprint, reserve_bytes: int) -> PackedWeights:
    support = supports(weights.dtype, fp, weights.shape.weight)
    if isinstance(support, Rejected):
        raise UsageError("packed weights", why=support.reason)
    prepare, sizes = prepare_of(fp), dict[str, int]()
    for name, w in weights.matrices():
        if w.shape[0] % ROWS == 0 and w.shape[1] % UNIT == 0:
            size = prepare.size(w)
            if size <= prepare.layout.worth * w.nbytes:
                sizes[name] = size
    if not sizes:
        raise UsageError("packed weights", why="no matrix would be smaller by a tenth")
    new = [name for name in sizes if STORE.peek(prepare, weights[name]) is None]
    need, free = sum(padded(sizes[name]) for name in new), free_memory("cpu") - reserve_bytes
    if need > free:
        raise UsageError("packed weights", why=_no_room(need, free))
    arena = Arena(need, torch.device("cpu"))
    made = {
        name: STORE.prepare(prepare, weights[name], size=size, allocate=arena.bytes) for name, size in sizes.items()
    }
    prepared = total(list(made.values()))
    assert prepared is not None
    return PackedWeights(matrices=made, prepared=prepared)
