"""Does the device take the whole step (persistent.py)? As with any candidate: parity first, then a race of whole steps.

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
from autosel.decode.persistent import kind_of, supports
from autosel.decode.run import Way
from autosel.decode.scene import Scene, judged
from autosel.decode.step import Step, WholeStep, write_step
from autosel.errors import BuildError, DeviceFault, ParityError, UsageError
from autosel.values import Fingerprint, Passed, Rejected


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

    Raises what `Kind.write` and `run` raise, and ParityError, where it was forced.
    """
    asked, kind = scene.plan.persistent, kind_of(scene.plan.device)
    if asked is False:
        return Whole(taken=False)
    support = supports(scene.plan)
    if isinstance(support, Rejected):
        return Whole(taken=False, note=f"no {kind.name}: {support.reason}")
    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
    fused = write_step(scene.decoder, scene.cache, scene.place)
    why = "" if asked else kind.reluctant(ops, fused, scene.plan, fp)
    if why:
        return Whole(taken=False, note=f"no {kind.name}: {why}; --persistent asks for one")
    try:
        team = kind.write(fused, fp)
        parity = _refuse_other_logits(scene, ops, team)
    except (BuildError, DeviceFault, ParityError, UsageError) as error:
        if asked:
            raise
        return Whole(taken=False, note=f"no {kind.name}: {error.why or error.what}")
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


def _refuse_other_logits(scene: Scene, ops: Step, team: WholeStep) -> Passed:
    """Raises ParityError, DeviceFault."""
    ops.run()
    team.run()
    team.settle()
    if torch.equal(ops.logits, team.logits):
        return Passed(cases=1, worst=0.0, worst_case="the logits of the step op by op, bit for bit")
    error, bound = judged(team.logits, ops.logits, scene.reference(), scene.plan.dtype)
    if not error <= bound:
        raise ParityError(
            f"the logits of {team.candidate} are not those of the step op by op",
            why=f"{error:.3g} from the reference, {bound:.3g} allowed",
            todo="use --no-persistent, and report this",
        )
    return Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")
