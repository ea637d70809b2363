"""Which ops the step is made of: a fused op is taken only if the whole step gets faster with it, and left only if the
whole step gets faster without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from random import Random

from autosel.decode.model import FORMS, FUSED, Chain
from autosel.decode.scene import Scene
from autosel.decode.step import write_step

ROUNDS = 9
# Nine rounds all won have probability 2^-9 by chance; a gain below a percent is not worth another list.
LEAST_GAIN = 1.01


def choose_chain(scene: Scene, rng: Random, clock: Callable[[], int]) -> Chain:
    """Race whole steps, the two halves of a layer one after the other. The fused chain serves unless beaten."""
    best = FUSED
    forms = FORMS[1:2] if scene.decoder.shape.sandwich else FORMS[1:]
    for half in ("attn", "mlp"):
        best = _fastest(scene, [best, *(replace(best, **{half: form}) for form in forms)], rng, clock)
    return best


def _fastest(scene: Scene, chains: list[Chain], rng: Random, clock: Callable[[], int]) -> Chain:
    """The first, unless another won every round by the least gain in the median."""
    steps = [write_step(scene.decoder, scene.cache, scene.place, chain) for chain in chains]
    times: list[list[int]] = [[] for _ in chains]
    for step in steps:
        step.run()
    for _ in range(ROUNDS):
        for i in rng.sample(range(len(steps)), len(steps)):
            begin = clock()
            steps[i].run()
            times[i].append(clock() - begin)
    medians = [statistics.median(t) for t in times]
    faster = [
        i
        for i in range(1, len(chains))
        if all(a < b for a, b in zip(times[i], times[0], strict=True)) and medians[0] >= LEAST_GAIN * medians[i]
    ]
    return chains[min(faster, key=lambda i: medians[i], default=0)]
