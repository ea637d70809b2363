"""The step as one native call: the written list, lowered to tasks that one thread team walks (kernels/cpu/step.cpp).

    step = write_team(write_step(decoder, cache, place), fp)    # raises UsageError with what `supports` says
    step.run()

The list of ops is the source: its tensors are the tasks' addresses, its workloads give the knobs. What the op-by-op
step does in several calls a task does in one: q/k norms, rotation, append and attention; the norm in front of a
projection; a sandwich of norms in front of the next one. The arithmetic is the same, and so are the bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autosel.candidates import registry
from autosel.decode import packed as packing
from autosel.decode.packed import MOST_THREADS, Packed
from autosel.decode.run import Plan, StepForm
from autosel.decode.step import Call, Rewritten, Step
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.native.compile import NO_COMPILER, compile_source, find_compiler, source_digest
from autosel.native.load import load_entry
from autosel.values import (
    LENGTH_DIMS,
    Accepted,
    Arm,
    Fingerprint,
    NativeRecipe,
    Rejected,
    Scalar,
    Support,
    digest,
    length_bucket,
)

SOURCE, ENTRY = "cpu/step.cpp", "step"
CANDIDATE, PACKED = "cpp:step", "cpp:step_packed"  # the latter reads its weights packed (packed.py)
MOST_ROWS = 8  # dot.h has kernels for so many rows of x
# The op of the list -> the single-op kernel whose arithmetic and knobs the task has.
KERNELS = {
    "norm_qkv": "cpp:norm_qkv",
    "linear": "cpp:gemv",
    "gate_up": "cpp:gate_up",
    "lm_head": "cpp:lm_head",
    "attn": "cpp:attn_decode",
    "rmsnorm": "cpp:rmsnorm",
    "add_rmsnorm": "cpp:add_rmsnorm",
    "rope": "cpp:rope",
    "kv_append": "cpp:kv_append",
}


def supports(plan: Plan) -> Support:
    """Can a team take the plan's step? Asked before weights are loaded."""
    if plan.device != "cpu":
        return Rejected(reason="a thread team runs on a CPU")
    if plan.not_whole:
        return Rejected(reason=plan.not_whole)
    if plan.batch > MOST_ROWS:
        return Rejected(reason=f"batch {plan.batch}: the team multiplies at most {MOST_ROWS} rows")
    if find_compiler() is None:
        return Rejected(reason=NO_COMPILER)
    return Accepted()


# --- the step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all threads do between two barriers. `calls` of the list are what it stands for, the slowest first."""

    calls: tuple[Call, ...]
    words: bytes
    saved_bytes: int = 0  # what it reads less than its ops, for its weights are packed


@dataclass(slots=True, kw_only=True)
class TeamStep(Rewritten):
    """One decode step by one native call; `ops` is the list it came from, and holds place, cache and buffers.

    `times` int64 [threads, tasks, 2] of the last run: when each thread had done its share of a task, and when the last
    had (CLOCK_MONOTONIC, ns).
    """

    tasks: tuple[Task, ...]
    threads: int
    rest: tuple[Call, ...]  # of the list: the choice of tokens, where the step does not make it itself
    entry: Callable[..., Any]
    program: Tensor
    times: Tensor
    build: str = ""  # the digest of what was compiled
    kept: list[Tensor] = field(default_factory=list)  # what the program points to beside the list's tensors
    packed: Packed | None = None

    @property
    def candidate(self) -> str:
        return PACKED if self.packed else CANDIDATE

    @property
    def weights_told(self) -> str:
        return self.packed.told if self.packed else ""

    @property
    def kernels(self) -> Mapping[str, str]:
        return KERNELS

    def run(self) -> None:
        self.entry(self.program, self.ops.logits, self.times, self.threads)
        for call in self.rest:
            call.function(*call.arguments)

    def settle(self) -> None:
        """The call returns when the step has ended."""

    def task_ns(self) -> list[int]:
        """One step: when the last thread was done with each task."""
        self.run()
        ends: list[int] = self.times[0, :, 1].tolist()
        return ends

    def idle(self) -> Callable[[], None]:
        """The same call with no task."""
        return replace(self, program=self.program[:0], times=self.times[:, :0], rest=()).run


