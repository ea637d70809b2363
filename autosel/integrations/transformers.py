"""Patch a Hugging Face model with `autosel.patch(model)`: its attention, norms, rotary embeddings, gated MLPs and
projections run decided kernels. `autosel.unpatch(model)` restores it.

Modules are replaced one by one. Other models of the same class do not change, nor do the model's configuration, its
masks and transformers' registries. Before a module is replaced, checks against the op's float64 reference show that the
module computes the op, and that the replacement is correct, on the module's own weights and device. Calls that need a
gradient, that come from another device, or that the ops do not describe, run the module's own code: attention falls
back to the implementation that the model was loaded with.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosel import dispatch, extras, ops
from autosel.errors import BadArguments, UsageError
from autosel.ops.arguments import FLOATS
from autosel.ops.contract import DTYPE_NAME, U32, UNIT, Match
from autosel.ops.stored import mapped

log = logging.getLogger(__name__)

NEEDED = "transformers 5"
CACHE_NAMES = ("cache", "past_key_values")  # names of the cache among attention's arguments: since 5.24, and before
KINDS = ("attention", "RMSNorm", "rotary", "MLP", "linear")
STATIC_ROPE = ("default", "linear", "llama3")  # kinds whose frequencies do not change with the position
CHECKED = 16  # rows of a projection that are checked in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Describe a module that was not replaced."""

    module: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """Count replaced modules, and their total, by kind; with the reasons for the others."""

    replaced: Mapping[str, int]
    found: Mapping[str, int]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{k} {self.replaced[k]}/{self.found[k]}" for k in KINDS if self.found[k])
        reasons = sorted({f"{left.kind} not replaced: {left.reason}" for left in self.left})
        return "\n".join([f"autosel: {counts}", *(f"  {reason}" for reason in reasons)])


Forward = Callable[..., Any]  # of (module, ...)
Names = dict[str, Any]  # globals that a module's own forward reads instead of its module's
DEVICES = ("cpu", "cuda")  # the device for which kernels can be decided
PROVEN_ON = "_autosel_on"  # attribute of a patched module, so that a deep copy has it too: the device of the proof


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Hold one module's replacement, proven and not yet made. `kind` is one of KINDS, or "frequencies"."""

    name: str
    kind: str
    module: nn.Module
    what: Forward | Names


# --- patch and unpatch -----------------------------------------------------------------------------------------------


def patch(model: Any) -> Patched:
    """Replace all supported modules; print and return the counts. The model is changed in place, completely or not at
    all.

    Raises UsageError if it is not a transformers model, is patched already, mixes devices or dtypes, or has nothing to
    replace.
    """
    _refuse(model)
    changes, left = _plan(model)
    patched = Patched(
        replaced={kind: sum(c.kind == kind for c in changes) for kind in KINDS},
        found={kind: [*(c.kind for c in changes), *(x.kind for x in left)].count(kind) for kind in KINDS},
        left=tuple(left),
    )
    if not changes:
        raise UsageError(
            f"nothing in {type(model).__name__} can be replaced",
            why=f"{_versions()}; {'; '.join(sorted({x.reason for x in left})) or 'no module of a kind autosel knows'}",
            todo="docs/guides/transformers.md names the modules that can be; the model is unchanged",
        )
    try:
        device = next(model.parameters()).device
        for module, forward in _forwards(changes):
            module.__dict__[PROVEN_ON] = device
            # A bound method, so that a deep copy of the model runs on the copy's own weights.
            module.__dict__["forward"] = types.MethodType(forward, module)
            _OURS.add(forward)
    except BaseException:
        _restore(model)
        raise
    print(patched)  # noqa: T201  (whoever patches shall see at once how much of the model it reached)
    return patched


