"""Time the optimised step and the baseline in turn, in coin-flipped order, from the same state.

    turns = Turns(scene=scene, ours=ours, theirs=theirs, timer=timer, power=power)
    turns.warm_up()
    steps = turns.timed()

A pair of steps does not count if a thread waited meanwhile for a core that another process used: its time is then that
process's. At a fixed context the pair is repeated, at most as often as pairs are timed; `waited` counts the pairs that
were disturbed and are among the timed ones nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from autosel import devices, dispatch
from autosel.decode.account import UsesSince
from autosel.decode.arms import Choosing, Ours, Remembers, StepArm, step
from autosel.decode.run import BaselineRun
from autosel.decode.scene import Scene
from autosel.decode.verdict import Passes, TokenVerdict, verdict
from autosel.devices.cpu.idle import wait_until_idle
from autosel.devices.device import StepTimer, Took
from autosel.devices.energy import Meter
from autosel.race.waits import WaitWatch, watch

MOST_CHECKED = 0.005  # of a step, by first checks of the guard, for the steps to be timed

Tokens = list[list[int]]  # by row


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of the optimised arm, and of the baseline if it runs."""

    optimised: Took
    baseline: tuple[Took, bool] | None  # its step, and if the optimised arm ran first
    verdict: TokenVerdict  # of the tokens
    kept: int  # tokens per row from the optimised step


