"""The step as one launch: its program (program.py), encoded as tasks of the whole-step kernel (kernels/cuda/step.cu).

This is the GPU's counterpart of the thread team (team.py): all CTAs run the same program. Status: the path from list to
tokens runs in tests on emulated threads; not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autosel import devices, ops
from autosel.candidates.arms import digest_of
from autosel.candidates.cuda import step as kernel
from autosel.candidates.cuda.step import BoundStep, Entries, StepBuild
from autosel.decode.program import PRODUCTS, SINGLE, Attend, Embed, Program, ProgramOp, Project, Rotate, lower
from autosel.decode.run import Offer, Plan, StepForm
from autosel.decode.step import Call, Raced, Rewritten, Step
from autosel.decode.weights import Weights
from autosel.errors import DeviceFault, UsageError
from autosel.formats import PLAIN
from autosel.knobs.gpu import gemv, persistent
from autosel.knobs.gpu.facts import facts
from autosel.knobs.gpu.step import StepCost
from autosel.models.cost import bytes_per_step, flops_per_step
from autosel.native.compile import source_digest
from autosel.values import Accepted, Arm, Fingerprint, Rejected, Support, Workload, length_bucket

CANDIDATE = kernel.CANDIDATE
WAITING_CC = (9, 0)  # from here on a kernel can wait for the previous one: CUDA C++ Programming Guide, PDL
KERNELS = {op: f"cuda:{name}" for op, name in SINGLE.items()}


@dataclass(slots=True, kw_only=True)
class LaunchStep(Rewritten):
    """One decode step by one launch; `ops` is its list of calls, which holds place, cache and buffers.

    It serves every length up to `reach`, the end of the length bucket, and is written again beyond.
    """

    fp: Fingerprint
    program: Program
    compiled: StepBuild
    entries: Entries
    bound: BoundStep
    reach: int
    ctas: int  # of the launch: as many as can be resident
    said: Tensor  # int32 [1] on the host: why it stopped, after the step's end

    @property
    def candidate(self) -> str:
        return CANDIDATE

    @property
    def tasks(self) -> tuple[ProgramOp, ...]:
        """Return the ops of the program, each done by all CTAs between two waits."""
        return self.program.ops

    @property
    def rest(self) -> tuple[Call, ...]:
        return self.program.rest

    @property
    def build(self) -> str:
        return self.entries.digest

    @property
    def kernels(self) -> Mapping[str, str]:
        return KERNELS

    def run(self) -> None:
        """Enqueue the step. Raises DeviceFault if the device refuses the launch."""
        if self.place.longest > self.reach:
            self._reach()
        self._launch(None)
        for call in self.rest:
            call.function(*call.arguments)

    def settle(self) -> None:
        """Wait until the step has ended. Raises DeviceFault if its watchdog stopped it."""
        devices.of(self.logits).settle()
        why = int(self.said)
        if why:
            raise self._stopped(why - 1)

    def task_ns(self) -> list[int]:
        """Run one step and return when the last CTA finished each task, by the device's clock."""
        times = torch.zeros(len(self.tasks), dtype=torch.int64, device=self.logits.device)
        self._launch(times)
        self.settle()
        return [int(t) for t in times.tolist()]

    def shares_ns(self) -> dict[str, list[tuple[int, int]]]:
        """Return the tasks of all CTAs in one lane, from the end of the previous task to the end of this one. The first
        has no length, because its begin is not known."""
        ends = self.task_ns()
        return {"CTAs": [(begin - ends[0], end - ends[0]) for begin, end in zip([ends[0], *ends], ends, strict=False)]}

    def idle(self) -> Callable[[], None]:
        """Return the same call with almost no work: one CTA that embeds the tokens."""
        state = torch.zeros(kernel.STATE_WORDS + 1, dtype=torch.int32, device=self.logits.device)
        return replace(self.bound, program=self.bound.program[:1], state=state, grid=1).run

    @property
    def arm(self) -> Arm:
        """Return the arm that a quarantine names."""
        return _arm(self.compiled, self.build, self.build)

    def _launch(self, times: Tensor | None) -> None:
        try:
            self.bound.run(times)
        except (RuntimeError, ValueError) as error:
            raise self._fault("the device refused the whole-step launch", str(error)) from error
        self.said.copy_(self.bound.state[:1], non_blocking=True)

    def _reach(self) -> None:
        """Encode the program again for another length bucket, which splits the keys differently; state and counters
        restart.
        """
        self.reach = _reach(self.ops)
        tasks = _encoded(self.program, self.compiled, self.fp, self.reach)
        self.bound = tasks.bound(self.entries.step, self.entries.check, self.logits)

    def _stopped(self, task: int) -> DeviceFault:
        call = self.tasks[task].calls[0]
        limit_s = self.bound.limit_us / 1e6
        where = f"task {task} ({call.site}): a wait for the task before took longer than {limit_s:g} s"
        return self._fault("the whole-step launch was stopped by its watchdog", where)

    def _fault(self, what: str, why: str) -> DeviceFault:
        todo = "use --step ops: the step then runs op by op"
        return DeviceFault(what, why=why, todo=todo, arm=self.arm, op="step")


