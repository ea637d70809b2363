"""The step taken whole by the device itself, whichever that is: the one place of decode that asks.

    kind = kind_of(plan.device)          # a thread team on a CPU (team.py), one launch on a GPU (launch.py)
    kind.supports(plan)                  # Accepted, or Rejected(reason): before weights are loaded
    step = kind.write(written, fp)       # the list of ops, lowered; compiles on first use
    step.run(); step.settle()            # begin; wait for its end

Both are made from the list that runs op by op, hold its buffers, and give its tokens. Whether one should take the step
is for `choose` to say.
"""

from __future__ import annotations

from typing import Protocol

from autosel import fingerprint
from autosel.decode import launch, packed, team
from autosel.decode.cache import Cache
from autosel.decode.graph import GraphStep
from autosel.decode.model import Decoder
from autosel.decode.run import FUSED, WHOLE, Chain, Plan, StepForm
from autosel.decode.sample import Sampler
from autosel.decode.step import Place, Step, WholeStep, write_step
from autosel.decode.weights import Weights, reference_bytes
from autosel.errors import UsageError
from autosel.knobs.gpu.persistent import fits
from autosel.models.cost import bytes_per_step, flops_per_step
from autosel.values import Accepted, Arm, Fingerprint, Rejected, Support

# Nearly all bytes of a step go through these: where they are not served by the kernels that a team is made of, nothing
# was decided for it either, and nobody waits for its compilation unasked.
DECIDED = ("linear", "attn", "lm_head")


class Kind(Protocol):
    """How one kind of device takes whole steps."""

    candidate: str
    name: str  # in notes
    taken: str  # the note of a run that it took

    def supports(self, plan: Plan) -> Support:
        """Asked before weights are loaded; what depends on the device's limits `write` refuses."""

    def packs(self, plan: Plan, fp: Fingerprint) -> Support:
        """Can it read weights packed without loss?"""

    def room(self, plan: Plan, weights: Weights) -> Support:
        """Is there memory for them just now? Where it reads packed weights at all."""

    def prepare(self, plan: Plan, weights: Weights, fp: Fingerprint) -> None:
        """Pack them, beside all that the plan still takes. Raises UsageError, BuildError, ParityError."""

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> WholeStep:
        """Return the step, written with the fused chain, as a whole step in this form.

        Raises UsageError, BuildError; ParityError where weights do not unpack to the same bits.
        """

    def arm(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm | None:
        """Return what `write` would make of the step, as it would be compiled; None where it would refuse."""

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint) -> str:
        """Why nobody should wait for its compilation unasked, or ""; `ops` is the step that serves now."""


def kind_of(device: str) -> Kind:
    return KINDS["cpu" if device == "cpu" else "cuda"]


def supports(plan: Plan) -> Support:
    """Can the plan's device take its steps whole? Asked before weights are loaded."""
    return kind_of(plan.device).supports(plan)


def refuse_unsupported(plan: Plan) -> None:
    """Raises UsageError with the reason."""
    support = supports(plan)
    if isinstance(support, Rejected):
        raise UsageError("--step whole", why=support.reason, todo="leave it out: the step then runs op by op")


def write(
    decoder: Decoder,
    cache: Cache,
    place: Place,
    chain: Chain = FUSED,
    sampler: Sampler | None = None,
    *,
    form: StepForm = "ops",
    fp: Fingerprint | None = None,
) -> Step | GraphStep | WholeStep:
    """Write the step in one form: op by op or as a graph with the ops of the chain, or whole, which is always fused.

    `fp` is the device that takes it whole; None: that of the weights.
    """
    if form in WHOLE:
        found = fp or fingerprint.take(str(decoder.weights.device))
        return KINDS[found.kind].write(write_step(decoder, cache, place, FUSED, sampler), found, form)
    step = write_step(decoder, cache, place, chain, sampler)
    return GraphStep.of(step) if form == "graph" else step


# --- a CPU: one thread team ------------------------------------------------------------------------------------------


class ThreadTeam:
    candidate = team.CANDIDATE
    name = "thread team"
    taken = "step: one native call, by one thread team"

    def supports(self, plan: Plan) -> Support:
        return team.supports(plan)

    def packs(self, plan: Plan, fp: Fingerprint) -> Support:
        return packed.supports(plan.dtype, fp) if plan.layout == "auto" else Rejected(reason="--weights-layout plain")

    def room(self, plan: Plan, weights: Weights) -> Support:
        return packed.room(weights, plan)

    def prepare(self, plan: Plan, weights: Weights, fp: Fingerprint) -> None:
        packed.pack(weights, fp, to_come_bytes=reference_bytes(plan))

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> WholeStep:
        return team.write_team(step, fp, form)

    def arm(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm | None:
        return team.arm_of(step, fp, form)

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint) -> str:
        """Where something else serves what weighs."""
        for call in ops.calls:
            candidate = getattr(call.function, "candidate", "")
            if call.op in DECIDED and candidate != team.KERNELS[call.op]:
                return f"{call.op} is served by {candidate}, not by {team.KERNELS[call.op]}"
        return ""


# --- a GPU: one launch -----------------------------------------------------------------------------------------------


class OneLaunch:
    candidate = launch.CANDIDATE
    name = "whole-step launch"
    taken = "step: one launch, by CTAs that are all resident and wait for each other"

    def supports(self, plan: Plan) -> Support:
        why = plan.not_whole or fits(plan.batch, plan.shape.D, plan.dtype)
        return Rejected(reason=why) if why else Accepted()

    def packs(self, plan: Plan, fp: Fingerprint) -> Support:
        return packed.supports(plan.dtype, fp)

    def room(self, plan: Plan, weights: Weights) -> Support:
        return Rejected(reason="no launch reads them")

    def prepare(self, plan: Plan, weights: Weights, fp: Fingerprint) -> None:
        raise UsageError("packed weights", why="no launch reads them")

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> WholeStep:
        assert form == "whole", "no launch reads packed weights"
        return launch.write_launch(step, fp)

    def arm(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> Arm | None:
        return launch.arm_of(step, fp)

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint) -> str:
        """Where it cannot be, or the rates that were measured say that it gains too little."""
        support = launch.supports(fused, fp)
        if isinstance(support, Rejected):
            return support.reason
        moved = bytes_per_step(plan.shape, plan.dtype, plan.batch, ops.place.longest)
        flops = flops_per_step(plan.shape, plan.batch, ops.place.longest)
        found = launch.predict(fused, len(ops.calls), moved, flops, fp)
        return "" if found.wins else found.text


KINDS: dict[str, Kind] = {"cpu": ThreadTeam(), "cuda": OneLaunch()}
