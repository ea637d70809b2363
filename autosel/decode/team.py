"""The step as one native call: its program (program.py), encoded as tasks of a thread team (kernels/cpu/step.cpp).

    step = write_team(write_step(decoder, cache, place), fp)    # raises UsageError with the reason of `supports`
    step.run()

The buffers are those of the list of ops, and the workloads of its calls give the knobs. A task does several calls of
the list: q/k norms, rotation, append and attention; the norm before a projection; a sandwich of norms before the next
one. Arithmetic and bits are the same.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autosel import devices
from autosel.candidates import registry
from autosel.candidates.cpp.linear import code_flags
from autosel.decode import packed as packing
from autosel.decode.packed import MOST_THREADS, PackedWeights
from autosel.decode.program import SINGLE, Attend, Embed, Norm, Program, Project, Rotate, lower
from autosel.decode.run import Offer, Plan, StepForm
from autosel.decode.spot import checks_of
from autosel.decode.step import Call, Raced, Rewritten, Step
from autosel.decode.watch import Check, StepWatch
from autosel.decode.weights import Weights
from autosel.formats import CODED, PLAIN, find_weight_format
from autosel.knobs.cpu.facts import ISA_FLAGS, Isa, facts
from autosel.models.shape import ModelShape
from autosel.native.compile import NO_COMPILER, compile_source, find_compiler, source_digest
from autosel.native.load import load_entry
from autosel.ops.weight import Weight
from autosel.values import (
    LENGTH_DIMS,
    Accepted,
    Arm,
    Fingerprint,
    NativeRecipe,
    Prepared,
    Rejected,
    Scalar,
    Support,
    digest,
    length_bucket,
)

# Nearly all bytes of a step go through these. If other kernels than the team's serve them, nothing was decided for a
# team either, and it is not compiled without a request.
DECIDED = ("linear", "attn", "lm_head")
SOURCE, ENTRY = "cpu/step.cpp", "step"
CANDIDATE, PACKED = "cpp:step", "cpp:step_packed"  # the latter reads packed weights (packed.py)
MOST_ROWS = 8  # dot.h has kernels for at most this many rows of x
WEIGHTS = (PLAIN, *CODED)  # weight formats that its projections read
KERNELS = {op: f"cpp:{name}" for op, name in SINGLE.items()}


def kernel_of(call: Call) -> str:
    """Return the single-op kernel with the arithmetic and knobs of an op's task, for its weights' format."""
    plain = call.workload is None or call.workload.weight_format.plain
    return KERNELS[call.op] if plain else f"{KERNELS[call.op]}_coded"


def is_of(call: Call, candidate: str) -> bool:
    """Return True if the candidate is the kernel of the op's task, or the same kernel on packed weights."""
    return candidate.removesuffix("_packed") == kernel_of(call)


class ThreadTeam:
    """How a CPU runs whole steps: a `Kind`."""

    candidate = CANDIDATE
    name = "thread team"
    taken = "step: one native call, by one thread team"

    def supports(self, plan: Plan) -> Support:
        if "C++" not in devices.named(plan.device).languages:
            return Rejected(reason="a thread team runs on a CPU")
        if plan.not_whole:
            return Rejected(reason=plan.not_whole)
        if other := set(plan.shape.formats) - set(WEIGHTS):
            return Rejected(reason=f"the team reads weights in {', '.join(WEIGHTS)}; some are {min(other)}")
        if plan.batch > MOST_ROWS:
            return Rejected(reason=f"batch {plan.batch}: the team multiplies at most {MOST_ROWS} rows")
        if find_compiler() is None:
            return Rejected(reason=NO_COMPILER)
        return Accepted()

    def offer(self, plan: Plan, weights: Weights, fp: Fingerprint, fused: Step | None) -> Offer:
        """Return the whole forms. Packed weights need a kernel of the team, and memory."""
        answer = self.supports(plan)
        if isinstance(answer, Rejected):
            return Offer(refused={"whole": answer.reason})
        packed = packing.offer(plan, weights, fp)
        forms: tuple[StepForm, ...] = ("whole", *packed.forms)
        arms = {form: arm_of(fused, fp, form) for form in forms} if fused is not None else {}
        return Offer(forms=forms, refused=packed.refused, arms=arms)

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> TeamStep:
        return write_team(step, fp, form)

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint, raced: Raced) -> str:
        """Return the op of a heavy call whose kernel here neither serves nor is proven, or "".

        A kernel that lost its own race, or stayed undecided, may win as part of the whole step, so it does not count.
        """
        for call in (c for c in ops.calls if c.op in DECIDED):
            candidate, kernel = getattr(call.function, "candidate", ""), kernel_of(call)
            if not any(is_of(call, name) for name in (candidate, *raced(getattr(call.function, "decision", None)))):
                return f"{call.op} is served by {candidate}, not by {kernel}"
        return ""