class OneLaunch:
    """How a GPU runs whole steps: a `Kind`."""

    candidate = CANDIDATE
    name = "whole-step launch"
    taken = "step: one launch, by CTAs that are all resident and wait for each other"

    def supports(self, plan: Plan) -> Support:
        why = plan.not_whole or persistent.fits(plan.batch, plan.shape.D, plan.dtype)
        if plan.shape.quantised != PLAIN:
            why = why or f"a launch reads plain weights; these are {plan.shape.quantised}"
        return Rejected(reason=why) if why else Accepted()

    def offer(self, plan: Plan, weights: Weights, fp: Fingerprint, fused: Step | None) -> Offer:
        answer = self.supports(plan)
        if isinstance(answer, Rejected):
            return Offer(refused={"whole": answer.reason})
        arm = arm_of(fused, fp) if fused is not None else None
        return Offer(forms=("whole",), arms={} if arm is None else {"whole": arm})

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> LaunchStep:
        assert form == "whole", "no launch reads packed weights"
        return write_launch(step, fp)

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint, raced: Raced) -> str:
        """Return why a launch is impossible, or why it gains too little by the measured rates."""
        answer = supports(fused, fp)
        if isinstance(answer, Rejected):
            return answer.reason
        moved = bytes_per_step(plan.shape, plan.dtype, plan.batch, ops.place.longest)
        flops = flops_per_step(plan.shape, plan.batch, ops.place.longest)
        found = predict(fused, len(ops.calls), moved, flops, fp)
        return "" if found.wins else found.text


# --- limits and launch -----------------------------------------------------------------------------------------------


def supports(step: Step, fp: Fingerprint) -> Support:
    """Return whether one launch can run this step on the device. Nothing is compiled."""
    if step.cache.paged:
        return Rejected(reason="--paged: the whole-step kernel reads a contiguous cache")
    return kernel.supports(_first_attention(step), fp)


def predict(step: Step, kernels: int, bytes_read: float, flops: float, fp: Fingerprint) -> persistent.Prediction:
    """Predict the fused list `step` as one launch against a graph of `kernels`.

    The graph has dependent launches if all kernels are autosel's.
    """
    tasks = len(lower(step).ops)
    dtype = step.decoder.weights.dtype
    cost = StepCost(kernels=kernels, bytes_read=bytes_read, flops=flops, dtype=dtype)
    f = facts(fp)
    ours = all(getattr(call.function, "chained", None) for call in step.calls if call.op != "glue")
    return persistent.predict(cost, tasks, f, dependent=ours and f.cc >= WAITING_CC)


def write_launch(step: Step, fp: Fingerprint) -> LaunchStep:
    """Return the list's step for one launch; the list must have the fused chain. Compiles the kernel on first use.

    Raises UsageError with the reason of `supports`, or if the device cannot hold all CTAs at once; BuildError.
    """
    answer = supports(step, fp)
    if isinstance(answer, Rejected):
        raise UsageError("no whole-step launch", why=answer.reason)
    build = _build(step, fp)
    program, reach = lower(step), _reach(step)
    tasks = _encoded(program, build, fp, reach)
    entries = kernel.compiled(build)
    ctas = kernel.room(entries, build, step.logits)
    if isinstance(ctas, Rejected):
        raise UsageError("no whole-step launch", why=ctas.reason)
    return LaunchStep(
        ops=step,
        fp=fp,
        program=program,
        compiled=build,
        entries=entries,
        bound=tasks.bound(entries.step, entries.check, step.logits),
        reach=reach,
        ctas=ctas,
        said=torch.zeros(1, dtype=torch.int32, pin_memory=not devices.of(step.logits).on_host),
    )


