"""The judgement of a race's samples. Pure: the same Race always gives the same Verdict.

Promote iff, in each of the three confirming sessions, E >= 1/alpha against the baseline *and* against the incumbent,
the session medians agree, the tail is no heavier than the baseline's, and neither rival is significantly faster in a
situation of a program. The effect is reported from the confirming sessions only, so that the selection of the fastest
cannot inflate it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autosel.race.evidence import (
    E_PAIRS,
    crossed,
    e_pairs,
    futile,
    median,
    median_interval,
    quantile,
    quantile_lower,
    rerun_interval,
    tail_crossed,
    tail_futile,
)
from autosel.race.plan import SESSIONS
from autosel.values import Conditions, DeployedTiming, Effect, Outcome, Race, RaceSession, Timing, Verdict

CLONE = "~baseline"  # the arm name of the baseline's clone in an A/A comparison
ROLLING = 15  # baseline samples in the rolling median that detrends the tail
TAIL_SLACK = 1.05
ONE_STATE = 1.3  # read rates that differ by more are two states of the machine


# --- counting --------------------------------------------------------------------------------------------------------


def pair_medians(session: RaceSession, arm: str) -> list[float]:
    """Return the arm's median in each pair in which it ran (screening drops hopeless arms early)."""
    index = session.arms.index(arm)
    return [median(pair.samples_ns[index]) for pair in session.pairs if pair.samples_ns[index]]


def duels(session: RaceSession, candidate: str, rival: str) -> Iterator[tuple[float, float]]:
    """Return (candidate's median, rival's median) of each pair in which both ran."""
    own, other = session.arms.index(candidate), session.arms.index(rival)
    for pair in session.pairs:
        if pair.samples_ns[own] and pair.samples_ns[other]:
            yield median(pair.samples_ns[own]), median(pair.samples_ns[other])


def wins(session: RaceSession, candidate: str, rival: str, delta: float) -> tuple[int, int]:
    """Return (pairs that the candidate won, pairs)."""
    won = [beats(own, theirs, delta) for own, theirs in duels(session, candidate, rival)]
    return sum(won), len(won)


def beats(own: float, theirs: float, delta: float) -> bool:
    """Return True if won by more than delta. A tie is a loss, also at the margin.

    The burden of proof is the candidate's, and if ties were wins, a clock of few ticks would give equal arms more than
    half of the pairs.
    """
    return theirs > (1 + delta) * own


def has_won(session: RaceSession, candidate: str, rivals: Sequence[str], delta: float) -> bool:
    return all(crossed(n, k) for k, n in (wins(session, candidate, r, delta) for r in rivals))


def has_lost(session: RaceSession, candidate: str, rivals: Sequence[str], delta: float) -> bool:
    return any(futile(n, k) for k, n in (wins(session, candidate, r, delta) for r in rivals) if n)


# --- the tail --------------------------------------------------------------------------------------------------------


