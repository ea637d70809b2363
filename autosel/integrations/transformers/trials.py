"""Time a patched model's decode steps, module by module, in turn with the model's own code, and keep the faster one.

Each decided kernel is faster than PyTorch's, but a call through Python costs a few microseconds: a small model, or one
for which little is decided, may be faster as it was. Both arms append to the cache in place. On a GPU, where a call
returns before its work is done, the patched modules always run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosel import devices, dispatch
from autosel.guard.rate import CANARY
from autosel.integrations.transformers.forward import CACHE_NAMES
from autosel.integrations.transformers.proof import Forward, own_code
from autosel.integrations.trial import ServingTrial
from autosel.values import length_bucket

log = logging.getLogger(__name__)
FIRST = CANARY + 1  # untimed steps: the guard checks each of the first calls of the logits, one per step
LATER = 2  # for another context of as many sequences, where attention alone is new

Trials = dict[tuple[Any, ...], ServingTrial]  # by board, threads, sequences and contexts


@dataclass(frozen=True, slots=True)
class StepTrials:
    """The trials of a patched model and its copies."""

    of: weakref.WeakKeyDictionary[nn.Module, Trials] = field(default_factory=weakref.WeakKeyDictionary)

    def __call__(self, model: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's `forward` over its patched modules, or over their own code."""
        run = partial(forward, model, *args, **kwargs)
        asked = _decode_step(model, args, kwargs)
        if asked is None:
            return run()
        board = dispatch.board()
        trials = self.of.setdefault(model, {})
        key = (id(board), board.digest, board.epoch, torch.get_num_threads(), *asked)
        if key not in trials:
            trials[key] = ServingTrial(LATER if any(key[:-1] == known[:-1] for known in trials) else FIRST)
        trial = trials[key]
        settled = trial.over
        if settled:
            with own_code(not trial.pays):
                return run()
        made, _ = trial(run, partial(_on_own_code, run))
        if trial.over and not trial.pays:
            _tell(model, asked, trial)
        return made


def _on_own_code(run: partial[Any]) -> Any:
    with own_code():
        return run()


def _decode_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, tuple[int, int]] | None:
    """Return (sequences, bucket of the context) of a step of one token each on the CPU; None for any other call."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or model.training:
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1 or cache is None:
        return None
    if not devices.on_host(tokens.device.type):
        return None
    return tokens.shape[0], length_bucket(_held(cache) + 1)


def _held(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 if its states do not grow with the text."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # linear attention alone; a cache of a model's own
        return 0


def _tell(model: nn.Module, asked: tuple[int, tuple[int, int]], trial: ServingTrial) -> None:
    rows, (low, high) = asked
    log.warning(
        "%s runs its own code in decode steps of %d sequences at %d to %d tokens, where it is faster: with patched "
        "modules a step took %s. More decisions may change that: `autosel record`, then `autosel tune --recorded`.",
        type(model).__name__, rows, low, high, trial.told,
    )  # fmt: skip
