"""A user's own kernel: a Python function with the decorator, or named `module:function`; raced like any other.

    @autosel.candidate("rmsnorm", name="mine", dtypes=("bf16",))
    def fast_rmsnorm(x, weight, eps, offset): ...

The function takes the op's arguments by position (autosel/ops/<op>.py lists them) and returns the result, or also takes
the outputs and fills them. It runs in worker processes, which import its module by name. So it must be a top-level
function of a file, and a script that defines one needs `if __name__ == "__main__":` around its work.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autosel.candidates.base import Candidate
from autosel.candidates.convention import (
    Parameters,
    parameters_in_source,
    parameters_of,
    takes_outputs,
)
from autosel.candidates.source import MOST_SOURCE_BYTES, find_source, import_root, installed
from autosel.errors import BadConfig, UnknownName, UsageError
from autosel.files import read_named
from autosel.formats import FORMER_OPS, PLAIN, WEIGHT_FORMATS, find_weight_format
from autosel.values import (
    DTYPES,
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

if TYPE_CHECKING:
    from autosel.ops.contract import Op

Supports = Callable[[Workload, Fingerprint], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
EVERY_DTYPE = ("bf16", "fp16", "fp32")

_REGISTERED: dict[tuple[str, str], Candidate] = {}  # (op, name)


class UserCandidate(Candidate):
    """A user's Python function, named `user:<name>`.

    `target`: `module:function`. `path`: the folder from which it is imported, "" if it is installed. The function gets
    the op's arguments, or `operands` (`w.codes`, ...) instead; for an op that became a format (formats.FORMER_OPS), the
    arguments of that op. `allows(w, fp)` may refuse workloads: True or None accepts, False or a reason (text) refuses.
    """

    backend: Backend = "USER"

    def __init__(
        self,
        op: str,
        target: str,
        path: str,
        *,
        name: str,
        dtypes: tuple[str, ...] = EVERY_DTYPE,
        formats: frozenset[str] = Candidate.formats,
        cache_formats: frozenset[str] = Candidate.cache_formats,
        operands: tuple[str, ...] = (),
        allows: Supports | None = None,
        deterministic: bool = True,
        writes_out: bool = True,
    ) -> None:
        former = FORMER_OPS.get(op)
        if former is not None:
            op, operands, own = former.op, operands or former.operands, frozenset({former.format})
            formats, cache_formats = (own, cache_formats) if former.trait == "weight" else (formats, own)
        self.op, self.target, self.path, self.name = op, target, path, f"user:{name}"
        self.dtypes, self.formats, self.cache_formats, self.allows = dtypes, formats, cache_formats, allows
        self.operands = operands
        self.deterministic, self.writes_out = deterministic, writes_out

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if w.dtype not in self.dtypes:
            return Rejected(reason=f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}")
        return Accepted() if self.allows is None else _answer(self.allows, w, fp)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=self.target, path=self.path, operands=self.operands)


def _answer(allows: Supports, w: Workload, fp: Fingerprint) -> Support:
    try:
        said = allows(w, fp)
    except Exception as error:
        return Rejected(reason=f"its supports() raised {type(error).__name__}: {error}")
    if isinstance(said, (Accepted, Rejected)):
        return said
    if isinstance(said, str):
        return Rejected(reason=said) if said else Accepted()
    return Rejected(reason="its supports() refused it") if said is not None and not said else Accepted()


# --- the decorator ---------------------------------------------------------------------------------------------------


def candidate(
    op: str,
    *,
    name: str = "",
    dtypes: Iterable[str] = EVERY_DTYPE,
    formats: Iterable[str] = (PLAIN,),
    supports: Supports | None = None,
    deterministic: bool = True,
) -> Callable[[Function], Function]:
    """Register the decorated function as a candidate for `op`; the function is returned unchanged.

    `name` (default: the function's) makes `user:<name>`. `formats` names the formats of weights that it reads; in any
    but plain it gets a `Weight`. `supports(workload, fingerprint)` returns False, or a reason as text, to refuse a
    workload. `deterministic=False` means that the same inputs may give other bits. Raises UnknownName or UsageError at
    the decoration.
    """
    contract = _op(op)
    known, read = _dtypes(dtypes), _formats(formats)

    def register_function(function: Function) -> Function:
        module, path = _home(function)
        who = f"{module}:{function.__qualname__}"
        writes_out = takes_outputs(contract, parameters_of(function), who)
        register(
            UserCandidate(
                contract.name,
                who,
                path,
                name=_checked_name(name or function.__name__),
                dtypes=known,
                formats=read,
                allows=supports,
                deterministic=deterministic,
                writes_out=writes_out,
            )
        )
        return function

    return register_function


def register(candidate: Candidate) -> None:
    """Register a candidate in this process. Raises UsageError if another one has its name."""
    key = (candidate.op, candidate.name)
    present = _REGISTERED.get(key)
    if present is not None and _identity(present) != _identity(candidate):
        raise UsageError(
            f"two candidates for {candidate.op} are called {candidate.name}",
            why=f"{_identity(present)} and {_identity(candidate)}",
            todo="set another name= for one of them",
        )
    _REGISTERED[key] = candidate


def registered(op: str) -> tuple[Candidate, ...]:
    """Return the candidates of an op in the order of registration."""
    return tuple(c for (name, _), c in _REGISTERED.items() if name == op)


def all_registered() -> tuple[Candidate, ...]:
    return tuple(_REGISTERED.values())


def _identity(candidate: Candidate) -> str:
    return candidate.target if isinstance(candidate, UserCandidate) else type(candidate).__qualname__


def _op(name: str) -> Op:
    from autosel.ops import find

    return find(name)


def _dtypes(dtypes: Iterable[str]) -> tuple[str, ...]:
    found = _listed("dtypes", dtypes, DTYPES)
    for dtype in found:
        if dtype not in DTYPES:
            raise UnknownName("dtype", str(dtype), DTYPES)
    return found


def _formats(formats: Iterable[str]) -> frozenset[str]:
    return frozenset(find_weight_format(str(name)).name for name in _listed("formats", formats, WEIGHT_FORMATS))


def _listed(what: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(names, Iterable):  # a decorator read from source has not been checked
        raise UsageError(
            f"invalid {what} {names!r}", why=f"names of {what} are expected", todo=f"use {', '.join(known)}"
        )
    return (names,) if isinstance(names, str) else tuple(names)


def _checked_name(name: str) -> str:
    plain = name.removeprefix("user:") if isinstance(name, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", plain):
        raise UsageError(f"invalid candidate name {name!r}", todo="use at most 64 letters, digits, _ . -")
    return plain


def _home(function: Callable[..., Any]) -> tuple[str, str]:
    """Return module and import folder (or ""), by which a worker finds this function."""
    qualname = getattr(function, "__qualname__", None)
    if qualname is None or "<" in qualname:
        raise UsageError(
            f"{qualname or function!r} cannot be imported by a worker",
            why="a candidate runs in a separate process, which imports it by name",
            todo="define it at the top level of a file",
        )
    module = function.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise UsageError(
            f"{qualname} is not in a file (module {module})",
            why="a candidate runs in a separate process, which imports it by name",
            todo="move it from the prompt or notebook into a .py file, and import that file",
        )
    if module == "__main__":
        return _script(Path(file).resolve())
    return module, _folder(import_root(module, Path(file).resolve()))


def _script(file: Path) -> tuple[str, str]:
    """Return a script's import name, which is its file's name, or the module's for `python -m a.b`."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and not spec.name.endswith("__main__"):
        return spec.name, _folder(file.parents[spec.name.count(".")])
    if not file.stem.isidentifier():
        raise UsageError(
            f"{file} cannot be imported by a worker",
            why=f"{file.stem!r} is not a module name",
            todo="rename the file; use letters, digits and _",
        )
    return file.stem, _folder(file.parent)


def _folder(root: Path) -> str:
    return "" if root in installed() else str(root)


# --- by name, without importing --------------------------------------------------------------------------------------


def from_target(target: str, op: str, *, folder: Path | None = None) -> UserCandidate:
    """Return the candidate `module:function` for `op`, found in `folder` (default: the current one) or on the path.

    Nothing is imported: file, function, parameters and the decorator's constant settings are read from the source.
    Raises UsageError, BadConfig, UnknownName.
    """
    module, colon, name = target.partition(":")
    if not colon or not re.fullmatch(r"\w+(\.\w+)*", module) or module.endswith(".py") or not name.isidentifier():
        raise UsageError(
            f"--candidate {target} is invalid",
            why="the form module:function is expected, as Python imports it",
            todo="for fast_rmsnorm in ./mykernels.py write mykernels:fast_rmsnorm",
        )
    here = str((folder or Path.cwd()).resolve())
    file = find_source(module, here)
    if file is None:
        raise BadConfig(
            f"no module {module}", why=f"looked in {here} and on Python's path", todo="check the name and the folder"
        )
    contract = _op(op)
    parameters, told = _in_source(file, name)
    return UserCandidate(
        contract.name,
        target,
        _folder(import_root(module, file.resolve())),
        name=_checked_name(told.get("name") or name),
        dtypes=_dtypes(told.get("dtypes") or EVERY_DTYPE),
        formats=_formats(told.get("formats") or (PLAIN,)),
        deterministic=bool(told.get("deterministic", True)),
        writes_out=takes_outputs(contract, parameters, target),
    )


def _in_source(file: Path, name: str) -> tuple[Parameters | None, dict[str, Any]]:
    """Return a top-level function's parameters (None if it is only assigned) and its decorator's constant settings."""
    if file.suffix != ".py":
        return None, {}
    try:
        tree = ast.parse(read_named(file, MOST_SOURCE_BYTES), filename=str(file))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: nested too deeply
        raise BadConfig(f"{file} is not Python", why=str(error) or type(error).__name__) from error
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if name in functions:
        return parameters_in_source(functions[name]), _decoration(functions[name])
    bound = {n.id for s in tree.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    imported = {a.asname or a.name for s in tree.body if isinstance(s, ast.ImportFrom) for a in s.names}
    if name in bound | imported:
        return None, {}
    raise UnknownName(f"function in {file}", name, tuple(functions))


def _decoration(node: ast.FunctionDef) -> dict[str, Any]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("candidate", "autosel.candidate"):
            return {k.arg: _constant(k.value) for k in decorator.keywords if k.arg and k.arg != "supports"}
    return {}


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
