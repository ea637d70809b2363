"""Common base of Triton kernels: a GPU, Triton, and knobs that the host function takes by keyword."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from autosel import devices, extras
from autosel.candidates.base import Candidate
from autosel.candidates.source import TRITON_KERNELS
from autosel.formats import PLAIN
from autosel.knobs.gpu.facts import Formula, GpuFacts, Limits, facts
from autosel.values import (
    Accepted,
    Backend,
    Fingerprint,
    Knob,
    Knobs,
    PythonRecipe,
    Recipe,
    Rejected,
    Support,
    Workload,
)

MOST_ELEMENTS = 2**31 - 1  # per dimension: kernels index within one in 32 bits
LEAST_CC = (8, 0)  # bf16 and asynchronous copies
E4M3_CC = (8, 9)
NO_TRITON = f"Triton is not installed; install it:  {extras.gpu_command()}"


class TritonKernel(Candidate):
    """A kernel `kernels/triton/<source>.py`, called by the function of the same name.

    The function takes the op's arguments, or `operands` (`w.codes`, ...) instead, then outputs and knobs. `formula`
    gives the knobs; the function takes those with a keyword parameter, and the others record how these were derived.
    `limits(w, facts)` returns why it cannot run w, or "".
    """

    backend: Backend = "TRITON"

    def __init__(
        self,
        op: str,
        source: str,
        *,
        formula: Formula,
        limits: Limits = lambda w, f: "",
        variant: str = "",
        dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32"),
        formats: tuple[str, ...] = (PLAIN,),
        cache_formats: tuple[str, ...] = (PLAIN,),
        operands: tuple[str, ...] = (),
    ) -> None:
        self.op, self.source, self.formula, self.limits, self.dtypes = op, source, formula, limits, dtypes
        self.formats, self.cache_formats, self.operands = frozenset(formats), frozenset(cache_formats), operands
        self.name = f"triton:{source}" + (f"@{variant}" if variant else "")

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if w.dtype not in self.dtypes:
            return Rejected(reason=f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}")
        if not devices.runs(fp.kind, "CUDA"):
            return Rejected(reason="a Triton kernel; the device is a CPU")
        too_long = [name for name, size in w.dims if size > MOST_ELEMENTS]
        if too_long:
            return Rejected(reason=f"{too_long[0]} = {w[too_long[0]]} is above 2^31 - 1")
        f = facts(fp)
        if f.cc < LEAST_CC:
            return Rejected(reason=f"needs compute capability 8.0 or later; the device has {f.cc[0]}.{f.cc[1]}")
        why = self.limits(w, f)
        if why:
            return Rejected(reason=why)
        if find_spec("triton") is None:
            return Rejected(reason=NO_TRITON)
        return Accepted()

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
