"""Who takes the whole step, as a decision that stands: op `step`, mode `team`, kept with its evidence in the ledger.

    standing = stand(scene, fp, ledger, rng, clock, listener)
    standing.form               # the form that a decision says; None: nothing is decided
    standing.judge(chain, proofs)    # race, and record what the samples justify

Ways are: op by op, the baseline; a graph of that, where the device has graphs; and whole, by the device itself
(persistent.py). How they are raced is race.py's.

A decision holds for the model's dimensions, the batch, the bucket of context lengths, the threads; and for as long as
every way that could be taken, and what serves every op of the step they were raced against, are what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from autosel import fingerprint
from autosel.candidates.arms import python_digest
from autosel.decode import graph, race
from autosel.decode.account import saved_bytes
from autosel.decode.graph import GraphStep
from autosel.decode.model import FORMS, Chain
from autosel.decode.persistent import kind_of
from autosel.decode.race import MARGIN, OPS, Terms
from autosel.decode.run import Listener, StepForm, Way
from autosel.decode.scene import Clock, Scene
from autosel.decode.step import Step, write_step
from autosel.decode.team import PACKED
from autosel.decode.whole import Whole
from autosel.errors import LedgerError
from autosel.ledger.key import budget_key, current_mode
from autosel.ledger.store import Ledger
from autosel.models.cost import bytes_per_step
from autosel.models.shape import ModelShape
from autosel.race.judge import judge
from autosel.tuning.contend import last_level_bytes
from autosel.values import (
    WHOLE_STEP,
    Accepted,
    Arm,
    Backend,
    Decision,
    DTypeName,
    Fingerprint,
    Passed,
    PythonRecipe,
    Race,
    Rejected,
    Scalar,
    Session,
    Verdict,
    Workload,
    digest,
)

GRAPH = "graph:step"
# Else whole, by the device's own kernel.
FORMS_BY_CANDIDATE: Mapping[str, StepForm] = {OPS: "ops", GRAPH: "graph", PACKED: "packed"}
PACKED_TOLD = "by one thread team, from packed weights"
WRITER = PythonRecipe(target="autosel.decode.step:write_step")
CAPTURER = PythonRecipe(target="autosel.decode.graph:captured")
CACHES = 3  # a step that moves less than so many last-level caches may find its weights in them
REST = timedelta(hours=1)  # for so long an undecided step is not raced again


def workload_of(shape: ModelShape, dtype: DTypeName, batch: int, context: int) -> Workload:
    """The step of these layers: what differs in any dimension or trait is another computation."""
    sizes = {"B": batch, "layers": shape.layers, "d": shape.d, "I": shape.I, "Hq": shape.Hq, "Hkv": shape.Hkv}
    traits: dict[str, Any] = {"activation": shape.activation}
    traits |= {"sliding": shape.sliding_layers, "window": shape.window} if shape.window else {}
    traits |= {name: True for name in ("qk_norm", "sandwich") if getattr(shape, name)}
    return Workload(
        op=WHOLE_STEP,
        dims=(*sizes.items(), ("D", shape.D), ("V", shape.V), ("L", context)),
        dtype=dtype,
        traits=tuple(sorted(traits.items())),
    )


# --- the arms --------------------------------------------------------------------------------------------------------


def arms_of(scene: Scene, fp: Fingerprint) -> dict[StepForm, Arm]:
    """Every way to take the scene's step there, as it would be written now; the baseline first."""
    plan, decoder, kind = scene.plan, scene.decoder, kind_of(scene.plan.device)
    forms = [form for form in FORMS if form != "added" or not decoder.shape.sandwich]
    steps = {form: write_step(decoder, scene.cache, scene.place, Chain(attn=form, mlp=form)) for form in forms}
    served = _served(list(steps.values()))
    backend: Backend = "CPP" if fp.kind == "cpu" else "CUDA_EXT"
    found: dict[StepForm, Arm] = {"ops": _python_arm(OPS, backend, WRITER, served)}
    if isinstance(graph.supports(plan), Accepted):
        found["graph"] = _python_arm(GRAPH, backend, CAPTURER, served)
    whole = kind.arm(steps["fused"], fp) if isinstance(kind.supports(plan), Accepted) else None
    if whole is not None:
        found["whole"] = whole
        packed = kind.arm(steps["fused"], fp, "packed") if isinstance(kind.packs(plan, fp), Accepted) else None
        found |= {"packed": packed} if packed is not None else {}
    return found


