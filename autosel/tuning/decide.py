"""Store a verdict: promote the winner of a race, or keep the incumbent with the reason."""

from __future__ import annotations

from autosel.ledger.commands import Record
from autosel.ledger.key import LengthRange
from autosel.tuning.job import Job, Tuning
from autosel.values import Decision, Workload, digest


def decide(tuning: Tuning, job: Job, *, lengths: LengthRange = None, workload: Workload | None = None) -> Decision:
    """Record the job's outcome, which is stored on return. `lengths` limits it to part of its bucket."""
    verdict, w = job.verdict, workload or job.workload
    identity = {
        "hw": tuning.fp.hw_id,
        "bucket": w.bucket,
        "mode": job.mode,
        "lengths": lengths,
        "race": digest(job.race) if job.race else digest([arm.digest for arm, _ in job.parities]),
    }
    return tuning.ledger.write(
        Record(
            fp=tuning.fp,
            workload=w,
            verdict=verdict,
            race=job.race,
            parities=tuple(job.parities),
            arm=job.winner.arm,
            baseline=job.baseline.arm,
            mode=job.mode,
            state="promoted" if verdict is not None and verdict.outcome == "promote" else "kept",
            reason=verdict.reason if verdict is not None else "no other candidate can run this here",
            idempotency_key=digest(identity),
            length_range=lengths,
            entrants=tuple(job.offered),
        )
    )
