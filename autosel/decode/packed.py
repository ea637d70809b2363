"""A model's matrices in the lossless layout of 12 bits (kernels/cpu/packed.h), which a thread team reads.

    packed = pack(decoder.weights, fp)     # UsageError: no room for a copy, or no gain;
                                           # ParityError: a unit does not unpack to the same bits
    packed.of("0.gate")                    # its bytes, or None for a matrix that stays unpacked
    packed.saved_bytes("0.gate")           # bytes that a step saves

The `prepare` of `cpp:gemv_packed` makes them, and they are kept where single ops find them too (candidates/layouts.py).
The original remains: prefill, the baseline and single ops read it. Packed matrices live as long as the weights, for all
steps; a run that needs the memory frees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autosel import devices
from autosel.candidates import registry
from autosel.candidates.layouts import RESERVE_BYTES, STORE, Packed, Prepare, total
from autosel.decode.pages import PageArena, padded
from autosel.decode.run import Offer, Plan
from autosel.decode.weights import Weights, arena_bytes, memory_need, reference_bytes
from autosel.devices.cpu.machine import free_memory
from autosel.errors import UsageError
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import facts
from autosel.native.compile import compile_source
from autosel.ops.stored import tensors
from autosel.values import Accepted, DTypeName, Fingerprint, Knobs, NativeRecipe, Prepared, Rejected, Support, Workload

CANDIDATE = "cpp:gemv_packed"  # the candidate that owns the layout
UNIT, ROWS = 128, 8  # a team divides a matrix into whole units and groups of eight rows
MOST_THREADS = 255  # limit of the kernels' team


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """The packed matrices of a model, by the original's name."""

    matrices: Mapping[str, Packed]
    prepared: Prepared

    def of(self, name: str) -> Tensor | None:
        found = self.matrices.get(name)
        return None if found is None else found.operand

    def saved_bytes(self, *names: str) -> int:
        """Return how many bytes a step that reads these matrices saves."""
        return sum(self.matrices[name].saved_bytes for name in names if name in self.matrices)

    @property
    def told(self) -> str:
        p = self.prepared
        sizes = f"{p.bytes / 1e9:.2f} GB for {p.plain_bytes / 1e9:.2f}"
        return f"weights in 12 bits, without loss: {sizes} GB, packed in {p.seconds:.1f} s"


_KEPT = WeakTensorKeyDictionary()  # embedding of the weights -> PackedWeights


def _key(weights: Weights) -> Tensor:
    """Return a tensor that lives as long as the weights."""
    return tensors(weights.embedding)[0]


def layout_format() -> str:
    """Return the layout's name and version, for the settings of an arm."""
    layout = registry.find("linear", CANDIDATE).layout
    assert layout is not None
    return f"{layout.name}, version {layout.version}"


def supports(dtype: DTypeName, fp: Fingerprint, weight: str = PLAIN) -> Support:
    """Return whether the device's team has a kernel for packed weights, without a look at the weights."""
    if not devices.runs(fp.kind, "C++"):
        return Rejected(reason="packed weights are a thread team's, on a CPU")
    if weight != PLAIN:
        return Rejected(reason=f"only plain weights are packed, and these are {weight}")
    if dtype != "bf16":
        return Rejected(reason=f"only bf16 is packed, and this is {dtype}")
    isa = facts(fp).isa
    return Rejected(reason="the kernel needs AVX2, which this CPU lacks") if isa == "portable" else Accepted()


def pack(weights: Weights, fp: Fingerprint, *, to_come_bytes: int = 0) -> PackedWeights:
    """Return the packed weights; they are packed once. `to_come_bytes` is memory that the caller will still need.

    Raises UsageError, BuildError, ParityError.
    """
    if _key(weights) not in _KEPT:
        _KEPT[_key(weights)] = _pack(weights, fp, to_come_bytes + RESERVE_BYTES)
    found: PackedWeights = _KEPT[_key(weights)]
    return found


def offer(plan: Plan, weights: Weights, fp: Fingerprint) -> Offer:
    """Return the packed form if the team has a kernel for it; refused if memory is short.

    The estimate uses the least that packed weights can need, besides the original and what the plan will use.
    """
    if isinstance(supports(plan.dtype, fp, plan.shape.quantised), Rejected):
        return Offer()
    STORE.sweep()
    need = sum(w.nbytes // 4 * 3 for _, w in weights.matrices())
    free = free_memory() - RESERVE_BYTES - reference_bytes(plan)
    fits = _key(weights) in _KEPT or need <= free
    return Offer(forms=("packed",), refused={} if fits else {"packed": _no_room(need, free)})


def make_room(weights: Weights, plan: Plan) -> None:
    """Free packed copies of an earlier run, of the team and of single ops, if this run needs the memory."""
    STORE.sweep()
    if devices.on_host(weights.device.type) and free_memory() < memory_need(plan) - arena_bytes(plan.shape, plan.dtype):
        STORE.forget([w for _, w in weights.matrices()])
        _KEPT.pop(_key(weights), None)


def forget(weights: Weights) -> None:
    """Free the packed copies. Steps that use them keep theirs until they end; single ops pack again."""
    if _key(weights) in _KEPT:
        STORE.forget([w for _, w in weights.matrices()])
        del _KEPT[_key(weights)]


def prepare_of(fp: Fingerprint) -> Prepare:
    """Return the function that packs a matrix on this device. Compiles on first use. Raises BuildError."""
    candidate, w = registry.find("linear", CANDIDATE), Workload(op="linear", dims=(), dtype="bf16")
    recipe = candidate.recipe(w, fp, Knobs())
    assert isinstance(recipe, NativeRecipe) and recipe.layout is not None
    built = compile_source(recipe.source, recipe.flags).digest
    return Prepare.of_artefact(recipe.layout, recipe.flags, built, min(facts(fp).cpus, MOST_THREADS))


def _no_room(need: int, free: int) -> str:
    have = f"{max(free, 0) / 2**30:.1f} GiB are free"
    return f"they need {need / 2**30:.1f} GiB in addition to the original weights; {have}"


def _pack(weights: Weights, fp: Fingerprint, reserve_bytes: int) -> PackedWeights:
    support = supports(weights.dtype, fp, weights.shape.quantised)
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
    need, free = sum(padded(sizes[name]) for name in new), free_memory() - reserve_bytes
    if need > free:
        raise UsageError("packed weights", why=_no_room(need, free))
    arena = PageArena(need, torch.device(devices.HOST))
    made = {
        name: STORE.prepare(prepare, weights[name], size=size, allocate=arena.bytes) for name, size in sizes.items()
    }
    prepared = total(list(made.values()))
    assert prepared is not None
    return PackedWeights(matrices=made, prepared=prepared)