# --- the step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work of all threads between two barriers. `calls` are the list's calls that it replaces, the slowest first."""

    calls: tuple[Call, ...]
    words: bytes
    saved_bytes: int = 0  # bytes that it reads less than its ops, because weights are packed


@dataclass(slots=True, kw_only=True)
class TeamStep(Rewritten):
    """One decode step by one native call; `ops` is its list of calls, which holds place, cache and buffers.

    `times` int64 [threads, tasks, 2] of the last run: when each thread finished its share of a task, and when the last
    one did (CLOCK_MONOTONIC, ns).
    """

    candidate: str
    tasks: tuple[Task, ...]
    threads: int
    rest: tuple[Call, ...]  # calls of the list that choose the tokens, unless the last task does
    entry: Callable[..., Any]
    program: Tensor
    times: Tensor
    build: str = ""  # digest of the compiled code
    kept: list[Tensor] = field(default_factory=list)  # tensors of the program other than the list's
    packed: PackedWeights | None = None
    watch: StepWatch | None = None  # of a step that serves
    checks: tuple[Check | None, ...] = ()  # the watch's checks

    @property
    def weights_told(self) -> str:
        return self.packed.told if self.packed else ""

    @property
    def prepared(self) -> Prepared | None:
        """Return the cost of packing its weights, for the record of a race."""
        return self.packed.prepared if self.packed else None

    @property
    def kernels(self) -> Mapping[str, str]:
        return {call.op: kernel_of(call) for call in self.ops.calls if call.op in KERNELS}

    def run(self) -> None:
        if self.watch is None:
            self.through()
        elif not self.watch.run(self):  # False: it ran op by op, including the choice of the tokens
            return
        for call in self.rest:
            call.function(*call.arguments)

    def guarded(self, watch: StepWatch, fp: Fingerprint) -> TeamStep:
        """Return the same step under a watch. Compiles its checks on first use."""
        return replace(self, watch=watch, checks=checks_of(self.ops, self.tasks, self.kept[-1], fp))

    def through(self) -> None:
        """Run all tasks."""
        self.entry(self.program, self.ops.logits, self.times, self.threads)

    def part(self, begin: int, end: int) -> None:
        """Run only these tasks."""
        if begin < end:
            self.entry(self.program[begin:end], self.ops.logits, None, self.threads)

    def list_through(self, task: int) -> None:
        """Run the step op by op, up to the calls of a task; after the last one, choose the largest logits."""
        wanted = {id(call) for call in self.tasks[task].calls}
        last = max(i for i, call in enumerate(self.ops.calls) if id(call) in wanted)
        self.ops.run_to(last + 1)
        if task + 1 == len(self.tasks):
            torch.argmax(self.ops.logits, -1, out=self.kept[-1])

    def settle(self) -> None:
        """Do nothing: the step has ended when the call returns."""

    def task_ns(self) -> list[int]:
        """Run one step; return when the last thread finished each task."""
        self.through()
        ends: list[int] = self.times[0, :, 1].tolist()
        return ends

    def shares_ns(self) -> dict[str, list[tuple[int, int]]]:
        """Run one step; return by thread when its share of each task began and ended, in ns since the call."""
        started = time.monotonic_ns()
        self.through()
        found = {}
        for rank, marks in enumerate((self.times - started).tolist()):
            begins = [0, *(after_all for _, after_all in marks)]
            found[f"thread {rank}"] = [(begin, own) for begin, (own, _) in zip(begins, marks, strict=False)]
        return found

    def idle(self) -> Callable[[], None]:
        """Return the same call with no task."""
        return replace(self, program=self.program[:0], times=self.times[:, :0], rest=(), watch=None).run


def write_team(step: Step, fp: Fingerprint, form: StepForm = "whole") -> TeamStep:
    """Return the step, which must have the fused chain, for a thread team. Compiles the kernel on first use.

    Form "packed" packs the weights on first use. Raises BuildError; UsageError and ParityError if packing fails.
    """
    prepared = packing.pack(step.decoder.weights, fp) if form == "packed" else None
    program = lower(step)
    encoder = _Encoder(program, fp, step.chosen, prepared)
    tasks = tuple(encoder.tasks())
    isa = facts(fp).isa
    artefact = compile_source(SOURCE, _flags(step, isa))
    words = torch.frombuffer(bytearray(b"".join(t.words for t in tasks)), dtype=torch.int64).view(len(tasks), -1)
    return TeamStep(
        ops=step,
        candidate=PACKED if prepared is not None else CANDIDATE,
        tasks=tasks,
        threads=encoder.threads,
        rest=tuple(call for call in program.rest if call.op == "sample"),  # the last task makes the greedy choice
        entry=load_entry(artefact.digest, ENTRY),
        program=words,
        times=torch.zeros(encoder.threads, len(tasks), 2, dtype=torch.int64),
        build=artefact.digest,
        kept=encoder.kept,
        packed=prepared,
    )


