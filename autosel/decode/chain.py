"""Choose the ops of the step: a fused op is used only if the whole step becomes faster.

The two halves of a layer are decided one after the other, by races of whole steps. The times of all forms of each half
are kept, with everything else as chosen, so that a user sees what leaving one out would cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autosel import devices
from autosel.decode.run import FORMS, HALVES, Chain, Form, Half, Way
from autosel.decode.scene import Scene
from autosel.decode.step import Call, Runnable, write_step
from autosel.devices.cpu.idle import wait_until_idle
from autosel.ops.eager_stored import held_bytes
from autosel.ops.weight import Weight
from autosel.values import DTypeName

ROUNDS = 9
# In nine rounds, the medians of equal steps differ by about one per cent; a smaller gain does not count.
LEAST_GAIN = 1.01


def converts(scene: Scene) -> bool:
    """Return True if PyTorch serves an op of the step and converts its weight at each call, because the plan keeps no
    form for it.
    """
    if scene.plan.baseline or not scene.plan.listed:
        return False
    calls = write_step(scene.decoder, scene.cache, scene.place).calls
    return any(_converts(call, scene.plan.dtype) for call in calls)


def _converts(call: Call, dtype: DTypeName) -> bool:
    if not getattr(call.function, "candidate", "").startswith("torch:"):
        return False
    weights = [call[name] for name in call.weights]
    return any(isinstance(w, Weight) and held_bytes(w.format, dtype, *w.shape) for w in weights)


def choose_chain(scene: Scene) -> tuple[Chain, tuple[Way, ...]]:
    """Return the chain, and each half's forms with the step's time, the other half as chosen."""
    chain, found = Chain(attn="normed", mlp="normed"), {}
    for half in HALVES:
        form, found[half] = _race(scene, chain, half)
        chain = replace(chain, **{half: form})
    if chain.mlp != "normed":  # the first half was raced with another form of the second
        form, found["attn"] = _race(scene, chain, "attn")
        chain = replace(chain, attn=form)
    return chain, tuple(way for half in HALVES for way in found[half])


def _race(scene: Scene, chain: Chain, half: Half) -> tuple[Form, tuple[Way, ...]]:
    """Return the form of one half with the fastest whole step; the plain form unless another gains enough."""
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
    """Return the median ns of each step, by the clock that certifies steps; each round runs all steps in a new random
    order.
    """
    timer = devices.named(scene.plan.device).timer(scene.clock)
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step.run()
        step.settle()
    for _ in range(ROUNDS):
        for i in scene.rng.sample(range(len(steps)), len(steps)):
            wait_until_idle()  # PyTorch's threads that still poll for work would use these cores
            times[i].append(timer.mean_ns(steps[i], 1))
    return [statistics.median(t) for t in times]
