"""Measure the time of the proofs of a cold tune, by part.

    python benchmarks/bench_proof.py [--model llama-8b] [--seq 8192] [--json] [--write]

It tunes in a new, empty home and times each step of each proof. Proofs run two at a time, so their seconds add up to
more than the wall-clock time. A part's share of the tune is its share of all steps times the share of the stage of
builds and proofs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import command_line
from kept import RESULTS, device_of, keep

if TYPE_CHECKING:
    from autosel.parity.check import Proof, Step
    from autosel.tuning.job import Job, Tuning

KEPT = RESULTS / "proof.json"
BY_HAND, ROWS, FULL_SIZE = "cases made by hand", "rows of the array", "the workload at full size"


def main() -> int:
    parser = command_line.parser(__doc__, write=f"store the table in {command_line.KEPT}proof.json")
    parser.add_argument("--model", default="llama-8b", help="a preset or checkpoint folder")
    parser.add_argument("--seq", type=int, default=8192, help="context")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOSEL_HOME"] = home
        found = measured(options.model, options.seq)
    if options.write:
        keep(KEPT, found)
    print(json.dumps(found) if options.json else text(found))
    return 0


def measured(model: str, seq: int) -> dict[str, Any]:
    """Return the seconds of a cold tune, of all its proofs, and of each part, with the number of decided workloads."""
    from autosel import models, pipeline
    from autosel.ledger.store import open_ledger
    from autosel.models.workloads import step
    from autosel.parity import check
    from autosel.tuning.prove import prove_all

    parts: dict[str, float] = defaultdict(float)
    walls: dict[str, float] = {}
    steps_of = check.Prover.steps

    def prove_timed(tuning: Tuning, jobs: Sequence[Job]) -> None:
        started = time.monotonic()
        prove_all(tuning, jobs)
        walls["proofs_s"] = time.monotonic() - started

    def timed_steps(prover: check.Prover, proof: Proof) -> list[Step]:
        return [timed(s, parts) for s in steps_of(prover, proof)]

    named = step(models.load(model), batch=1, context=seq)
    steps, proofs = patch.object(check.Prover, "steps", timed_steps), patch.object(pipeline, "prove_all", prove_timed)
    with steps, proofs, open_ledger() as ledger:
        report = pipeline.tune(pipeline.Request(workloads=named), ledger, _Progress())
    decided = len(report.decisions)
    about = {"date": time.strftime("%Y-%m-%d"), "device": device_of(report.fingerprint), "model": model}
    return {**about, "tune_s": report.seconds, **walls, "decided": decided, "of": len(named), "parts_s": parts}


def timed(step: Step, parts: dict[str, float]) -> Step:
    """Return the step, whose run adds its seconds to its part."""
    part = part_of(step)

    def run(*arguments: Any) -> None:
        started = time.monotonic()
        try:
            step.run(*arguments)
        finally:
            parts[part] += time.monotonic() - started

    return replace(step, run=run)


def part_of(step: Step) -> str:
    from autosel.parity.battery import HABITS

    if step.name in HABITS:
        return step.name
    if step.name.startswith("at "):
        return FULL_SIZE
    return ROWS if step.name.startswith("pairs ") else BY_HAND


class _Progress:
    """Prints a line to stderr for each stage's end and each decision."""

    def stage(self, name: str, what: str, done: int, of: int) -> None:
        if done == of > 0:
            print(f"  {name} {done}/{of}", file=sys.stderr, flush=True)

    def rejected(self, *_: object) -> None: ...

    def decided(self, decision: Any, settled_before: bool) -> None:
        print(f"  {decision.workload.key}  {decision.state}", file=sys.stderr, flush=True)


def text(found: Mapping[str, Any]) -> str:
    """Return the table: parts by size, with their share of the tune's wall-clock time."""
    parts = sorted(found["parts_s"].items(), key=lambda part: -part[1])
    total = sum(seconds for _, seconds in parts)
    proofs = found["proofs_s"] / found["tune_s"]
    decided = f"{found['decided']} of {found['of']} workloads decided"
    lines = [
        f"{found['device']}, {found['date']}: cold tune of {found['model']}, {found['tune_s']:.0f} s, {decided}.",
        f"Builds and proofs took {found['proofs_s']:.0f} s of them.",
        "",
        "| part of the proofs | seconds | share of the tune |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {seconds:.1f} | {proofs * seconds / total:.1%} |" for name, seconds in parts]
    return "\n".join([*lines, f"| **all** | {total:.1f} | {proofs:.1%} |"])


if __name__ == "__main__":
    sys.exit(main())
