"""Spell a plan as the command that measures it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autosel import settings
from autosel.decode.run import AskedStep, Plan
from autosel.models import weights_of

STEP_WORDS: Mapping[AskedStep, list[str]] = {
    "auto": [],
    "ops": ["--no-persistent", "--no-graph"],
    "graph": ["--graph"],
    "whole": ["--persistent"],
}


def command(name: str, plan: Plan) -> str:
    """Return the command of a run whose stream goes on, of the model of this name."""
    s = plan.sampling
    words: list[object] = ["--model", name, "--dtype", plan.dtype, "--seq", plan.seq, "--iters", plan.iters]
    words += ["--warmup", 0, "--advance"]
    words += ["--layers", plan.layers] if plan.layers else []
    words += ["--device", plan.device] if plan.device != "cpu" else []
    words += ["--weights", plan.weights] if plan.weights != weights_of(name) else []
    words += ["--paged", plan.page] if plan.cache == "paged" else []
    words += ["--seed", plan.seed] if plan.seed else []
    words += STEP_WORDS[plan.step]
    words += ["--no-packed"] if plan.layout == "plain" else []
    words += ["--no-prealloc"] if not plan.prealloc else []
    if s.changes_greedy:
        words += ["--temperature", s.temperature, "--top-k", s.top_k, "--top-p", s.top_p]
        words += ["--repetition-penalty", s.repetition_penalty]
    return shlex.join([settings.spelling(), "run", *map(str, words)])
