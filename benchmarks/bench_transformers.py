"""Compare a Hugging Face model with the same model after `autosel.patch`, in turn, on the same weights.

    python benchmarks/bench_transformers.py [--model llama-1b] [--layers 16] [--seq 2048] [--rounds 40] [--json]
    python benchmarks/bench_transformers.py --generate [--batch 1 4] [--cache dynamic static] [--compile] [--tokens 24]

It times decode steps of one sequence under torch.inference_mode, as `generate` makes them: transformers' own forward,
SDPA and DynamicCache. Its layers concatenate, or grow in place in the patched model, and are restored after each step,
untimed. Both models hold the same tensors. Pairs run in random order, every step waits until the other model's threads
sleep, and the chosen tokens are compared. Timing starts after the guard's first checks (each of the first 32 calls of a
shape in a process also runs the baseline, which for the logits is every one of the first 32 tokens), and after the
steps in which a patched model tries its own code.

--generate calls `generate` instead (greedy, a random prompt of --seq tokens), for each batch and kind of cache, and
times the tokens after the first. --compile adds a third arm: the unpatched model's forward under torch.compile, over a
static cache. A --model DIR in codes of compressed-tensors is loaded by transformers, which needs that package; its
unpatched model computes with the dequantised weights.

This home's decisions serve. To decide these shapes, run this program
under `autosel record`, then run `autosel tune --recorded`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import command_line
import torch
from hugging_face import filled_cache, loaded_model, model_of, rewinding
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autosel
from autosel import dispatch, fingerprint, models
from autosel.certify.statistics import median, speedup_interval
from autosel.decode.cache import make_cache
from autosel.decode.run import Plan
from autosel.decode.weights import Weights, load_weights
from autosel.devices.cpu.idle import wait_until_idle
from autosel.formats import PLAIN
from autosel.integrations.transformers.trials import FIRST
from autosel.integrations.trial import TIMED

GOAL = 1.5
RUN_UP = 2  # steps until a cache has the state of the middle of a text
WARM = FIRST + 2 * TIMED + 1  # steps


def main() -> int:
    options = _parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    shape = models.load(options.model)
    layers = min(options.layers, shape.layers)
    source = options.model if Path(options.model).is_dir() else "random"
    plan = Plan(model=shape, layers=layers, dtype=options.dtype, seq=options.seq, seed=options.seed, weights=source)
    in_codes = shape.stored != PLAIN
    if in_codes and not (options.generate and layers == shape.layers):
        sys.exit("a checkpoint in codes is compared with --generate, with all its layers")
    weights = None if in_codes else load_weights(plan)
    with torch.inference_mode():
        if weights is None:
            own, ours = (loaded_model(options.model, options.dtype) for _ in range(2))
        else:
            own = model_of(weights)
            ours = copy.deepcopy(own, {id(t): t for t in (*own.parameters(), *own.buffers())})
        if weights is None or options.generate:
            found = _compared_generating(options, own, ours, shape.V)
        else:
            found = _compared_steps(options, own, ours, weights)
    found |= {"model": shape.name, "layers": layers, "dtype": options.dtype, "seq": options.seq, "device": fp.name}
    found |= {"date": command_line.today(), "goal": GOAL, "threads": fp.identity["cpus"]}
    found |= {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    found["load"] = round(os.getloadavg()[0], 2)
    command_line.show(options, found, _of_cells if options.generate else _of_steps)
    return 0


def _compared_steps(options: argparse.Namespace, own: Any, ours: Any, weights: Weights) -> dict[str, Any]:
    cache = make_cache(weights.shape, weights.dtype, rows=1, room=options.seq, device="cpu")
    generator = torch.Generator().manual_seed(options.seed)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_(generator=generator)
    token = torch.randint(weights.shape.V, (1, 1), generator=generator)
    with dispatch.use(autosel.settings.home()) as board, dispatch.measuring():
        with redirect_stdout(sys.stderr):
            patched = autosel.patch(ours)
        held = options.seq - 1 - RUN_UP
        caches = {"own": filled_cache(own, cache, held), "patched": filled_cache(ours, cache, held)}
        found = _compared({"own": own, "patched": ours}, caches, token, options)
        return found | {"replaced": dict(patched.replaced), "uses": _uses(board)}


def _compared_generating(options: argparse.Namespace, own: Any, ours: Any, vocabulary: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(options.seed)
    prompts = {b: torch.randint(5, vocabulary, (b, options.seq), generator=generator) for b in options.batch}

    with dispatch.use(autosel.settings.home()) as board, dispatch.measuring():
        with redirect_stdout(sys.stderr):
            patched = autosel.patch(ours)
        arms = {"own": own, "patched": ours}
        if options.compile:
            arms["compiled"] = copy.copy(own)
            arms["compiled"].forward = torch.compile(own.forward)
        cells = list(_generate(options, arms, prompts))
        return {"cells": cells, "replaced": dict(patched.replaced), "uses": _uses(board)}


def _uses(board: dispatch.Board) -> list[dict[str, Any]]:
    used = sorted((u for u in board.uses() if u.calls), key=lambda u: -u.calls)
    return [{"bucket": u.bucket, "candidate": u.candidate, "decision": u.decision_id, "calls": u.calls} for u in used]


def _compared(
    models_: dict[str, Any], caches: dict[str, Any], token: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in models_}
    distance, equal, rng = 0.0, 0, random.Random(options.seed)

    def step(name: str) -> Tensor:
        made: Tensor = models_[name](token, past_key_values=caches[name], use_cache=True).logits[:, -1]
        return made

    for name in [*models_] * RUN_UP:
        step(name)
    rewind = {name: rewinding(cache) for name, cache in caches.items()}
    for i in range(options.warmup + options.rounds):
        made: dict[str, Tensor] = {}
        for name in rng.sample(list(models_), 2):
            wait_until_idle()
            begin = time.perf_counter_ns()
            made[name] = step(name)
            made[name].argmax(-1).tolist()
            took = time.perf_counter_ns() - begin
            rewind[name]()
            if i >= options.warmup:
                times[name].append(took / 1e6)
        distance = max(distance, (made["own"].float() - made["patched"].float()).abs().max().item())
        equal += int(made["own"].argmax()) == int(made["patched"].argmax())
    interval = speedup_interval(times["own"], times["patched"])
    return {
        "own_ms": median(times["own"]),
        "patched_ms": median(times["patched"]),
        "speedup": median(times["own"]) / median(times["patched"]),
        "interval": [interval.lo, interval.hi],
        "steps": options.rounds,
        "tokens_equal": f"{equal} of {options.warmup + options.rounds}",
        "largest_logit_difference": distance,
    }


# --- generate ---------------------------------------------------------------------------------------------------------


def generated(model: Any, prompt: Tensor, count: int, cache: str) -> tuple[list[float], Tensor]:
    """Return the ms between the tokens of one greedy `generate`, and the tokens."""
    from transformers import StoppingCriteriaList

    ends: list[int] = []

    def never(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        ends.append(time.perf_counter_ns())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    more: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([never]),
        **more,
    )
    return [(b - a) / 1e6 for a, b in itertools.pairwise(ends)], tokens[:, prompt.shape[1] :]


def _generate(
    options: argparse.Namespace, arms: dict[str, Any], prompts: dict[int, Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield the results of each batch and kind of cache, with the ms between tokens by arm; the arms of a round come in
    random order."""
    rng = random.Random(options.seed)
    for batch, cache in itertools.product(options.batch, options.cache):
        prompt = prompts[batch]
        for model in arms.values():
            for _ in range(-(-options.warmup // options.tokens)):
                generated(model, prompt, options.tokens, cache)
        times: dict[str, list[float]] = {name: [] for name in arms}
        made: dict[str, Tensor] = {}
        for _ in range(options.rounds):
            for name in rng.sample(list(arms), len(arms)):
                wait_until_idle()
                took, made[name] = generated(arms[name], prompt, options.tokens, cache)
                times[name] += took
        interval = speedup_interval(times["own"], times["patched"])
        same = int((made["own"] == made["patched"]).int().cumprod(-1).sum())
        yield {
            "batch": batch,
            "cache": cache,
            "ms": {name: median(found) for name, found in times.items()},
            "speedup": median(times["own"]) / median(times["patched"]),
            "interval": [interval.lo, interval.hi],
            "tokens_equal": f"{same} of {made['own'].numel()} before the first that differs",
        }


def _of_cells(found: dict[str, Any]) -> str:
    lines = [f"{_heading(found)}, prompt {found['seq']}"]
    names = "".join(f"{name + ' ms':>12}" for name in found["cells"][0]["ms"])
    lines += [f"  batch cache   {names}   patched against own"]
    for c in found["cells"]:
        times = "".join(f"{ms:12.2f}" for ms in c["ms"].values())
        lines += [f"  {c['batch']:5} {c['cache']:<8}{times}   {_speedup(c)}  {c['tokens_equal']}"]
    return "\n".join(lines)


def _of_steps(found: dict[str, Any]) -> str:
    difference = found["largest_logit_difference"]
    lines = [
        f"{_heading(found)}, context {found['seq']}",
        f"  transformers, unpatched    {found['own_ms']:8.1f} ms a token",
        f"  patched, as decided        {found['patched_ms']:8.1f} ms a token",
        f"  speedup {_speedup(found)}, {found['steps']} steps each; goal {GOAL}x",
        f"  same token in {found['tokens_equal']} steps; largest logit difference {difference:.3f}",
    ]
    lines += [f"  {use['calls']:7} calls  {use['candidate']:<18} {use['bucket']}" for use in found["uses"]]
    return "\n".join(lines)


def _heading(found: dict[str, Any]) -> str:
    return f"{found['device']}: {found['model']}, {found['layers']} layers, {found['dtype']}"


def _speedup(found: dict[str, Any]) -> str:
    lo, hi = found["interval"]
    return f"{found['speedup']:.2f}x ({lo:.2f} .. {hi:.2f})"


def _parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    command_line.decoding(parser, seqs=(2048,), rounds=40)
    command_line.dtype(parser)
    parser.add_argument("--warmup", type=int, default=WARM, help="untimed first steps")
    parser.add_argument("--generate", action="store_true", help="compare `generate` instead of single steps")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="rows of generate")
    parser.add_argument("--cache", nargs="+", default=["dynamic", "static"], choices=("dynamic", "static"))
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of one generate")
    parser.add_argument("--compile", action="store_true", help="add torch.compile of the unpatched model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
