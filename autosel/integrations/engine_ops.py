"""Serve decided kernels in the plug-ins of serving engines; return None if nothing is decided, and the engine's own
kernel runs.

An engine's own kernels are faster than autosel's baseline, which is eager PyTorch. So autosel runs only if another arm
than the baseline was decided for a shape and serves: not if it was demoted, is stale or cannot be loaded. Calls left to
the engine are counted with the reason, so that `record`, `status` and the daemon see them. Inside torch.compile the
engine's own code is compiled, and nothing is counted. Tensors that no workload describes have no decision. After an
exception here the engine's kernel runs from then on, with one warning.

A CUDA graph contains the kernels that ran before the capture, in the engine's warm-up: loading a kernel may not be
captured.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch, ops, settings
from autosel.dispatch.left import Left
from autosel.errors import BadArguments
from autosel.files import read_named
from autosel.guard.call import captured
from autosel.guard.rate import CANARY
from autosel.integrations.trial import ServingTrial
from autosel.ops.weight import Matrix
from autosel.values import DTypeName, Workload, count_bucket, length_bucket

log = logging.getLogger(__name__)
MOST_SHAPES = 1024
MOST_TILES_BYTES = 1 << 20
MOST_SAID = 8  # different warnings per op


class EngineDecisions:
    """Hold the decisions of an op by the shapes of a call; looked up again for another home or a new shape."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.board: Any = None
        self.bound: dict[Any, Any] = {}  # Bound, or Left where the engine runs in any case
        self.left: dict[str, Left] = {}  # by reason
        self.trials: dict[Any, ServingTrial] = {}
        self.said: set[str] = set()

    def __call__(self, key: Any, *arguments: Any, length: int | None = None, out: Tensor | None = None) -> Any:
        """Return the op's result, or None. `key` holds all other properties that distinguish workloads, `length` the
        longest context, by which the arm may change within a key."""
        found = self._found(key, arguments)
        if not found.beyond_baseline(length):
            found.elsewhere[0] += 1
            return None
        return self._run(found, key, arguments, out)

    def beside(self, key: Any, arguments: tuple[Any, ...], own: Callable[[], Any], weights: int) -> Any:
        """Return the op's result, by the decided kernel if it is faster here than the engine's `own`, else by that.
        `weights`: how many the engine calls with this key."""
        found = self._found(key, arguments)
        if not found.beyond_baseline():
            found.elsewhere[0] += 1
            return own()
        trial = self.trials.get(key)
        if trial is None:
            trial = self.trials[key] = ServingTrial(CANARY + 3 * weights)
        if trial.over:
            made = self._run(found, key, arguments, None)
            return own() if made is None else made
        made, decided = trial(lambda: self._run(found, key, arguments, None), own)
        found.elsewhere[0] += not decided
        self._settle(key, arguments, trial)
        return made

    def _settle(self, key: Any, arguments: tuple[Any, ...], trial: ServingTrial) -> None:
        """Leave the key to the engine if its own kernel has won the trial."""
        if not trial.over:
            return
        log.info("%s, %s rows: %s", self.op, key[0][1], trial.told)
        if not trial.pays and key in self.bound:
            self.bound[key] = self._left(f"the engine's own is faster here: {trial.told}", arguments)

    def _run(self, found: Any, key: Any, arguments: tuple[Any, ...], out: Tensor | None) -> Any:
        try:
            if out is None:
                return found(*arguments)
            found(*arguments, out)
        except Exception as error:
            self._failed(key, arguments, error).elsewhere[0] += 1
            return None
        return out

    def leave(self, reason: str) -> None:
        """Count a call that the engine runs itself, before its tensors are looked at."""
        self._follow()
        if reason not in self.left:
            self.left[reason] = self.board.leave(ops.find(self.op), reason)
        self.left[reason].elsewhere[0] += 1

    def miss(self, key: Any, workload: Callable[[], Workload]) -> None:
        """Count a call that the engine runs itself because nothing is decided for its workload on the CPU."""
        self._follow()
        if key not in self.bound:
            self.bound[key] = self.board.miss(ops.find(self.op), workload())
        self.bound[key].elsewhere[0] += 1

    def is_new(self, key: Any) -> bool:
        return dispatch.board() is not self.board or key not in self.bound

    def _found(self, key: Any, arguments: tuple[Any, ...]) -> Any:
        self._follow()
        if key not in self.bound:
            if captured(arguments):
                self._say("a CUDA graph was captured before autosel saw its shapes: it holds the engine's own")
                return self._left("captured in a CUDA graph before its shapes ran", arguments)
            try:
                self.bound[key] = dispatch.best(self.op, like=arguments)
            except BadArguments as error:
                self.bound[key] = self._left(f"no workload describes these tensors: {error.what}", arguments)
            except Exception as error:
                self._failed(key, arguments, error)
        return self.bound[key]

    def _follow(self) -> None:
        """Begin again for another board, or when there are too many shapes."""
        board = dispatch.board()
        if board is not self.board or len(self.bound) >= MOST_SHAPES:
            self.board, self.bound, self.left, self.trials = board, {}, {}, {}

    def _failed(self, key: Any, arguments: tuple[Any, ...], error: Exception) -> Left:
        """Leave this key to the engine from now on."""
        why = f"{type(error).__name__}: {str(error)[:500]}"
        self.bound[key] = left = self._left(f"the engine's own runs after {why}", arguments)
        self._say(left.reason)
        return left

    def _left(self, reason: str, arguments: tuple[Any, ...]) -> Left:
        found: Left = self.board.leave(ops.find(self.op), reason, arguments)
        return found

    def _say(self, what: str) -> None:
        if what not in self.said and len(self.said) < MOST_SAID:
            self.said.add(what)
            log.warning("%s: %s", self.op, what)