class BaselineLevel:
    """The rolling median of the last 15 baseline samples, which removes the drift that both arms share."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=ROLLING)

    def relative(self, base: Sequence[float], own: Sequence[float]) -> list[float]:
        """Return a pair's own samples over the level, after the baseline's of that pair were added."""
        self.recent.extend(base)
        level = median(list(self.recent))
        return [sample / level for sample in own]


def relative_samples(session: RaceSession, arm: str) -> list[float]:
    """Return each of the arm's samples over the baseline's level."""
    base, index, level = 0, session.arms.index(arm), BaselineLevel()
    return [r for pair in session.pairs for r in level.relative(pair.samples_ns[base], pair.samples_ns[index])]


def tail_threshold(screening: RaceSession) -> float:
    """Return the threshold of slow samples: 5 % above the 95th percentile of the baseline's own samples, at its lower
    confidence limit. With the plain estimate, a rare hiccup of the baseline at the percentile would disable the gate.
    """
    return TAIL_SLACK * quantile_lower(relative_samples(screening, screening.arms[0]), 0.95)


def tail_counts(sessions: Sequence[RaceSession], candidate: str, threshold: float) -> tuple[int, int]:
    """Return (samples beyond the threshold, samples)."""
    ratios = [r for session in sessions for r in relative_samples(session, candidate)]
    return sum(r > threshold for r in ratios), len(ratios)


# --- nomination ------------------------------------------------------------------------------------------------------


def nominees(screening: RaceSession, incumbent: str, delta: float, excluded: Sequence[str] = ()) -> list[str]:
    """Return the candidates whose E crossed against the baseline and which lead the incumbent, fastest first.

    Compared within pairs: a clock that changes its speed would distort medians of whole sessions.
    """
    base = screening.arms[0]
    crossed_arms = [
        arm
        for arm in screening.arms[1:]
        if arm not in (CLONE, incumbent, *excluded)
        and has_won(screening, arm, [base], delta)
        and (incumbent not in screening.arms or _ratio(screening, arm, incumbent) > 1)
    ]
    return sorted(crossed_arms, key=lambda arm: -_ratio(screening, arm, base))


def leaders(screening: RaceSession, found: Sequence[str]) -> Sequence[str]:
    """Return the first nominee, and the second unless the first beats it beyond doubt by more than two sessions in one
    state of the machine may differ: the memory of a minute may favour one of two kernels by a quarter.
    """
    level = len(found) > 1 and not has_won(screening, found[0], [found[1]], ONE_STATE - 1)
    return found[:2] if level else found[:1]


def favoured(confirming: Sequence[RaceSession], finalists: Sequence[str], rivals: Sequence[str], delta: float) -> str:
    """Return the finalist to judge: of two level ones the first by name, so that another run decides the same, unless
    the other beats it beyond doubt over all confirming sessions or it fails in one of them.
    """
    first, *others = sorted(finalists)
    for other in others:
        counts = [wins(session, other, first, delta) for session in confirming]
        better = crossed(sum(n for _, n in counts), sum(k for k, _ in counts))
        if better or not all(has_won(session, first, rivals, delta) for session in confirming):
            return other
    return first


# --- the verdict -----------------------------------------------------------------------------------------------------


def judge(race: Race) -> Verdict:
    """Return the verdict of a finished attempt. `race.sessions` also holds voided sessions, which are ignored."""
    valid = [s for s in race.sessions if not s.voided and s.pairs]
    screening = next((s for s in valid if s.kind == "screening"), None)
    confirming = [s for s in valid if s.kind == "confirming" and race.finalist in s.arms]
    if screening is None:
        verdict = _settle(race, "undecided", race.incumbent, _why_void(race), _Quotable(screening=None, confirming=[]))
        return replace(verdict, conditions=conditions_of(race.sessions))
    if race.finalist is None:
        return _unchallenged(race, screening)
    if len(confirming) >= SESSIONS or _lost(race, confirming):
        return _confirmed(race, screening, confirming)
    why = race.notes[-1] if race.notes else "the race stopped before three sessions were complete"
    return _settle(race, "undecided", race.incumbent, why, _Quotable(screening=screening, confirming=confirming))


def _lost(race: Race, confirming: Sequence[RaceSession]) -> bool:
    assert race.finalist is not None
    return any(has_lost(s, race.finalist, _rivals(race), race.delta) for s in confirming)


def _rivals(race: Race) -> list[str]:
    return [race.baseline] if race.incumbent == race.baseline else [race.baseline, race.incumbent]


def _why_void(race: Race) -> str:
    reasons = [s.voided for s in race.sessions if s.voided]
    return reasons[-1] if reasons else "nothing was timed"


def _unchallenged(race: Race, screening: RaceSession) -> Verdict:
    """Return the verdict without a nominee: the incumbent stays, with the distance of the best rival."""
    told = _Quotable(screening=screening, confirming=[])
    rivals = [a for a in screening.arms if a not in (race.incumbent, CLONE)]
    if not rivals:
        return _settle(race, "lose", race.incumbent, "no other candidate passed parity", told)
    best = min(rivals, key=lambda arm: median(pair_medians(screening, arm)))
    ratio = _seen([screening], best, race.incumbent)
    span = f"{100 * (ratio.lo - 1):+.1f} .. {100 * (ratio.hi - 1):+.1f} %"
    if has_lost(screening, best, [race.incumbent], race.delta):
        outcome: Outcome = "lose" if ratio.hi < 1 else "tie"
        word = "slower" if outcome == "lose" else "a tie"
        why = f"kept {race.incumbent}: the best rival, {best}, is {word} ({span})"
        return _settle(race, outcome, race.incumbent, why, told)
    if ratio.lo < 1 + race.delta:
        why = f"kept {race.incumbent}: {best} is not {race.delta:.0%} faster beyond doubt ({span})"
        return _settle(race, "tie", race.incumbent, why, told)
    why = f"{best} looked faster ({span}) but its evidence did not reach {E_PAIRS} to 1"
    return _settle(race, "undecided", race.incumbent, why, told)


def _confirmed(race: Race, screening: RaceSession, confirming: list[RaceSession]) -> Verdict:
    finalist = race.finalist
    assert finalist is not None
    outcome, why = _rule(race, screening, confirming)
    winner = finalist if outcome == "promote" else race.incumbent
    return _settle(race, outcome, winner, why, _Quotable(screening=screening, confirming=confirming))


def _rule(race: Race, screening: RaceSession, confirming: list[RaceSession]) -> tuple[Outcome, str]:
    finalist, rivals = race.finalist, _rivals(race)
    assert finalist is not None
    for number, session in enumerate(confirming, 1):
        if has_won(session, finalist, rivals, race.delta):
            continue
        effect = _seen(confirming, finalist, rivals[-1])
        span = f"{100 * (effect.lo - 1):+.1f} .. {100 * (effect.hi - 1):+.1f} %"
        if effect.lo < 1 + race.delta:
            return "tie", f"{finalist} did not hold its lead in session {number} ({span})"
        return "undecided", f"{finalist} led ({span}) but session {number} did not reach {E_PAIRS} to 1"
    spread = _session_spread(confirming, finalist, rivals[-1])
    medians = [_ratio(s, finalist, rivals[-1]) for s in confirming]
    if spread > 2 * race.delta and min(medians) < 1 + 2 * race.delta:
        return "undecided", f"{finalist}: its sessions disagree by {spread:.1%} (allowed {2 * race.delta:.0%})"
    slow, n = tail_counts(confirming, finalist, tail_threshold(screening))
    if tail_futile(n, slow):
        return "tie", f"{finalist} has the heavier tail ({slow} of {n} samples beyond the baseline's p95)"
    if not tail_crossed(n, slow):
        return "undecided", f"{finalist}: {slow} of {n} samples beyond the baseline's p95 do not clear its tail"
    for rival in rivals:
        if slower := _slower_deployed(confirming, finalist, rival, race.delta):
            return "tie", slower
    counts = [wins(s, finalist, race.baseline, race.delta) for s in confirming]
    won = f"{sum(k for k, _ in counts)} of {sum(n for _, n in counts)}"
    return (
        "promote",
        f"{finalist} won {won} confirming pairs by at least {race.delta:.0%} in {len(confirming)} processes",
    )


def _slower_deployed(sessions: Sequence[RaceSession], candidate: str, rival: str, delta: float) -> str:
    """Return the situation of a program in which the rival is significantly faster; "" if there is none."""
    for situation, calls in _deployed(sessions, candidate, rival).items():
        lost = sum(beats(theirs, own, delta) for own, theirs in calls)
        if crossed(len(calls), lost):
            return (
                f"{candidate} is faster call after call, and slower than {rival} {situation} ({lost} of {len(calls)})"
            )
    return ""


def _deployed(sessions: Sequence[RaceSession], arm: str, rival: str) -> dict[str, list[tuple[float, float]]]:
    """Return (the arm's time, the rival's) of each turn in which both ran, by situation."""
    found: dict[str, list[tuple[float, float]]] = {}
    for session in sessions:
        if arm in session.arms and rival in session.arms:
            own, other = session.arms.index(arm), session.arms.index(rival)
            for one in session.deployed:
                found.setdefault(one.situation, []).extend((turn[own], turn[other]) for turn in one.turns_ns)
    return found


def _session_spread(sessions: Sequence[RaceSession], candidate: str, rival: str) -> float:
    medians = [_ratio(s, candidate, rival) for s in sessions]
    return max(medians) / min(medians) - 1


def _ratio(session: RaceSession, candidate: str, rival: str) -> float:
    return median(list(_pair_ratios([session], candidate, rival)))


def _pair_ratios(sessions: Sequence[RaceSession], candidate: str, rival: str) -> Iterator[float]:
    for session in sessions:
        for own, theirs in duels(session, candidate, rival):
            yield theirs / own


# --- figures ---------------------------------------------------------------------------------------------------------


def _effect(race: Race, sessions: Sequence[RaceSession], candidate: str, rival: str) -> Effect:
    """Return the median of the pair ratios with an interval for another run of these sessions.

    Placement and alignment are constant within a process, and its pairs do not show them. So the interval of these
    sessions is widened to that of their medians, each taken as one observation, and of earlier runs on this device.
    Sessions in which memory was read at different rates have no common median: for them the range is reported.
    """
    seen = _seen(sessions, candidate, rival)
    if not one_state(s.read_bytes_per_s for s in sessions):
        return seen
    low, high = rerun_interval([_ratio(s, candidate, rival) for s in sessions], race.reruns)
    return replace(seen, lo=min(seen.lo, low), hi=max(seen.hi, high))


def one_state(rates: Iterable[float]) -> bool:
    """Return True if memory was read at the same rate; 0 is no rate. A hypervisor that separates its guest's cores
    doubles it.
    """
    found = [rate for rate in rates if rate]
    return not found or max(found) <= ONE_STATE * min(found)


def _seen(sessions: Sequence[RaceSession], candidate: str, rival: str) -> Effect:
    """Return the median of the pair ratios; the interval is that of the pairs, widened to the session medians."""
    ratios = list(_pair_ratios(sessions, candidate, rival))
    low, high = median_interval(ratios)
    per_session = [_ratio(s, candidate, rival) for s in sessions]
    return Effect(median=median(ratios), lo=min(low, *per_session), hi=max(high, *per_session))


def _deployed_timings(sessions: Sequence[RaceSession], winner: str, baseline: str) -> tuple[DeployedTiming, ...]:
    return tuple(
        DeployedTiming(
            situation=situation,
            calls=len(calls),
            winner_us=median([own / 1e3 for own, _ in calls]),
            baseline_us=median([theirs / 1e3 for _, theirs in calls]),
        )
        for situation, calls in _deployed(sessions, winner, baseline).items()
    )


def _timing(sessions: Sequence[RaceSession], arm: str) -> Timing:
    medians = [m / 1e3 for s in sessions if arm in s.arms for m in pair_medians(s, arm)]
    samples = [x / 1e3 for s in sessions if arm in s.arms for p in s.pairs for x in p.samples_ns[s.arms.index(arm)]]
    low, high = median_interval(medians)
    return Timing(
        median_us=median(medians),
        lo_us=low,
        hi_us=high,
        p95_us=quantile(samples, 0.95),
        min_us=min(samples),
        samples=len(samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quotable:
    """Return the sessions that a verdict may quote."""

    screening: RaceSession | None
    confirming: Sequence[RaceSession]

    @property
    def all(self) -> list[RaceSession]:
        return [*self.confirming, *([self.screening] if self.screening else [])]

    def of(self, *arms: str) -> list[RaceSession]:
        """Return the confirming sessions in which all these arms ran, otherwise the screening session if they ran
        there.
        """
        for source in (self.confirming, self.all):
            found = [s for s in source if set(arms) <= set(s.arms)]
            if found:
                return found
        return []


def _settle(race: Race, outcome: Outcome, winner: str, reason: str, told: _Quotable) -> Verdict:
    """Fill in the figures: from the confirming sessions for arms that ran in them, from screening for the others."""
    arms = sorted({arm for s in told.all for arm in s.arms if arm != CLONE})
    timings = {a: _timing(told.of(a), a) for a in arms}
    quoted, confirming, finalist = told.of(winner, race.baseline), told.confirming, race.finalist
    return Verdict(
        outcome=outcome,
        winner=winner,
        reason=reason,
        effect=_effect(race, quoted, winner, race.baseline) if quoted else None,
        over_incumbent=_over_incumbent(race, winner, told),
        next_best=_next_best(winner, told),
        timings=timings,
        e_values=tuple(_e_value(s, finalist, race) for s in confirming) if finalist else (),
        wins=tuple(wins(s, finalist, race.baseline, race.delta) for s in confirming) if finalist else (),
        false_promotion_bound=_false_promotion_bound(race, confirming) if outcome == "promote" else None,
        read_bytes_per_s=max((s.read_bytes_per_s for s in told.all), default=0.0),
        conditions=conditions_of(told.all),
        prepared=next((s.prepared[winner] for s in told.all if s.prepared and winner in s.prepared), None),
        checked=checked_of(race.sessions, winner),
        deployed=_deployed_timings(quoted, winner, race.baseline),
    )


def _false_promotion_bound(race: Race, confirming: Sequence[RaceSession]) -> float:
    """Return the bound of each finalist's promotion, summed: two level ones each had their chance."""
    finalists = {arm for session in confirming for arm in session.arms} - {*_rivals(race), CLONE}
    return len(finalists) * max(race.pi, race.alpha_session) ** SESSIONS


