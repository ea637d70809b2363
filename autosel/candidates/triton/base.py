"""Common base of Triton kernels: a GPU, Triton, and knobs that the host function takes by keyword."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from autosel import extras
from autosel.candidates.gpu import GpuCandidate, too_long
from autosel.candidates.source import TRITON_KERNELS
from autosel.formats import PLAIN
from autosel.knobs.gpu.facts import Formula, GpuFacts, Limits, facts
from autosel.values import Backend, Fingerprint, Knob, Knobs, PythonRecipe, Recipe, Workload

LEAST_CC = (8, 0)  # bf16 and asynchronous copies
E4M3_CC = (8, 9)
NO_TRITON = f"Triton is not installed; install it:  {extras.gpu_command()}"


class TritonKernel(GpuCandidate):
    """A kernel `kernels/triton/<source>.py`, called by the function of the same name.

    The function takes the op's arguments, or `operands` (`w.codes`, ...) instead, then outputs and knobs. `formula`
    gives the knobs; the function takes those with a keyword parameter, and the others record how these were derived.
    `limits(w, facts)` returns why it cannot run w, or "".
    """

    backend: Backend = "TRITON"
    dtypes = ("bf16", "fp16", "fp32")
    noun = "a Triton kernel"

    def __init__(
        self,
        op: str,
        source: str,
        *,
        formula: Formula,
        limits: Limits = lambda w, f: "",
        variant: str = "",
        formats: tuple[str, ...] = (PLAIN,),
        cache_formats: tuple[str, ...] = (PLAIN,),
        operands: tuple[str, ...] = (),
    ) -> None:
        self.op, self.source, self.formula, self.limits = op, source, formula, limits
        self.formats, self.cache_formats, self.operands = frozenset(formats), frozenset(cache_formats), operands
        self.name = f"triton:{source}" + (f"@{variant}" if variant else "")

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if why := super().why_not(w, fp) or too_long(w):
            return why
        f = facts(fp)
        if f.cc < LEAST_CC:
            return f"needs compute capability 8.0 or later; the device has {f.cc[0]}.{f.cc[1]}"
        return self.limits(w, f) or (NO_TRITON if find_spec("triton") is None else "")

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        return self.formula(w, facts(fp))

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{TRITON_KERNELS}.{self.source}:{self.source}", operands=self.operands)


# --- knobs of Triton only ---------------------------------------------------------------------------------------------


def without_e4m3(f: GpuFacts) -> str:
    """Return why Triton cannot read e4m3 on a device, or ""."""
    if f.cc >= E4M3_CC:
        return ""
    return f"Triton converts e4m3 from compute capability 8.9; the device has {f.cc[0]}.{f.cc[1]}"


def also(formula: Formula, *more: Callable[[GpuFacts], Knob]) -> Formula:
    return lambda w, f: joined(formula(w, f), *(knob(f) for knob in more))


def joined(knobs: Knobs, *more: Knob) -> Knobs:
    return Knobs(settings=(*knobs.settings, *more))


def pdl(f: GpuFacts) -> Knob:
    return Knob(
        name="pdl",
        value=f.cc >= (9, 0),
        formula="cc >= 9.0",
        inputs={"cc": f.cc[0] + f.cc[1] / 10},
        reason="weights are loaded before the wait for the kernel that makes the activations",
    )


def shared(f: GpuFacts) -> Knob:
    return Knob(name="shared", value=f.smem_per_cta, formula="shared memory of a CTA", inputs={"smem": f.smem_per_cta})


def fixed(name: str, value: bool | int, reason: str) -> Callable[[GpuFacts], Knob]:
    return lambda f: Knob(name=name, value=value, formula=str(value), inputs={}, reason=reason)