def _forwards(changes: list[_Change]) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each module once, with its new forward."""
    named: dict[int, tuple[nn.Module, Names]] = {}
    for change in changes:
        if isinstance(change.what, dict):
            named.setdefault(id(change.module), (change.module, {}))[1].update(change.what)
        else:
            yield change.module, change.what
    for module, names in named.values():
        yield module, _around_attention(type(module).forward, names)


def unpatch(model: Any) -> None:
    """Restore the model as it was before `patch`. Raises UsageError if it is not patched."""
    if not is_patched(model):
        raise UsageError(f"this {type(model).__name__} is not patched", todo="autosel.patch(model) comes first")
    _restore(model)


def is_patched(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(_is_ours(m) for m in model.modules())


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(PROVEN_ON, None)
        if _is_ours(module):
            del module.__dict__["forward"]


_OURS: weakref.WeakSet[Any] = weakref.WeakSet()  # the functions that replace forwards


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) in _OURS


def _refuse(model: Any) -> None:
    if not isinstance(model, _pretrained()):
        raise UsageError(
            f"cannot patch {type(model).__module__}.{type(model).__name__}",
            why=f"it is not a transformers.PreTrainedModel ({_versions()})",
            todo="patch the model itself, not a wrapper around it; elsewhere use torch.ops.autosel or autosel.best",
        )
    if is_patched(model):
        raise UsageError("this model is patched already", todo="autosel.unpatch(model) comes first")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in DEVICES:
        raise UsageError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices))) or 'no device'}",
            why="patch proves every module on its device, which must be one CPU or one GPU for all",
            todo="model.to('cpu') or model.to('cuda:0') first; elsewhere autosel.best and torch.ops.autosel serve",
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise UsageError(
            f"the model mixes or uses dtypes no op takes: {', '.join(sorted(map(str, dtypes)))}",
            why="an op takes one of bfloat16, float16, float32 for all its tensors",
            todo="model.to(torch.bfloat16), or load it with dtype=",
        )


def _pretrained() -> Any:
    """Return transformers' base class. Raises UsageError, naming both versions, if the parts that patching needs are
    missing."""
    try:
        import transformers
    except ImportError as error:
        raise extras.missing("hf", "autosel.patch", error) from error
    try:
        from transformers import AttentionInterface, PreTrainedModel  # noqa: F401
        from transformers.integrations.flash_attention import flash_attention_forward  # noqa: F401
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"transformers {transformers.__version__} has another interface than {NEEDED}, for which patch was written",
            why=str(error),
            todo=f"install a release of it:  {extras.command('hf')}; the model is unchanged",
        ) from error
    return PreTrainedModel


def _versions() -> str:
    import transformers

    from autosel.version import __version__

    return f"autosel {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


# --- what can be replaced --------------------------------------------------------------------------------------------


def _plan(model: Any) -> tuple[list[_Change], list[Left]]:
    changes: list[_Change] = []
    left: list[Left] = []
    # The proofs' operands belong on the weights' device, whatever the process's default device.
    with torch.inference_mode(), next(model.parameters()).device:
        for name, module in model.named_modules():
            for kind, prove in _kinds(module):
                try:
                    changes.append(_Change(name=name, kind=kind, module=module, what=prove(module)))
                except _NotThis as reason:
                    if kind != "RMSNorm" or _is_called_norm(module):
                        left.append(Left(module=name, kind=kind, reason=str(reason)))
                except Exception as error:  # a class that only resembles a known one
                    log.info("%s cannot be tried", name, exc_info=True)
                    left.append(Left(module=name, kind=kind, reason=_why(module, error)))
    return _rotary_or_nothing(changes, left)


def _why(module: nn.Module, error: Exception) -> str:
    """Return why a module whose trial raised an error is not replaced."""
    name = type(module).__name__
    if isinstance(error, AttributeError) and error.name is not None:
        return f"{name}: {type(error.obj).__name__} has no {error.name}"
    return f"{name} cannot be tried: {str(error).partition(chr(10))[0] or type(error).__name__}"


def _rotary_or_nothing(changes: list[_Change], left: list[Left]) -> tuple[list[_Change], list[Left]]:
    """Refuse rotary embeddings without known frequencies: the op needs positions and frequencies."""
    told = any(c.kind == "frequencies" for c in changes)
    used = any(c.kind == "rotary" for c in changes)
    if told and used:
        return changes, [x for x in left if x.kind in KINDS]
    why = next((x.reason for x in left if x.kind == "frequencies"), "its frequencies are not known")
    left += [Left(module=c.name, kind=c.kind, reason=why) for c in changes if c.kind == "rotary"]
    return [c for c in changes if c.kind not in ("rotary", "frequencies")], [x for x in left if x.kind in KINDS]


class _NotThis(Exception):
    """Raised with the reason why a module cannot be replaced."""


def _kinds(module: nn.Module) -> Iterator[tuple[str, Callable[[Any], Forward | Names]]]:
    """Return the kinds that a module resembles, still to be proven."""
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        yield "linear", _prove_linear
    elif _resembles_norm(module):
        yield "RMSNorm", _prove_norm
    elif all(isinstance(getattr(module, n, None), nn.Module) for n in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        yield "MLP", _prove_mlp
    elif kind.endswith("RotaryEmbedding") and hasattr(module, "rope_type"):
        yield "frequencies", _prove_frequencies
    elif kind.endswith("Attention") and "ALL_ATTENTION_FUNCTIONS" in _names_used(module):
        yield "attention", _prove_attention
        if "apply_rotary_pos_emb" in _names_used(module):
            yield "rotary", _prove_rotation


def _names_used(module: nn.Module) -> dict[str, Any]:
    """Return the globals that its class's forward names, without decorators around it."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    return {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}


def _own(module: nn.Module) -> None:
    """Check that its forward is its class's own, not replaced by autosel, `kernels`, accelerate or other code."""
    if "forward" in module.__dict__:
        raise _NotThis("its forward was replaced by other code, and is kept")


