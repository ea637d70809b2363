"""The step as one native call: its program (program.py), encoded as the tasks of a thread team (kernels/cpu/step.cpp).

    step = write_team(write_step(decoder, cache, place), fp)    # raises UsageError with what `supports` says
    step.run()

The buffers are those of the list of ops, and the workloads of its calls give the knobs. A task does what the list does
in several calls: q/k norms, rotation, append and attention; the norm in front of a projection; a sandwich of norms in
front of the next one. The arithmetic is the same, and so are the bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autosel.candidates import registry
from autosel.decode import packed as packing
from autosel.decode.packed import MOST_THREADS, PackedWeights
from autosel.decode.program import Attend, Embed, Norm, Program, Project, Rotate, lower
from autosel.decode.run import Offer, Plan, StepForm
from autosel.decode.spot import checks_of
from autosel.decode.step import Call, Raced, Rewritten, Step
from autosel.decode.watch import Check, StepWatch
from autosel.decode.weights import Weights
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
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

# Nearly all bytes of a step go through these: where they are not served by the kernels that a team is made of, nothing
# was decided for it either, and nobody waits for its compilation unasked.
DECIDED = ("linear", "attn", "lm_head")
SOURCE, ENTRY = "cpu/step.cpp", "step"
CANDIDATE, PACKED = "cpp:step", "cpp:step_packed"  # the latter reads its weights packed (packed.py)
MOST_ROWS = 8  # dot.h has kernels for so many rows of x
WEIGHTS = (PLAIN, "int8-row")  # formats that its projections read
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


def kernel_of(call: Call) -> str:
    """The single-op kernel whose arithmetic and knobs an op's task has: that of its weights' format."""
    plain = call.workload is None or call.workload.weight_format.plain
    return KERNELS[call.op] if plain else f"{KERNELS[call.op]}_int8"


def is_of(call: Call, candidate: str) -> bool:
    """Is the candidate the kernel of the op's task? The same kernel on packed weights is: it has its knobs and bits."""
    return candidate.removesuffix("_packed") == kernel_of(call)


def supports(plan: Plan) -> Support:
    """Can a team take the plan's step? Asked before weights are loaded."""
    if plan.device != "cpu":
        return Rejected(reason="a thread team runs on a CPU")
    if plan.not_whole:
        return Rejected(reason=plan.not_whole)
    if plan.shape.weight not in WEIGHTS:
        return Rejected(reason=f"the team reads weights in {', '.join(WEIGHTS)}; these are {plan.shape.weight}")
    if plan.batch > MOST_ROWS:
        return Rejected(reason=f"batch {plan.batch}: the team multiplies at most {MOST_ROWS} rows")
    if find_compiler() is None:
        return Rejected(reason=NO_COMPILER)
    return Accepted()


class ThreadTeam:
    """How a CPU takes whole steps: a `Kind`."""

    candidate = CANDIDATE
    name = "thread team"
    taken = "step: one native call, by one thread team"

    def supports(self, plan: Plan) -> Support:
        return supports(plan)

    def offer(self, plan: Plan, weights: Weights, fp: Fingerprint, fused: Step | None) -> Offer:
        """Packed weights are one of its forms where it has a kernel for them; refused where there is no room."""
        answer = supports(plan)
        if isinstance(answer, Rejected):
            return Offer(refused={"whole": answer.reason})
        packed = packing.offer(plan, weights, fp)
        forms: tuple[StepForm, ...] = ("whole", *packed.forms)
        arms = {form: arm_of(fused, fp, form) for form in forms} if fused is not None else {}
        return Offer(forms=forms, refused=packed.refused, arms=arms)

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> TeamStep:
        return write_team(step, fp, form)

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint, raced: Raced) -> str:
        """Return an op that moves most of the bytes, and whose kernel here is neither served nor proven: a kernel that
        lost its own race, or was left undecided, may win as a part of the whole."""
        for call in (c for c in ops.calls if c.op in DECIDED):
            candidate, kernel = getattr(call.function, "candidate", ""), kernel_of(call)
            if not any(is_of(call, name) for name in (candidate, *raced(getattr(call.function, "decision", None)))):
                return f"{call.op} is served by {candidate}, not by {kernel}"
        return ""


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

    candidate: str
    tasks: tuple[Task, ...]
    threads: int
    rest: tuple[Call, ...]  # of the list: the choice of tokens, where the step does not make it itself
    entry: Callable[..., Any]
    program: Tensor
    times: Tensor
    build: str = ""  # the digest of what was compiled
    kept: list[Tensor] = field(default_factory=list)  # what the program points to beside the list's tensors
    packed: PackedWeights | None = None
    watch: StepWatch | None = None  # of the step that serves
    checks: tuple[Check | None, ...] = ()  # for it

    @property
    def weights_told(self) -> str:
        return self.packed.told if self.packed else ""

    @property
    def prepared(self) -> Prepared | None:
        """What packing its weights took, for the record of a race."""
        return self.packed.prepared if self.packed else None

    @property
    def kernels(self) -> Mapping[str, str]:
        return {call.op: kernel_of(call) for call in self.ops.calls if call.op in KERNELS}

    def run(self) -> None:
        if self.watch is None:
            self.through()
        elif not self.watch.run(self):  # it was run op by op, to the choice of the tokens
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
        """Run these tasks alone."""
        if begin < end:
            self.entry(self.program[begin:end], self.ops.logits, None, self.threads)

    def list_through(self, task: int) -> None:
        """Run the step op by op, up to what a task stands for; after the last one, choose the largest logits."""
        wanted = {id(call) for call in self.tasks[task].calls}
        last = max(i for i, call in enumerate(self.ops.calls) if id(call) in wanted)
        self.ops.run_to(last + 1)
        if task + 1 == len(self.tasks):
            torch.argmax(self.ops.logits, -1, out=self.kept[-1])

    def settle(self) -> None:
        """The call returns when the step has ended."""

    def task_ns(self) -> list[int]:
        """One step: when the last thread was done with each task."""
        self.through()
        ends: list[int] = self.times[0, :, 1].tolist()
        return ends

    def idle(self) -> Callable[[], None]:
        """The same call with no task."""
        return replace(self, program=self.program[:0], times=self.times[:, :0], rest=(), watch=None).run