def arm_of(step: Step, fp: Fingerprint) -> Arm | None:
    """Return the arm of the launch that would be written from the list; None if `supports` refuses it."""
    if isinstance(supports(step, fp), Rejected):
        return None
    build = _build(step, fp)
    digest = source_digest(build.recipe.source, build.recipe.flags)
    return _arm(build, digest, digest_of(digest, build.knobs.values))


def _build(step: Step, fp: Fingerprint) -> StepBuild:
    """Return the build for a list. Raises UsageError."""
    products = [c.workload for c in step.calls if c.op in PRODUCTS and c.workload is not None]
    smallest = min(products, key=lambda w: gemv.projection(w).outputs)
    return StepBuild.of(_first_attention(step), smallest, fp)


def _arm(build: StepBuild, artefact: str, digest: str) -> Arm:
    return Arm(
        candidate=CANDIDATE,
        backend="CUDA_EXT",
        recipe=build.recipe,
        knobs=build.knobs.values,
        digest=digest,
        build=artefact,
    )


def _first_attention(step: Step) -> Workload:
    return _attention(next(c for c in step.calls if c.op == "attn"), step.place.longest)


def _attention(call: Call, length: int) -> Workload:
    """Return the attention's workload at a context of `length`, without the window that only some layers have."""
    assert call.workload is not None
    ragged = bool(call.workload.trait("ragged", default=False))
    dims = {**dict(call.workload.dims), "L": length}
    return ops.find("attn").workload(call.workload.dtype, dims, ragged=ragged, window=0, softcap=0.0)


# --- from ops to tasks -----------------------------------------------------------------------------------------------


def _reach(step: Step) -> int:
    """Return the longest context that one program serves: the end of the length bucket, or of the cache."""
    longest = step.place.longest
    return max(longest, min(length_bucket(longest)[1], step.cache.k[0].shape[2]))


def _encoded(program: Program, build: StepBuild, fp: Fingerprint, reach: int) -> kernel.StepProgram:
    """Return the tasks of the program, for contexts up to `reach`."""
    made = kernel.StepProgram(build)
    for op in program.ops:
        if isinstance(op, Embed):
            made.embed(op.tokens, program.weights[op.table], op.out, scale=op.scale)
        elif isinstance(op, Project):
            _project(made, program, op)
        elif isinstance(op, Rotate):
            _rotate(made, program, op)
        elif isinstance(op, Attend):
            attn = _attention(op.call, min(reach, op.window) if op.window else reach)
            _attend(made, op, persistent.chunk(attn, int(build.knobs["slots"]), facts(fp)), reach)
        else:
            weight = program.weights[op.weight]
            made.norm(op.x, weight, op.out, eps=program.eps, offset=program.offset, residual=op.residual)
    return made


def _project(made: kernel.StepProgram, program: Program, op: Project) -> None:
    made.project(
        op.x,
        program.weights[op.w],
        op.y,
        norm=program.weight(op.norm),
        eps=program.eps if op.norm is not None else 0.0,
        offset=program.offset if op.norm is not None else 0.0,
        up=program.weight(op.up),
        activation=op.activation,
        residual=op.residual,
    )


def _rotate(made: kernel.StepProgram, program: Program, op: Rotate) -> None:
    made.rotate(
        op.qkv,
        op.positions,
        op.inv_freq,
        _flat(op.q),
        op.k_cache,
        op.v_cache,
        interleaved=op.style == 1,
        q_norm=program.weight(op.q_norm),
        k_norm=program.weight(op.k_norm),
        eps=program.eps,
        offset=program.offset,
    )


def _attend(made: kernel.StepProgram, op: Attend, chunk: int, reach: int) -> None:
    made.attend(
        _flat(op.q),
        op.k,
        op.v,
        op.lengths,
        _flat(op.out),
        max_len=reach,
        scale=op.scale,
        window=op.window,
        softcap=op.softcap,
        chunk=chunk,
    )


def _flat(heads: Tensor) -> Tensor:
    """View [B, H, D], or [B, H, 1, D] of one position, as [B, H D] in the same memory."""
    rows = heads.shape[0]
    assert heads[:1].is_contiguous() or heads.transpose(1, 2)[:1].is_contiguous()
    return heads.as_strided((rows, heads.shape[1] * heads.shape[-1]), (heads.stride(0), 1))
