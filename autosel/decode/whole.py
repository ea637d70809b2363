"""Does one thread team take the whole step? As with any candidate: parity first, then a race of whole steps.

Parity is against the op-by-op step that it would replace, from the same state: the same bits, or else as close to a
pass in higher precision as the judge of a measurement asks. The race needs a gain that noise does not explain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from autosel.decode.chain import LEAST_GAIN, step_medians
from autosel.decode.model import Chain
from autosel.decode.run import Way
from autosel.decode.scene import Scene, judged
from autosel.decode.step import Step, write_step
from autosel.decode.team import KERNELS, TeamStep, supports, write_team
from autosel.errors import BuildError, ParityError
from autosel.values import Fingerprint, Passed, Rejected

# Nearly all bytes of a step go through these: where they are not served by the kernels that a team is made of, nothing
# was decided for it either, and nobody waits for its compilation unasked.
DECIDED = ("linear", "attn", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Taken or not; `ways` are empty where there was no race, and `note` says why not."""

    taken: bool
    ways: tuple[Way, ...] = ()
    note: str = ""


Judge = Callable[[Chain, Passed], Whole | None]


def choose_team(
    scene: Scene,
    chain: Chain,
    fp: Fingerprint,
    rng: Random,
    clock: Callable[[], int],
    judge: Judge | None = None,
) -> Whole:
    """Taken if the plan forces it; never if it forbids it; else as the judge decides (decode.standing); where there is
    none, or nothing it could decide, if it wins against op by op in the chosen chain, for this run alone.

    Raises ParityError and BuildError where it was forced.
    """
    asked = scene.plan.persistent
    if asked is False:
        return Whole(taken=False)
    support = supports(scene.plan)
    if isinstance(support, Rejected):
        return Whole(taken=False, note=f"no thread team: {support.reason}")
    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
    why = "" if asked else _undecided(ops)
    if why:
        return Whole(taken=False, note=f"no thread team: {why}; --persistent asks for one")
    try:
        team = write_team(write_step(scene.decoder, scene.cache, scene.place), fp)
        parity = _refuse_other_logits(scene, ops, team)
    except (BuildError, ParityError) as error:
        if asked:
            raise
        return Whole(taken=False, note=f"no thread team: {error.what}")
    found = judge(chain, parity) if judge is not None and asked is None else None
    if found is not None:
        return found
    ops_ns, team_ns = step_medians([ops, team], rng, clock)
    taken = asked is True or ops_ns >= LEAST_GAIN * team_ns
    ways = (
        Way(half="step", form="ops", step_us=ops_ns / 1000, taken=not taken),
        Way(half="step", form="team", step_us=team_ns / 1000, taken=taken),
    )
    return Whole(taken=taken, ways=ways)


def _undecided(ops: Step) -> str:
    """What of the step something else than the team's kernels serves; empty: nothing that weighs."""
    for call in ops.calls:
        candidate = getattr(call.function, "candidate", "")
        if call.op in DECIDED and candidate != KERNELS[call.op]:
            return f"{call.op} is served by {candidate}, not by {KERNELS[call.op]}"
    return ""


def _refuse_other_logits(scene: Scene, ops: Step, team: TeamStep) -> Passed:
    """Raises ParityError."""
    ops.run()
    team.run()
    if torch.equal(ops.logits, team.logits):
        return Passed(cases=1, worst=0.0, worst_case="the logits of the step op by op, bit for bit")
    error, bound = judged(team.logits, ops.logits, scene.reference(), scene.plan.dtype)
    if not error <= bound:
        raise ParityError(
            "the thread team's logits are not those of the step op by op",
            why=f"{error:.3g} from the reference, {bound:.3g} allowed",
            todo="use --no-persistent, and report this",
        )
    return Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")