def _drawn(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw without touching the user's random state, on the present device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def _wrong(op: str, inputs: Mapping[str, Any], *got: Tensor) -> str:
    """Return why this is not the op's result for these inputs; "" if it is. The CPU's float64 reference decides."""
    with torch.device("cpu"):
        there = {name: mapped(value, Tensor.cpu) for name, value in inputs.items()}
        found = ops.find(op).verify(there, [t.cpu() for t in got])
    return "" if isinstance(found, Match) else f"{found.check}: {found.reason}"


def _serves(op: str, inputs: Mapping[str, Any], *got: Tensor) -> None:
    wrong = _wrong(op, inputs, *got)
    if wrong:
        raise _NotThis(f"what serves {op} fails parity on its weights ({wrong})")


def _dynamic(module: nn.Module, *tensors: Tensor) -> bool:
    """Return True if the call must run the module's own code: no op describes it, or the model was moved since. Without
    a proof the baseline would serve, which is slower than the module's own code."""
    proven_on = module.__dict__.get(PROVEN_ON)
    for t in tensors:
        if t.device != proven_on:
            return True
    return _undescribed(*tensors)


def _undescribed(*tensors: Tensor) -> bool:
    """Return True for an empty computation, or one that needs a gradient."""
    return tensors[0].numel() == 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _rows(x: Tensor) -> Tensor:
    """Return x as [M, K], each row contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _ask(op: str) -> Callable[..., Any]:
    """Return the callable that serves an op; in a graph that is being compiled, the operator."""
    served, operator = dispatch.best(op), _operator(op)

    def ask(*values: Any) -> Any:
        return operator(*values) if torch.compiler.is_compiling() else served(*values)

    return ask


# --- linear ----------------------------------------------------------------------------------------------------------


def _prove_linear(module: nn.Linear) -> Forward:
    """Prove a linear layer. A subclass is one if its own forward computes the op."""
    _own(module)
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        raise _NotThis(f"its weight is a {type(weight).__name__}")
    if weight.dtype not in FLOATS:
        raise _NotThis(f"its weight is {weight.dtype}")
    contract, served, original = ops.find("linear"), _ask("linear"), type(module).forward
    x = _drawn(1, module.in_features, dtype=weight.dtype)
    inputs = {"x": x, "w": weight, "bias": module.bias, "residual": None}
    rows = contract.rows(contract.workload_of(inputs), inputs, CHECKED, 1)
    if original is not nn.Linear.forward:
        _refuse_other_linear(module, rows, original)
    _serves("linear", rows.inputs, *rows.pick((served(x, weight, module.bias, None),)))

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if weight is not None and not _dynamic(self, input, weight):
            shape = input.shape
            try:
                made: Tensor = served(_rows(input), weight, bias, None)
                return made.view(*shape[:-1], weight.shape[0])
            except BadArguments:
                pass
        found: Tensor = original(self, input)
        return found

    return forward


def _refuse_other_linear(module: nn.Linear, rows: Any, original: Forward) -> None:
    """Check a subclass. It may not compute by anything else that it holds, which may change later."""
    name, known = type(module).__name__, {"in_features", "out_features", "training"}
    held = {*_tensors_of(module), *module._modules} - {"weight", "bias"}
    read = set(inspect.unwrap(original).__code__.co_names) & set(vars(module)) - known
    if held or read:
        raise _NotThis(f"{name} computes by {', '.join(sorted(held | read))} too")
    own = original(module, rows.inputs["x"])
    if not isinstance(own, Tensor) or own.shape != (1, module.out_features):
        raise _NotThis(f"{name} returns something else than its product")
    wrong = _wrong("linear", rows.inputs, *rows.pick((own,)))
    if wrong:
        raise _NotThis(f"{name} computes something else than x @ weight^T + bias ({wrong})")


# --- norms -----------------------------------------------------------------------------------------------------------


SCALES = (1.0, 1.0, 1e-3, 30.0)  # of a probe's rows; at 1e-3 the epsilon decides
WIDTH = 64  # of the probe of a norm without weights
CONSTANTS = (1e-6, 1e-5, 1e-8, 1e-12)  # epsilons that a forward may have instead of an attribute
GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}
GATE_ROUNDINGS = 8  # of a gate's exponential, quotient and products, fp32, relative to the result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """Say how a module normalises. `epsilon` is the attribute that holds it, else the number; None: the dtype's own."""

    weighted: bool
    epsilon: str | float | None
    offset: float
    gate: Callable[[Tensor], Tensor] | None = None  # of a second argument
    gate_first: bool = False

    def eps(self, module: Any, dtype: torch.dtype) -> float:
        found = getattr(module, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon
        return torch.finfo(dtype).eps if found is None else float(found)

    def weight(self, module: Any, like: Tensor) -> Tensor:
        found: Tensor = module.weight if self.weighted else _ones(like.shape[-1], like.dtype, like.device)
        return found


def _is_called_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _resembles_norm(module: nn.Module) -> bool:
    """Return True for a module without others in it that is called a norm, or has one vector and nothing else."""
    if next(module.children(), None) is not None:
        return False
    held = _tensors_of(module)
    return _is_called_norm(module) or [(t.dim(), t.is_floating_point()) for t in held.values()] == [(1, True)]


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _prove_norm(module: Any) -> Forward:
    """Prove a norm by what it computes: its name says neither whether 1 is added to the weight, nor the epsilon."""
    _own(module)
    held = _tensors_of(module)
    weight = held.pop("weight", None)
    if held or (weight is not None and (weight.dim() != 1 or weight.dtype not in FLOATS)):
        raise _NotThis(f"{type(module).__name__} has other tensors than one vector of floats")
    how = _way_to_norm(module, weight)
    served, original = _ask("rmsnorm"), type(module).forward
    x = _drawn(3, WIDTH, dtype=torch.float32) if weight is None else _drawn(3, len(weight), dtype=weight.dtype)
    inputs = {"x": x, "weight": how.weight(module, x), "eps": how.eps(module, x.dtype), "offset": how.offset}
    _serves("rmsnorm", inputs, served(*inputs.values()))

    return _plain_norm(how, served, original) if how.gate is None else _gated_norm(how, served, original)


def _plain_norm(how: _Norm, served: Callable[..., Any], original: Forward) -> Forward:
    weight_of, eps_of, offset = how.weight, how.eps, how.offset

    def forward(self: Any, *states: Tensor, **named: Any) -> Tensor:
        if len(states) == 1 and not named:
            (x,) = states
            weight = weight_of(self, x)
            if not _dynamic(self, x, weight):
                try:
                    made: Tensor = served(_rows(x), weight, eps_of(self, x.dtype), offset)
                    return made.view(x.shape)
                except BadArguments:
                    pass
        found: Tensor = original(self, *states, **named)
        return found

    return forward


def _gated_norm(how: _Norm, served: Callable[..., Any], original: Forward) -> Forward:
    """Apply the gate in fp32, as the modules do. A gate in front makes the norm one of fp32."""
    opening, first = how.gate, how.gate_first
    assert opening is not None

    def gated(module: Any, x: Tensor, gate: Tensor) -> Tensor:
        weight, opened = how.weight(module, x), opening(gate.float())
        rows = _rows(opened * x if first else x)
        weight = weight.float() if first else weight
        made: Tensor = served(rows, weight, how.eps(module, x.dtype), how.offset).view(x.shape)
        return (made if first else made * opened).to(x.dtype)

    def forward(self: Any, *states: Tensor, **named: Any) -> Tensor:
        given = (*states, *named.values())
        if len(given) == 2 and all(isinstance(t, Tensor) for t in given):
            x, gate = given
            if x.shape == gate.shape and not _dynamic(self, x, gate, how.weight(self, x)):
                with suppress(BadArguments):
                    return gated(self, x, gate)
        found: Tensor = original(self, *states, **named)
        return found

    return forward


def _way_to_norm(module: Any, weight: Tensor | None) -> _Norm:
    """Return how the module's class computes the op, found in fp32 on a copy with another weight."""
    name, width = type(module).__name__, WIDTH if weight is None else len(weight)
    probe = copy.copy(module)
    drawn = 1.0 + 0.3 * _drawn(width, dtype=torch.float32, seed=3)
    for kind in ("_parameters", "_buffers"):
        changed = {
            n: nn.Parameter(drawn, requires_grad=False) if n == "weight" and t is not None else t
            for n, t in getattr(module, kind).items()
        }
        probe.__dict__[kind] = changed
    scales = torch.tensor(SCALES).to(torch.get_default_device())
    x = _drawn(len(SCALES), width, dtype=torch.float32) * scales[:, None]
    gate = _drawn(len(SCALES), width, dtype=torch.float32, seed=2)
    taken = inspect.signature(type(module).forward).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken) - 1  # without self
    states = (x[None], gate[None])[: max(1, min(count, 2))]
    own = type(module).forward(probe, *states)
    if not isinstance(own, Tensor) or own.shape != x[None].shape:
        raise _NotThis(f"{name} returns something else than one tensor of its input's shape")
    for how in _ways_to_norm(module, weighted=weight is not None, gated=len(states) == 2):
        vector = drawn if how.weighted else _ones(width, torch.float32, x.device)
        inputs = {"x": x, "weight": vector, "eps": how.eps(module, torch.float32), "offset": how.offset}
        if _is_norm(how, inputs, gate, own[0]):
            return how
    raise _NotThis(f"{name} does not compute an RMSNorm by weight or 1 + weight")


def _ways_to_norm(module: Any, *, weighted: bool, gated: bool) -> Iterator[_Norm]:
    """Yield what a module may compute, by its own attributes first."""
    names = [name for name, value in vars(module).items() if isinstance(value, float) and 0.0 <= value < 1.0]
    unset = [name for name in ("eps", "variance_epsilon") if getattr(module, name, 0.0) is None]
    gates = [(g, first) for g in GATES.values() for first in (False, True)] if gated else [(None, False)]
    for epsilon in (*names, *unset, None, *CONSTANTS):
        for offset, used in ((0.0, True), (1.0, True), (0.0, False)) if weighted else ((0.0, False),):
            for gate, first in gates:
                yield _Norm(weighted=used, epsilon=epsilon, offset=offset, gate=gate, gate_first=first)


def _is_norm(how: _Norm, inputs: dict[str, Any], gate: Tensor, own: Tensor) -> bool:
    if how.gate is None:
        return not _wrong("rmsnorm", inputs, own)
    if how.gate_first:
        return not _wrong("rmsnorm", {**inputs, "x": inputs["x"] * how.gate(gate)}, own)
    contract, there = ops.find("rmsnorm"), {name: mapped(value, Tensor.cpu) for name, value in inputs.items()}
    (y,), opened = contract.reference(there), how.gate(gate.cpu().double())
    (bound,) = contract.bound(there, (y,))
    allowed = bound * opened.abs() + GATE_ROUNDINGS * U32 * (y * opened).abs()
    return bool(((own.cpu().double() - y * opened).abs() <= allowed).all())


@functools.cache
def _ones(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(width, dtype=dtype, device=device)


# --- gated MLP -------------------------------------------------------------------------------------------------------

_GATED = (("swiglu", ()), ("geglu", (1,)), ("geglu", (0,)))


def _prove_mlp(module: Any) -> Forward:
    """Replace the product in the middle; the projections are separate modules."""
    _own(module)
    _refuse_other_mlp(module)
    dtype = next(module.parameters()).dtype
    gate, up = _drawn(1, 256, dtype=torch.float32), _drawn(1, 256, dtype=torch.float32, seed=2)
    own = module.act_fn(gate) * up
    found = [(op, more) for op, more in _GATED if not _wrong(op, _gated(op, gate, up, more), own)]
    if not found:
        raise _NotThis(f"its activation is {type(module.act_fn).__name__}, neither SiLU nor GELU")
    op, more = found[0]
    served = _ask(op)
    gate, up = gate.to(dtype), up.to(dtype)
    _serves(op, _gated(op, gate, up, more), served(gate, up, *more))

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        middle = None
        if not _dynamic(self, gate, up):
            rows = (gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]))
            with suppress(BadArguments):
                middle = served(*rows, *more).view(gate.shape)
        made: Tensor = self.down_proj(self.act_fn(gate) * up if middle is None else middle)
        return made

    return forward


