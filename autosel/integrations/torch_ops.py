"""Provide every op as `torch.ops.autosel.<op>`, for torch.compile, and for code that needs an operator.

    import autosel, torch                                      # in either order (`namespace`)
    y = torch.ops.autosel.rmsnorm(x, weight, 1e-6)             # allocates
    torch.ops.autosel.rmsnorm.out(x, weight, 1e-6, out=y)      # writes; returns nothing
    torch.ops.autosel.kv_append(k, v, positions, None, k_cache, v_cache)    # in place, like the op
    torch.ops.autosel.linear_stored(x, codes, scales, None, "fp8_e4m3-row", None, None)    # a weight in a format

An operator takes tensors, not a `Weight` or a `Cached`: `<op>_stored` takes their parts and the format's name.

An operator runs the kernel that `best()` serves for the call's shapes. It uses `Library.define/impl`, because calls of
`custom_op` cost several times as much (docs/figures.md). For inference: a backward pass raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autosel import dispatch, ops
from autosel.candidates.convention import defined, pure_outputs
from autosel.errors import UsageError
from autosel.ops.cached import Cached
from autosel.ops.contract import Arg, Op
from autosel.ops.weight import Weight

NAMESPACE = "autosel"


# --- schemas ---------------------------------------------------------------------------------------------------------


def schema(op: Op) -> str:
    """Return the schema of the functional form; for an op that only writes its arguments, of the in-place form."""
    returned = ", ".join("Tensor" for _ in pure_outputs(op))
    return f"{op.name}({_parameters(op)}) -> {returned if len(pure_outputs(op)) == 1 else f'({returned})'}"


def out_schema(op: Op) -> str:
    """Return the schema of the form that writes; it returns nothing, because a graph may not have two names for one
    tensor."""
    written = ", ".join(f"Tensor({_alias(len(op.args) + i)}!) {name}" for i, name in enumerate(pure_outputs(op)))
    return f"{op.name}.out({_parameters(op)}, *, {written}) -> ()"


def _parameters(op: Op) -> str:
    given = zip(op.args, _named(op), strict=True)
    return ", ".join(f"{_kind(arg, position)} {text}" for position, (arg, text) in enumerate(given))


def _named(op: Op) -> list[str]:
    """Return `name` or `name=default`; a default is possible only if all following arguments have one."""
    texts: list[str] = []
    optional = True
    for arg in reversed(op.args):
        default = _default(arg)
        optional = optional and default is not None
        texts.append(f"{arg.name}={default}" if optional else arg.name)
    return texts[::-1]


def _kind(arg: Arg, position: int) -> str:
    if arg.role == "inout":
        return f"Tensor({_alias(position)}!)"
    if arg.name == "max_len":  # it grows by one per token: a graph must not be compiled again for each
        return "SymInt?"
    return {"optional": "Tensor?", "int": "int", "float": "float"}.get(arg.kind, "Tensor")


def _default(arg: Arg) -> str | None:
    if arg.kind == "optional" or arg.name == "max_len":
        return "None"
    return None if arg.default is None else repr(arg.default)


def _alias(position: int) -> str:
    return chr(ord("a") + position)


# --- what the results look like --------------------------------------------------------------------------------------


def _like(*names: str) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
    return lambda given: tuple(given[n].new_empty(given[n].shape) for n in names)


def _projected(weight: str) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
    return lambda given: (given["x"].new_empty((given["x"].shape[0], given[weight].shape[0])),)


def _lm_head(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    rows = given["x"].shape[0]
    if given["greedy"]:
        return (given["x"].new_empty((rows,), dtype=torch.int64),)
    return (given["x"].new_empty((rows, given["w"].shape[0])),)


# Not taken from `Op.outputs`, which needs numbers: these also accept a graph's symbols for sizes.
_FAKE: Mapping[str, Callable[[Mapping[str, Any]], tuple[Tensor, ...]]] = {
    "linear": _projected("w"),
    "attn": _like("q"),
    "paged_attn": _like("q"),
    "prefill_attn": _like("q"),
    "kv_append": lambda given: (),
    "rmsnorm": _like("x"),
    "add_rmsnorm": _like("x", "x"),
    "rope": _like("q", "k"),
    "swiglu": _like("gate"),
    "geglu": _like("gate"),
    "norm_qkv": _projected("w"),
    "gate_up": _projected("w_gate"),
    "lm_head": _lm_head,
    "sample": lambda given: (given["logits"].new_empty((given["logits"].shape[0],), dtype=torch.int64),),
}


# --- registration ----------------------------------------------------------------------------------------------------


def _register(op: Op, library: torch.library.Library) -> None:
    names, outs = ", ".join(a.name for a in op.args), pure_outputs(op)
    library.define(schema(op))
    library.impl(op.name, _functional(op, names), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", _fake(op), lib=library)
    if outs:
        torch.library.register_autograd(f"{NAMESPACE}::{op.name}", _no_backward(op), lib=library)
        library.define(out_schema(op))
        library.impl(f"{op.name}.out", _writing(op, names, outs), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{op.name}.out", lambda *given, **outs: None, lib=library)


def _register_stored(op: Op, library: torch.library.Library) -> None:
    """Register the form for operands in a format, for an op that takes any."""
    stored = [arg for arg in op.args if arg.kind in KINDS]
    if not stored:
        return
    name, given = f"{op.name}_stored", [part for arg in op.args for part in _parts(arg)]
    returned = "Tensor" if len(pure_outputs(op)) == 1 else f"({', '.join('Tensor' for _ in pure_outputs(op))})"
    library.define(f"{name}({', '.join(f'{kind} {part}' for kind, part in given)}) -> {returned}")
    made = ", ".join(
        f"{KINDS[arg.kind].__name__}.of({arg.name}_format, codes={arg.name}_codes, scales={arg.name}_scales"
        + (
            f", zeros={arg.name}_zeros, shape=({arg.name}_codes.shape[0], x.shape[-1]))"
            if arg.kind == "weight"
            else ")"
        )
        if arg in stored
        else arg.name
        for arg in op.args
    )
    lines = [f"def {name}({', '.join(part for _, part in given)}):", f"    return chosen()({made}).contiguous()"]
    scope = {"chosen": _chosen(op), **{kind.__name__: kind for kind in KINDS.values()}}
    library.impl(name, defined(name, lines, scope), "CompositeExplicitAutograd")
    shapes = ", ".join(f"{a.name!r}: {a.name}_codes" if a in stored else f"{a.name!r}: {a.name}" for a in op.args)
    fake = [lines[0], f"    return shapes({{{shapes}}})[0]"]
    torch.library.register_fake(f"{NAMESPACE}::{name}", defined(name, fake, {"shapes": _FAKE[op.name]}), lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_backward(op), lib=library)


KINDS: Mapping[str, type] = {"weight": Weight, "cache": Cached}


def _parts(arg: Arg) -> list[tuple[str, str]]:
    """Return (kind, name) of the parts that a stored form takes for an argument."""
    if arg.kind not in KINDS:
        return [({"optional": "Tensor?", "int": "int", "float": "float"}.get(arg.kind, "Tensor"), arg.name)]
    zeros = [("Tensor?", f"{arg.name}_zeros")] if arg.kind == "weight" else []
    return [("Tensor", f"{arg.name}_codes"), ("Tensor", f"{arg.name}_scales"), *zeros, ("str", f"{arg.name}_format")]


def _functional(op: Op, names: str) -> Callable[..., Any]:
    """Make results contiguous, whichever kernel ran: the graph expects it."""
    made = {0: "chosen()({})", 1: "return chosen()({}).contiguous()"}.get(
        len(pure_outputs(op)), "return tuple([t.contiguous() for t in chosen()({})])"
    )
    lines = [f"def {op.name}({', '.join(_named(op))}):", f"    {made.format(names)}"]
    return defined(op.name, lines, {"chosen": _chosen(op)})


def _chosen(op: Op) -> Callable[[], Callable[..., Any]]:
    """Return a function that returns `best(op)`, looked up again only when another home serves (`use`)."""
    held: list[Any] = [None, None]

    def chosen() -> Callable[..., Any]:
        board = dispatch.board()
        if held[0] is not board:
            held[:] = board, board.selection(op)
        found: Callable[..., Any] = held[1]
        return found

    return chosen


def _writing(op: Op, names: str, outs: tuple[str, ...]) -> Callable[..., Any]:
    lines = [
        f"def {op.name}({', '.join(_named(op))}, *, {', '.join(outs)}):",
        f"    chosen()({names}, {', '.join(outs)})",
    ]
    return defined(op.name, lines, {"chosen": _chosen(op)})


def _fake(op: Op) -> Callable[..., Any]:
    given = ", ".join(f"{a.name!r}: {a.name}" for a in op.args)
    returned = {0: "None", 1: "shapes({})[0]"}.get(len(pure_outputs(op)), "shapes({})").format(f"{{{given}}}")
    lines = [f"def {op.name}({', '.join(_named(op))}):", f"    return {returned}"]
    return defined(op.name, lines, {"shapes": _FAKE[op.name]})


def _no_backward(op: Op) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UsageError(
            f"torch.ops.autosel.{op.name} has no backward",
            why="autosel's kernels are for inference",
            todo="run the model under torch.inference_mode(), or train without them",
        )

    return backward


def _registered() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for op in ops.OPS.values():
        _register(op, library)
        _register_stored(op, library)
    return library


LIBRARY = _registered()  # the ops exist as long as it does
