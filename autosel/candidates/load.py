"""Load a recipe as the callable `f(*arguments, *outputs)`; only workers and `dispatch` call this.

A native kernel takes the op's arguments, the outputs, then its knobs. The closure made here hides the knobs and
allocates an output that is None. A Python function takes its knobs, if any, by keyword.

A kernel with the knob `pdl` has a second closure, the attribute `chained` of the first: for a chain of calls whose
weights stay unchanged (decode.graph). It takes all arguments and outputs, and launches as a programmatic dependent of
the previous kernel.

A candidate with a layout has the attribute `reader`, which looks up its prepared weights (candidates/layouts.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from autosel import devices
from autosel.candidates.convention import (
    checked_operands,
    defined,
    parameters_of,
    takes_outputs,
    with_operands,
    with_outputs,
)
from autosel.candidates.layouts import Reader, reader
from autosel.errors import BuildError, UnknownName
from autosel.native.load import load_entry
from autosel.ops.contract import Op
from autosel.values import NativeRecipe, PythonRecipe, Recipe, Scalar

CHAINED = "pdl"  # of a CUDA kernel: 1 if it may start before the previous one has ended


def load(op: Op, recipe: Recipe, digest: str, knobs: Mapping[str, Scalar]) -> Callable[..., Any]:
    """Return the loaded candidate. Raises BuildError, or any error of the candidate's module at import."""
    threads = int(knobs.get("threads", 0)) or torch.get_num_threads()
    found = reader(op, recipe, digest, threads, load_python)
    function = _load(op, recipe, digest, knobs, found.of if found else None)
    if found is not None:
        function.reader = found  # type: ignore[attr-defined]
    return function


def reader_of(function: Callable[..., Any]) -> Reader | None:
    """Return the reader of a loaded candidate's prepared weights; None if it reads plain weights."""
    return getattr(function, "reader", None)


def _load(
    op: Op, recipe: Recipe, digest: str, knobs: Mapping[str, Scalar], packed: Callable[..., Any] | None
) -> Callable[..., Any]:
    if isinstance(recipe, NativeRecipe):
        entry, names, operands = load_entry(digest, recipe.entry), recipe.knob_args, recipe.operands
        function = _native(op, entry, operands, tuple(knobs[name] for name in names), packed)
        if CHAINED in names:
            chained = tuple(1 if name == CHAINED else knobs[name] for name in names)
            function.chained = _native(op, entry, operands, chained, packed)  # type: ignore[attr-defined]
        return function
    function = _with_knobs(load_python(recipe), knobs)
    fills = takes_outputs(op, parameters_of(function), recipe.target, recipe.operands)
    if recipe.operands:
        function = with_operands(op, function, recipe.operands, fills=fills, packed=packed)
    if not fills:
        function = with_outputs(op, function, recipe.target)
    return _where_operands_are(op, function) if torch.cuda.device_count() > 1 else function


def _where_operands_are(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the operands' GPU current for the call: Triton and most libraries launch on the current one.

    Native kernels and PyTorch's own select the device themselves.
    """
    position = next(i for i, a in enumerate(op.args) if a.kind == "tensor")

    def there(*arguments: Any) -> Any:
        device = arguments[position].device
        if not devices.accelerated(device.type) or device.index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(device):
            return function(*arguments)

    return there


def load_python(recipe: PythonRecipe) -> Callable[..., Any]:
    if recipe.path and recipe.path not in sys.path:
        sys.path.insert(0, recipe.path)
    module, _, name = recipe.target.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise BuildError(
            f"cannot import {recipe.target}", why=str(error), todo="check the name and PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise UnknownName("function", name, tuple(n for n in vars(import_module(module)) if n[0] != "_")) from error
    if not callable(found):
        raise BuildError(f"{recipe.target} is {type(found).__name__}, not a function")
    _refuse_namesake(recipe, module)
    function: Callable[..., Any] = found
    return function


def _with_knobs(function: Callable[..., Any], knobs: Mapping[str, Scalar]) -> Callable[..., Any]:
    """Bind the function to knobs with keyword-only parameters; the others record how these were derived."""
    if not knobs:
        return function
    parameters = inspect.signature(function).parameters.values()
    taken = {p.name: knobs[p.name] for p in parameters if p.kind == p.KEYWORD_ONLY and p.name in knobs}
    return partial(function, **taken)


def _refuse_namesake(recipe: PythonRecipe, module: str) -> None:
    """Refuse another module of the same name, imported earlier or found first, because it is not the raced module."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if recipe.path and file is not None and Path(recipe.path).resolve() not in Path(file).resolve().parents:
        raise BuildError(
            f"{recipe.target} is not the one in {recipe.path}",
            why=f"Python imported {file} by that name",
            todo="rename the module",
        )


def _native(
    op: Op,
    entry: Callable[..., Any],
    operands: Sequence[str],
    knob_values: tuple[Scalar, ...],
    packed: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Generate a wrapper with a fixed number of arguments: a starred call costs several times as much as the lookup
    before it.
    """
    arguments = [a.name for a in op.args]
    inout = {a.name for a in op.args if a.role == "inout"}
    outputs = [f"out{i}" for i, name in enumerate(op.output_names) if name not in inout]
    returned = ", ".join([*[n for n in arguments if n in inout], *outputs])
    passed = checked_operands(op, operands) or arguments
    call = ", ".join([*passed, *outputs, *(repr(v) for v in knob_values)])
    lines = [f"def {op.name}({', '.join([*arguments, *(f'{o}=None' for o in outputs)])}):"]
    if outputs:
        lines += [f"    if {outputs[0]} is None:", f"        specs = known.get({_shapes(op)})"]
        lines += [f"        if specs is None: specs = describe({', '.join(arguments)})"]
        place = next(a.name for a in op.args if a.kind == "tensor")
        lines += [f"        {o} = {place}.new_empty(specs[{i}][0], dtype=specs[{i}][1])" for i, o in enumerate(outputs)]
    lines += [f"    entry({call})", f"    return {returned}"]
    known: dict[Any, _Specs] = {}
    scope = {"entry": entry, "known": known, "describe": _describer(op, known), "packed": packed}
    return defined(op.name, lines, scope)


_Specs = tuple[tuple[tuple[int, ...], torch.dtype], ...]
MOST_SHAPES = 4096


def _shapes(op: Op) -> str:
    """Return the text of a key for the outputs' shapes: checking the arguments takes 40 us, a lookup one."""
    tensors = [f"{a.name}.shape, {a.name}.dtype" for a in op.args if a.kind in ("tensor", "weight", "cache")]
    return f"({', '.join([*tensors, *(a.name for a in op.args if a.name in op.trait_defaults)])},)"


def _describer(op: Op, known: dict[Any, _Specs]) -> Callable[..., _Specs]:
    """Return a function that finds and remembers the outputs' shapes and dtypes. It raises BadArguments."""
    arguments = [a.name for a in op.args]
    key = defined("key", [f"def key({', '.join(arguments)}): return {_shapes(op)}"], {})

    def describe(*values: Any) -> _Specs:
        w = op.workload_of(dict(zip(arguments, values, strict=True)))
        specs = tuple((tuple(t.shape), t.dtype) for t in op.allocate(w) if t is not None)
        if len(known) >= MOST_SHAPES:
            known.clear()
        known[key(*values)] = specs
        return specs

    return describe
