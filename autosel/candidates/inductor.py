"""The eager composition, fused by torch.compile: raced only with `--effort full`, because a first compile takes
seconds.

It accepts only buckets with exact dimensions (M or B up to 8) that do not grow with the context: compiled for static
shapes, attention would compile again for every token. Loading `autosel.candidates.inductor:<op>` makes a function that
compiles at its first call with a shape. Dynamo stops after 8 compilations per code object, fewer than the shapes of
parity: then the function continues with a new code object.

First, a child process with a time limit compiles and calls a small function: a compiler or a Triton that does not fit
this PyTorch excludes every op, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from autosel import devices, settings
from autosel.candidates.base import Checked
from autosel.candidates.probe import device, fault
from autosel.devices.cuda import nvml
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import EXACT, Backend, Fingerprint, Knobs, PythonRecipe, Recipe, Workload

COMPILED_OPS = (
    "linear", "rmsnorm", "add_rmsnorm", "rope", "swiglu", "geglu", "norm_qkv", "gate_up", "lm_head",
)  # fmt: skip
FIRST_CALL_S = 300.0  # Inductor starts its compilers and, on a GPU, Triton's


class Inductor(Checked):
    """`inductor:<op>`: the op's eager code, compiled."""

    backend: Backend = "INDUCTOR"
    effort: Literal["quick", "full"] = "full"
    static_shapes = True
    first_call_s = FIRST_CALL_S

    def __init__(self, op: str) -> None:
        self.op, self.name = op, f"inductor:{op}"

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if w.dtype == "fp8_e4m3":
            return "the eager composition computes in bf16, fp16 and fp32; the workload is fp8_e4m3"
        if w["M"] > EXACT:
            return f"compiled for one M; buckets above M = {EXACT} hold several"
        if devices.runs(fp.kind, "C++") and find_compiler() is None:
            return NO_COMPILER
        return unusable(fp)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{__name__}:{self.op}")


def unusable(fp: Fingerprint) -> str:
    """Return why a small compiled function does not give the right result on this device, or ""."""
    compiler = find_compiler() if devices.runs(fp.kind, "C++") else None
    about = (fp.hw_id, nvml.driver() if devices.runs(fp.kind, "CUDA") else compiler.version if compiler else "")
    why = fault(f"{__name__}:called", fp.kind, str(fp.identity.get("cc", "")), about=about, deadline_s=FIRST_CALL_S)
    return why and f"torch.compile does not work here: {why}"


def called(kind: str, cc: str) -> None:
    """Run in the child: raise the error of a compilation, or ValueError if the result differs from eager."""
    _keep_artefacts()
    import torch

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    x = torch.arange(64, dtype=torch.float32, device=device(kind, cc))
    got = torch.compile(doubled, fullgraph=True, dynamic=False)(x)
    if not torch.equal(got, doubled(x)):
        raise ValueError("a small compiled function gives a different result than eager PyTorch")


INDUCTOR = tuple(Inductor(op) for op in COMPILED_OPS)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a new function for the op `name` that compiles at its first call."""
    if name in COMPILED_OPS:
        return _lazy(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy(name: str) -> Callable[..., Any]:
    _keep_artefacts()  # Dynamo fixes the folder when it is imported
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
    """Compile eager and the copy into the outputs, which Inductor folds into the last kernel if it can."""
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
    """Define a function with its own code object: Dynamo keeps compilations by code object."""
    exec("\n".join(lines), scope)  # noqa: S102  (text from our own op table)
    made: FunctionType = scope[name]
    return made


def _keep_artefacts() -> None:
    """Set Inductor's cache folder; its default is below /tmp, where every user may write and a reboot deletes it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.home() / "inductor"))
