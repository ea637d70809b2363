"""Test verdicts from samples of arms with known speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from autosel.race.judge import CLONE, has_won, judge
from autosel.race.plan import DELTA_UNCALIBRATED, TrialPlan, plan
from autosel.race.session import BUSY, MOST_BUSY, Duel, SessionRules, confirm, screen
from autosel.testing.rates.noise import NOISES, WORK, Scenario, SimulatedBench, attempt, iid
from autosel.testing.rates.studies import margin_of
from autosel.values import Conditions, Deployed, PairedSamples, Prepared, Race, RaceSession, Verdict, from_json, to_json

DELTA = DELTA_UNCALIBRATED


def drawn(trial: TrialPlan, seed: int, delta: float = DELTA) -> SessionRules:
    return SessionRules(plan=trial, delta=delta, seed=seed)


def run_race(true_ns: dict[str, float], seed: int = 7, incumbent: str = "base", noise: str = "iid") -> Race:
    """Run an attempt like the pipeline, on synthetic arms; `base` is the baseline."""
    margin = margin_of(DELTA)
    setting = Scenario(true_ns=true_ns, noise=NOISES[noise], plan=plan(2e6), margin=margin, incumbent=incumbent)
    return attempt(setting, Random(seed))


def of_sessions(*sessions: RaceSession) -> Race:
    """Return a race of `fast` against the baseline."""
    return Race(
        workload=WORK, baseline="base", incumbent="base", finalist="fast", delta=DELTA, alpha_session=0.05, pi=0.05,
        sessions=sessions,
    )  # fmt: skip


def verdict(true_ns: dict[str, float], incumbent: str = "base") -> Verdict:
    return judge(run_race(true_ns, incumbent=incumbent))


@pytest.fixture(scope="module")
def twice() -> Race:
    """Return the race of a candidate twice as fast as the baseline."""
    return run_race({"base": 2e6, "fast": 1e6})


def test_a_candidate_twice_as_fast_is_promoted_with_an_interval_around_two() -> None:
    found = verdict({"base": 2e6, "fast": 1e6, "slow": 3e6})
    assert (found.outcome, found.winner) == ("promote", "fast")
    assert found.effect is not None
    assert found.effect.lo < 2 < found.effect.hi
    assert found.false_promotion_bound == pytest.approx(0.05**3)
    assert found.next_best is not None
    assert found.next_best[0] == "base"


def test_a_candidate_inside_the_margin_is_a_tie_and_the_baseline_stays() -> None:
    found = verdict({"base": 2e6, "same": 1.98e6})
    assert (found.outcome, found.winner) == ("tie", "base")
    assert "tie" in found.reason or "not 5% faster" in found.reason


def test_slower_candidates_lose() -> None:
    found = verdict({"base": 2e6, "slow": 2.4e6})
    assert (found.outcome, found.winner) == ("lose", "base")


def test_a_challenger_slower_than_the_incumbent_is_not_promoted_though_it_beats_the_baseline() -> None:
    found = verdict({"base": 4e6, "incumbent": 1e6, "challenger": 2e6}, incumbent="incumbent")
    assert found.outcome != "promote"
    assert found.winner == "incumbent"


def test_a_challenger_faster_than_both_replaces_the_incumbent() -> None:
    found = verdict({"base": 4e6, "incumbent": 2e6, "challenger": 1e6}, incumbent="incumbent")
    assert (found.outcome, found.winner) == ("promote", "challenger")
    assert found.over_incumbent is not None
    assert found.over_incumbent.lo > 1.5


def test_promotion_needs_all_three_sessions(twice: Race) -> None:
    assert judge(replace(twice, sessions=twice.sessions[:-1])).outcome == "undecided"


def test_sessions_that_disagree_do_not_promote_if_the_weakest_is_near_the_margin() -> None:
    def session(ratio: float, kind: str = "confirming") -> RaceSession:
        pairs = tuple(PairedSamples(order=(0, 1), samples_ns=((100.0 * ratio,) * 2, (100.0,) * 2)) for _ in range(40))
        return RaceSession(kind=kind, seed=0, arms=("base", "fast"), pairs=pairs, calls_per_sample=(1, 1))  # type: ignore[arg-type]

    def race(*ratios: float) -> Race:
        return of_sessions(session(1.3, "screening"), *(session(r) for r in ratios))

    assert judge(race(1.07, 1.3, 1.3)).outcome == "undecided"
    assert judge(race(1.25, 1.25, 1.25)).outcome == "promote"
    assert judge(race(1.5, 1.9, 2.4)).outcome == "promote"  # they disagree, but even the smallest is far above


def test_a_heavier_tail_stops_a_promotion() -> None:
    class Stutters:
        def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
            times = {a: [100.0 if a == "base" else 80.0 for _ in range(samples)] for a in order}
            times["fast"][-1] = 500.0  # one sample in eight: more than the one in ten allowed
            return times, ""

        def probe(self) -> float:
            return 0.0

    trial, duel = plan(2_000), Duel(arms=("base", "fast"), finalist="fast", rivals=("base",))
    screening = screen(Stutters(), duel.arms, drawn(trial, 1))
    sessions = [screening]
    for seed in range(3):
        sessions.append(confirm(Stutters(), duel, drawn(trial, seed), screening, sessions[1:]))
    found = judge(of_sessions(*sessions))
    assert found.outcome != "promote"
    assert "tail" in found.reason or "p95" in found.reason


def test_screening_drops_slow_candidates_early_but_keeps_visiting_the_baseline() -> None:
    screening = run_race({"base": 2e6, "fast": 1e6, "hopeless": 9e6}).sessions[0]
    visits = [sum(bool(p.samples_ns[i]) for p in screening.pairs) for i in range(3)]
    assert visits[0] == len(screening.pairs) >= 14
    assert visits[2] < visits[0]


@pytest.mark.parametrize("kind", sorted(NOISES))
def test_identical_arms_are_hardly_ever_promoted(kind: str) -> None:
    """Run 400 races per noise: at the rule's bound of 1.25e-4, one promotion has probability 5 %, two 0.1 %."""
    races = (run_race({"base": 2e6, "same": 2e6}, seed, noise=kind) for seed in range(400))
    promoted = sum(judge(race).outcome == "promote" for race in races)
    assert promoted <= 1


