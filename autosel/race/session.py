"""One session, pair by pair: the arms to visit, their order, and the stopping rule.

Works on any `Instrument`: a worker process that times real kernels, or a synthetic one with a known truth, on which the
error rates of these rules are tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, Protocol

from autosel.race.evidence import crossed, futile, median, tail_crossed, tail_futile
from autosel.race.judge import CLONE, BaselineLevel, beats, tail_counts, tail_threshold
from autosel.race.plan import DELTA_CALIBRATED, SESSIONS, TrialPlan
from autosel.values import PairedSamples, RaceSession

Phase = Literal["screening", "confirming"]
MAX_DROPPED_SHARE = 0.5  # if more than half of a session was disturbed, it measured the disturbance
BUSY = "machine busy"  # why a pair is dropped: its samples were repeated too often
MOST_BUSY = 4  # such pairs that are allowed beyond the share; each of them costs many samples
PROBE_EVERY = 10  # pairs between two read probes


class Instrument(Protocol):
    """Takes the samples."""

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        """Visit the arms in this order; return (nanoseconds per call by arm, why the pair must be dropped or "")."""

    def probe(self) -> float:
        """Return the memory read rate right now, bytes/s; 0 if its operands may be in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The rules of a session: how much to measure, by how much to win, the coins, the watcher."""

    plan: TrialPlan
    delta: float
    seed: int
    watch: Callable[[RaceSession], None] = lambda session: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Hold the arms of a confirming session: the rivals (the baseline first, then the incumbent), the finalist, one
    that is level with it, a clone; the last two not always.
    """

    arms: tuple[str, ...]
    finalist: str
    rivals: tuple[str, ...]


def screen(instrument: Instrument, arms: Sequence[str], trial: SessionRules) -> RaceSession:
    """Race every arm against the baseline (arms[0]), until each has crossed or is hopeless. Nominates; promotes
    nothing.

    The baseline is always visited for `plan.screening_pairs` pairs: its own tail is the reference later. An arm that is
    still undecided then gets as many pairs as a confirming session has; none is dropped too early.
    """
    plan, score = trial.plan, _Score([(arm, arms[0]) for arm in arms[1:] if arm != CLONE], trial.delta)
    recorder = _Recorder("screening", instrument, arms, trial, [score])
    active = list(arms)
    while True:
        session = recorder.take(active)
        trial.watch(session)
        active = [a for a in active if a in (arms[0], CLONE) or not score.lost(a)]
        undecided = [a for a in active if a not in (arms[0], CLONE) and not score.won(a)]
        enough = len(session.pairs) >= plan.screening_pairs
        if recorder.exhausted or (enough and not undecided) or len(session.pairs) >= plan.max_pairs:
            return recorder.finish()


def confirm(
    instrument: Instrument, duel: Duel, trial: SessionRules, screening: RaceSession, earlier: Sequence[RaceSession] = ()
) -> RaceSession:
    """Race the finalist against baseline and incumbent on fresh data, until E crosses for both or cannot.

    The last of the three sessions continues for the tail gate alone, until it passes, cannot pass, or reaches
    `plan.tail_samples`, for each arm that may be promoted.
    """
    plan, finalist = trial.plan, duel.finalist
    score = _Score([(finalist, rival) for rival in duel.rivals], trial.delta)
    finalists = [arm for arm in duel.arms if arm not in (*duel.rivals, CLONE)]
    tails = [_Tail(duel.arms[0], arm, tail_threshold(screening), earlier) for arm in finalists]
    recorder = _Recorder("confirming", instrument, duel.arms, trial, [score, *tails])
    while True:
        session = recorder.take(duel.arms)
        trial.watch(session)
        pairs = len(session.pairs)
        if recorder.exhausted or score.lost(finalist):
            return recorder.finish()
        if pairs < plan.min_pairs:
            continue
        if score.won(finalist):
            if len(earlier) + 1 < SESSIONS or all(tail.settled(plan.tail_samples) for tail in tails):
                return recorder.finish()
        elif pairs >= plan.max_pairs:
            return recorder.finish()


# Running counts of the pairs, so that the cost of a pair does not grow with the session.


class _Score:
    """Count wins in some duels (arm, rival), as `judge.wins` does."""

    def __init__(self, duels: Iterable[tuple[str, str]], delta: float) -> None:
        self.counts = dict.fromkeys(duels, (0, 0))  # (pairs won, pairs)
        self.delta = delta

    def add(self, times: Mapping[str, Sequence[float]]) -> None:
        medians = {arm: median(samples) for arm, samples in times.items()}
        for (arm, rival), (k, n) in self.counts.items():
            if arm in medians and rival in medians:
                self.counts[arm, rival] = k + beats(medians[arm], medians[rival], self.delta), n + 1

    def won(self, arm: str) -> bool:
        return all(crossed(n, k) for (own, _), (k, n) in self.counts.items() if own == arm)

    def lost(self, arm: str) -> bool:
        return any(futile(n, k) for (own, _), (k, n) in self.counts.items() if own == arm)