def _gated(op: str, gate: Tensor, up: Tensor, more: tuple[int, ...]) -> dict[str, Any]:
    return {"gate": gate, "up": up, **dict(zip(("tanh",), more, strict=False))}


def _refuse_other_mlp(module: Any) -> None:
    """Check that its class computes down(act(gate(x)) * up(x)) and nothing more, in float64 on a small module of that
    class."""
    probe = copy.copy(module)
    probe._modules = {**module._modules}
    for seed, (name, sizes) in enumerate({"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}.items()):
        part = nn.Linear(*sizes, bias=False, dtype=torch.float64, device="meta")
        part.weight = nn.Parameter(_drawn(*sizes[::-1], dtype=torch.float64, seed=seed), requires_grad=False)
        probe._modules[name] = part
    x = _drawn(3, 8, dtype=torch.float64, seed=9)
    expected = probe.down_proj(probe.act_fn(probe.gate_proj(x)) * probe.up_proj(x))
    try:
        got = type(module).forward(probe, x)
    except Exception as error:
        raise _NotThis(f"{type(module).__name__} takes more than its projections: {error}") from error
    # The same sums of eight products in float64, in any order: they differ by roundings of 2^-53 alone.
    if not isinstance(got, Tensor) or not torch.allclose(got, expected, rtol=1e-12, atol=1e-12):
        raise _NotThis(f"{type(module).__name__} computes something else than down(act(gate(x)) * up(x))")


# --- rotary ----------------------------------------------------------------------------------------------------------


def _prove_frequencies(module: Any) -> Forward:
    """Keep cos and sin unchanged, and attach the positions and frequencies that they were made from."""
    _own(module)
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    usable = {}
    for layer_type, kind in kinds.items():
        prefix = f"{layer_type}_" if layer_type else ""
        if kind in STATIC_ROPE and getattr(module, f"{prefix}attention_scaling", None) == 1.0:
            usable[layer_type] = f"{prefix}inv_freq"
    if not usable:
        raise _NotThis(f"its frequencies change with the position, or its scores are scaled ({', '.join(kinds)})")
    for layer_type, name in usable.items():
        _refuse_other_tables(module, layer_type, getattr(module, name))
    original = type(module).forward

    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = original(self, x, position_ids, *(() if layer_type is None else (layer_type,)))
        name = usable.get(layer_type or "")
        if name is not None and position_ids.dim() == 2 and not torch.compiler.is_compiling():
            cos._autosel = (position_ids, getattr(self, name).float())  # half a model's buffers are halved too
        return cos, sin

    return forward


def _refuse_other_tables(module: Any, layer_type: str, inv_freq: Tensor) -> None:
    """Check that the module returns cos and sin of positions times frequencies, each twice in a row."""
    positions = torch.tensor([[0, 1, 200]])
    x = _drawn(1, 3, 8, dtype=torch.float32)
    own = type(module).forward(module, x, positions, *((layer_type,) if layer_type else ()))
    angle = torch.cat((inv_freq, inv_freq)).double() * positions[..., None]
    # An angle in fp32 is off by a few roundings of itself; cos and sin by as much, and by one of their own.
    allowed = 4 * U32 * angle.abs() + 2 * UNIT[DTYPE_NAME[x.dtype]]
    alike = isinstance(own, tuple) and [getattr(t, "shape", None) for t in own] == [angle.shape] * 2
    if not alike or any(((t - e).abs() > allowed).any() for t, e in zip(own, (angle.cos(), angle.sin()), strict=True)):
        raise _NotThis(f"{type(module).__name__} returns something else than cos and sin, each for both halves")


def _prove_rotation(module: Any) -> Names:
    _own(module)
    own = _names_used(module)["apply_rotary_pos_emb"]
    head, served = int(module.head_dim), _ask("rope")
    inputs = _refuse_other_rotation(module, own, head, head)
    partly = False  # rotating the first part of a head
    with suppress(Exception):
        _refuse_other_rotation(module, own, head, head // 2)
        partly = True
    _serves("rope", inputs, *served(*inputs.values()))

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        mark = getattr(cos, "_autosel", None)
        if mark is not None and not more and not named and not _undescribed(q, k) and _fits(q, k, mark, partly):
            with suppress(BadArguments):
                return _rotated(served, q, k, *mark)
        made: tuple[Tensor, Tensor] = own(q, k, cos, sin, *more, **named)
        return made

    names = {"apply_rotary_pos_emb": rotate}
    _with_globals(type(module).forward, names)  # or a decorator is in the way
    return names


def _refuse_other_rotation(module: Any, own: Forward, head: int, turned: int) -> dict[str, Any]:
    """Return inputs of the op, for heads of which the first `turned` elements are rotated."""
    config, dtype = module.config, next(module.parameters()).dtype
    hq, hkv = int(config.num_attention_heads), int(config.num_key_value_heads)
    q, k = _drawn(1, 3, hq, head, dtype=dtype), _drawn(1, 3, hkv, head, dtype=dtype, seed=2)
    positions = torch.tensor([[0, 1, 1000]])
    inv_freq = 10_000.0 ** -(torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angle = positions[..., None].float() * inv_freq
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angle.cos(), angle.sin()))
    inputs = {"q": q[0], "k": k[0], "positions": positions[0], "inv_freq": inv_freq, "style": 0}
    theirs = [t.transpose(1, 2)[0].contiguous() for t in own(q.transpose(1, 2), k.transpose(1, 2), cos, sin)]
    wrong = _wrong("rope", inputs, *theirs)
    if wrong:
        raise _NotThis(f"{type(module).__name__} does not rotate halves ({wrong})")
    return inputs


def _fits(q: Tensor, k: Tensor, mark: tuple[Tensor, Tensor], partly: bool) -> bool:
    """Return True if the heads [B,H,S,D] are those of the positions, and are rotated as was proven."""
    positions, inv_freq = mark
    if q.dim() != 4 or k.dim() != 4 or positions.shape[0] not in (1, q.shape[0]) or positions.shape[1] != q.shape[2]:
        return False
    turned = 2 * inv_freq.shape[0]
    return q.shape[2:] == k.shape[2:] and (turned == q.shape[3] or (partly and turned < q.shape[3]))


def _rotated(
    served: Callable[..., Any], q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B,Hq,S,D] and k, as views of [B,S,H,D] if that is their layout."""
    b, hq, s, d = q.shape
    rows = positions.expand(b, s).reshape(-1)
    tokens = (t.transpose(1, 2).reshape(b * s, t.shape[1], d) for t in (q, k))
    q_out, k_out = served(*tokens, rows, inv_freq, 0)
    return q_out.view(b, s, hq, d).transpose(1, 2), k_out.view(b, s, -1, d).transpose(1, 2)


# --- the forward of attention ----------------------------------------------------------------------------------------


def _around_attention(original: Forward, names: Names) -> Forward:
    replaced = _with_globals(original, names)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(states, Tensor) or states.device != getattr(self, PROVEN_ON, None):
            return original(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
            _make_room(cache, getattr(self, "layer_idx", None))
        return replaced(self, *args, **kwargs)

    return forward


def _with_globals(function: Any, names: Names) -> Forward:
    """Return a copy of `function` that reads `names` instead of its module's globals; its module and other models keep
    theirs.

    Decorators of transformers around it are copied too, each around the copy. Raises _NotThis for other decorators.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        there = {**function.__globals__, **names}
        there.pop("__name__")  # otherwise torch.compile would read the globals of the module with this name
        return _copied(function, there, function.__closure__)
    written_in = getattr(function, "__globals__", {}).get("__name__", "another kind")  # `wraps` hides it in __module__
    if not isinstance(function, types.FunctionType) or not written_in.startswith("transformers."):
        raise _NotThis(f"{inner.__qualname__} is wrapped by a decorator of {written_in}, not of transformers")
    cells = function.__closure__ or ()
    if sum(_holds(cell, inner) for cell in cells) != 1:
        raise _NotThis(f"{inner.__qualname__} is wrapped by a decorator of {written_in} that does not hold it directly")
    copied = _with_globals(inner, names)
    closure = tuple(types.CellType(copied) if _holds(cell, inner) else cell for cell in cells)
    return _copied(function, function.__globals__, closure, __wrapped__=copied)


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _copied(
    function: Any, names: dict[str, Any], closure: tuple[types.CellType, ...] | None, **attributes: Any
) -> Forward:
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({**function.__dict__, **attributes})
    return made


# --- the cache -------------------------------------------------------------------------------------------------------


def _make_room(cache: Any, index: int | None) -> None:
    """Turn a plain dynamic layer of the cache into one that grows in place; others stay unchanged."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", ())
    if index is not None and index < len(layers) and type(layers[index]) is DynamicLayer:
        layers[index].__class__ = _growing()


@functools.cache
def _growing() -> type:
    """Return a layer class that grows in place. DynamicLayer copies all its keys and values at each step. This one
    appends, with room for an eighth more, as long as its contents are what it returned last: after a crop, a reordering
    or any other change it copies like its base class. References to older keys remain valid."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[misc]
        keys: Tensor
        values: Tensor
        room: tuple[Tensor, Tensor] | None = None
        last: tuple[Tensor, Tensor] | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            new = key_states, value_states
            if self.last is None or not self._goes_on(new):
                self.room = None
                self.last = super().update(key_states, value_states, *args, **kwargs)
                return self.last
            held, count = self.keys.shape[2], key_states.shape[2]
            if self.room is None or self.room[0].shape[2] < held + count:
                self.room = tuple(_with_room(t, held + count) for t in self.last)  # type: ignore[assignment]
            assert self.room is not None
            for room, states in zip(self.room, new, strict=True):
                room[:, :, held : held + count] = states
            self.keys, self.values = self.last = tuple(room[:, :, : held + count] for room in self.room)  # type: ignore[assignment]
            return self.keys, self.values

        def _goes_on(self, new: tuple[Tensor, Tensor]) -> bool:
            assert self.last is not None
            if self.keys is not self.last[0] or self.values is not self.last[1] or self.keys.dim() != 4:
                return False
            return not torch.compiler.is_compiling() and all(
                t.shape[:2] == held.shape[:2]
                and (t.shape[3], t.dtype, t.device) == (held.shape[3], held.dtype, held.device)
                and not (torch.is_grad_enabled() and (t.requires_grad or held.requires_grad))
                and held.is_inference() == torch.is_inference_mode_enabled()
                for t, held in zip(new, self.last, strict=True)
            )

    return GrowingLayer


LEAST_ROOM = 64  # tokens


def _with_room(held: Tensor, needed: int) -> Tensor:
    made = held.new_empty(*held.shape[:2], needed + max(LEAST_ROOM, needed // 8), held.shape[3])
    made[:, :, : held.shape[2]] = held
    return made


# --- attention -------------------------------------------------------------------------------------------------------


# Arguments that no form of transformers' attention reads, or that a mask of one query already expresses.
UNREAD = {"position_ids", "cache_position", "use_cache", "return_dict", "labels", "num_items_in_batch", "seq_idx"}
UNREAD |= {"output_hidden_states", "output_router_logits", "logits_to_keep"}
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # only FlashAttention reads them


def _prove_attention(module: Any) -> Names:
    """Check that the module's own eager form computes the op, and that the kernel that serves the op is correct."""
    _own(module)
    if not getattr(module, "is_causal", False):
        raise _NotThis("it is not causal")
    used, dtype = _names_used(module), next(module.parameters()).dtype
    eager = [name for name in used if name.endswith("eager_attention_forward")]
    if len(eager) != 1:
        raise _NotThis(f"{type(module).__name__} has {len(eager)} eager forms to compare with, not one")
    q, k, v, rest = _heads_of(module)
    more = {"softcap": rest["softcap"]} if rest["softcap"] else {}
    own, _ = used[eager[0]](module, q, k, v, None, scaling=module.scaling, dropout=0.0, **more)
    wrong = _wrong("attn", {"q": q, "k": k, "v": v, **rest}, own.transpose(1, 2).contiguous())
    if wrong:
        raise _NotThis(f"{type(module).__name__} computes something else than attention ({wrong})")
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), **rest}
    _serves("attn", inputs, _asked("attn")(*inputs.values()))
    asking = functools.partial(_attend, used[eager[0]], "eager")
    names = {eager[0]: asking, "ALL_ATTENTION_FUNCTIONS": _asking(used["ALL_ATTENTION_FUNCTIONS"])}
    _with_globals(type(module).forward, names)  # or a decorator is in the way
    return names


def _heads_of(module: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return q, k, v of one query over 20 keys in the module's heads, fp32, and the op's other arguments."""
    config, head = module.config, int(module.head_dim)
    q = _drawn(1, int(config.num_attention_heads), 1, head, dtype=torch.float32)
    k, v = (_drawn(1, int(config.num_key_value_heads), 20, head, dtype=torch.float32, seed=s) for s in (2, 3))
    cap = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
    return q, k, v, {"lengths": None, "max_len": 20, "scale": module.scaling, "window": 0, "softcap": cap}


def _asking(registry: Any) -> Any:
    """Return a copy of a registry of attention functions in which those that compute the op use the decision."""
    made = copy.copy(registry)
    kind: Any = type(registry)
    made.__class__ = _asking_kind(kind)
    return made


@functools.cache
def _asking_kind(kind: Any) -> Any:
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class Asking(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            theirs = super().__getitem__(name)
            if theirs is sdpa_attention_forward:
                return functools.partial(_attend, theirs, "sdpa")
            return functools.partial(_attend, theirs, "flash") if theirs is flash_attention_forward else theirs

    return Asking


def _attend(
    theirs: Forward,
    form: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *more: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Serve q [B,Hq,S,D], k and v [B,Hkv,L,D] -> o [B,S,Hq,D], or call `theirs`: the model's own, of a form of eager,
    sdpa and flash."""
    made = None
    if not more and not _dynamic(module, query, key, value):
        with suppress(BadArguments):
            made = _served_attention(form, module, query, key, value, attention_mask, **named)
    if made is not None:
        return made.transpose(1, 2).contiguous(), None
    found: tuple[Tensor, Tensor | None] = theirs(module, query, key, value, attention_mask, *more, **named)
    return found


def _served_attention(
    form: str,
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **named: Any,
) -> Tensor | None:
    """Return None for calls that the ops do not describe. Eager and sdpa have their windows in the mask, flash as an
    argument."""
    s, keys, scale, cap = q.shape[2], k.shape[2], scaling or 0.0, softcap or 0.0
    known = UNREAD if form == "flash" else UNREAD | PACKED
    if dropout or any(named[n] is not None and named[n] is not False for n in named if n not in known):
        return None
    if (form == "flash" and (sliding_window or keys) < keys) or (form == "sdpa" and cap):
        return None
    if s == 1 and mask is None:
        made: Tensor = _asked("attn")(q, k, v, None, keys, scale, 0, cap)
        return made
    # for prompts, sdpa has no mask where a causal one would do
    readable = form == "eager" or (form == "sdpa" and s == 1)
    seen = _look(mask, module) if readable and mask is not None and mask.shape[-1] == keys else None
    if s == 1:
        return _by_spans(q, k, v, seen.spans, scale, cap) if seen and seen.spans else None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if s == keys and (seen.causal if seen else form == "sdpa" and mask is None and causal):
        prompt: Tensor = _asked("prefill_attn")(q, k, v, scale, 0, cap)
        return prompt
    return None


# --- masks -----------------------------------------------------------------------------------------------------------

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Describe a mask's visible keys: (first, last + 1) for each row's single query, or a prompt's causal half."""

    spans: Spans | None
    causal: bool
    asked_by: set[int]


def _look(mask: Tensor, module: Any) -> _Seen | None:
    """Read a mask [B,1,S,L], boolean or added to the scores, once for all modules of a step. A module that reads it
    twice starts another step, before which the caller may have changed its mask. None: not read, or it weakens single
    scores."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return None  # reading it on a GPU would have to wait, which breaks a capture
    found: _Seen | None = getattr(mask, "_autosel", None)
    if found is None or id(module) in found.asked_by:
        lets = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if mask.dtype != torch.bool and not bool((lets | (mask[:, 0] <= torch.finfo(mask.dtype).min)).all()):
            return None
        one, square = lets.shape[1] == 1, lets.shape[1] == lets.shape[2]
        causal = square and not one and bool((lets == torch.ones_like(lets).tril()).all())
        found = _Seen(spans=_spans(lets[:, 0]) if one else None, causal=causal, asked_by=set())
        mask._autosel = found  # type: ignore[attr-defined]
    found.asked_by.add(id(module))
    return found


def _spans(seen: Tensor) -> Spans | None:
    """Return (first, last + 1) of the keys that each row sees, from bool [B, L]; None unless each row sees one unbroken
    run."""
    first, count = seen.int().argmax(-1), seen.sum(-1)
    end = seen.shape[1] - seen.flip(-1).int().argmax(-1)
    if not bool(((end - first == count) & (count > 0)).all()):
        return None
    return tuple(zip(first.tolist(), end.tolist(), strict=True))


def _by_spans(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, cap: float) -> Tensor | None:
    """Split rows that see different keys into separate calls, unless all begin at the first key."""
    attn = _asked("attn")
    if len(set(spans)) == 1:
        first, end = spans[0]
        made: Tensor = attn(q, k[:, :, first:end], v[:, :, first:end], None, end - first, scale, 0, cap)
        return made
    if len(spans) != q.shape[0]:
        return None
    if all(first == 0 for first, _ in spans):
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
        ragged: Tensor = attn(q, k, v, ends, int(ends.max()), scale, 0, cap)
        return ragged
    out = torch.empty_like(q)
    for row, (first, end) in enumerate(spans):
        here = slice(row, row + 1)
        out[here] = attn(q[here], k[here, :, first:end], v[here, :, first:end], None, end - first, scale, 0, cap)
    return out


def _asked(op: str) -> Callable[..., Any]:
    """Return the present board: models share one attention function."""
    return _operator(op) if torch.compiler.is_compiling() else dispatch.best(op)


def _operator(op: str) -> Callable[..., Any]:
    from autosel.integrations import torch_ops  # registers them

    found: Callable[..., Any] = getattr(getattr(torch.ops, torch_ops.NAMESPACE), op)
    return found
