"""Signatures of users' functions, and adapters to call them as `f(*arguments, *outputs)`.

A function takes the op's arguments in order and returns the result; or it also takes the outputs (each a tensor to
write into, or None: allocate) and returns them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autosel.errors import BadArguments, UsageError

if TYPE_CHECKING:
    from autosel.ops.contract import Op

Default = Literal["required", "none", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters that can be passed to a function by position."""

    names: tuple[str, ...]
    defaults: tuple[Default, ...]
    starred: bool  # has *args
    keyword_required: tuple[str, ...] = ()

    def take(self, count: int) -> bool:
        required = self.defaults.count("required")
        return required <= count and (self.starred or count <= len(self.names))


def parameters_of(function: Callable[..., Any]) -> Parameters | None:
    """Return the parameters; None for a callable without a signature (a builtin)."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Parameters(
        names=tuple(p.name for p in positional),
        defaults=tuple(
            "required" if p.default is p.empty else "none" if p.default is None else "other" for p in positional
        ),
        starred=any(p.kind == p.VAR_POSITIONAL for p in found),
        keyword_required=tuple(p.name for p in found if p.kind == p.KEYWORD_ONLY and p.default is p.empty),
    )


def parameters_in_source(node: ast.FunctionDef) -> Parameters:
    """Return the parameters read from the source, without running it."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    told: list[Default] = [
        "none" if isinstance(d, ast.Constant) and d.value is None else "other" for d in node.args.defaults
    ]
    required: list[Default] = ["required"] * (len(arguments) - len(told))
    keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return Parameters(
        names=tuple(a.arg for a in arguments),
        defaults=(*required, *told),
        starred=node.args.vararg is not None,
        keyword_required=tuple(a.arg for a, default in keyword if default is None),
    )


def takes_outputs(op: Op, parameters: Parameters | None, who: str, operands: Sequence[str] = ()) -> bool:
    """Return True if the function takes the outputs. Raises UsageError, with the signature to use, if it fits neither
    way.

    A parameter in an output's position with a default other than None is the function's own option. `operands` replace
    the op's arguments.
    """
    if parameters is None:
        return True
    names = list(operands) or [a.name for a in op.args]
    arguments, outputs = len(names), pure_outputs(op)
    total = arguments + len(outputs)
    if not parameters.keyword_required:
        if parameters.take(total) and "other" not in parameters.defaults[arguments:total]:
            return True
        if parameters.take(arguments):
            return False
    taken = [*parameters.names, *(["*"] if parameters.starred else []), *parameters.keyword_required]
    raise UsageError(
        f"{who} cannot be called as {op.name}",
        why=f"it takes ({', '.join(taken)}); {op.name} passes ({', '.join(names)})"
        + (f", or ({', '.join([*names, *outputs])})" if outputs else ""),
        todo="define it with these parameters, by position",
    )


def pure_outputs(op: Op) -> tuple[str, ...]:
    """Return parameter names of the outputs that are not arguments: out, or out0, out1, ..."""
    count = len(_result_names(op))
    return ("out",) if count == 1 else tuple(f"out{i}" for i in range(count))


def checked_operands(op: Op, operands: Sequence[str]) -> list[str]:
    """Return names of arguments or of their parts (`w.codes`) that generated code may use. Raises BadArguments."""
    known, parts = {a.name for a in op.args}, ("codes", "scales", "zeros", "packed")
    for name in operands:
        argument, dot, part = name.partition(".")
        if argument not in known or (dot and part not in parts):
            why = f"its operands are {', '.join(sorted(known))}"
            raise BadArguments(f"{op.name} has no operand {name!r:.40}", why=why)
    return [_passed(name) for name in operands]


def _passed(operand: str) -> str:
    """Return an operand as an expression; a prepared weight is looked up by the function `packed`
    (candidates/layouts.py).
    """
    argument, _, part = operand.partition(".")
    return f"packed({argument})" if part == "packed" else operand


def with_operands(
    op: Op,
    function: Callable[..., Any],
    operands: Sequence[str],
    *,
    fills: bool,
    packed: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Wrap a function of `operands` as one of the op's arguments; with `fills`, both also take the outputs.

    `packed` looks up a prepared weight.
    """
    outputs = list(pure_outputs(op)) if fills else []
    arguments = ", ".join([*(a.name for a in op.args), *(f"{o}=None" for o in outputs)])
    passed = ", ".join([*checked_operands(op, operands), *outputs])
    lines = [f"def {op.name}({arguments}):", f"    return function({passed})"]
    return defined(op.name, lines, {"function": function, "packed": packed})


def with_outputs(op: Op, function: Callable[..., Any], who: str) -> Callable[..., Any]:
    """Wrap a function that returns its result so that it copies it into given outputs.

    A call with outputs raises BadArguments if the result has another shape or dtype.
    """
    arguments, outputs = ", ".join(a.name for a in op.args), pure_outputs(op)
    results = ("result",) if len(outputs) == 1 else tuple(f"result{i}" for i in range(len(outputs)))
    lines = [f"def {op.name}({arguments}, {', '.join(f'{o}=None' for o in outputs)}):"]
    lines += [f"    if {outputs[0]} is None:", f"        return function({arguments})"]
    lines += [f"    {', '.join(results)} = function({arguments})"]
    lines += [f"    keep({r}, {o}, {i})" for i, (r, o) in enumerate(zip(results, outputs, strict=True))]
    lines += [f"    return {', '.join(outputs)}"]
    return defined(op.name, lines, {"function": function, "keep": _keeper(op, who)})


def defined(name: str, lines: Sequence[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the function `name` that these lines define, with the names in `scope`."""
    exec("\n".join(lines), scope)  # noqa: S102  (text from the op table: no outside data reaches it)
    made: Callable[..., Any] = scope[name]
    return made


def _keeper(op: Op, who: str) -> Callable[[Any, Any, int], None]:
    def keep(result: Any, out: Any, index: int) -> None:
        # Without this check, copy_ would broadcast a wrong shape and convert a wrong dtype, and parity would not detect
        # it.
        if getattr(result, "shape", None) != out.shape or result.dtype != out.dtype:
            raise BadArguments(
                f"{who} returned {_told(result)} as {op.name}'s {_result_names(op)[index]}",
                why=f"expected {_told(out)}",
            )
        out.copy_(result)

    return keep


def _result_names(op: Op) -> Sequence[str]:
    inout = {a.name for a in op.args if a.role == "inout"}
    return [name for name in op.output_names if name not in inout]


def _told(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
