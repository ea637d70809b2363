"""Race the jobs that have a challenger, and judge the races."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

from autosel import devices, ops
from autosel.candidates.control import CONTROL, WORKED
from autosel.errors import UsageError
from autosel.ledger.commands import Hold, SaveAA, SaveParity, Spend
from autosel.ledger.key import budget_key
from autosel.race import reruns
from autosel.race.contest import Contest, Entrant
from autosel.race.judge import judge
from autosel.race.plan import SAMPLE_NS, Margin, TimeClass, margin
from autosel.race.quiet import Quiet
from autosel.race.realtime import raised
from autosel.race.run import Disqualified, RaceTerms, run
from autosel.race.worker import Workers
from autosel.tuning.job import Buildable, Job, Tuning
from autosel.tuning.prove import on_trial
from autosel.values import Failed, Fingerprint, Verdict, Workload

TIME_CLASSES: tuple[TimeClass, TimeClass] = ("short", "long")
OTHERS_BYTES = 1 << 30  # two interpreters with torch, and a reserve


def contend(tuning: Tuning, jobs: Sequence[Job]) -> Iterator[Job]:
    """Yield each job with its race and verdict once the race is complete; yield jobs without a challenger first."""
    yield from (job for job in jobs if not job.ways)
    contested = {job.workload.key: job for job in jobs if job.ways}
    found_contests = contests(tuning, jobs)
    request = tuning.request
    earlier = reruns.of(tuning.ledger.history(hw_id=tuning.fp.hw_id, limit=reruns.REMEMBERED))
    workers = Workers(threads=tuning.fp.cpus, rng=tuning.rng, device=request.device, realtime=request.realtime)
    with raised() if request.realtime else nullcontext():
        for found in run(found_contests, _terms(tuning, contested), workers):
            if isinstance(found, Disqualified):
                _disqualify(tuning, contested[found.contest.workload.key], found)
                continue
            contest, race = found[0], replace(found[1], reruns=earlier)
            job = contested[contest.workload.key]
            crossings = tuple(s.aa_crossed for s in race.sessions if s.aa_crossed is not None and not s.voided)
            tuning.ledger.write(SaveAA(hw_id=tuning.fp.hw_id, time_class=race.time_class, crossings=crossings))
            job.race, job.verdict = race, with_roofline(judge(race), job.workload)
            yield job


def contests(tuning: Tuning, jobs: Sequence[Job]) -> list[Contest]:
    """Return the races of the jobs, with the margins that this device's A/A sessions allow."""
    margins = {kind: margin(*tuning.ledger.aa(tuning.fp.hw_id, kind), SAMPLE_NS) for kind in TIME_CLASSES}
    return [contest_of(job, tuning.fp, margins) for job in jobs if job.ways]


def _terms(tuning: Tuning, jobs: Mapping[str, Job]) -> RaceTerms:
    """Return the terms of the races. `jobs` are by workload key."""

    def debit(contest: Contest, candidate: str, allowed: Margin) -> bool:
        key = budget_key(tuning.fp.hw_id, contest.workload)
        return tuning.ledger.write(Spend(key=key, amount=allowed.false_promotion_bound, reason=candidate))

    @contextmanager
    def journal(contest: Contest, arms: Sequence[str]) -> Iterator[None]:
        with ExitStack() as open_trials:
            for way in jobs[contest.workload.key].ways:
                if way.candidate.name in arms:
                    trial = on_trial(tuning.ledger, tuning.fp.hw_id, contest.workload.op, way.arm)
                    open_trials.enter_context(trial)
            yield

    def tell(who: str) -> None:
        tuning.tally.stage("waiting", f"for a quiet machine, busy: {who}", 0, 1)

    quiet = Quiet(tell=tell, deadline=tuning.deadline, clock=tuning.clock).wait if tuning.request.wait else None
    return RaceTerms(
        rng=tuning.rng,
        quiet=quiet,
        debit=debit,
        progress=tuning.tally.tick,
        journal=journal,
        clock=tuning.clock,
        deadline=tuning.deadline,
    )


