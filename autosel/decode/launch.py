"""The step as one launch: the written list, lowered to the tasks of the whole-step kernel (kernels/cuda/step.cu).

What a thread team is to a CPU (team.py), this is to a GPU: the same list of ops is the source, its tensors are the
tasks' addresses, and all CTAs go through it. Status: the way from list to tokens runs in tests on emulated threads; not
yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autosel import ops
from autosel.candidates.arms import digest_of
from autosel.candidates.cuda import step as kernel
from autosel.candidates.cuda.step import Bound, Entries, Program, StepBuild
from autosel.decode.step import Call, Rewritten, Step
from autosel.errors import DeviceFault, UsageError
from autosel.knobs.gpu import gemv, persistent
from autosel.knobs.gpu.facts import facts
from autosel.knobs.gpu.step import StepCost
from autosel.native.compile import source_digest
from autosel.values import Arm, Fingerprint, Rejected, Support, Workload, length_bucket

CANDIDATE = kernel.CANDIDATE
WAITING_CC = (9, 0)  # from here on a kernel can wait for the one ahead of it: CUDA C++ Programming Guide, PDL
PRODUCTS = ("norm_qkv", "linear", "gate_up", "lm_head")
# The op of the list -> the single-op kernel whose arithmetic the task has.
KERNELS = {
    "norm_qkv": "cuda:norm_qkv",
    "linear": "cuda:gemv",
    "gate_up": "cuda:gate_up",
    "lm_head": "cuda:lm_head",
    "attn": "cuda:attn_decode",
    "rmsnorm": "cuda:rmsnorm",
    "add_rmsnorm": "cuda:add_rmsnorm",
    "rope": "cuda:rope",
    "kv_append": "cuda:kv_append",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTask:
    """What all CTAs do between two waits. `calls` of the list are what it stands for, the slowest first."""

    calls: tuple[Call, ...]


@dataclass(slots=True, kw_only=True)
class LaunchStep(Rewritten):
    """One decode step by one launch; `ops` is the list it came from, and holds place, cache and buffers.

    It serves every length up to `reach`, the end of the length bucket, and is written anew beyond.
    """

    fp: Fingerprint
    tasks: tuple[LaunchTask, ...]
    rest: tuple[Call, ...]  # of the list: the choice of tokens
    compiled: StepBuild
    entries: Entries
    bound: Bound
    reach: int
    ctas: int  # of the launch: all that can be resident
    said: Tensor  # int32 [1] on the host: why it stopped, once the step has ended

    @property
    def candidate(self) -> str:
        return CANDIDATE

    @property
    def build(self) -> str:
        return self.entries.digest

    @property
    def kernels(self) -> Mapping[str, str]:
        return KERNELS

    def run(self) -> None:
        """Enqueue the step. Raises DeviceFault where the device refuses the launch."""
        if self.place.longest > self.reach:
            self._reach()
        self._launch(None)
        for call in self.rest:
            call.function(*call.arguments)

    def settle(self) -> None:
        """Until the step has ended. Raises DeviceFault where its watchdog stopped it."""
        _wait_for(self.said, self.logits)
        why = int(self.said)
        if why:
            raise self._stopped(why - 1)

    def task_ns(self) -> list[int]:
        """One step: when the last CTA was done with each task, by the device's clock."""
        times = torch.zeros(len(self.tasks), dtype=torch.int64, device=self.logits.device)
        self._launch(times)
        self.settle()
        return [int(t) for t in times.tolist()]

    def idle(self) -> Callable[[], None]:
        """The same call with next to nothing to do: one CTA, which embeds the tokens."""
        state = torch.zeros(kernel.STATE_WORDS + 1, dtype=torch.int32, device=self.logits.device)
        b = self.bound
        one = Bound(
            entry=b.entry,
            program=b.program[:1],
            state=state,
            like=b.like,
            grid=1,
            slots=b.slots,
            limit_us=b.limit_us,
            kept=b.kept,
        )
        return one.run

    @property
    def arm(self) -> Arm:
        """What a quarantine names."""
        return _arm(self.compiled, self.build, self.build)

    def _launch(self, times: Tensor | None) -> None:
        try:
            self.bound.run(times)
        except (RuntimeError, ValueError) as error:
            raise self._fault("the device refused the whole-step launch", str(error)) from error
        self.said.copy_(self.bound.state[:1], non_blocking=True)

    def _reach(self) -> None:
        """Another length bucket: the keys are cut anew. State and counters begin again."""
        lowering = _Lowering(self.ops, self.compiled, self.fp)
        lowering.tasks()
        self.reach = lowering.reach
        self.bound = lowering.program.bound(self.entries.step, self.entries.check, self.logits)

    def _stopped(self, task: int) -> DeviceFault:
        call = self.tasks[task].calls[0]
        limit_s = self.bound.limit_us / 1e6
        where = f"task {task} ({call.site}): a wait for the task before took longer than {limit_s:g} s"
        return self._fault("the whole-step launch was stopped by its watchdog", where)

    def _fault(self, what: str, why: str) -> DeviceFault:
        todo = "use --step ops: the step then runs op by op"
        return DeviceFault(what, why=why, todo=todo, arm=self.arm, op="step")


