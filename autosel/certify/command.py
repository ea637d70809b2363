"""The command of a run: write a plan as a command, and translate commands of earlier versions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autosel import devices, settings
from autosel.decode.run import Plan
from autosel.formats import PLAIN
from autosel.models import weights_of

EARLIER = ("--no-persistent", "--no-packed", "--graph", "--no-graph")


def command(name: str, plan: Plan) -> str:
    """Return the command of a run with an advancing stream, for the model of this name."""
    s = plan.sampling
    words: list[object] = ["--model", name, "--dtype", plan.dtype, "--seq", plan.seq, "--iters", plan.iters]
    words += ["--warmup", plan.warmup, "--advance"]
    words += ["--prompt", plan.prompt] if plan.prompt != "random" else []
    words += ["--format", plan.model.weight] if plan.model.weight != PLAIN else []
    words += ["--layers", plan.layers] if plan.layers else []
    words += ["--device", plan.device] if plan.device != devices.HOST else []
    words += ["--weights", plan.weights] if plan.weights != weights_of(name) else []
    words += ["--paged", plan.page] if plan.cache == "paged" else []
    words += ["--seed", plan.seed] if plan.seed else []
    words += ["--step", plan.step] if plan.step != "auto" else []
    words += ["--weights-layout", plan.layout] if plan.layout != "auto" else []
    words += ["--no-prealloc"] if not plan.prealloc else []
    if s.changes_greedy:
        words += ["--temperature", s.temperature, "--top-k", s.top_k, "--top-p", s.top_p]
        words += ["--repetition-penalty", s.repetition_penalty]
    return shlex.join([settings.spelling(), "run", *map(str, words)])


def translated(words: Sequence[str], ran: str) -> list[str]:
    """Return the words of a command with today's options for the form of the step.

    Earlier, without --persistent a GPU replayed a graph where it could, and without --graph it could run the whole
    step: `ran`, the first word of the certificate's mode, is what it did.
    """
    given = {word for word in words if word in (*EARLIER, "--persistent")}
    found = [word for word in words if word not in EARLIER]
    if step := _step(given, ran, on_gpu=_device(words) != devices.HOST):
        found += ["--step", step]
    return [*found, "--weights-layout", "plain"] if "--no-packed" in given else found


def _step(given: set[str], ran: str, *, on_gpu: bool) -> str:
    if "--persistent" in given:
        return ""  # the same option today
    if "--graph" in given:
        return "graph"
    if "--no-persistent" in given:
        return "graph" if ran == "graph" else "ops"
    if "--no-graph" in given and on_gpu:
        return "whole" if ran == "team" else "ops"
    return ""


def _device(words: Sequence[str]) -> str:
    return words[words.index("--device") + 1] if "--device" in words[:-1] else devices.HOST