class Fits:
    """Check once, at the first decode step, that the engine's interface is the expected one. Another release of the
    engine then uses its own attention, with a message, instead of crashing at its first token."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.why: str | None = None

    def __call__(self, *looks: Callable[[], str]) -> bool:
        """Return True if it fits; each of `looks` returns a difference from the expectation, or ""."""
        if self.why is None:
            self.why = next((why for look in looks if (why := look())), "")
            if self.why:
                log.warning("%s's own attention runs, not the decided kernel for paged_attn: %s", self.engine, self.why)
        return not self.why


def lacking(thing: Any, *names: str) -> str:
    """Return which of these attributes an object lacks."""
    absent = [name for name in names if not hasattr(thing, name)]
    return f"{type(thing).__name__} has no {', '.join(absent)}" if absent else ""


NORM, ADD_NORM = EngineDecisions("rmsnorm"), EngineDecisions("add_rmsnorm")
LINEAR = EngineDecisions("linear")
GATED = {"swiglu": EngineDecisions("swiglu"), "geglu": EngineDecisions("geglu")}
PAGED = EngineDecisions("paged_attn")
AUTOGRAD = "its tensors require gradients"
INVARIANT = "the engine wants the same rounding for every batch"


def norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, residual: Tensor | None = None, sandwich: int = 0
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return y of x[..., d], or (y, x + residual); `sandwich`: that of the op add_rmsnorm."""
    if torch.compiler.is_compiling() or not x.numel():
        return None
    if needs_gradient(x, weight):
        (NORM if residual is None else ADD_NORM).leave(AUTOGRAD)
        return None
    rows = x.reshape(-1, x.shape[-1])
    key = (count_bucket(len(rows)), rows.shape[1], x.dtype, weight.dtype, x.device, rows.stride(0), eps, offset)
    if residual is None:
        made = NORM(key, rows, weight, eps, offset)
        return None if made is None else made.view(x.shape)
    others = residual.reshape(rows.shape)
    both = ADD_NORM((key, others.stride(0), sandwich), rows, others, weight, eps, offset, sandwich)
    if both is None:
        return None
    y, added = both
    return y.view(x.shape), added.view(x.shape)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None, own: Callable[[], Tensor], weights: int) -> Tensor:
    """Return x[..., K] @ weight[N, K]^T (+ bias); `own` is the engine's kernel, `weights` how many it has of this
    shape."""
    rows = x.reshape(-1, x.shape[-1])
    if not rows.numel():
        return own()
    key = (count_bucket(len(rows)), weight.shape, weight.dtype, rows.stride(0), x.dtype, bias is None)
    made: Tensor = LINEAR.beside(key, (rows, weight, bias, None), own, weights)
    return made.view(*x.shape[:-1], weight.shape[0])