def _wait_for(said: Tensor, like: Tensor) -> None:
    if like.device.type == "cuda":
        torch.cuda.current_stream(like.device).synchronize()
    assert said.device.type == "cpu"


# --- whether, and how ------------------------------------------------------------------------------------------------


def supports(step: Step, fp: Fingerprint) -> Support:
    """Can one launch take this step there? Nothing is compiled for the answer."""
    if step.cache.paged:
        return Rejected(reason="--paged: the whole-step kernel reads a contiguous cache")
    return kernel.supports(_attention(step, step.place.longest), fp)


def predict(step: Step, kernels: int, bytes_read: float, flops: float, fp: Fingerprint) -> persistent.Prediction:
    """What the fused list `step` would take as one launch, against a graph of `kernels`: of dependent launches where
    all of them are our own kernels."""
    tasks = sum(_makes_task(call) for call in step.calls)
    dtype = step.decoder.weights.dtype
    cost = StepCost(kernels=kernels, bytes_read=bytes_read, flops=flops, dtype=dtype)
    f = facts(fp)
    ours = all(getattr(call.function, "chained", None) for call in step.calls if call.op != "glue")
    return persistent.predict(cost, tasks, f, dependent=ours and f.cc >= WAITING_CC)


def write_launch(step: Step, fp: Fingerprint) -> LaunchStep:
    """The list's step for one launch; the list was written with the fused chain. Compiles the kernel on first use.

    Raises UsageError with what `supports` says, or where the device cannot hold its CTAs at once; BuildError.
    """
    answer = supports(step, fp)
    if isinstance(answer, Rejected):
        raise UsageError("no whole-step launch", why=answer.reason)
    build = _build(step, fp)
    lowering = _Lowering(step, build, fp)
    tasks = lowering.tasks()
    entries = kernel.compiled(build)
    ctas = kernel.room(entries, build, step.logits)
    if isinstance(ctas, Rejected):
        raise UsageError("no whole-step launch", why=ctas.reason)
    return LaunchStep(
        ops=step,
        fp=fp,
        tasks=tasks,
        rest=tuple(lowering.rest),
        compiled=build,
        entries=entries,
        bound=lowering.program.bound(entries.step, entries.check, step.logits),
        reach=lowering.reach,
        ctas=ctas,
        said=torch.zeros(1, dtype=torch.int32, pin_memory=step.logits.device.type == "cuda"),
    )


def arm_of(step: Step, fp: Fingerprint) -> Arm | None:
    """The launch that would be written from the list, as it would be compiled; None where `supports` refuses it."""
    if isinstance(supports(step, fp), Rejected):
        return None
    build = _build(step, fp)
    digest = source_digest(build.recipe.source, build.recipe.flags)
    return _arm(build, digest, digest_of(digest, build.knobs.values))


def _build(step: Step, fp: Fingerprint) -> StepBuild:
    """Raises UsageError."""
    products = [c.workload for c in step.calls if c.op in PRODUCTS and c.workload is not None]
    smallest = min(products, key=lambda w: gemv.projection(w).outputs)
    return StepBuild.of(_attention(step, step.place.longest), smallest, fp)


def _arm(build: StepBuild, artefact: str, digest: str) -> Arm:
    return Arm(
        candidate=CANDIDATE,
        backend="CUDA_EXT",
        recipe=build.recipe,
        knobs=build.knobs.values,
        digest=digest,
        build=artefact,
    )


def _attention(step: Step, length: int) -> Workload:
    """The workload of its attention at a context of `length`; without a window, which only some layers have."""
    call = next(c for c in step.calls if c.op == "attn")
    assert call.workload is not None
    ragged = bool(call.workload.trait("ragged", default=False))
    dims = {**dict(call.workload.dims), "L": length}
    return ops.find("attn").workload(call.workload.dtype, dims, ragged=ragged, window=0, softcap=0.0)


# --- from calls to tasks ---------------------------------------------------------------------------------------------


def _makes_task(call: Call) -> bool:
    """Is it a task, and not something that another one does by the way? An embedding's scale is no task."""
    if call.site == "embed":
        return len(call.arguments) == 3
    return call.op in (*PRODUCTS, "attn", "add_rmsnorm", "kv_append") or call.site == "norm"