def arm_of(step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm:
    """Return the arm of the team that would be written from the step's list."""
    knobs = {c.workload.bucket: knobs_of(_at_longest(c), fp) for c in step.calls if c.workload and c.op in KERNELS}
    flags = _flags(step, facts(fp).isa)
    threads = max(int(k.get("threads", 1)) for k in knobs.values())
    settings: dict[str, Scalar] = {"threads": threads, "knobs": digest(knobs)[:12]}
    settings |= {"weights": packing.layout_format()} if form == "packed" else {}
    build = source_digest(SOURCE, flags)
    return Arm(
        candidate=PACKED if form == "packed" else CANDIDATE,
        backend="CPP",
        recipe=NativeRecipe(source=SOURCE, entry=ENTRY, flags=flags),
        knobs=settings,
        digest=digest({"source": build, "knobs": settings}),
        build=build,
    )


def _flags(step: Step, isa: Isa) -> tuple[str, ...]:
    """Return the flags of the build that serves the step's dtype and formats of weights."""
    dtype, formats = step.decoder.weights.dtype, map(find_weight_format, coded_formats(step.decoder.shape))
    return (*ISA_FLAGS[isa], f"-DAUTOSEL_{dtype.upper()}", *code_flags(*formats, dtype=dtype))


def coded_formats(shape: ModelShape) -> tuple[str, ...]:
    """Return the formats of codes that a model's step reads, by the numbers that the build gives them."""
    return tuple(name for name in shape.formats if name != PLAIN)


def _at_longest(call: Call) -> Call:
    """Return the call at its bucket's longest context: a decision is for a bucket, but derived knobs vary within it."""
    w = call.workload
    if w is None or not LENGTH_DIMS & {name for name, _ in w.dims}:
        return call
    return replace(call, workload=w.at(L=length_bucket(w["L"])[1]))


# --- from ops to tasks ----------------------------------------------------------------------------------------------

TASK_WORDS = 48
EMBED, PROJECT, ATTEND = 0, 1, 2
EPILOGUES = {"norm_qkv": 0, "linear": 1, "gate_up": 2, "lm_head": 3}  # kStore, kAdd, kGate, kChoose

Word = int | float | Tensor | None


def _pack(kind: int, *words: Word) -> bytes:
    """Encode a task: kind, number of words, words; a tensor is its address, None a null."""
    packed = b"".join(_word(w) for w in (kind, len(words) + 2, *words))
    assert len(packed) <= TASK_WORDS * 8
    return packed.ljust(TASK_WORDS * 8, b"\0")


def _word(w: Word) -> bytes:
    if isinstance(w, float):
        return struct.pack("d", w)
    return struct.pack("q", 0 if w is None else w.data_ptr() if isinstance(w, Tensor) else w)


class _Encoder:
    """Encoder of a program. Norms and rotations wait for the projection or attention that includes them."""

    def __init__(
        self, program: Program, fp: Fingerprint, chosen: Tensor | None, packed: PackedWeights | None = None
    ) -> None:
        self.program, self.fp, self.chosen, self.packed = program, fp, chosen, packed
        self.norm = (program.eps, program.offset)
        self.formats = coded_formats(program.weights.shape)
        self.threads = 1
        self.kept: list[Tensor] = []

    def tasks(self) -> Iterator[Task]:
        waiting: list[Norm | Rotate] = []
        for op in self.program.ops:
            if isinstance(op, (Norm, Rotate)):
                waiting.append(op)
                continue
            calls = (*op.calls, *(call for other in waiting for call in other.calls))
            if isinstance(op, Embed):
                yield Task(calls=calls, words=self._embed(op))
            elif isinstance(op, Attend):
                yield Task(calls=calls, words=self._attend(op, waiting))
            else:
                yield Task(calls=calls, words=self._project(op, waiting), saved_bytes=self._saved_bytes(op))
            waiting = []
        assert not waiting, "the step ends with a projection"

    def _embed(self, op: Embed) -> bytes:
        table = self.program.weights[op.table]
        codes, scales = _parts(table)
        size = (*op.out.shape, table.shape[0])
        return _pack(
            EMBED, *size, codes, codes.stride(0), op.tokens, op.scale, op.out, scales, _row_bytes(scales),
            self._format(table),
        )  # fmt: skip

    def _attend(self, op: Attend, waiting: list[Norm | Rotate]) -> bytes:
        (turn,) = waiting
        assert isinstance(turn, Rotate), "only rotation precedes attention"
        weight, knobs = self.program.weight, knobs_of(op.call, self.fp)
        batch, heads, _, d = op.q.shape
        return _pack(
            ATTEND,
            *(batch, heads, op.k.shape[1], d),
            *(turn.qkv, weight(turn.q_norm), weight(turn.k_norm), *self.norm),
            *(turn.positions, turn.starts, op.lengths),
            turn.inv_freq,
            *(turn.inv_freq.shape[0], turn.style),
            *(op.k, op.v),
            *(op.k.shape[2], *op.k.stride()[:3]),
            *(op.scale or 1.0 / math.sqrt(d), op.softcap),
            *(op.window, knobs["tile"], knobs["chunk"], knobs["prefetch"]),
            op.out,
        )

    def _project(self, op: Project, waiting: list[Norm | Rotate]) -> bytes:
        """Encode a projection with the waiting norms: a sandwich, then a norm; or neither."""
        norms = [other for other in waiting if isinstance(other, Norm)]
        sandwich = next((n for n in norms if n.residual is not None), None)
        normed = next((n for n in norms if n.residual is None), None)
        weight, x = self.program.weight, op.x if normed is None else normed.x
        post_norm = residual = joined = None
        if sandwich is not None:
            assert x.data_ptr() == sandwich.out.data_ptr(), "the next projection reads a sandwich's sum"
            x, post_norm, residual, joined = sandwich.x, weight(sandwich.weight), sandwich.residual, sandwich.out
        assert all(t is None or t.is_contiguous() for t in (x, op.residual, op.y, residual, joined))
        knobs, w = knobs_of(op.call, self.fp), self.program.weights[op.w]
        (codes, scales), (up, up_scales) = _parts(w), _parts(weight(op.up))
        self.threads = max(self.threads, min(MOST_THREADS, int(knobs["threads"])))
        return _pack(
            PROJECT,
            *(len(x), *w.shape, knobs["rows"]),
            *(x, post_norm, residual, joined),
            *(weight(op.norm if normed is None else normed.weight), *self.norm, int(normed is not None)),
            *(codes, up, codes.stride(0), 0 if up is None else up.stride(0)),
            *self._packed_of(op),
            *(EPILOGUES[op.call.op], op.activation, op.residual, op.y, self._token(op)),
            *(scales, up_scales, _row_bytes(scales), _row_bytes(up_scales), self._format(w)),
        )

    def _format(self, w: Any) -> int:
        """Return the number of a weight's format in the build."""
        return self.formats.index(w.format.name) if isinstance(w, Weight) else -1

    def _token(self, op: Project) -> Tensor | None:
        """Return where the output head writes the index of each row's largest logit."""
        if op.call.op != "lm_head":
            return None
        token = self.chosen if self.chosen is not None else torch.empty(len(op.y), dtype=torch.int64)
        self.kept.append(token)
        return token

    def _packed_of(self, op: Project) -> tuple[Tensor | None, Tensor | None]:
        """Return the packed operands: both of gate and up, or neither."""
        names = [op.w] if op.up is None else [op.w, op.up]
        found = [self.packed.of(name) for name in names] if self.packed is not None else [None]
        if any(tensor is None for tensor in found):
            return None, None
        return found[0], found[-1] if op.up is not None else None

    def _saved_bytes(self, op: Project) -> int:
        if self.packed is None or self._packed_of(op)[0] is None:
            return 0
        return self.packed.saved_bytes(op.w, *([op.up] if op.up is not None else []))


def _parts(w: Any) -> tuple[Any, Any]:
    """Return the codes and scales of a weight; for a plain one itself and None."""
    return (w.codes, w.scales) if isinstance(w, Weight) else (w, None)


def _row_bytes(scales: Tensor | None) -> int:
    return 0 if scales is None else scales.stride(0) * scales.itemsize


def knobs_of(call: Call, fp: Fingerprint) -> dict[str, Any]:
    """Return the knobs of the op's decision if it chose the task's kernel; else derived ones."""
    decision = getattr(call.function, "decision", None)
    if decision is not None and is_of(call, decision.arm.candidate):
        return dict(decision.arm.knobs)
    assert call.workload is not None
    return registry.find(call.op, kernel_of(call)).knobs(call.workload, fp).values