@dataclass(slots=True, kw_only=True)
class Turns:
    """The arms of one measurement, and what disturbed it."""

    scene: Scene
    ours: Ours
    theirs: StepArm | None  # None: only the optimised step runs
    timer: StepTimer
    power: Meter
    watch: WaitWatch | None = None  # None on a device whose own clock times it
    repeated: int = 0  # pairs that did not count
    waited: int = 0  # timed pairs during which a thread waited for a core
    steps: list[TimedStep] = field(default_factory=list)
    chosen: list[Tokens] = field(default_factory=list)  # by the arms in the last pair that counts
    uses: UsesSince = field(default_factory=UsesSince)  # calls of the timed steps

    def warm_up(self) -> None:
        """Run the arms until clocks, caches and the allocator have settled, and ours until the guard's first checks
        have.

        The guard compares the first 32 calls of a kernel with the baseline. For a kernel that a step calls once, as
        `sample`, they are 32 steps: each took twice its time with a vocabulary of 262,144 and eight sequences.
        """
        scene, asked = self.scene, self.scene.plan.warmup
        for i in range(asked):
            scene.listener.stage("warmup", "", i, asked)
            step(self.ours)
            if self.theirs is not None:
                step(self.theirs)
        # How many steps the checks take is a matter of time, so they leave the stream of sampled tokens as it was.
        with self.ours.sampler.rewound() if isinstance(self.ours, Choosing) else nullcontext():
            while asked and self._checked_share() > MOST_CHECKED:
                scene.listener.stage("warmup", "the guard's first checks", asked, asked)

    def _checked_share(self) -> float:
        """Run a step. Return the share of its time that the guard's first checks took."""
        board = dispatch.board()
        spent_ns, began_ns = board.first_checks_ns(), self.scene.clock()
        step(self.ours)
        return (board.first_checks_ns() - spent_ns) / max(1, self.scene.clock() - began_ns)

    def timed(self) -> list[TimedStep]:
        """Run the plan's steps."""
        self.uses = UsesSince()
        self.watch = watch() if devices.named(self.scene.plan.device).on_host else None
        try:
            if self.theirs is not None:
                self._pairs(self.theirs)
            else:
                self._alone()
        finally:
            if self.watch is not None:
                self.watch.waits.close()
        return self.steps

    def _pairs(self, theirs: StepArm) -> None:
        scene, done = self.scene, 0
        while done < scene.plan.iters:
            first = scene.rng.random() < 0.5
            found = self._taken((self.ours, theirs) if first else (theirs, self.ours), done)
            if found is None:
                continue
            (optimised, ours), (baseline, plain) = found[self.ours], found[theirs]
            kept = [row[: scene.plan.iters - done] for row in ours]
            ends = done == 0 or (scene.plan.advance and done + len(kept[0]) >= scene.plan.iters)
            told = verdict(scene, self.ours, theirs, kept, plain, always=ends)
            self.steps.append(
                TimedStep(optimised=optimised, baseline=(baseline, first), verdict=told, kept=len(kept[0]))
            )
            done += len(kept[0])
            self._advance(kept, (self.ours, theirs), done)

    def _alone(self) -> None:
        """Run the optimised steps only, and judge their tokens by untimed passes."""
        scene, done, passes = self.scene, 0, Passes(self.scene, self.ours)
        while done < scene.plan.iters:
            found = self._taken((self.ours,), done)
            if found is None:
                continue
            took, chosen = found[self.ours]
            kept = [row[: scene.plan.iters - done] for row in chosen]
            last = scene.plan.advance and done + len(kept[0]) >= scene.plan.iters
            told = passes.verdict(kept, first=done == 0, last=last)
            self.steps.append(TimedStep(optimised=took, baseline=None, verdict=told, kept=len(kept[0])))
            done += len(kept[0])
            self._advance(kept, (self.ours, passes), done)

    def _taken(self, arms: Sequence[StepArm], done: int) -> dict[StepArm, tuple[Took, Tokens]] | None:
        """Run a step of each arm, after a probe of the memory; return None if they are to be repeated."""
        scene = self.scene
        scene.listener.stage("decode", "", done, scene.plan.iters)
        self.uses.mark()
        joules = self.power.total
        scene.probe()
        if self.watch is not None:
            self.watch.begin()
        found, lost_ns = {}, 0
        for arm in arms:
            found[arm], waited_ns = self._timed(arm)
            lost_ns += waited_ns
        if lost_ns and self._repeatable([tokens for _, tokens in found.values()]):
            self.repeated += 1
            self.uses.drop()
            self.power.total = joules
            scene.probes.pop()
            return None
        self.waited += bool(lost_ns)
        self.chosen = [tokens for _, tokens in found.values()]
        return found

    def _repeatable(self, chosen: Sequence[Tokens]) -> bool:
        """Return True if a repeated pair would be the same pair, and not too many were repeated.

        A pair in which an arm chose other tokens, which needs a verdict, is not repeated.
        """
        plan = self.scene.plan
        if plan.advance or plan.sampling.changes_greedy or self.repeated >= plan.iters:
            return False
        seen = [*self.chosen, *chosen]
        return len(seen) > 1 and all(tokens == seen[0] for tokens in seen)

    def _timed(self, arm: StepArm) -> tuple[tuple[Took, Tokens], int]:
        """Run one step. Return its time and tokens, and its nanoseconds if a thread waited for a core."""
        wait_until_idle()  # the other arm's threads poll for work for some milliseconds and would use these cores
        run = partial(_run, arm, self.timer)
        if arm is not self.ours:
            return self._watched(run)
        self.power.begin()
        found = self._watched(run)
        self.power.end()
        return found

    def _watched(self, run: partial[tuple[Took, Tokens]]) -> tuple[tuple[Took, Tokens], int]:
        return (run(), 0) if self.watch is None else self.watch.once(run)

    def _advance(self, kept: Tokens, streams: Sequence[Remembers], done: int) -> None:
        """Advance the stream and all that remember it, if the plan requires it and more steps follow."""
        if self.scene.plan.advance and done < self.scene.plan.iters:
            self.scene.advance(kept)
            for one in streams:
                one.remember([row[-1] for row in kept])

    # --- what was found ----------------------------------------------------------------------------------------------

    def baseline(self) -> BaselineRun | None:
        taken = [s.baseline for s in self.steps if s.baseline is not None]
        if self.theirs is None:
            return None
        return BaselineRun(
            ns=tuple(took.ns for took, _ in taken),
            optimised_first=tuple(first for _, first in taken),
            ttft_ns=self.scene.baseline_ttft_ns,
            host_ns=tuple(took.host_ns for took, _ in taken if self.timer.by != "host"),
        )

    def told(self) -> str:
        """Return a note about pairs of steps that other processes disturbed."""
        one, many = ("step", "steps") if self.theirs is None else ("pair of steps", "pairs of steps")
        why = "a thread waited for a core that another process used"
        again = f"1 {one} was" if self.repeated == 1 else f"{self.repeated} {many} were"
        lines = [f"{again} repeated: {why}"] if self.repeated else []
        lines += [f"in {self.waited} of {len(self.steps)} timed {many} {why}"] if self.waited else []
        return "; ".join(lines)


def _run(arm: StepArm, timer: StepTimer) -> tuple[Took, Tokens]:
    timer.begin()
    arm.enqueue()
    timer.enqueued()
    tokens = arm.tokens()
    return timer.took(), tokens