class _Tail:
    """Count a finalist's slow samples, as `judge.tail_counts` does over all confirming sessions."""

    def __init__(self, base: str, finalist: str, threshold: float, earlier: Sequence[RaceSession]) -> None:
        self.base, self.finalist, self.threshold, self.level = base, finalist, threshold, BaselineLevel()
        self.slow, self.n = tail_counts(earlier, finalist, threshold)

    def add(self, times: Mapping[str, Sequence[float]]) -> None:
        ratios = self.level.relative(times[self.base], times.get(self.finalist, ()))
        self.slow += sum(r > self.threshold for r in ratios)
        self.n += len(ratios)

    def settled(self, most: int) -> bool:
        return self.n >= most or tail_crossed(self.n, self.slow) or tail_futile(self.n, self.slow)


class _Twins:
    """Test the baseline against its clone, with no true difference, by the rule of a confirming session.

    The stopping rule is the same: a shorter session would find fewer crossings than a lucky candidate has, and pi would
    be too small. Judged at the calibrated delta: only A/A sessions quiet at 2 % may give a margin of 2 %.
    """

    def __init__(self, base: str, plan: TrialPlan) -> None:
        self.plan, self.crossed, self.pairs = plan, False, 0
        self.score = _Score([(base, CLONE), (CLONE, base)], DELTA_CALIBRATED)
        self.open = {base, CLONE}

    @property
    def settled(self) -> bool:
        return self.crossed or not self.open or self.pairs >= self.plan.max_pairs

    def add(self, times: Mapping[str, Sequence[float]]) -> None:
        if self.settled:
            return
        self.pairs += 1
        self.score.add(times)
        self.open = {arm for arm in self.open if not self.score.lost(arm)}
        self.crossed = self.pairs >= self.plan.min_pairs and any(self.score.won(arm) for arm in self.open)


class _Recorder:
    """Takes pairs in coin-flipped order and keeps them."""

    def __init__(
        self,
        kind: Phase,
        instrument: Instrument,
        arms: Sequence[str],
        trial: SessionRules,
        tallies: Sequence[_Score | _Tail],
    ) -> None:
        self.twins = _Twins(arms[0], trial.plan) if CLONE in arms else None
        self.tallies = [*tallies, self.twins] if self.twins else tallies
        self.kind, self.instrument, self.plan, self.seed = kind, instrument, trial.plan, trial.seed
        self.arms = tuple(arms)
        self.coin = Random(trial.seed)
        self.pairs: list[PairedSamples] = []
        self.dropped: list[str] = []
        self.read_bytes_per_s = 0.0

    @property
    def exhausted(self) -> bool:
        share = MAX_DROPPED_SHARE * len(self.pairs)
        return len(self.dropped) > 20 + share or self.dropped.count(BUSY) > MOST_BUSY + share

    def take(self, active: Sequence[str]) -> RaceSession:
        """Take one more pair (unless it had to be dropped); return the session so far."""
        if (len(self.pairs) + len(self.dropped)) % PROBE_EVERY == 0:
            self.read_bytes_per_s = max(self.read_bytes_per_s, self.instrument.probe())
        order = list(active)
        self.coin.shuffle(order)
        times, disturbed = self.instrument.pair(order, self.plan.calls, self.plan.samples)
        if disturbed:
            self.dropped.append(disturbed)
        else:
            for tally in self.tallies:
                tally.add(times)
            self.pairs.append(
                PairedSamples(
                    order=tuple(self.arms.index(a) for a in order),
                    samples_ns=tuple(tuple(times.get(a, ())) for a in self.arms),
                )
            )
        return self._session()

    def finish(self) -> RaceSession:
        """Return the session after its A/A comparison is settled too."""
        while self.twins and not self.twins.settled and not self.exhausted:
            self.take((self.arms[0], CLONE))
        session = self._session(Counter(self.dropped).most_common(1)[0][0] if self.exhausted else "")
        return replace(session, aa_crossed=self.twins.crossed if self.twins and self.pairs else None)

    def _session(self, voided: str = "") -> RaceSession:
        return RaceSession(
            kind=self.kind,
            seed=self.seed,
            arms=self.arms,
            pairs=tuple(self.pairs),
            calls_per_sample=(self.plan.calls,) * len(self.arms),
            read_bytes_per_s=self.read_bytes_per_s,
            dropped_pairs=len(self.dropped),
            voided=voided,
        )
