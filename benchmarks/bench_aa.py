"""Race two identical functions on this machine and count how often each rule prefers one of them.

    python benchmarks/bench_aa.py                      300 races of PyTorch's rmsnorm against itself: a few minutes
    python benchmarks/bench_aa.py --op linear          another op, raced in the form for long calls
    python benchmarks/bench_aa.py --races 20           a trial, not to be quoted
    python benchmarks/bench_aa.py --write              also store the result in benchmarks/results/cpu/aa-<op>.json
    python benchmarks/bench_aa.py --parts FILE --minutes 3    stop after 3 minutes; the next call continues
    python benchmarks/bench_aa.py --calibrate 59       instead: A/A sessions in fresh processes, stored in your ledger

In a race the same candidate is loaded twice; the twin has its own operands and outputs, like the clone in a tune. Each
race takes a tape of 60 coin-ordered pairs, on which autosel's one-session rule and the usual rules decide, and blocks
of 100 samples an arm, on which the usual rules decide as they usually do. If autosel's rule nominates, three
confirming sessions follow. Sessions here share a process, so luck that is fixed in a process shows only in
--calibrate. The usual rules are imitations on the race's own timer, not the peers' code. Only --calibrate writes to
the ledger.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import command_line
import numpy as np
from figures import commit
from kept import keep

from autosel.testing.rates.common import RULES

if TYPE_CHECKING:
    from autosel.race.bench import Bench
    from autosel.race.contest import Entrant, Operands
    from autosel.race.plan import Plan
    from autosel.values import Fingerprint, Race, Session, Workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
SCHEMA = 2
UNFINISHED = 5
SEED = 20
PAIRS, BLOCK, FEW = 60, 100, 10
WARM_NS = 20_000_000
# llama-8b. It depends on the machine which of LONG_OPS is long enough, and short enough to carry a clone.
SHORT_OPS: Mapping[str, Mapping[str, int]] = {
    "rmsnorm": {"M": 1, "d": 4096},
    "swiglu": {"M": 1, "I": 14336},
    "rope": {"M": 1, "Hq": 32, "Hkv": 8, "D": 128, "R": 128},
}
LONG_OPS: Sequence[tuple[str, Mapping[str, int]]] = [
    ("linear", {"M": 1, "N": n, "K": 4096}) for n in (2048, 1024, 4096)
]
RACED: Mapping[str, Mapping[str, int]] = {**SHORT_OPS, "linear": {"M": 1, "N": 4096, "K": 4096}}


def main() -> int:
    parser = command_line.parser(__doc__, write="store the result in benchmarks/results/cpu/")
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--op", default="rmsnorm", choices=sorted(RACED))
    parser.add_argument("--parts", type=Path, metavar="FILE", help="continue with the races in FILE and add to them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new race after this time")
    parser.add_argument("--calibrate", type=int, metavar="N", help="N A/A sessions per time class, into your ledger")
    options = parser.parse_args()
    if options.write and options.races < 300:
        parser.error("--write requires at least 300 races")
    if options.minutes < float("inf") and not options.parts:
        parser.error("--minutes requires --parts FILE, which stores the races so far")
    sys.path.insert(0, str(ROOT))
    if options.calibrate:
        return calibrate(options.calibrate, options.op)
    with tempfile.TemporaryDirectory(prefix="autosel-aa-") as home:
        os.environ["AUTOSEL_HOME"] = home  # neither read nor write the user's ledger
        document = measured(options, time.monotonic() + 60 * options.minutes)
    if document is None:
        return UNFINISHED
    print(json.dumps(document, indent=1) if options.json else markdown(document))
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"aa-{options.op}.json"
        keep(path, document)
        told = f"written to {path.relative_to(ROOT)}; python docs/generate.py puts it into docs/method.md"
        print(told, file=sys.stderr)
    return 0


def stored() -> list[dict[str, Any]]:
    """Return every stored document, the short ops first."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("aa-*.json"))]
    return sorted(found, key=lambda document: document["form"], reverse=True)


