"""Common base of C++ kernels: a CPU, a compiler, an instruction set, a source below kernels/cpu/."""

from __future__ import annotations

from collections.abc import Callable

from autosel import devices
from autosel.candidates.base import Checked
from autosel.formats import PLAIN
from autosel.knobs.cpu.facts import ISA_FLAGS, CpuFacts, facts
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import Backend, Fingerprint, Knobs, Layout, NativeRecipe, Recipe, Workload

Formula = Callable[[Workload, CpuFacts], Knobs]
Limits = Callable[[Workload], str]


class CppKernel(Checked):
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
        formats: tuple[str, ...] = (PLAIN,),
        operands: tuple[str, ...] = (),
        layout: Layout | None = None,
    ) -> None:
        self.op, self.source, self.formula, self.knob_args = op, source, formula, knob_args
        self.name, self.limits, self.dtypes, self.layout = f"cpp:{source}", limits, dtypes, layout
        self.formats, self.operands = frozenset(formats), operands

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if not devices.runs(fp.kind, "C++"):
            return "a CPU kernel; the device is a GPU"
        if w.dtype not in self.dtypes:
            return f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}"
        return self.limits(w) or ("" if find_compiler() else NO_COMPILER)

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        return self.formula(w, facts(fp))

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return NativeRecipe(
            source=f"cpu/{self.source}.cpp",
            entry=self.source,
            flags=(*ISA_FLAGS[facts(fp).isa], f"-DAUTOSEL_{w.dtype.upper()}"),
            knob_args=self.knob_args,
            operands=self.operands,
            layout=self.layout,
        )
