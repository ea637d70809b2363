"""Common base of C++ kernels: a CPU, a compiler, an instruction set, a source below kernels/cpu/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autosel import devices
from autosel.candidates.base import Candidate
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import ISA_FLAGS, CpuFacts, Isa, facts
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import (
    Accepted,
    Backend,
    Fingerprint,
    Knobs,
    Layout,
    NativeRecipe,
    Recipe,
    Rejected,
    Support,
    Workload,
)

Formula = Callable[[Workload, CpuFacts], Knobs]
Limits = Callable[[Workload], str]


class CppKernel(Candidate):
    """A kernel `kernels/cpu/<source>.cpp`.

    Its entry takes the op's arguments, or `operands` (`w.codes`, ...) instead, then outputs and `knob_args`. With a
    `layout`, the source also has the entries that the layout names. `formula` gives the knobs (at least those in
    `knob_args`); `limits(w)` returns why it cannot run w, or "".
    """

    backend: Backend = "CPP"

    def __init__(
        self,
        op: str,
        source: str,
        *,
        formula: Formula,
        knob_args: tuple[str, ...],
        limits: Limits = lambda w: "",
        dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32"),
        entry: str = "",
        formats: tuple[str, ...] = (PLAIN,),
        operands: tuple[str, ...] = (),
        layout: Layout | None = None,
        isa: Isa | None = None,
        extra_flags: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.op, self.source, self.formula, self.knob_args = op, source, formula, knob_args
        self.name = f"cpp:{source}" + (f"@{isa}" if isa else "")
        self.limits, self.dtypes, self.entry, self.isa = limits, dtypes, entry or source, isa
        self.formats, self.operands, self.extra_flags = frozenset(formats), operands, extra_flags or {}
        self.layout = layout

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if not devices.runs(fp.kind, "C++"):
            return Rejected(reason="a CPU kernel; the device is a GPU")
        if w.dtype not in self.dtypes:
            return Rejected(reason=f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}")
        why = self.limits(w)
        if why:
            return Rejected(reason=why)
        if find_compiler() is None:
            return Rejected(reason=NO_COMPILER)
        return Accepted()

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        f = facts(fp)
        return self.formula(w, replace(f, isa=self.isa) if self.isa else f)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        isa = self.isa or facts(fp).isa
        return NativeRecipe(
            source=f"cpu/{self.source}.cpp",
            entry=self.entry,
            flags=(*ISA_FLAGS[isa], f"-DAUTOSEL_{w.dtype.upper()}", *self.extra_flags.get(isa, ())),
            knob_args=self.knob_args,
            operands=self.operands,
            layout=self.layout,
        )