def _served(steps: Sequence[Step]) -> str:
    """What serves an op in any of the forms: another decision about one of them makes another arm."""
    served = {}
    for call in (c for step in steps for c in step.calls if c.workload is not None):
        decision = getattr(call.function, "decision", None)
        candidate = getattr(call.function, "candidate", "")
        own = decision is not None and decision.arm.candidate == candidate
        served[call.workload.bucket] = decision.arm.digest if own else candidate  # type: ignore[union-attr]
    return digest(served)[:12]


def _python_arm(candidate: str, backend: Backend, recipe: PythonRecipe, served: str) -> Arm:
    settings: dict[str, Scalar] = {"served": served}
    made = digest({"source": python_digest(recipe), "knobs": settings})
    return Arm(candidate=candidate, backend=backend, recipe=recipe, knobs=settings, digest=made)


# --- what stands -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Standing:
    """The question for one scene, and its answer if there is one."""

    scene: Scene
    fp: Fingerprint
    ledger: Ledger
    rng: Random
    clock: Clock
    listener: Listener
    workload: Workload
    mode: str
    arms: Mapping[StepForm, Arm]
    known: Decision | None
    decides: bool
    crowded: bool  # no room for packed weights, for now: then nothing is decided about them
    moved: dict[str, int] = field(default_factory=dict)  # bytes of a step, by candidate: of those that were raced
    weights: str = ""  # what packing them took, where it was raced

    @property
    def form(self) -> StepForm | None:
        """What a decision says; None: none does."""
        return None if self.known is None else self._form(self.known)

    def kept(self) -> Whole:
        """Op by op, or a graph of that, by the decision that stands."""
        assert self.known is not None
        return self._whole(self.known)

    def judge(self, chain: Chain, proofs: Mapping[StepForm, Passed]) -> Whole | None:
        """As the decision says; else race the ways that were proven, record and obey. None where nothing is to be
        recorded, or can be."""
        name, free = kind_of(self.scene.plan.device).name, dict(proofs)
        held = self.ledger.quarantined(self.fp.hw_id, WHOLE_STEP)
        for form in proofs:
            stopped = held.get(self.arms[form].build) or held.get(self.arms[form].digest)
            if stopped is not None:
                del free[form]
                if not free:
                    return Whole(note=f"no {name}: in quarantine: {stopped.reason}")
        if self.known is not None:
            if self.form == "packed" and "packed" not in free and "whole" in free:  # no room for them, for now
                return replace(self._whole(self.known), form="whole")
            return self._whole(self.known) if self.form in ("ops", *free) else None
        if not self.decides or not self.ledger.writable:
            return None
        try:
            with self.ledger.lock(self.fp.hw_id, fingerprint.unit(self.scene.plan.device)):
                return self._whole(self._decide(chain, free))
        except LedgerError as error:
            return Whole(note=f"no {name}: it could not be decided: {error.what}")

    def _decide(self, chain: Chain, proofs: Mapping[StepForm, Passed]) -> Decision:
        raced = [self.arms[form] for form in proofs]
        with ExitStack() as trials:
            for arm in raced:
                trials.enter_context(self.ledger.trial(self.fp.hw_id, WHOLE_STEP, arm))
            raced_now = self._race(chain, list(proofs))
        verdict = judge(raced_now)
        verdict = _with_roofline(verdict, self.moved.get(verdict.winner, 0))
        promoted, baseline = verdict.outcome == "promote", self.arms["ops"]
        digests = [arm.digest for form, arm in self.arms.items() if form != "packed" or not self.crowded]
        return self.ledger.record(
            self.fp,
            self.workload,
            verdict=verdict,
            race=replace(raced_now, notes=(*filter(None, [self.weights]), *raced_now.notes)),
            parities=list(zip(raced, proofs.values(), strict=True)),
            arm=next(a for a in raced if a.candidate == verdict.winner) if promoted else baseline,
            baseline=baseline,
            entrants=digests,  # those too that could not be written, or promised too little
            mode=self.mode,
            state="promoted" if promoted else "kept",
            reason=verdict.reason,
            idempotency_key=digest({"race": digest(raced_now), "arms": digests}),
        )

    def _race(self, chain: Chain, challengers: Sequence[StepForm]) -> Race:
        def debit(candidate: str) -> bool:
            key = budget_key(self.fp.hw_id, self.workload)
            return self.ledger.spend(key, MARGIN.false_promotion_bound, candidate)

        def watch(kind: str, session: Session) -> None:
            self.listener.stage("step", f"{kind}, {len(session.pairs)} pairs of whole steps", 0, 1)

        scene, kind = self.scene, kind_of(self.scene.plan.device)

        def arms(names: Sequence[str]) -> race.Steps:
            written: dict[str, Any] = {}
            for name in names:
                if name in (OPS, GRAPH):
                    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
                    written[name] = ops if name == OPS else GraphStep.of(ops)
                else:
                    fused = write_step(scene.decoder, scene.cache, scene.place)
                    written[name] = kind.write(fused, self.fp, FORMS_BY_CANDIDATE.get(name, "whole"))
                self.moved[name] = bytes_of(scene) - saved_bytes(written[name])
                self.weights = getattr(written[name], "weights_told", "") or self.weights
            return written

        streams = bytes_of(scene) > CACHES * last_level_bytes(self.fp)
        terms = Terms(
            arms=arms,
            device=scene.plan.device,
            clock=self.clock,
            debit=debit,
            watch=watch,
            rng=self.rng,
            streamed_bytes=self.moved if streams else {},
        )
        return race.race(self.workload, [self.arms[form].candidate for form in challengers], terms)

    def _form(self, decision: Decision) -> StepForm:
        return FORMS_BY_CANDIDATE.get(decision.arm.candidate, "whole")

    def _whole(self, decision: Decision) -> Whole:
        """What to do by the decision; its race is why."""
        taken = self._form(decision)
        timings = decision.verdict.timings if decision.verdict else {}
        timed = {form: timings[a.candidate] for form, a in self.arms.items() if a.candidate in timings}
        ways = [Way.of_step(form, t.median_us, taken=form == taken) for form, t in timed.items()]
        who = {"ops": "op by op", "graph": "as a graph of its ops", "packed": PACKED_TOLD}.get(taken)
        who = who or f"by one {kind_of(self.scene.plan.device).name}"
        return Whole(
            form=taken,
            ways=tuple(ways) if len(ways) > 1 else (),
            note=f"the step {who}, by decision {decision.id}: {decision.reason}",
        )