def write_team(step: Step, fp: Fingerprint, form: StepForm = "whole") -> TeamStep:
    """Return the step, which was written with the fused chain, for a thread team. Compiles the kernel on first use.

    Form "packed" packs the weights on first use. Raises BuildError; UsageError and ParityError where that fails.
    """
    prepared = packing.pack(step.decoder.weights, fp) if form == "packed" else None
    program = lower(step)
    encoder = _Encoder(program, fp, step.chosen, prepared)
    tasks = tuple(encoder.tasks())
    isa = facts(fp).isa
    artefact = compile_source(SOURCE, (*ISA_FLAGS[isa], f"-DAUTOSEL_{step.decoder.weights.dtype.upper()}"))
    words = torch.frombuffer(bytearray(b"".join(t.words for t in tasks)), dtype=torch.int64).view(len(tasks), -1)
    return TeamStep(
        ops=step,
        candidate=PACKED if prepared is not None else CANDIDATE,
        tasks=tasks,
        threads=encoder.threads,
        rest=tuple(call for call in program.rest if call.op == "sample"),  # the greedy choice is the last task's
        entry=load_entry(artefact.digest, ENTRY),
        program=words,
        times=torch.zeros(encoder.threads, len(tasks), 2, dtype=torch.int64),
        build=artefact.digest,
        kept=encoder.kept,
        packed=prepared,
    )


def arm_of(step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm:
    """Return the team that would be written from the step's list, as it would be compiled."""
    knobs = {c.workload.bucket: knobs_of(_at_longest(c), fp) for c in step.calls if c.workload and c.op in KERNELS}
    flags = (*ISA_FLAGS[facts(fp).isa], f"-DAUTOSEL_{step.decoder.weights.dtype.upper()}")
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


def _at_longest(call: Call) -> Call:
    """At its bucket's longest context: a decision is about a bucket, and knobs that are derived differ within it."""
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
    """A task's place: kind, the number of words, the words; a tensor is its address, None a null."""
    packed = b"".join(_word(w) for w in (kind, len(words) + 2, *words))
    assert len(packed) <= TASK_WORDS * 8
    return packed.ljust(TASK_WORDS * 8, b"\0")


def _word(w: Word) -> bytes:
    if isinstance(w, float):
        return struct.pack("d", w)
    return struct.pack("q", 0 if w is None else w.data_ptr() if isinstance(w, Tensor) else w)


class _Encoder:
    """Goes through the program once and keeps what a projection or attention does itself until that comes."""

    def __init__(
        self, program: Program, fp: Fingerprint, chosen: Tensor | None, packed: PackedWeights | None = None
    ) -> None:
        self.program, self.fp, self.chosen, self.packed = program, fp, chosen, packed
        self.norm = (program.eps, program.offset)
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
        return _pack(EMBED, *size, codes, codes.stride(0), op.tokens, op.scale, op.out, scales)

    def _attend(self, op: Attend, waiting: list[Norm | Rotate]) -> bytes:
        (turn,) = waiting
        assert isinstance(turn, Rotate), "in front of attention comes rotation alone"
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
        """What waits goes in front: a sandwich, then a norm; or neither."""
        norms = [other for other in waiting if isinstance(other, Norm)]
        sandwich = next((n for n in norms if n.residual is not None), None)
        normed = next((n for n in norms if n.residual is None), None)
        weight, x = self.program.weight, op.x if normed is None else normed.x
        post_norm = residual = joined = None
        if sandwich is not None:
            assert x.data_ptr() == sandwich.out.data_ptr(), "a sandwich's sum is what the next projection is made of"
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
            *(scales, up_scales),
        )

    def _token(self, op: Project) -> Tensor | None:
        """Where the output head puts the index of each row's largest logit."""
        if op.call.op != "lm_head":
            return None
        token = self.chosen if self.chosen is not None else torch.empty(len(op.y), dtype=torch.int64)
        self.kept.append(token)
        return token

    def _packed_of(self, op: Project) -> tuple[Tensor | None, Tensor | None]:
        """Of gate and up both, or neither."""
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
    """The codes and scales of a weight; of a plain one itself and nothing."""
    return (w.codes, w.scales) if isinstance(w, Weight) else (w, None)


def knobs_of(call: Call, fp: Fingerprint) -> dict[str, Any]:
    """Of the decision that serves the op, where that is the kernel the task is made of; else derived."""
    decision = getattr(call.function, "decision", None)
    if decision is not None and is_of(call, decision.arm.candidate):
        return dict(decision.arm.knobs)
    assert call.workload is not None
    return registry.find(call.op, kernel_of(call)).knobs(call.workload, fp).values
