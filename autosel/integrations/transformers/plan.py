"""Plan the replacements of a model: which modules can be replaced, each proven, and why the others are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosel.integrations.transformers.attention import prove_attention
from autosel.integrations.transformers.coded import prove_coded
from autosel.integrations.transformers.layer_format import told_format
from autosel.integrations.transformers.linear import prove_linear
from autosel.integrations.transformers.mlp import prove_mlp
from autosel.integrations.transformers.norms import is_called_norm, prove_norm, resembles_norm
from autosel.integrations.transformers.proof import Forward, Names, NotReplaceable, names_used
from autosel.integrations.transformers.rotary import prove_frequencies, prove_rotation

log = logging.getLogger(__name__)
KINDS = ("attention", "RMSNorm", "rotary", "MLP", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftModule:
    """Describe a module that was not replaced."""

    module: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Hold one module's replacement, proven and not yet made. `kind` is one of KINDS, or "frequencies"."""

    name: str
    kind: str
    module: nn.Module
    what: Forward | Names


def plan_of(model: Any) -> tuple[list[Replacement], list[LeftModule]]:
    changes: list[Replacement] = []
    left: list[LeftModule] = []
    # The proofs' operands belong on the weights' device, whatever the process's default device.
    with torch.inference_mode(), next(model.parameters()).device:
        for name, module in model.named_modules():
            for kind, prove in _kinds(module):
                try:
                    changes.append(Replacement(name=name, kind=kind, module=module, what=prove(module)))
                except NotReplaceable as reason:
                    if kind != "RMSNorm" or is_called_norm(module):
                        left.append(LeftModule(module=name, kind=kind, reason=str(reason)))
                except Exception as error:  # a class that only resembles a known one
                    log.info("%s cannot be tried", name, exc_info=True)
                    left.append(LeftModule(module=name, kind=kind, reason=_why(module, error)))
    return _rotary_or_nothing(changes, left)


def _why(module: nn.Module, error: Exception) -> str:
    """Return why a module whose trial raised an error is not replaced."""
    name = type(module).__name__
    if isinstance(error, AttributeError) and error.name is not None:
        return f"{name}: {type(error.obj).__name__} has no {error.name}"
    return f"{name} cannot be tried: {str(error).partition(chr(10))[0] or type(error).__name__}"


def _rotary_or_nothing(
    changes: list[Replacement], left: list[LeftModule]
) -> tuple[list[Replacement], list[LeftModule]]:
    """Refuse rotary embeddings without known frequencies: the op needs positions and frequencies."""
    told = any(c.kind == "frequencies" for c in changes)
    used = any(c.kind == "rotary" for c in changes)
    if told and used:
        return changes, [x for x in left if x.kind in KINDS]
    why = next((x.reason for x in left if x.kind == "frequencies"), "its frequencies are not known")
    left += [LeftModule(module=c.name, kind=c.kind, reason=why) for c in changes if c.kind == "rotary"]
    return [c for c in changes if c.kind not in ("rotary", "frequencies")], [x for x in left if x.kind in KINDS]


def _kinds(module: nn.Module) -> Iterator[tuple[str, Callable[[Any], Forward | Names]]]:
    """Return the kinds that a module resembles, still to be proven."""
    kind = type(module).__name__
    if told_format(module):
        yield "linear", prove_coded
    elif isinstance(module, nn.Linear):
        yield "linear", prove_linear
    elif resembles_norm(module):
        yield "RMSNorm", prove_norm
    elif all(isinstance(getattr(module, n, None), nn.Module) for n in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        yield "MLP", prove_mlp
    elif kind.endswith("RotaryEmbedding") and hasattr(module, "rope_type"):
        yield "frequencies", prove_frequencies
    elif kind.endswith("Attention") and "ALL_ATTENTION_FUNCTIONS" in names_used(module):
        yield "attention", prove_attention
        if "apply_rotary_pos_emb" in names_used(module):
            yield "rotary", prove_rotation