def bytes_of(scene: Scene) -> int:
    return bytes_per_step(scene.plan.shape, scene.plan.dtype, scene.plan.batch, scene.place.longest)


def stand(
    scene: Scene,
    fp: Fingerprint,
    ledger: Ledger,
    rng: Random,
    clock: Clock,
    listener: Listener,
    *,
    decides: bool = True,
) -> Standing | None:
    """What is decided about the scene's step; None where there is one way to take it, or the plan says which.

    `decides`: may it be raced?
    """
    plan, arms = scene.plan, arms_of(scene, fp)
    could_pack = isinstance(kind_of(plan.device).packs(replace(plan, layout="auto"), fp), Accepted)
    if len(arms) == 1 or plan.step != "auto" or (plan.layout == "plain" and could_pack):
        return None
    w = workload_of(plan.shape, plan.dtype, plan.batch, plan.seq)
    mode, digests = current_mode("team"), {arm.digest for arm in arms.values()}
    found = ledger.known(fp.hw_id, w.bucket, mode, digests)
    weights = scene.decoder.weights
    crowded = "packed" in arms and isinstance(kind_of(plan.device).room(plan, weights), Rejected)
    if found is None and crowded:
        digests = digests - {arms["packed"].digest}
        found = ledger.known(fp.hw_id, w.bucket, mode, digests)
    found = found or _fresh_doubt(ledger, fp.hw_id, w.bucket, mode, digests)
    return Standing(
        scene=scene,
        fp=fp,
        ledger=ledger,
        rng=rng,
        clock=clock,
        listener=listener,
        workload=w,
        mode=mode,
        arms=arms,
        known=found,
        decides=decides,
        crowded=crowded,
    )


def _fresh_doubt(ledger: Ledger, hw_id: str, bucket: str, mode: str, now: set[str]) -> Decision | None:
    """What was left undecided less than REST ago, about these very arms: not every run of a row pays for a race."""
    for d in ledger.serving_rows(hw_id, bucket, mode):
        undecided = d.verdict is not None and d.verdict.outcome == "undecided"
        fresh = datetime.now(UTC) - datetime.fromisoformat(d.created_at) < REST
        entrants = {a.digest for a, _ in ledger.evidence(d.id).parities} | {d.arm.digest, d.baseline.digest}
        if undecided and fresh and entrants <= now:
            return d
    return None


def _with_roofline(verdict: Verdict, moved: int) -> Verdict:
    """Fraction of what the read rate of this very race allows."""
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    floor_us = moved / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)