def checked_of(sessions: Sequence[RaceSession], arm: str) -> tuple[int, int] | None:
    """Return (an arm's timed calls that were compared in full, its timed calls); None if nothing was compared."""
    found = [s.checked[s.arms.index(arm)] for s in sessions if s.checked and arm in s.arms]
    return (sum(c for c, _ in found), sum(t for _, t in found)) if found else None


def conditions_of(sessions: Sequence[RaceSession]) -> Conditions | None:
    """Return the conditions of all sessions together: the worst of each; None if none were recorded."""
    found = [s.conditions for s in sessions if s.conditions is not None]
    if not found:
        return None
    busiest = max(found, key=lambda c: c.busy_cores)
    return Conditions(
        watched=all(c.watched for c in found),
        again=sum(c.again for c in found),
        busy_cores=busiest.busy_cores,
        stolen=max(c.stolen for c in found),
        by=busiest.by,
    )


def _over_incumbent(race: Race, winner: str, told: _Quotable) -> Effect | None:
    quoted = told.of(winner, race.incumbent)
    return _effect(race, quoted, winner, race.incumbent) if quoted and race.incumbent != race.baseline else None


def _e_value(session: RaceSession, finalist: str, race: Race) -> float:
    return min(e_pairs(n, k) for k, n in (wins(session, finalist, r, race.delta) for r in _rivals(race)))


def _next_best(winner: str, told: _Quotable) -> tuple[str, float] | None:
    """Return the fastest other candidate and its time over the winner's, from the confirming sessions if it ran in
    them.

    The effect uses the same sessions, so that two candidates have one ratio.
    """
    others = {arm for s in told.all for arm in s.arms} - {winner, CLONE}
    ratios = {a: _seen(sessions, winner, a).median for a in sorted(others) if (sessions := told.of(winner, a))}
    best = min(ratios, key=lambda a: ratios[a], default=None)
    return (best, ratios[best]) if best is not None else None
