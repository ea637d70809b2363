"""Patch a Hugging Face model in place, completely or not at all, and restore it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosel import devices, extras
from autosel.errors import UsageError
from autosel.integrations.transformers.coded import Codes, dequantise, held_codes, told_codes
from autosel.integrations.transformers.forward import around_attention
from autosel.integrations.transformers.plan import KINDS, LeftModule, Replacement, plan_of
from autosel.integrations.transformers.proof import PROVEN_ON, Forward, Names, NotReplaceable
from autosel.integrations.transformers.whole import Whole, around_steps, whole_of
from autosel.ops.arguments import FLOATS

NEEDED = "transformers 5"
BEFORE = "_autosel_before"  # attribute of a patched module: the forward that its package had put on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """Count replaced modules, and their total, by kind; with the reasons for the others.

    `codes` describes the layers that are served as codes; `steps` says where decode steps run whole, or why they do
    not.
    """

    replaced: Mapping[str, int]
    found: Mapping[str, int]
    left: tuple[LeftModule, ...]
    steps: str = ""
    codes: str = ""

    def __str__(self) -> str:
        counts = ", ".join(f"{k} {self.replaced[k]}/{self.found[k]}" for k in KINDS if self.found[k])
        reasons = sorted({f"{left.kind} not replaced: {left.reason}" for left in self.left})
        return "\n".join([f"autosel: {counts}", *(f"  {line}" for line in (*reasons, self.codes, self.steps) if line)])


def patch(model: Any) -> Patched:
    """Replace all supported modules; print and return the counts. The model is changed in place, completely or not at
    all.

    Raises UsageError if it is not a transformers model, is patched already, mixes devices or dtypes, or has nothing to
    replace.
    """
    _refuse(model)
    dequantise(model)
    changes, left = plan_of(model)
    codes = held_codes((change.name, change.what) for change in changes)
    whole = _whole(model, codes)
    patched = Patched(
        replaced={kind: sum(c.kind == kind for c in changes) for kind in KINDS},
        found={kind: [*(c.kind for c in changes), *(x.kind for x in left)].count(kind) for kind in KINDS},
        left=tuple(left),
        steps=whole.told() if isinstance(whole, Whole) else f"no whole decode steps: {whole}",
        codes=told_codes(codes),
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
            if "forward" in module.__dict__:  # a quantised layer's, by its package
                module.__dict__[BEFORE] = module.__dict__["forward"]
            # A bound method, so that a deep copy of the model runs on the copy's own weights.
            module.__dict__["forward"] = types.MethodType(forward, module)
            _OURS.add(forward)
        forward = around_steps(type(model).forward, whole if isinstance(whole, Whole) else None)
        model.__dict__["forward"] = types.MethodType(forward, model)
        _OURS.add(forward)
        if isinstance(whole, Whole):
            whole.begin()
    except BaseException:
        _restore(model)
        raise
    print(patched)  # noqa: T201  (whoever patches shall see at once how much of the model it reached)
    return patched


def _whole(model: Any, codes: Mapping[str, Codes]) -> Whole | str:
    """Return what runs the model's decode steps whole, or why nothing does."""
    try:
        return whole_of(model, codes)
    except NotReplaceable as reason:
        return str(reason)


def _forwards(changes: list[Replacement]) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each module once, with its new forward."""
    named: dict[int, tuple[nn.Module, Names]] = {}
    for change in changes:
        if isinstance(change.what, dict):
            named.setdefault(id(change.module), (change.module, {}))[1].update(change.what)
        else:
            yield change.module, change.what
    for module, names in named.values():
        yield module, around_attention(type(module).forward, names)


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
        before = module.__dict__.pop(BEFORE, None)
        if _is_ours(module):
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


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
    places = {p.device for p in model.parameters()}
    if len(places) != 1 or next(iter(places)).type not in devices.KINDS:
        raise UsageError(
            f"the model's parameters are on {', '.join(sorted(map(str, places))) or 'no device'}",
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