# --- the instrument ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Live:
    """Runs `base` and its twin `same` on this machine, in this process; an Instrument."""

    bench: Bench
    workload: Workload
    operands: Operands
    loaded: Mapping[str, str]  # arm of the race -> loaded arm
    random: Random

    def sit(self) -> None:
        """Allocate fresh operands and warm up."""
        from autosel.race.judge import CLONE

        arms = {"base": self.loaded["base"], CLONE: self.loaded["same"]}  # a clone gets its own operands
        self.bench.prepare(self.workload, self.operands.inputs, arms, self.operands.copies)
        self.bench.warm(WARM_NS)

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
        from autosel.race.judge import CLONE

        seats = {"base": "base", "same": CLONE}
        changed = self.operands.refresh(self.random.getrandbits(31))
        self.bench.refresh({name: self.operands.inputs[name] for name in changed})
        times, disturbed = self.bench.pair([seats[arm] for arm in order], calls, samples)
        return {arm: times[seats[arm]] for arm in order}, disturbed

    def block(self, arm: str, calls: int, samples: int) -> np.ndarray:
        """Return consecutive samples of one arm after three warm-up samples, as most tuners measure."""
        while True:
            times, disturbed = self.pair([arm], calls, samples + 3)
            if not disturbed:
                return np.array(times[arm][3:])

    def probe(self) -> float:
        return 0.0


@dataclass(slots=True)
class Tape:
    """Records coin-ordered pairs once and replays them for every rule; an Instrument."""

    pairs: list[dict[str, list[float]]] = field(default_factory=list)
    orders: list[tuple[str, ...]] = field(default_factory=list)
    at: int = 0

    def record(self, live: Live, plan: Plan) -> None:
        while len(self.pairs) < PAIRS:
            order = ["base", "same"]
            live.random.shuffle(order)
            times, disturbed = live.pair(order, plan.calls, plan.samples)
            if not disturbed:
                self.pairs.append(times)
                self.orders.append(tuple(order))

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
        self.at += 1
        return self.pairs[self.at - 1], ""

    def probe(self) -> float:
        return 0.0

    def samples(self, arm: str) -> np.ndarray:
        return np.concatenate([pair[arm] for pair in self.pairs])

    def medians(self, arm: str) -> np.ndarray:
        return np.median([pair[arm] for pair in self.pairs], axis=1)


# --- the races --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold one A/A race: the rules that promoted the twin, and the cost of being second in a pair and of being the
    twin.

    `load` is the machine's at the end of the race. `form` is the plan's, from the baseline's time at the process's
    start.
    """

    op: str
    form: str
    promoted: Mapping[str, bool]  # by "rule|samples"
    second_slot: float
    twin: float
    load: float
    seconds: float


def measured(options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Return the document; None if the time was over first."""
    import torch

    from autosel import fingerprint
    from autosel.race.plan import plan

    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    torch.set_grad_enabled(False)
    outcomes = kept_parts(options.parts, options.op)
    live = seated(options.op, fp, seed=SEED + len(outcomes))
    full = plan(live.bench.warm(10 * WARM_NS)["base"])
    try:
        while len(outcomes) < options.races:
            if len(outcomes) % 20 == 0:
                print(f"{time.strftime('%H:%M:%S')}  race {len(outcomes)} of {options.races}", file=sys.stderr)
            if time.monotonic() > deadline:
                return None
            outcomes.append(outcome(live, full))
            if options.parts:
                with options.parts.open("a") as file:
                    file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    finally:
        live.bench.release()
        live.operands.close()
    return describe(fp, live.workload, outcomes)


def kept_parts(path: Path | None, op: str) -> list[Outcome]:
    if path is None or not path.is_file():
        return []
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    if any(found.op != op for found in outcomes):
        raise SystemExit(f"{path} has races of another op")
    return outcomes