def missed_linear(x: Tensor, n: int, dtype: DTypeName, bias: Tensor | None) -> None:
    """Count a product by a weight [n, K] that nothing is decided for; the engine has it in its own layout only."""
    if torch.compiler.is_compiling() or not x.numel():
        return
    k = x.shape[-1]
    rows = x.numel() // k

    def workload() -> Workload:
        return ops.find("linear").workload(dtype, {"M": rows, "N": n, "K": k}, bias=bias is not None)

    LINEAR.miss(("missed", count_bucket(rows), n, k, dtype, bias is None), workload)


def gated(op: str, x: Tensor, *more: int) -> Tensor | None:
    """Return swiglu or geglu of x[..., 2 I], with gate before up."""
    if torch.compiler.is_compiling() or not x.numel():
        return None
    if needs_gradient(x):
        GATED[op].leave(AUTOGRAD)
        return None
    gate, up = x.reshape(-1, x.shape[-1]).chunk(2, dim=-1)
    key = (count_bucket(len(gate)), gate.shape[1], gate.stride(0), x.dtype, x.device, *more)
    made = GATED[op](key, gate, up, *more)
    return None if made is None else made.view(*x.shape[:-1], gate.shape[1])


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    max_len: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor,
    longest: int = 0,
) -> bool:
    """Run one decode step of q[B,Hq,1,D] over k/v[pages,page,Hkv,D] into `out`; return False if nothing is decided.

    `longest`: the context for which the engine will capture this step. The step also runs once with that context first,
    because an engine's warm-up has short contexts; the result is equally correct.
    """
    if torch.compiler.is_compiling():
        return False
    if needs_gradient(q):
        PAGED.leave(AUTOGRAD)
        return False
    shapes = (count_bucket(q.shape[0]), q.shape[1:], k.shape[1:], q.dtype, k.dtype, q.device)
    layout = (k.stride(), v.stride(), q.stride(0), window, softcap)

    def run(reach: int) -> bool:
        given = (q, k, v, table, lengths, reach, scale, window, softcap)
        return PAGED((length_bucket(reach), shapes, layout), *given, length=reach, out=out) is not None

    new = longest > max_len and PAGED.is_new((length_bucket(longest), shapes, layout)) and not captured((q,))
    return (new and run(longest)) or run(max_len)


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# --- files -----------------------------------------------------------------------------------------------------------

Lookup = Callable[[int, int, int, int], dict[int, Any] | None]


def handed_over(own: Lookup, named: Callable[[int, int, int, int], str]) -> Lookup:
    """Wrap the engine's lookup of tiles, so that it finds those of AUTOSEL_ENGINE_FILES before its own."""

    @functools.wraps(own)
    def lookup(n: int, k: int, block_n: int, block_k: int) -> dict[int, Any] | None:
        if torch.compiler.is_compiling():
            return own(n, k, block_n, block_k)
        found = read(n, k, block_n, block_k)
        return found if found is not None else own(n, k, block_n, block_k)

    @functools.cache
    def read(n: int, k: int, block_n: int, block_k: int) -> dict[int, Any] | None:
        folder = settings.get("engine_files")
        path = Path(folder) / "gemm" / "configs" / named(n, k, block_n, block_k) if folder else None
        if path is None or not path.is_file():
            return None
        return {int(m): tiles for m, tiles in json.loads(read_named(path, MOST_TILES_BYTES)).items()}

    lookup._autosel = True  # type: ignore[attr-defined]
    return lookup
