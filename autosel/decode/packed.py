"""A model's matrices in 12 bits an element, without loss (kernels/cpu/packed.h): read by a thread team in their place.

    packed = pack(decoder.weights, fp)     # UsageError: no room beside the original, or nothing gained by it;
                                           # ParityError: some unit does not unpack to the same bits
    packed.of("0.gate")                    # its bytes, or None: a matrix that stays as it is
    packed.saved_bytes("0.gate")           # what a step needs to read less

The original stays: prefill, the baseline and every op by itself read it. What is packed is kept for as long as the
weights are, for all steps that are written; a run that needs the room takes it back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autosel.decode.pages import Arena, padded
from autosel.decode.run import Offer, Plan
from autosel.decode.weights import Weights, arena_bytes, free_memory, memory_need, reference_bytes
from autosel.errors import ParityError, UsageError
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.native.compile import compile_source
from autosel.native.load import load_entry
from autosel.ops.stored import tensors
from autosel.values import Accepted, DTypeName, Fingerprint, Rejected, Support

SOURCE = "cpu/pack.cpp"
VERSION = 2  # of the layout: kPackedVersion
FORMAT = f"12 bits, layout {VERSION}"
UNIT = 128
ROWS = 8  # a matrix has whole eights of rows
MOST_THREADS = 255  # of the kernels' team
WORTH = 0.9  # of the original: what takes more is left as it is
RESERVE_BYTES = 1 << 30  # that stay free, beside what the caller is still to take


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """`bytes` are what the packed matrices take beside `plain_bytes`, the originals; `seconds` what packing took."""

    matrices: Mapping[str, Tensor]  # name of the original -> uint8 [bytes]
    saved: Mapping[str, int]  # name -> what the original takes more
    plain_bytes: int
    bytes: int
    seconds: float

    def of(self, name: str) -> Tensor | None:
        return self.matrices.get(name)

    def saved_bytes(self, *names: str) -> int:
        """What a step that reads these reads less."""
        return sum(self.saved.get(name, 0) for name in names)

    @property
    def told(self) -> str:
        sizes = f"{self.bytes / 1e9:.2f} GB beside {self.plain_bytes / 1e9:.2f}"
        return f"weights in 12 bits, without loss: {sizes} GB, packed in {self.seconds:.1f} s"


_KEPT = WeakTensorKeyDictionary()  # by the embedding of the weights: Packed


def _key(weights: Weights) -> Tensor:
    """What lives as long as they do."""
    return tensors(weights.embedding)[0]


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


def pack(weights: Weights, fp: Fingerprint, *, to_come_bytes: int = 0) -> Packed:
    """Packed once, then found again. `to_come_bytes` are not free: they are still to be taken by whoever asks.

    Raises UsageError, BuildError, ParityError.
    """
    if _key(weights) not in _KEPT:
        _KEPT[_key(weights)] = _pack(weights, fp, to_come_bytes + RESERVE_BYTES)
    found: Packed = _KEPT[_key(weights)]
    return found


def offer(plan: Plan, weights: Weights, fp: Fingerprint) -> Offer:
    """Return the form that reads packed weights, where the team has a kernel for them; refused where there is no room
    beside the original and what the plan still takes. By the least that packed weights can take."""
    if isinstance(supports(plan.dtype, fp, plan.shape.weight), Rejected):
        return Offer()
    need = sum(w.nbytes // 4 * 3 for _, w in weights.matrices())
    free = free_memory("cpu") - RESERVE_BYTES - reference_bytes(plan)
    fits = _key(weights) in _KEPT or need <= free
    return Offer(forms=("packed",), refused={} if fits else {"packed": _no_room(need, free)})


def make_room(weights: Weights, plan: Plan) -> None:
    """For a run on these weights that needs what an earlier one packed."""
    if _key(weights) in _KEPT and free_memory("cpu") < memory_need(plan) - arena_bytes(plan.shape, plan.dtype):
        forget(weights)


def forget(weights: Weights) -> None:
    """Nobody reads them packed. Steps that do keep their bytes until they are gone."""
    if _key(weights) in _KEPT:
        del _KEPT[_key(weights)]


def _no_room(need: int, free: int) -> str:
    have = f"{max(free, 0) / 2**30:.1f} GiB are to be had"
    return f"they would take {need / 2**30:.1f} GiB beside the original; {have}"


def _pack(weights: Weights, fp: Fingerprint, reserve_bytes: int) -> Packed:
    began, f = time.monotonic(), facts(fp)
    support = supports(weights.dtype, fp, weights.shape.weight)
    if isinstance(support, Rejected):
        raise UsageError("packed weights", why=support.reason)
    built = compile_source(SOURCE, ISA_FLAGS[f.isa]).digest
    entry, compare = (load_entry(built, name) for name in ("pack", "compare"))
    threads = min(f.cpus, MOST_THREADS)
    size, sizes = torch.zeros(1, dtype=torch.int64), dict[str, int]()
    for name, w in weights.matrices():
        if w.shape[0] % ROWS == 0 and w.shape[1] % UNIT == 0:
            entry(w, None, size, threads)
            if int(size) <= WORTH * w.nbytes:
                sizes[name] = int(size)
    need, free = sum(map(padded, sizes.values())), free_memory("cpu") - reserve_bytes
    if not sizes:
        raise UsageError("packed weights", why="no matrix would be smaller by a tenth")
    if need > free:
        raise UsageError("packed weights", why=_no_room(need, free))
    arena, made = Arena(need, torch.device("cpu")), dict[str, Tensor]()
    for name, bytes_ in sizes.items():
        w, made[name] = weights[name], arena.bytes(bytes_)
        entry(w, made[name], size, threads)
        compare(made[name], w, size, threads)
        if int(size):
            units = f"{int(size)} units of {UNIT} weights"
            raise ParityError(
                "packed weights are not the weights", why=f"{units} of a {w.shape[0]} x {w.shape[1]} matrix"
            )
    return Packed(
        matrices=made,
        saved={name: weights[name].nbytes - bytes_ for name, bytes_ in sizes.items()},
        plain_bytes=sum(weights[name].nbytes for name in sizes),
        bytes=sum(sizes.values()),
        seconds=time.monotonic() - began,
    )