def contest_of(job: Job, fp: Fingerprint, margins: Mapping[TimeClass, Margin]) -> Contest:
    return Contest(
        workload=job.workload,
        baseline=entrant_of(job.baseline),
        incumbent=entrant_of(job.incumbent),
        challengers=tuple(entrant_of(way) for way in job.ways if way is not job.incumbent),
        margins=margins,
        llc_bytes=last_level_bytes(fp),
        read_bytes_per_s=max((r.value for n, r in fp.rates.items() if n.startswith("read_bytes_per_s")), default=0.0),
    )


def last_level_bytes(fp: Fingerprint) -> int:
    """Return the bytes of cache that cold operands must exceed: all of a CPU's L3, or a GPU's L2."""
    if "l3_bytes" not in fp.identity:
        return int(fp.identity["l2_bytes"])
    return int(fp.identity["l3_bytes"]) * int(fp.identity.get("l3_domains", 1))


def entrant_of(way: Buildable) -> Entrant:
    return Entrant(
        candidate=way.candidate.name,
        op=way.candidate.op,
        recipe=way.recipe,
        digest=way.build_digest,
        knobs=way.knobs.values,
        writes_out=way.candidate.writes_out,
    )


def _disqualify(tuning: Tuning, job: Job, found: Disqualified) -> None:
    """Record a challenger that failed in the race as a failed proof, quarantine it, and drop it from the job."""
    way = next(x for x in job.ways if x.candidate.name == found.candidate)
    evidence = {CONTROL: WORKED} if found.check == "crash" else {}  # race.run has checked the control
    failed = Failed(check=found.check, case="while racing", evidence=evidence, reason=found.reason)
    hw_id = tuning.fp.hw_id
    job.parities.append((way.arm, failed))
    tuning.ledger.write(SaveParity(hw_id=hw_id, workload=job.workload, arm=way.arm, parity=failed))
    op, reason = job.workload.op, f"{found.check}: {found.reason}"
    held = tuning.ledger.write(Hold(arm=way.arm, hw_id=hw_id, op=op, cause=found.check, reason=found.reason))
    tuning.tally.rejected(job.workload, found.candidate, "race", reason, quarantine=held)
    job.drop(way)


def with_roofline(verdict: Verdict, w: Workload) -> Verdict:
    """Add the fraction of the roofline that the winner reaches, from the bytes it reads and the race's read rate.

    Verdicts without a read rate stay unchanged.
    """
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    moved = ops.find(w.op).bytes_moved(w) - (verdict.prepared.saved_bytes if verdict.prepared else 0)
    floor_us = moved / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)


def refuse_without_memory(contests: Sequence[Contest], device: str = devices.HOST) -> None:
    """Raise UsageError without enough memory for the operands in shared memory and their copies on the device."""
    import psutil

    if not contests:
        return
    sizes = {c.workload.key: c.op.bytes_moved(c.workload) for c in contests}
    private = max(_private_bytes(c, size) for c, size in zip(contests, sizes.values(), strict=True))
    there, here = devices.named(device), sum(sizes.values()) + OTHERS_BYTES
    if there.on_host:
        here += private
    _refuse(here, psutil.virtual_memory().available, "memory", sizes)
    free = there.own_free_bytes()
    if free is not None:
        _refuse(private + OTHERS_BYTES, free, f"{device}'s memory", sizes)


def _private_bytes(contest: Contest, size: int) -> int:
    """Return the bytes of the operands' copies, and of prepared weights for each arm with a layout."""
    layouts = [e.recipe.layout for e in contest.entrants.values() if e.recipe.layout]
    return int((size + 4 * contest.llc_bytes) * (1 + sum(layout.share for layout in layouts)))


def _refuse(need: int, free: int, what: str, sizes: Mapping[str, int]) -> None:
    if need > free:
        worst = max(sizes, key=lambda key: sizes[key])
        raise UsageError(
            f"racing these workloads needs {need / 2**30:.1f} GiB of {what}; {free / 2**30:.1f} GiB are free",
            why=f"the largest is {worst}: {sizes[worst] / 2**30:.1f} GiB",
            todo="exclude it with --op, or use a smaller model, batch or context",
        )