def test_with_a_random_order_a_clone_wins_no_session_under_a_position_effect() -> None:
    noise = NOISES["position_effect"]()
    crossings = 0
    for seed in range(200):
        bench = SimulatedBench({"base": 2e6, CLONE: 2e6}, noise, Random(seed))
        session = screen(bench, ["base", CLONE], drawn(plan(2e6), seed, delta=0.0))
        crossings += has_won(session, CLONE, ["base"], 0.0)
    assert crossings <= 0.05 * 200 + 3 * (0.05 * 0.95 * 200) ** 0.5


def test_a_race_and_its_verdict_survive_json(twice: Race) -> None:
    found = judge(twice)
    assert from_json(Race, to_json(twice)) == twice
    assert from_json(Verdict, to_json(found)) == found


# --- as a program calls it -------------------------------------------------------------------------------------------


def in_a_program(race: Race, *, finalist_ns: float, base_ns: float, turns: int = 8) -> Race:
    """Return the race with this many calls after an op of PyTorch in each confirming session."""

    def measured(session: RaceSession) -> RaceSession:
        times = {"base": base_ns, "fast": finalist_ns}
        called = Deployed(situation="after an op of PyTorch", turns_ns=(tuple(times[a] for a in session.arms),) * turns)
        return replace(session, deployed=(called,)) if session.kind == "confirming" else session

    return replace(race, sessions=tuple(map(measured, race.sessions)))


def test_a_kernel_that_is_slower_after_an_op_of_pytorch_is_not_promoted(twice: Race) -> None:
    assert judge(twice).outcome == "promote"
    found = judge(in_a_program(twice, finalist_ns=3e6, base_ns=2.5e6))
    assert (found.outcome, found.winner) == ("tie", "base")
    assert "slower than base after an op of PyTorch (24 of 24)" in found.reason


def test_a_kernel_that_keeps_its_lead_in_a_program_is_promoted_with_both_times(twice: Race) -> None:
    found = judge(in_a_program(twice, finalist_ns=2e6, base_ns=2.5e6))
    assert found.outcome == "promote"
    (timing,) = found.deployed
    assert (timing.calls, timing.winner_us, timing.baseline_us) == (24, 2e3, 2.5e3)
    assert from_json(Verdict, to_json(found)) == found


def test_too_few_calls_in_a_program_refuse_no_candidate(twice: Race) -> None:
    assert judge(in_a_program(twice, finalist_ns=3e6, base_ns=2.5e6, turns=2)).outcome == "promote"


def slowed(session: RaceSession, factor: float, rate: float) -> RaceSession:
    """Return the session with a slower baseline and this read rate."""
    base = session.arms.index("base")

    def changed(pair: PairedSamples) -> PairedSamples:
        times = [tuple(ns * (factor if at == base else 1) for ns in of) for at, of in enumerate(pair.samples_ns)]
        return replace(pair, samples_ns=tuple(times))

    return replace(session, pairs=tuple(map(changed, session.pairs)), read_bytes_per_s=rate)


