"""The eager composition, fused by torch.compile: raced with `--effort full` only, for a first compile takes seconds.

Only where every dimension of a bucket is exact (M or B up to 8) and none grows with the context: compiled for static
shapes, attention would compile again at every token. Loading `autosel.candidates.inductor:<op>` makes a function that
compiles at its first call with a shape. Dynamo stops at 8 compilations a code object, fewer than parity brings shapes:
then the function starts afresh with a new code object.

A small function is compiled and called once first, in a child process with a deadline: a compiler or a Triton that does
not fit this PyTorch keeps every op out, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from autosel import settings
from autosel.candidates.base import Candidate
from autosel.candidates.probe import device, fault
from autosel.fingerprint import nvml
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import (
    EXACT,
    Accepted,
    Backend,
    Fingerprint,
    Knobs,
    PythonRecipe,
    Recipe,
    Rejected,
    Support,
    Workload,
)

COMPILED_OPS = (
    "linear", "rmsnorm", "add_rmsnorm", "rope", "swiglu", "geglu", "norm_qkv", "gate_up", "lm_head",
)  # fmt: skip
FIRST_CALL_S = 300.0  # Inductor starts its compilers and, on a GPU, Triton's


class Inductor(Candidate):
    """`inductor:<op>`."""

    backend: Backend = "INDUCTOR"
    effort: Literal["quick", "full"] = "full"
    static_shapes = True
    first_call_s = FIRST_CALL_S

    def __init__(self, op: str) -> None:
        self.op, self.name = op, f"inductor:{op}"

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if w.dtype == "fp8_e4m3":
            return Rejected(reason="the eager composition computes in bf16, fp16 and fp32; the workload is fp8_e4m3")
        if w["M"] > EXACT:
            return Rejected(reason=f"compiled for one M; buckets above M = {EXACT} hold several")
        if fp.kind == "cpu" and find_compiler() is None:
            return Rejected(reason=NO_COMPILER)
        why = unusable(fp)
        return Rejected(reason=why) if why else Accepted()

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{__name__}:{self.op}")


def unusable(fp: Fingerprint) -> str:
    """Why a small function, compiled, does not come back right on this device, or ""."""
    compiler = find_compiler() if fp.kind == "cpu" else None
    about = (fp.hw_id, nvml.driver() if fp.kind == "cuda" else compiler.version if compiler else "")
    why = fault(f"{__name__}:called", fp.kind, str(fp.identity.get("cc", "")), about=about, deadline_s=FIRST_CALL_S)
    return why and f"torch.compile does not work here: {why}"


def called(kind: str, cc: str) -> None:
    """In the child: raises what the compilation raises, or ValueError where the result is not eager's."""
    _keep_artefacts()
    import torch

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    x = torch.arange(64, dtype=torch.float32, device=device(kind, cc))
    got = torch.compile(doubled, fullgraph=True, dynamic=False)(x)
    if not torch.equal(got, doubled(x)):
        raise ValueError("a small compiled function gives another result than eager")


INDUCTOR = tuple(Inductor(op) for op in COMPILED_OPS)


def __getattr__(name: str) -> Callable[..., Any]:
    """The op `name`, to be compiled at its first call. A new function each time it is asked for."""
    if name in COMPILED_OPS:
        return _lazy(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy(name: str) -> Callable[..., Any]:
    _keep_artefacts()  # before Dynamo is imported: it settles the folder then
    from torch._dynamo.exc import FailOnRecompileLimitHit

    scope: dict[str, Any] = {"Full": FailOnRecompileLimitHit, "compiled": [_compiled(name)]}
    scope["again"] = lambda: _compiled(name)
    arguments, outputs = _signature(name)
    call = f"compiled[0]({', '.join([*arguments, *outputs])})"
    lines = [f"def {name}({', '.join([*arguments, *(f'{o}=None' for o in outputs)])}):"]
    lines += ["    try:", f"        return {call}"]
    lines += ["    except Full:", "        compiled[0] = again()", f"        return {call}"]
    return _defined(name, lines, scope)


def _compiled(name: str) -> Callable[..., Any]:
    """Eager, then the copy into the outputs, which Inductor folds into the last kernel where it can."""
    import torch

    from autosel.ops import eager

    arguments, outputs = _signature(name)
    results = ", ".join(o.replace("out", "result") for o in outputs)
    lines = [f"def {name}({', '.join([*arguments, *outputs])}):"]
    lines += [f"    {results} = eager({', '.join(arguments)}, {', '.join('None' for _ in outputs)})"]
    lines += ["    if out0 is None:", f"        return {results}"]
    lines += [f"    {o}.copy_({o.replace('out', 'result')})" for o in outputs]
    lines += [f"    return {', '.join(outputs)}"]
    return torch.compile(_defined(name, lines, {"eager": getattr(eager, name)}), fullgraph=True, dynamic=False)


def _signature(name: str) -> tuple[list[str], list[str]]:
    from autosel.ops import find

    op = find(name)
    return [a.name for a in op.args], [f"out{i}" for i in range(len(op.output_names))]


def _defined(name: str, lines: list[str], scope: dict[str, Any]) -> FunctionType:
    """Each time with a code object of its own: Dynamo keeps its compilations by code object."""
    exec("\n".join(lines), scope)  # noqa: S102  (text from our own op table)
    made: FunctionType = scope[name]
    return made


def _keep_artefacts() -> None:
    """Inductor's own default is a folder below /tmp, which every user may write to and a reboot empties."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.home() / "inductor"))
