"""Common base of installed libraries: the library must exist, be new enough, be importable, and fit the device.

The import of a package is tried once per installed version, in a child process with a time limit (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from autosel.candidates.gpu import GpuCandidate, capability
from autosel.candidates.probe import PROBE_S, fault
from autosel.devices.stack import version_of
from autosel.values import Backend, Fingerprint, Knobs, PythonRecipe, Recipe, Workload

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = __name__.rpartition(".")[0]
Limits = Callable[[Workload, "tuple[int, int]"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An installable package.

    `module` is what must be importable. `distribution` is its name for pip and `renamed` its later name: either counts.
    """

    distribution: str
    module: str
    least_version: tuple[int, ...]
    least_cc: tuple[int, int] = (8, 0)
    most_cc: tuple[int, int] = (99, 0)
    needs: tuple[str, ...] = ()  # attributes of the module that are called
    compiles_s: float = 0.0  # time limit of a first call that compiles for this device
    renamed: str = ""

    def version(self) -> str:
        """Return the installed version; "" if it is not installed."""
        names = filter(None, (self.distribution, self.renamed))
        return next((found for name in names if (found := version_of(name))), "")

    def why_not(self, cc: tuple[int, int]) -> str:
        """Return why it cannot be called on a device of this compute capability, or ""."""
        found = self.version()
        if not found:
            return f"{self.distribution} is not installed"
        if parsed(found) < self.least_version:
            return f"{self.distribution} {found} is too old; needs {spelled(self.least_version)}"
        if not self.least_cc <= cc <= self.most_cc:
            most = "" if self.most_cc[0] == 99 else f" to {spelled(self.most_cc)}"
            needed = f"compute capability {spelled(self.least_cc)}{most}"
            return f"{self.distribution} needs {needed}; the device has {spelled(cc)}"
        return unimportable(self, found)


def parsed(version: str) -> tuple[int, ...]:
    """Return the leading numbers: (0, 7, 2) for `0.7.2.post1`."""
    numbers = []
    for part in version.split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def spelled(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


# --- the probe --------------------------------------------------------------------------------------------------------


def unimportable(library: Library, version: str, deadline_s: float = PROBE_S) -> str:
    """Return why the module cannot be imported or lacks a needed attribute, or ""; tested once per version."""
    target, needs = f"{__name__}:imported", list(library.needs)
    about = (library.distribution, version)
    why = fault(target, library.module, needs, about=about, deadline_s=deadline_s)
    return why and f"{library.distribution} cannot be imported: {why}"


def imported(module: str, needs: Sequence[str]) -> None:
    """Run in the child: raise the error of the import, or AttributeError."""
    found = import_module(module)
    for name in needs:
        getattr(found, name)


# --- the candidate ----------------------------------------------------------------------------------------------------


class LibraryKernel(GpuCandidate):
    """`<file>:<function>`: a function of the file that wraps the library.

    `limits(w, cc)` returns why it cannot run w, or "".
    """

    def __init__(
        self,
        op: str,
        name: str,
        library: Library,
        *,
        backend: Backend,
        limits: Limits = lambda w, cc: "",
        dtypes: tuple[str, ...] = ("bf16", "fp16"),
        writes_out: bool = True,
    ) -> None:
        self.op, self.name, self.library, self.backend = op, name, library, backend
        self.limits, self.dtypes, self.noun = limits, dtypes, f"a kernel of {library.distribution}"
        self.writes_out, self.first_call_s = writes_out, library.compiles_s

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if why := super().why_not(w, fp):
            return why
        cc = capability(fp)
        return self.limits(w, cc) or self.library.why_not(cc)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{PACKAGE}.{self.name}")


# --- operands ---------------------------------------------------------------------------------------------------------

VECTOR_BYTES = 16


def aligned(t: Tensor) -> Tensor:
    """Return `t`, or a copy if its start or its row strides are not multiples of 16 bytes.

    Libraries load vectors of 16 bytes, and a misaligned address ends the process.
    """
    if t.data_ptr() % VECTOR_BYTES:
        return t.clone() if t.is_contiguous() else t.contiguous()
    steps = () if t.is_contiguous() else t.stride()[:-1]
    whole = t.stride(-1) == 1 and all(s * t.element_size() % VECTOR_BYTES == 0 for s in steps)
    return t if whole or t.is_contiguous() else t.contiguous()


def room(out: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """Return where a library writes a result of `like`'s dtype: `out` if it can be written there, else new memory."""
    if out is not None and out.is_contiguous() and out.data_ptr() % VECTOR_BYTES == 0:
        return out
    return like.new_empty(shape)


def handed(made: Tensor, out: Tensor | None) -> Tensor:
    """Return the result that was written into `room`, copied to `out` if the caller gave one."""
    return made if out is None or made is out else out.copy_(made)


# --- common limits ----------------------------------------------------------------------------------------------------


def plain_norm(w: Workload, _: tuple[int, int]) -> str:
    """Accept Llama's norm only, as most libraries do."""
    return "its norm has no weight offset" if w.trait("offset", 0.0) else ""


def either_norm(w: Workload, cc: tuple[int, int]) -> str:
    """Accept Gemma's norm too, which some libraries have as a separate function."""
    return "" if w.trait("offset", 0.0) in (0.0, 1.0) else plain_norm(w, cc)


def sum_then_norm(w: Workload, _: tuple[int, int]) -> str:
    """Accept only a norm after the residual's sum, which is the order of the fused functions. Some normalise the
    rounded sum."""
    if w.trait("sandwich", 0) == 2:
        return "it may normalise the rounded sum; the workload normalises the unrounded one"
    return "it adds, then normalises; the workload normalises first" if w.trait("sandwich", 0) else ""


def whole_vectors(w: Workload, _: tuple[int, int]) -> str:
    """Accept rows of whole vectors: the activation reads gate and up, adjacent in a row, by 16 bytes of two-byte
    elements.
    """
    return "" if w["I"] % 8 == 0 else f"reads rows by vectors of 8; the workload's have {w['I']}"


def whole_cache(w: Workload, _: tuple[int, int]) -> str:
    """Accept only a cache that is read completely."""
    if w.trait("ragged", default=False):
        return "its call has no lengths of single sequences"
    if w.trait("window", 0) or w.trait("softcap", 0.0):
        return "no window and no softcap in this call"
    return "" if w["S"] == 1 else f"supports one position per call; the workload has S = {w['S']}"


def narrow_heads(w: Workload, widest: int) -> str:
    """Accept heads up to `widest` elements in steps of 8."""
    if w["D"] > widest or w["D"] % 8:
        return f"supports heads up to {widest} wide in steps of 8; the workload's are {w['D']}"
    return ""
