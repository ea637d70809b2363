"""Serve decided kernels through FlashInfer's `trace_apply`, under its definition names, to all callers of FlashInfer.

    from autosel.integrations import flashinfer_apply
    print(flashinfer_apply.enable(rms_eps=1e-6))      # before the engine starts; flashinfer.trace_apply.stats() counts
    flashinfer_apply.disable()

Gated activations (`silu_and_mul_h28672`, `gelu_tanh_and_mul_h..`, `gelu_and_mul_h..`) and norms (`rmsnorm_h4096`,
`fused_add_rmsnorm_h4096`, `gemma_rmsnorm_h4608`). FlashInfer's definitions of norms fix epsilon at 1e-6 and
ignore the call's value, so norms are registered only for models with that epsilon. Attention is not registered, because
its definitions leave out window and softcap, nor `gemma_fused_add_rmsnorm`, whose definition does not say where it
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from autosel import settings
from autosel.devices import accelerated, device_at, ids_of, kind_of, places_here
from autosel.errors import UsageError
from autosel.integrations import engine_ops
from autosel.ledger import snapshot
from autosel.ledger.key import current_mode, matters
from autosel.values import SERVING, Decision

EPSILON = 1e-6  # fixed in FlashInfer 0.7's definitions rmsnorm and fused_add_rmsnorm
WRITTEN_FOR = "0.7.2"
Function = Callable[..., Any] | None
GELU = {0: "gelu_and_mul", 1: "gelu_tanh_and_mul"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """List the definitions that FlashInfer routes here, and the decisions that are left out, with the reason."""

    names: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"autosel serves {len(self.names)} of FlashInfer's definitions: {', '.join(self.names)}"]
        return "\n".join([*lines, *(f"  not routed: {line}" for line in self.left)])


def enable(*, rms_eps: float) -> Applied:
    """Route from now on, in this process. Raises UsageError, changing nothing, if FlashInfer is missing or has another
    interface, if there is nothing to serve, or if other solutions are in force."""
    apply = _trace_apply()
    if apply.is_enabled():
        raise UsageError(
            "FlashInfer already applies solutions",
            why="it holds one set at a time",
            todo="flashinfer.trace_apply.disable_apply() first",
        )
    served, left = definitions(_decisions(), rms_eps, _own)
    if not served:
        raise UsageError(
            "nothing decided here has a definition in FlashInfer",
            why="; ".join(left) or "no norm and no gated activation was decided",
            todo=f"{settings.spelling()} tune --op swiglu",
        )
    apply.enable_apply(served)
    return Applied(names=tuple(sorted(served)), left=tuple(left))


def disable() -> None:
    """Restore FlashInfer's own kernels."""
    _trace_apply().disable_apply()


def _trace_apply() -> Any:
    try:
        from flashinfer import trace_apply
    except ImportError as error:
        raise UsageError(
            f"no FlashInfer with trace_apply: {_installed()}",
            why=f"{error}; this was written for FlashInfer {WRITTEN_FOR}",
            todo=f"pip install 'flashinfer-python>={WRITTEN_FOR}' in the environment that serves",
        ) from error
    return trace_apply


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"FlashInfer {version('flashinfer-python')} is installed"
    except PackageNotFoundError:
        return "none is installed"


def _own(name: str) -> Function:
    """Return FlashInfer's function of that name, before it is replaced."""
    import flashinfer

    found: Function = getattr(flashinfer, name, None)
    return found


def _decisions() -> list[Decision]:
    found = snapshot.read(settings.home() / snapshot.FILE)
    return serving([row.decision for row in found.rows]) if found else []


def serving(decided: Iterable[Decision]) -> list[Decision]:
    """Return decisions that can serve a call of FlashInfer here: on a GPU of this machine, or on its CPU if there is
    none.

    Routing other definitions would only delay FlashInfer's own kernel.
    """
    first, *gpus = places_here()
    kinds = {hw_id: kind_of(place) for place in gpus or (first,) for hw_id in ids_of(device_at(place)[0])}
    mode = current_mode()
    mine = [d for d in decided if d.hw_id in kinds and d.state in SERVING]
    return [d for d in mine if len({matters(m, kinds[d.hw_id], d.bucket) for m in (d.mode, mode)}) == 1]


Own = Callable[[str], Function]


def definitions(
    decided: Iterable[Decision], rms_eps: float, own: Own = lambda name: None
) -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """Return FlashInfer's name -> a callable by keyword, and the decisions without a definition, with the reason. `own`
    returns FlashInfer's function."""
    served: dict[str, Callable[..., Any]] = {}
    left: list[str] = []
    for d in decided:
        w = d.workload
        if d.arm.digest == d.baseline.digest:
            continue
        if w.op in ("swiglu", "geglu"):
            tanh = int(w.trait("tanh", 0))
            beginning = "silu_and_mul" if w.op == "swiglu" else GELU[tanh]
            served[f"{beginning}_h{2 * w['I']}"] = _gated(own(beginning), w.op, *((tanh,) if w.op == "geglu" else ()))
        elif (w.op, w.traits) in NORMS:
            beginning, made = NORMS[w.op, w.traits]
            name = f"{beginning}_h{w['d']}"
            if rms_eps == EPSILON:
                served[name] = made(own(beginning))
            else:
                left.append(f"{name}: FlashInfer's definition fixes epsilon at {EPSILON:g}, the model's is {rms_eps:g}")
        else:
            left.append(f"{w.key}: FlashInfer has no definition of it that says all it depends on")
    return served, left


# If a matched definition raises, FlashInfer fails and does not fall back. So for undecided numbers of rows this calls
# FlashInfer's own function; on a CPU, where it has no kernel, the op's eager composition. Arguments have the names of
# the definition's inputs.


def _gated(own: Function, op: str, *more: int) -> Callable[..., Any]:
    def run(input: Any) -> Any:
        made = engine_ops.gated(op, input, *more)
        if made is not None:
            return made
        if own and accelerated(input.device.type):
            return own(input)
        return _eager(op, *input.chunk(2, dim=-1), *more)

    return run


def _norm(own: Function, offset: float = 0.0) -> Callable[..., Any]:
    def run(hidden_states: Any, weight: Any) -> Any:
        made = engine_ops.norm(hidden_states, weight, EPSILON, offset)
        if made is not None:
            return made
        if own and accelerated(hidden_states.device.type):
            return own(hidden_states, weight, eps=EPSILON)
        return _eager("rmsnorm", hidden_states, weight, EPSILON, offset)

    return run


def _add_norm(own: Function) -> Callable[..., Any]:
    def run(hidden_states: Any, residual: Any, weight: Any) -> Any:
        made = engine_ops.norm(hidden_states, weight, EPSILON, residual=residual)
        if made is not None:
            return made
        if own and accelerated(hidden_states.device.type):
            own(hidden_states, residual, weight, eps=EPSILON)  # in place, where FlashInfer stores the returned tensor
            return hidden_states, residual
        return _eager("add_rmsnorm", hidden_states, residual, weight, EPSILON, 0.0, 0)

    return run


# op and traits -> the start of FlashInfer's name, and the maker of its callable
NORMS: Mapping[Any, tuple[str, Callable[[Function], Callable[..., Any]]]] = {
    ("rmsnorm", ()): ("rmsnorm", _norm),
    ("rmsnorm", (("offset", 1.0),)): ("gemma_rmsnorm", partial(_norm, offset=1.0)),
    ("add_rmsnorm", ()): ("fused_add_rmsnorm", _add_norm),
}


def _eager(op: str, *arguments: Any) -> Any:
    from autosel.ops import eager

    return getattr(eager, op)(*arguments)