@dataclass(slots=True)
class _Lowering:
    """Goes through the list once and keeps what comes before rotation until that comes."""

    step: Step
    build: StepBuild
    fp: Fingerprint
    program: Program = field(init=False)
    rest: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)  # calls that the next task makes itself
    reach: int = 0

    def __post_init__(self) -> None:
        self.program = Program(self.build)
        longest = self.step.place.longest
        top = length_bucket(longest)[1]
        self.reach = max(longest, min(top, self.step.cache.k[0].shape[2]))

    def tasks(self) -> tuple[LaunchTask, ...]:
        return tuple(self._tasks())

    def _tasks(self) -> Iterator[LaunchTask]:
        for call in self.step.calls:
            if _makes_task(call):
                self._make(call)
                yield LaunchTask(calls=(call, *self.waiting))
                self.waiting = []
            elif call.op == "sample" or call.site == "argmax":
                self.rest.append(call)
            elif call.site != "embed":
                self.waiting.append(call)
        assert not self.waiting, "the step ends with a projection"

    def _make(self, call: Call) -> None:
        if call.site == "embed":
            self._embed(call)
        elif call.op == "kv_append":
            self._rotate(call)
        elif call.op == "attn":
            self._attend(call)
        elif call.op in ("add_rmsnorm", "rmsnorm"):
            self._norm(call)
        else:
            self._project(call)

    def _embed(self, call: Call) -> None:
        """With the scale of Gemma's embedding, which is a call of its own in the list, as that rounds it."""
        table, tokens, out = call.arguments
        scale = float(torch.tensor(self.step.decoder.shape.embedding_scale, dtype=table.dtype))
        self.program.embed(tokens, table, out, scale=scale)

    def _project(self, call: Call) -> None:
        a = call.arguments
        eps, offset = map(float, self.step.decoder.norm)
        normed: dict[str, Any] = {"norm": a[1], "eps": eps, "offset": offset}
        if call.op == "norm_qkv":
            self.program.project(a[0], a[2], a[5], **normed)
        elif call.op == "gate_up":
            self.program.project(a[0], a[2], a[7], up=a[3], activation=int(a[6]), **normed)
        elif call.op == "linear":
            assert a[2] is None, "no projection of these models has a bias"
            self.program.project(a[0], a[1], a[4], residual=a[3])
        else:
            self.program.project(a[0], a[1], a[3])

    def _rotate(self, call: Call) -> None:
        """Norms of q and k, rotation and append: `call` is the last of them."""
        before = {c.site: c for c in self.waiting}
        rope = before["rope"].arguments
        q_norm, k_norm = (before[s].arguments[1] if s in before else None for s in ("q norm", "k norm"))
        eps, offset = map(float, self.step.decoder.norm)
        self.program.rotate(
            self._qkv(),
            self.step.place.positions,
            rope[3],
            _flat(rope[5]),
            call.arguments[4],
            call.arguments[5],
            interleaved=rope[4] == 1,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            offset=offset,
        )

    def _qkv(self) -> Tensor:
        """What each layer's projection writes: [B, (Hq + 2 Hkv) D]."""
        made = next(c for c in self.step.calls if c.op == "norm_qkv")
        qkv: Tensor = made.arguments[5]
        return qkv

    def _attend(self, call: Call) -> None:
        q, k, v, _, _, scale, _, softcap, out = call.arguments
        shape = self.step.decoder.shape
        window = shape.window if shape.layer_types[call.layer] == "sliding" else 0
        self.program.attend(
            _flat(q),
            k,
            v,
            self.step.place.lengths,
            _flat(out),
            max_len=self.reach,
            scale=float(scale),
            window=window,
            softcap=float(softcap),
            chunk=self._chunk(window),
        )

    def _chunk(self, window: int) -> int:
        attn = _attention(self.step, min(self.reach, window) if window else self.reach)
        return persistent.chunk(attn, int(self.build.knobs["slots"]), facts(self.fp))

    def _norm(self, call: Call) -> None:
        """The last norm; or a sandwich: the residual stream and the norm of what was made."""
        eps, offset = map(float, self.step.decoder.norm)
        if call.op == "rmsnorm":
            x, weight, _, _, out = call.arguments
            self.program.norm(x, weight, out, eps=eps, offset=offset)
            return
        made, residual, weight, _, _, _, _, joined = call.arguments
        self.program.norm(made, weight, joined, eps=eps, offset=offset, residual=residual)


def _flat(heads: Tensor) -> Tensor:
    """[B, H, D], or [B, H, 1, D] of one position, as [B, H D]: the same memory."""
    rows = heads.shape[0]
    assert heads[:1].is_contiguous() or heads.transpose(1, 2)[:1].is_contiguous()
    return heads.as_strided((rows, heads.shape[1] * heads.shape[-1]), (heads.stride(0), 1))