def write_team(step: Step, fp: Fingerprint, form: StepForm = "whole") -> TeamStep:
    """Return the step, which was written with the fused chain, for a thread team. Compiles the kernel on first use.

    Form "packed" packs the weights on first use. Raises BuildError; UsageError and ParityError where that fails.
    """
    prepared = packing.pack(step.decoder.weights, fp) if form == "packed" else None
    lowering = _Lowering(step, fp, prepared)
    tasks = tuple(lowering.tasks())
    isa = facts(fp).isa
    artefact = compile_source(SOURCE, (*ISA_FLAGS[isa], f"-DAUTOSEL_{step.decoder.weights.dtype.upper()}"))
    program = torch.frombuffer(bytearray(b"".join(t.words for t in tasks)), dtype=torch.int64).view(len(tasks), -1)
    return TeamStep(
        ops=step,
        tasks=tasks,
        threads=lowering.threads,
        rest=tuple(lowering.rest),
        entry=load_entry(artefact.digest, ENTRY),
        program=program,
        times=torch.zeros(lowering.threads, len(tasks), 2, dtype=torch.int64),
        build=artefact.digest,
        kept=lowering.kept,
        packed=prepared,
    )


def arm_of(step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm:
    """Return the team that would be written from the step's list, as it would be compiled."""
    knobs = {c.workload.bucket: knobs_of(_at_longest(c), fp) for c in step.calls if c.workload and c.op in KERNELS}
    flags = (*ISA_FLAGS[facts(fp).isa], f"-DAUTOSEL_{step.decoder.weights.dtype.upper()}")
    threads = max(int(k.get("threads", 1)) for k in knobs.values())
    settings: dict[str, Scalar] = {"threads": threads, "knobs": digest(knobs)[:12]}
    settings |= {"weights": packing.FORMAT} if form == "packed" else {}
    build = source_digest(SOURCE, flags)
    return Arm(
        candidate=PACKED if form == "packed" else CANDIDATE,
        backend="CPP",
        recipe=NativeRecipe(source=SOURCE, entry=ENTRY, flags=flags),
        knobs=settings,
        digest=digest({"source": build, "knobs": settings}),
        build=build,
    )


def _at_longest(call: Call) -> Call:
    """At its bucket's longest context: a decision is about a bucket, and knobs that are derived differ within it."""
    w = call.workload
    if w is None or not LENGTH_DIMS & {name for name, _ in w.dims}:
        return call
    return replace(call, workload=w.at(L=length_bucket(w["L"])[1]))


# --- from calls to tasks ---------------------------------------------------------------------------------------------

TASK_WORDS = 48
EMBED, PROJECT, ATTEND = 0, 1, 2
STORE, ADD, GATE, CHOOSE = 0, 1, 2, 3

Word = int | float | Tensor | None


def _pack(kind: int, *words: Word) -> bytes:
    """A task's place: kind, the number of words, the words; a tensor is its address, None a null."""
    packed = b"".join(_word(w) for w in (kind, len(words) + 2, *words))
    assert len(packed) <= TASK_WORDS * 8
    return packed.ljust(TASK_WORDS * 8, b"\0")


def _word(w: Word) -> bytes:
    if isinstance(w, float):
        return struct.pack("d", w)
    return struct.pack("q", 0 if w is None else w.data_ptr() if isinstance(w, Tensor) else w)


class _Lowering:
    """Goes through the list once and keeps what comes before a projection or attention until that comes."""

    def __init__(self, step: Step, fp: Fingerprint, packed: Packed | None = None) -> None:
        self.step, self.fp, self.shape, self.packed = step, fp, step.decoder.shape, packed
        self.threads = 1
        self.rest: list[Call] = []
        self.kept: list[Tensor] = []
        self.waiting: list[Call] = []  # calls that the next task makes itself
        self.saved_bytes = 0  # by the next task

    def tasks(self) -> Iterator[Task]:
        for call in self.step.calls:
            made = self._task(call)
            if made is not None:
                yield Task(calls=(call, *self.waiting), words=made, saved_bytes=self.saved_bytes)
                self.waiting, self.saved_bytes = [], 0
        assert not self.waiting, "the step ends with a projection"

    def _task(self, call: Call) -> bytes | None:
        """The task that the call completes, or None: it waits for the next one, or comes after the team."""
        if call.site == "embed":
            return self._embed(call) if len(call.arguments) == 3 else None  # two: the scale of it
        if call.op == "attn":
            return self._attend(call)
        if call.op in ("norm_qkv", "linear", "gate_up", "lm_head"):
            return self._project(call)
        if call.op == "sample":
            self.rest.append(call)
        elif call.site not in ("embed", "argmax"):
            self.waiting.append(call)
        return None

    def _embed(self, call: Call) -> bytes:
        """With the scale of Gemma's embedding, which is a call of its own in the list."""
        table, tokens, out = call.arguments
        rounded = float(torch.tensor(self.shape.embedding_scale, dtype=table.dtype))
        return _pack(EMBED, *out.shape, table.shape[0], table, table.stride(0), tokens, rounded, out)

    def _attend(self, call: Call) -> bytes:
        q, k, v, _, _, scale, _, softcap, out = call.arguments
        before = {c.op if c.op != "rmsnorm" else c.site: c for c in self.waiting}
        norm = self.step.decoder.norm
        q_norm, k_norm = (before[s].arguments[1] if s in before else None for s in ("q norm", "k norm"))
        inv_freq, style = before["rope"].arguments[3:5]
        knobs = knobs_of(call, self.fp)
        batch, heads, _, d = q.shape
        place, layer = self.step.place, self.shape.layer_types[call.layer]
        return _pack(
            ATTEND,
            *(batch, heads, k.shape[1], d),
            *(self.qkv, q_norm, k_norm, *map(float, norm)),
            *(place.positions, place.starts, place.lengths),
            *(inv_freq, inv_freq.shape[0], style),
            *(k, v, k.shape[2], *k.stride()[:3]),
            *(float(scale) or 1.0 / math.sqrt(d), float(softcap)),
            *(self.shape.window if layer == "sliding" else 0, knobs["tile"], knobs["chunk"], knobs["prefetch"]),
            out,
        )

    def _project(self, call: Call) -> bytes:
        """What `waiting` holds goes in front: a sandwich, then a norm; or neither."""
        sandwich = next((c for c in self.waiting if c.op == "add_rmsnorm"), None)
        normed = next((c for c in self.waiting if c.op == "rmsnorm"), None)
        eps, offset = map(float, self.step.decoder.norm)
        x, (w, up, norm), (epilogue, activation, add), y = self._operands(call)
        post_norm = residual = joined = None
        if normed is not None:
            x, norm = normed.arguments[0], normed.arguments[1]
        if sandwich is not None:
            made, residual, post_norm, _, _, _, _, joined = sandwich.arguments
            assert x.data_ptr() == joined.data_ptr(), "a sandwich's sum is what the next projection is made of"
            x = made
        assert all(t is None or t.is_contiguous() for t in (x, add, y, residual, joined))
        knobs = knobs_of(call, self.fp)
        self.threads = max(self.threads, min(MOST_THREADS, int(knobs["threads"])))
        token = None
        if call.op == "lm_head":
            token = self.step.chosen if self.step.chosen is not None else torch.empty(len(y), dtype=torch.int64)
            self.kept.append(token)
        if call.op == "norm_qkv":
            self.qkv = y
        packed = self._packed_of(w, up)
        return _pack(
            PROJECT,
            *(len(x), *w.shape, knobs["rows"]),
            *(x, post_norm, residual, joined, norm, eps, offset, int(normed is not None)),
            *(w, up, w.stride(0), 0 if up is None else up.stride(0)),
            *packed,
            *(epilogue, activation, add, y, token),
        )

    def _packed_of(self, w: Tensor, up: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of gate and up both, or neither."""
        if self.packed is None or self.packed.of(w) is None or (up is not None and self.packed.of(up) is None):
            return None, None
        self.saved_bytes = self.packed.saved_bytes(w, up)
        return self.packed.of(w), self.packed.of(up)

    def _operands(self, call: Call) -> tuple[Tensor, Sequence[Any], Sequence[Any], Tensor]:
        """x, (w, up, norm), (epilogue, activation, add), y."""
        a = call.arguments
        if call.op == "norm_qkv":
            return a[0], (a[2], None, a[1]), (STORE, 0, None), a[5]
        if call.op == "gate_up":
            return a[0], (a[2], a[3], a[1]), (GATE, a[6], None), a[7]
        if call.op == "linear":
            assert a[2] is None, "no projection of these models has a bias"
            return a[0], (a[1], None, None), (ADD, 0, a[3]), a[4]
        return a[0], (a[1], None, None), (CHOOSE, 0, None), a[3]


def knobs_of(call: Call, fp: Fingerprint) -> dict[str, Any]:
    """Of the decision that serves the op, where that is the kernel the task is made of; else derived."""
    decision = getattr(call.function, "decision", None)
    if decision is not None and decision.arm.candidate == KERNELS[call.op]:
        return dict(decision.arm.knobs)
    assert call.workload is not None
    return registry.find(call.op, KERNELS[call.op]).knobs(call.workload, fp).values