@pytest.mark.parametrize(
    ("factors", "rates", "low", "high"),
    [
        # Student's t of 2.00, 2.04 and 2.08, for the mean of three others.
        ((1.0, 1.02, 1.04), (0.0, 0.0, 0.0), pytest.approx(1.90, abs=0.02), pytest.approx(2.19, abs=0.02)),
        # Two states of the machine: their range.
        ((1.0, 1.0, 2.0), (60e9, 60e9, 120e9), pytest.approx(2.0, abs=0.05), pytest.approx(4.0, abs=0.1)),
    ],
)
def test_the_interval_of_an_effect_follows_from_how_its_sessions_differ(
    twice: Race, factors: tuple[float, ...], rates: tuple[float, ...], low: float, high: float
) -> None:
    first, *confirming = twice.sessions
    apart = map(slowed, confirming, factors, rates)
    found = judge(replace(twice, sessions=(first, *apart))).effect
    assert found is not None and (found.lo, found.hi) == (low, high)


# --- a busy machine ---------------------------------------------------------------------------------------------------


class Disturbed(SimulatedBench):
    """A bench on which every pair after the first `good` ones is disturbed."""

    good: int = 0
    why: str = BUSY

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
        self.good -= 1
        taken, _ = super().pair(order, calls, samples)
        return taken, "" if self.good >= 0 else self.why


def screened_beside_others(good: int, why: str = BUSY) -> RaceSession:
    bench = Disturbed({"base": 2e6, "fast": 1e6}, iid(), Random(3))
    bench.good, bench.why = good, why
    return screen(bench, ["base", "fast"], drawn(plan(2e6), 1))


def test_a_disturbed_session_is_voided_and_counts_for_nothing() -> None:
    session = screened_beside_others(good=0, why="the cgroup was throttled")
    assert (session.voided, session.pairs) == ("the cgroup was throttled", ())


def test_a_session_without_clean_pairs_ends_soon_and_is_void() -> None:
    session = screened_beside_others(good=0)
    assert (session.voided, session.dropped_pairs) == (BUSY, MOST_BUSY + 1)


def test_a_session_allows_disturbed_pairs_up_to_half_of_its_clean_ones() -> None:
    session = screened_beside_others(good=10)
    assert (session.voided, session.dropped_pairs, len(session.pairs)) == (BUSY, MOST_BUSY + 5 + 1, 10)


def test_on_a_busy_machine_the_verdict_is_undecided_and_names_the_busy_processes(twice: Race) -> None:
    conditions = Conditions(watched=True, again=99, busy_cores=1.9, by=("cc1plus 1.9 cores",))
    void = replace(screened_beside_others(good=0), voided=f"{BUSY}: cc1plus 1.9 cores", conditions=conditions)
    found = judge(replace(twice, sessions=(void,), finalist=None))
    assert (found.outcome, found.winner, found.effect) == ("undecided", "base", None)
    assert found.reason == "machine busy: cc1plus 1.9 cores"
    assert found.conditions == conditions


def test_an_effect_carries_the_worst_conditions_of_its_sessions(twice: Race) -> None:
    quiet = Conditions(watched=True, again=2)
    busy = Conditions(watched=True, again=40, busy_cores=1.2, stolen=0.1, by=("make 1.2 cores",))
    sessions = tuple(replace(s, conditions=busy if i == 1 else quiet) for i, s in enumerate(twice.sessions))
    found = judge(replace(twice, sessions=sessions)).conditions
    assert found == Conditions(watched=True, again=46, busy_cores=1.2, stolen=0.1, by=("make 1.2 cores",))
    assert found.contended and not quiet.contended
    assert judge(twice).conditions is None, "of an unwatched race they are unknown"


def test_a_verdict_has_the_prepared_weights_of_a_winner_with_a_layout_only(twice: Race) -> None:
    took = Prepared(layout="lossless-12", version=3, bytes=75, plain_bytes=100, seconds=0.5)
    sessions = tuple(replace(s, prepared={"fast": took, "other": took}) for s in twice.sessions)
    packed = replace(twice, sessions=sessions)
    assert judge(packed).prepared == took and judge(twice).prepared is None
    assert from_json(Race, to_json(packed)) == packed
    assert "prepared" not in to_json(judge(twice)) and "prepared" not in to_json(twice.sessions[0])
    slower = run_race({"base": 1e6, "fast": 2e6})
    kept = replace(slower, sessions=tuple(replace(s, prepared={"fast": took}) for s in slower.sessions))
    assert judge(kept).winner == "base" and judge(kept).prepared is None