def seated(op: str, fp: Fingerprint, seed: int) -> Live:
    """Load the op's baseline twice and seat both."""
    from autosel.race.bench import Bench
    from autosel.race.contest import Operands

    bench, first = Bench(), entrant(op, RACED[op], fp)
    second = replace(first, candidate=f"{first.candidate} again")
    for one in (first, second):
        bench.load(one)
    w = workload(op, RACED[op])
    live = Live(
        bench=bench,
        workload=w,
        operands=Operands(w, seed, int(fp.identity["l3_bytes"]) * int(fp.identity["l3_domains"])),
        loaded={"base": first.loaded_name, "same": second.loaded_name},
        random=Random(seed),
    )
    live.sit()
    return live


def workload(op: str, dims: Mapping[str, int]) -> Workload:
    from autosel import ops

    return ops.find(op).workload("bf16", dims)


def entrant(op: str, dims: Mapping[str, int], fp: Fingerprint) -> Entrant:
    from autosel.candidates import registry
    from autosel.race.contest import Entrant

    w, candidate = workload(op, dims), registry.baseline(op)
    knobs = candidate.knobs(w, fp)
    return Entrant(
        candidate=candidate.name,
        op=op,
        recipe=candidate.recipe(w, fp, knobs),
        digest="",
        knobs=knobs.values,
        writes_out=candidate.writes_out,
    )


def outcome(live: Live, full: Plan) -> Outcome:
    """Run one A/A race on fresh allocations."""
    started, tape = time.monotonic(), Tape()
    live.sit()
    tape.record(live, full)
    promoted = {f"{rule}|{samples}": bool(found) for (rule, samples), found in decisions(live, tape, full)}
    slots = [np.array([np.median(p[o[i]]) for p, o in zip(tape.pairs, tape.orders, strict=True)]) for i in (0, 1)]
    return Outcome(
        op=live.workload.op,
        form=full.time_class,
        promoted=promoted,
        second_slot=float(np.median(slots[1] / slots[0])),
        twin=float(np.median(tape.medians("same") / tape.medians("base"))),
        load=round(os.getloadavg()[0], 2),
        seconds=round(time.monotonic() - started, 3),
    )


def decisions(live: Live, tape: Tape, full: Plan) -> Iterator[tuple[tuple[str, str], bool]]:
    """Yield ((rule, samples), True if it promoted the twin) for every rule."""
    from autosel.race.plan import DELTA_CALIBRATED, DELTA_UNCALIBRATED

    short = replace(full, max_pairs=PAIRS)
    for delta in (0.0, DELTA_CALIBRATED, DELTA_UNCALIBRATED):
        yield (f"ours, one session, margin {delta:.0%}", "pairs"), one_session(tape, short, delta)
    for delta in (DELTA_CALIBRATED, DELTA_UNCALIBRATED):
        yield (f"ours, attempt, margin {delta:.0%}", "pairs"), attempt(live, tape, full, delta)
    for rule in RULES.values():
        paired = tape.medians if rule.paired else tape.samples
        yield (rule.name, "pairs"), bool(rule.decide(paired("base"), paired("same")))
    blocks = {arm: live.block(arm, full.calls, BLOCK) for arm in ("base", "same")}
    for rule in RULES.values():
        if not rule.paired:
            yield (rule.name, f"blocks of {BLOCK}"), bool(rule.decide(blocks["base"], blocks["same"]))
            few = {arm: times[-FEW:] if arm == "base" else times[:FEW] for arm, times in blocks.items()}
            yield (rule.name, f"blocks of {FEW}"), bool(rule.decide(few["base"], few["same"]))


