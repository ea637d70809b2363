"""The step run whole by the device itself. It is selected by the backend of the device's native kernels.

    kind = kind_of(plan.device)          # a thread team on a CPU (team.py), one launch on a GPU (launch.py)
    kind.supports(plan)                  # Accepted, or Rejected(reason): before weights are loaded
    step = kind.write(written, fp)       # the list of ops, lowered; compiles on first use
    step = serve(write(decoder, cache, place))  # written, under the guard, for generation and measurements
    step.run(); step.settle()            # begin; wait for its end

Both kinds are made from the list that runs op by op, use its buffers, and give its tokens. `choose` decides if the step
runs this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autosel import devices, dispatch, fingerprint
from autosel.decode import launch, team
from autosel.decode.cache import Cache
from autosel.decode.graph import GraphStep
from autosel.decode.model import Decoder
from autosel.decode.run import FUSED, WHOLE, Chain, Offer, Plan, StepForm
from autosel.decode.sample import Sampler
from autosel.decode.step import Place, Raced, Step, WholeStep, write_step
from autosel.decode.team import TeamStep
from autosel.decode.torch_step import AS_PYTORCH, TorchStep
from autosel.decode.watch import SHARE, StepWatch
from autosel.decode.weights import Weights
from autosel.errors import UsageError
from autosel.guard import Allowance
from autosel.values import Backend, Decision, Fingerprint, Rejected, Support

AnyStep = Step | TorchStep | GraphStep | WholeStep


class Kind(Protocol):
    """How one kind of device runs whole steps."""

    candidate: str
    name: str  # in notes
    taken: str  # the note of a run with this form

    def supports(self, plan: Plan) -> Support:
        """Return whether the plan is possible. Call it before weights are loaded; `write` checks device limits."""

    def offer(self, plan: Plan, weights: Weights, fp: Fingerprint, fused: Step | None) -> Offer:
        """Return the whole forms that it has now for the plan's steps on these weights.

        If the step `fused` is given, `arms` are what `write` would build from it in each form.
        """

    def write(self, step: Step, fp: Fingerprint, form: StepForm = "whole") -> WholeStep:
        """Return the step, written with the fused chain, as a whole step in this form.

        Raises UsageError, BuildError; ParityError if weights do not unpack to the same bits.
        """

    def reluctant(self, ops: Step, fused: Step, plan: Plan, fp: Fingerprint, raced: Raced) -> str:
        """Return why it should not be compiled without a request, or ""; `ops` is the step that serves now."""


def kind_of(device: str) -> Kind:
    return KINDS[devices.named(device).native]


def refuse_unsupported(plan: Plan) -> None:
    """Raise UsageError with the reason if the plan's device cannot run whole steps."""
    support = kind_of(plan.device).supports(plan)
    if isinstance(support, Rejected):
        todo = "use --step ops: the step then runs op by op"
        raise UsageError("--step whole is impossible", why=support.reason, todo=todo)


def write(
    decoder: Decoder,
    cache: Cache,
    place: Place,
    chain: Chain = FUSED,
    sampler: Sampler | None = None,
    *,
    form: StepForm = "ops",
    fp: Fingerprint | None = None,
) -> AnyStep:
    """Write the step in one form: op by op or as a graph with the chain's ops; by PyTorch alone; or whole and fused.

    When this returns, weights are in the layouts of the kernels that read them. `fp` is the device that runs a whole
    step; None means the weights' device.
    """
    if form in WHOLE:
        found = fp or fingerprint.take(str(decoder.weights.device))
        kind = KINDS[devices.KINDS[found.kind].native]
        return kind.write(write_step(decoder, cache, place, FUSED, sampler), found, form)
    if form == "torch":
        return TorchStep.of(write_step(decoder, cache, place, AS_PYTORCH, sampler))
    step = write_step(decoder, cache, place, chain, sampler)
    for call in step.calls:
        reader = getattr(call.function, "reader", None)
        if reader is not None:
            reader.ready(call.arguments)
    return GraphStep.of(step) if form == "graph" else step


def serve(step: AnyStep, fp: Fingerprint | None = None, decision: Decision | None = None) -> AnyStep:
    """Return a written step under the guard.

    A thread team's step is checked while it serves (watch.py); ops of a list are always checked. `decision` is the one
    by which the form serves; a fault demotes it. `fp` is as in `write`.
    """
    board = dispatch.board()
    if not isinstance(step, TeamStep) or not board.policy.on or not board.policy.spot_rate:
        return step
    watch = StepWatch(policy=board.policy, allowance=Allowance(share=SHARE), decision=decision, report=board.report)
    return step.guarded(watch, fp or fingerprint.take("cpu"))


KINDS: Mapping[Backend, Kind] = {"CPP": team.ThreadTeam(), "CUDA_EXT": launch.OneLaunch()}
