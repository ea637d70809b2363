"""The eager composition, fused by torch.compile: raced with `--effort full` only, for a first compile takes seconds.

Only where every dimension of a bucket is exact (M or B up to 8) and none grows with the context: compiled for static
shapes, attention would compile again at every token. Loading `autosel.candidates.inductor:<op>` makes a function that
compiles at its first call; each load has its own code object, so that Dynamo's limit on recompilations, which it counts
by code object, is never shared between workloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from autosel import settings
from autosel.candidates.base import Candidate
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import Accepted, Backend, Fingerprint, Knobs, PythonRecipe, Recipe, Rejected, Support, Workload

COMPILED_OPS = (
    "linear", "rmsnorm", "add_rmsnorm", "rope", "swiglu", "geglu", "norm_qkv", "gate_up", "lm_head",
)  # fmt: skip
EXACT_COUNT = 8  # values.count_bucket: counts up to here have a bucket of their own


class Inductor(Candidate):
    """`inductor:<op>`."""

    backend: Backend = "INDUCTOR"
    effort: Literal["quick", "full"] = "full"

    def __init__(self, op: str) -> None:
        self.op, self.name = op, f"inductor:{op}"

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if w.dtype == "fp8_e4m3":
            return Rejected(reason="the eager composition computes in bf16, fp16 and fp32; the workload is fp8_e4m3")
        if w["M"] > EXACT_COUNT:
            return Rejected(reason=f"compiled for one M; buckets above M = {EXACT_COUNT} hold several")
        if fp.kind == "cpu" and find_compiler() is None:
            return Rejected(reason=NO_COMPILER)
        return Accepted()

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{__name__}:{self.op}")


INDUCTOR = tuple(Inductor(op) for op in COMPILED_OPS)


def __getattr__(name: str) -> Callable[..., Any]:
    """The op `name`, to be compiled at its first call. A new function each time it is asked for."""
    if name in COMPILED_OPS:
        return _lazy(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy(name: str) -> Callable[..., Any]:
    import torch

    from autosel.ops import OPS, eager

    _keep_artefacts()
    arguments = [a.name for a in OPS[name].args]
    outputs = [f"out{i}" for i in range(len(OPS[name].output_names))]
    results = ", ".join(f"y{i}" for i in range(len(outputs)))
    lines = [f"def {name}({', '.join(arguments)}, {', '.join(f'{o}=None' for o in outputs)}):"]
    lines += [f"    {results} = eager({', '.join(arguments)}, {', '.join('None' for _ in outputs)})"]
    lines += ["    if out0 is None:", f"        return {results}"]
    lines += [f"    out{i}.copy_(y{i})" for i in range(len(outputs))]
    lines += [f"    return {', '.join(outputs)}"]
    scope: dict[str, Any] = {"eager": getattr(eager, name)}
    exec(compile("\n".join(lines), f"<inductor {name}>", "exec"), scope)  # noqa: S102 (text from our own op table)
    made = scope[name]
    own = FunctionType(made.__code__.replace(), scope, name, made.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _keep_artefacts() -> None:
    """Inductor's own default is a folder below /tmp, which every user may write to and a reboot empties."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.home() / "inductor"))