def one_session(tape: Tape, plan: Plan, delta: float) -> bool:
    from autosel.race.judge import has_won
    from autosel.race.session import Duel, Trial, confirm

    tape.at = 0
    duel = Duel(arms=("base", "same"), finalist="same", rivals=("base",))
    screening = screened(tape, plan, delta)
    tape.at = 0
    session = confirm(tape, duel, Trial(plan=plan, delta=delta, seed=SEED), screening)
    return has_won(session, "same", ["base"], delta)


def screened(tape: Tape, plan: Plan, delta: float) -> Session:
    from autosel.race.session import Trial, screen

    tape.at = 0
    return screen(tape, ["base", "same"], Trial(plan=replace(plan, max_pairs=PAIRS), delta=delta, seed=SEED))


def attempt(live: Live, tape: Tape, plan: Plan, delta: float) -> bool:
    """Screen on the tape, then run confirming sessions live, each on fresh allocations."""
    from autosel.race.judge import has_won, judge, nominees
    from autosel.race.plan import SESSIONS
    from autosel.race.session import Duel, Trial, confirm
    from autosel.values import Race

    sessions = [screened(tape, plan, delta)]
    if not nominees(sessions[0], "base", delta):
        return False
    duel = Duel(arms=("base", "same"), finalist="same", rivals=("base",))
    while len(sessions) <= SESSIONS:
        live.sit()
        trial = Trial(plan=plan, delta=delta, seed=live.random.getrandbits(32))
        sessions.append(confirm(live, duel, trial, sessions[0], sessions[1:]))
        if not has_won(sessions[-1], "same", ["base"], delta):
            return False
    found = Race(
        workload=live.workload,
        baseline="base",
        incumbent="base",
        finalist="same",
        delta=delta,
        alpha_session=0.05,
        pi=0.05,
        sessions=tuple(sessions),
    )
    return judge(found).outcome == "promote"


# --- calibrating ------------------------------------------------------------------------------------------------------


def calibrate(count: int, op: str) -> int:
    """Run A/A sessions as a tune does, in fresh processes and with a clone of the baseline; store them in the ledger.

    Only timing shows whether a shape is long enough, and short enough to carry a clone.
    """
    from autosel import fingerprint
    from autosel.ledger.commands import SaveAA
    from autosel.ledger.store import open_ledger
    from autosel.race.plan import SAMPLE_NS, margin

    fp = fingerprint.take("cpu")
    shapes = {"short": [(op, SHORT_OPS[op])], "long": LONG_OPS}
    with open_ledger() as ledger, ledger.lock(fp.hw_id):
        for kind, choices in shapes.items():
            before = ledger.aa(fp.hw_id, kind)[0]
            for number in range(4 * count):
                found = aa_session(*choices[number % len(choices)], fp)
                crossings = tuple(s.aa_crossed for s in found.sessions if s.aa_crossed is not None and not s.voided)
                ledger.write(SaveAA(hw_id=fp.hw_id, time_class=found.time_class, crossings=crossings))
                counted = ledger.aa(fp.hw_id, kind)[0] - before
                told = f"{kind} {counted} of {count}: {found.workload.key} {_told(found)}"
                print(f"{time.strftime('%H:%M:%S')}  {told}", file=sys.stderr)
                if counted >= count:
                    break
            sessions, crossed = ledger.aa(fp.hw_id, kind)
            now = margin(sessions, crossed, SAMPLE_NS)
            print(
                f"{kind}: {crossed} of {sessions} A/A sessions crossed at 2 %; margin {now.delta:.0%}, pi {now.pi:.3f}"
            )
    return 0


