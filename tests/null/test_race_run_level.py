"""Test whole races of simulated arms in which screening does not tell the two fastest apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from autosel.ops.contract import Mismatch
from autosel.race.evidence import tail_crossed, tail_futile
from autosel.race.judge import favoured, judge, tail_counts, tail_threshold
from autosel.race.plan import TrialPlan, margin, plan
from autosel.race.run import Disqualified, RaceTerms, run
from autosel.testing.rates.noise import WORK, Lognormal, Scenario, SimulatedBench, confirmed, screened
from autosel.values import PairedSamples, Race, RaceSession, Verdict

Times = Mapping[str, float]  # ns by arm
MARGIN = margin(0, 0, 5_000_000)  # 5 %
BASE, PACKED, PLAIN = "base", "gemv_packed", "gemv"
LEVEL = {BASE: 5e6, PLAIN: 2.5e6, PACKED: 2.49e6}
PACKED_FASTER = {BASE: 5e6, PLAIN: 2.5e6, PACKED: 2.1e6}
PACKED_LEADS = {BASE: 5e6, PLAIN: 2.5e6, PACKED: 1.7e6}


class Crash(Exception):
    """Names the arm that ended a session."""


@dataclass
class Simulated:
    """A venue, its rooms, and their seats: `times` has one row per session; an arm without a time crashes."""

    times: Sequence[Times]
    seated: list[list[str]] = field(default_factory=list)
    failures: tuple[type[Exception], ...] = (Crash,)
    plan: TrialPlan | None = None
    again: int = 0
    watched: bool = True
    prepared: Mapping[str, Any] = field(default_factory=dict)
    checked: Mapping[str, Any] = field(default_factory=dict)

    def room(self) -> Simulated:
        return self

    def seat(self, contest: Any, arms: Sequence[str], earlier: TrialPlan | None) -> Simulated:
        self.seated.append(list(arms))
        return self

    @property
    def arms(self) -> list[str]:
        return self.seated[-1]

    def sit(self) -> None:
        session = len(self.seated) - 1
        self.plan = plan(self.times[session][BASE])
        self.bench = SimulatedBench(self.times[session], Lognormal(), Random(session))
        if lacking := set(self.arms) - set(self.times[session]):
            raise Crash(*lacking)

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        return self.bench.pair(order, calls, samples)

    def probe(self) -> float:
        return 0.0

    def moved_bytes(self, arm: str) -> int:
        return 0

    def deployed(self, arms: Sequence[str]) -> tuple[()]:
        return ()

    def blame(self, error: Exception) -> Mapping[str, Mismatch]:
        return {str(error): Mismatch(check="crash", reason="it ended the process", evidence={})}

    def release(self) -> None: ...

    def renew(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Ended:
    verdict: Verdict
    seated: list[list[str]]  # arms by session
    debits: list[str]
    fallen: list[str]


def raced(*times: Times) -> Ended:
    """Race PLAIN and PACKED with these times in the screening session and those after it."""
    entrants = [SimpleNamespace(candidate=name) for name in (BASE, PACKED, PLAIN)]
    contest: Any = SimpleNamespace(
        workload=WORK,
        baseline=entrants[0],
        incumbent=entrants[0],
        challengers=entrants[1:],
        margins={"short": MARGIN, "long": MARGIN},
        read_bytes_per_s=0.0,
    )
    debits: list[str] = []

    def debit(_: object, candidate: str, __: object) -> bool:
        debits.append(candidate)
        return True

    venue: Any = Simulated(times)
    found = list(run([contest], RaceTerms(rng=Random(1), debit=debit), venue))
    fallen = [one.candidate for one in found if isinstance(one, Disqualified)]
    (race,) = [one[1] for one in found if not isinstance(one, Disqualified)]
    assert isinstance(race, Race)
    return Ended(judge(race), venue.seated, debits, fallen)


def test_the_faster_of_two_kernels_that_were_level_in_screening_is_promoted() -> None:
    ended = raced(LEVEL, *[PACKED_FASTER] * 3)
    assert ended.seated[1:] == [[BASE, PACKED, PLAIN]] * 3 or ended.seated[1:] == [[BASE, PLAIN, PACKED]] * 3
    assert (ended.verdict.outcome, ended.verdict.winner) == ("promote", PACKED)


def test_the_first_by_name_of_two_level_kernels_is_promoted_whichever_led_in_screening() -> None:
    one_ahead = {BASE: 5e6, PLAIN: 2.5e6, PACKED: 2.45e6}
    other_ahead = {BASE: 5e6, PLAIN: 2.45e6, PACKED: 2.5e6}
    for screening in (one_ahead, other_ahead):
        assert raced(screening, *[LEVEL] * 3).verdict.winner == PLAIN


def test_a_minute_that_favours_one_by_a_quarter_does_not_choose() -> None:
    slow_minute = {BASE: 8.3e6, PLAIN: 4.8e6, PACKED: 5.9e6}  # as seen: then 6.8, 3.4 and 3.0
    assert raced(slow_minute, *[PACKED_FASTER] * 3).verdict.winner == PACKED


def test_a_kernel_that_clearly_leads_screening_is_confirmed_alone() -> None:
    ended = raced(*[PACKED_LEADS] * 4)
    assert ended.seated[1:] == [[BASE, PACKED]] * 3
    assert ended.debits == [PACKED]


def test_the_first_by_name_is_not_favoured_where_it_failed_in_a_session() -> None:
    steady = by_hand({BASE: [10.0] * 12, PLAIN: [5.0] * 12, PACKED: [5.0] * 12})
    uneven = by_hand({BASE: [10.0] * 12, PLAIN: [5.0, 15.0] * 6, PACKED: [5.0] * 12})
    assert favoured([steady] * 3, [PACKED, PLAIN], [BASE], MARGIN.delta) == PLAIN
    assert favoured([steady, uneven, steady], [PACKED, PLAIN], [BASE], MARGIN.delta) == PACKED


def by_hand(medians: Mapping[str, Sequence[float]]) -> RaceSession:
    rows = zip(*medians.values(), strict=True)
    pairs = tuple(PairedSamples(order=(0, 1, 2), samples_ns=tuple((x,) for x in row)) for row in rows)
    return RaceSession(kind="confirming", seed=0, arms=tuple(medians), pairs=pairs, calls_per_sample=(1, 1, 1))


def test_the_last_session_continues_until_the_tail_of_each_finalist_is_settled() -> None:
    """With 7 % of slow samples, PACKED takes more of them than PLAIN, which has none."""
    setting = Scenario(true_ns=LEVEL, noise=Lognormal, plan=plan(LEVEL[BASE]), margin=MARGIN, stutters={PACKED: 0.07})
    random = Random(3)
    screening, finalists = screened(setting, random), [PLAIN, PACKED]
    earlier = [confirmed(setting, finalists, random, screening) for _ in range(2)]
    last = confirmed(setting, finalists, random, screening, earlier)
    slow, n = tail_counts([*earlier, last], PACKED, tail_threshold(screening))
    assert tail_crossed(n, slow) or tail_futile(n, slow) or n >= setting.plan.tail_samples
    assert len(last.pairs) > len(confirmed(setting, [PLAIN], random, screening, earlier).pairs)


def test_each_of_two_level_kernels_is_debited_and_the_bound_covers_both() -> None:
    ended, alone = raced(*[LEVEL] * 4), raced(*[PACKED_LEADS] * 4)
    assert sorted(ended.debits) == [PLAIN, PACKED]
    assert ended.verdict.false_promotion_bound == 2 * (alone.verdict.false_promotion_bound or 0.0) > 0.0


def test_the_other_finalist_goes_on_where_one_crashes() -> None:
    for crashing, other in ((PLAIN, PACKED), (PACKED, PLAIN)):
        without = {arm: ns for arm, ns in LEVEL.items() if arm != crashing}
        ended = raced(LEVEL, LEVEL, without, LEVEL, LEVEL)
        assert ended.fallen == [crashing]
        assert ended.seated[3:] == [[BASE, other]] * 2
        assert (ended.verdict.outcome, ended.verdict.winner) == ("promote", other)
        assert len(ended.debits) == 2
