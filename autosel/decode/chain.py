"""Which ops the step is made of: a fused op is taken only if the whole step gets faster with it.

The two halves of a layer are decided one after the other, each by racing whole steps; what every other form of a half
would cost, all else as it was chosen, is kept: leave one out, and see what the whole loses.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autosel.decode.device import step_timer
from autosel.decode.run import FORMS, HALVES, Chain, Form, Half, Way
from autosel.decode.scene import Scene
from autosel.decode.step import Runnable, write_step
from autosel.race.idle import wait_until_idle

ROUNDS = 9
# In nine rounds the medians of equal steps differ by a per cent or so; a gain below that is none.
LEAST_GAIN = 1.01


def choose_chain(scene: Scene) -> tuple[Chain, tuple[Way, ...]]:
    """The chain, and of each half every way to make it, timed with the other half as chosen."""
    chain, found = Chain(attn="normed", mlp="normed"), {}
    for half in HALVES:
        form, found[half] = _race(scene, chain, half)
        chain = replace(chain, **{half: form})
    if chain.mlp != "normed":  # the first half was timed beside another second one
        form, found["attn"] = _race(scene, chain, "attn")
        chain = replace(chain, attn=form)
    return chain, tuple(way for half in HALVES for way in found[half])


def _race(scene: Scene, chain: Chain, half: Half) -> tuple[Form, tuple[Way, ...]]:
    """The form of one half with which the whole step is fastest; the plain one unless another gains enough."""
    forms = [form for form in FORMS if form != "added" or not scene.decoder.shape.sandwich]
    medians = _medians(scene, [replace(chain, **{half: form}) for form in forms])
    times = dict(zip(forms, medians, strict=True))
    best = min(forms, key=times.__getitem__)
    if times["normed"] < LEAST_GAIN * times[best]:
        best = "normed"
    return best, tuple(
        Way(half=half, form=form, step_us=took / 1000, taken=form == best) for form, took in times.items()
    )


def _medians(scene: Scene, chains: list[Chain]) -> list[float]:
    steps = [write_step(scene.decoder, scene.cache, scene.place, chain) for chain in chains]
    return step_medians(scene, steps)


def step_medians(scene: Scene, steps: Sequence[Runnable]) -> list[float]:
    """Median ns of each step by the clock that certifies steps; each round takes all of them in an order drawn anew."""
    timer = step_timer(scene.plan.device, scene.clock)
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step.run()
        step.settle()
    for _ in range(ROUNDS):
        for i in scene.rng.sample(range(len(steps)), len(steps)):
            wait_until_idle()  # threads of PyTorch's that another step left looking for work would take our cores
            times[i].append(timer.mean_ns(steps[i], 1))
    return [statistics.median(t) for t in times]