def aa_session(op: str, dims: Mapping[str, int], fp: Fingerprint) -> Race:
    """Race the op's baseline against its clone in one fresh process: a screening session without a challenger."""
    from autosel.race.contest import Contest
    from autosel.race.plan import SAMPLE_NS, margin
    from autosel.race.run import Disqualified, Terms, run
    from autosel.race.worker import Workers

    own = entrant(op, dims, fp)
    contest = Contest(
        workload=workload(op, dims),
        baseline=own,
        incumbent=own,
        challengers=(),
        margins={kind: margin(0, 0, SAMPLE_NS) for kind in ("short", "long")},
        llc_bytes=int(fp.identity["l3_bytes"]) * int(fp.identity["l3_domains"]),
    )
    rng = Random()
    workers = Workers(threads=int(fp.identity["cpus"]), rng=rng, clone_share=1.0)
    [found] = run([contest], Terms(rng=rng), workers)
    assert not isinstance(found, Disqualified)
    return found[1]


def _told(race: Race) -> str:
    session = race.sessions[-1]
    if session.voided or session.aa_crossed is None:
        return f"not counted: {session.voided or 'too slow to carry a clone'}"
    return f"{'crossed' if session.aa_crossed else 'quiet'} after {len(session.pairs)} pairs"


# --- showing ----------------------------------------------------------------------------------------------------------


def describe(fp: Fingerprint, w: Workload, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    from autosel.fingerprint.describe import headline
    from autosel.race.evidence import median, median_interval

    costs = {name: [float(getattr(o, name)) for o in outcomes] for name in ("second_slot", "twin")}
    spread = {name: (median(ratios), *median_interval(ratios)) for name, ratios in costs.items()}
    promoted = {rule: sum(o.promoted[rule] for o in outcomes) for rule in outcomes[0].promoted}
    races, loads = len(outcomes), sorted(o.load for o in outcomes)
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "device": headline(fp),
        "hw_id": fp.hw_id,
        "torch": fp.environment["torch"],
        "workload": w.key,
        "form": outcomes[-1].form,
        "races": races,
        "seconds": round(sum(o.seconds for o in outcomes)),
        "load": {"lo": loads[0], "median": median(loads), "hi": loads[-1]},
        **{name: {"median": m, "lo": low, "hi": high} for name, (m, low, high) in spread.items()},
        "rules": [
            {"rule": rule, "samples": samples, "promoted": n, "rate": n / races, **interval(races, n)}
            for (rule, _, samples), n in ((name.partition("|"), n) for name, n in promoted.items())
        ],
    }


def interval(n: int, x: int) -> dict[str, float]:
    """Return the 95 % Clopper-Pearson interval."""
    from autosel.race.plan import clopper_pearson_upper

    return {"lo": 1 - clopper_pearson_upper(n, n - x, 0.975), "hi": clopper_pearson_upper(n, x, 0.975)}


def markdown(document: Mapping[str, Any]) -> str:
    kinds = ["pairs", f"blocks of {BLOCK}", f"blocks of {FEW}"]
    found = {(r["rule"], r["samples"]): r for r in document["rules"]}
    lines = ["| rule | " + " | ".join(kinds) + " |", "| --- | " + " | ".join("---" for _ in kinds) + " |"]
    for rule in dict.fromkeys(r["rule"] for r in document["rules"]):
        cells = [_cell(found.get((rule, kind))) for kind in kinds]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    second, twin, load = _costs(document["second_slot"]), _costs(document["twin"]), document["load"]
    head = f"{document['device']}; torch {document['torch']}; {document['date']}, commit {document['commit']}"
    races = f"{document['races']} races in {document['seconds']} s, form: {document['form']}"
    return "\n".join(
        [
            f"**{document['workload']} against itself**: {races}. {head}; load average {load['lo']} .. {load['hi']}.",
            "",
            *lines,
            "",
            f"Coming second in a pair costs {second}; being the twin, seated later, costs {twin}.",
        ]
    )


def _costs(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median'] - 1:+.2%} ({ratio['lo'] - 1:+.2%} .. {ratio['hi'] - 1:+.2%})"


def _cell(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return ""
    return f"{rate['promoted']} = {rate['rate']:.1%} ({rate['lo']:.1%} .. {rate['hi']:.1%})"


if __name__ == "__main__":
    sys.exit(main())
