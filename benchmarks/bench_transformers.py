"""A Hugging Face model as it comes against the same model after `autosel.patch`, in turn, on the same weights.

    python benchmarks/bench_transformers.py [--model llama-1b] [--layers 16] [--seq 2048] [--rounds 40] [--pinned]
                                            [--json] [--write]

Decode steps of one sequence under torch.inference_mode, as `generate` makes them: transformers' own forward, SDPA and
DynamicCache (whose layers concatenate, or grow in place in the patched model; put back after each step, untimed). Both
models hold the same tensors. The order of each pair is a coin's, every step waits for the other's threads to sleep,
and the tokens they choose are compared. Timed are steps after the guard's first checks: of the first 32 calls of a
shape in a process each runs the baseline too, which for the logits is every one of the first 32 tokens.

What serves is what this home has decided; `--pinned` instead serves autosel's C++ kernels wherever there is one,
without a race, from a home of its own: what tuning can reach, not what it has proven. `autosel record` beside a run of
this program, then `autosel tune --recorded`, decides for exactly these shapes.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import command_line
import torch
from hugging_face import filled_cache, model_of, rewinding
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autosel
from autosel import dispatch, fingerprint, models, ops
from autosel.certify.statistics import median, speedup_interval
from autosel.decode.cache import make_cache
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.guard.rate import CANARY
from autosel.race.idle import wait_until_idle
from autosel.values import Workload

RESULTS = Path(__file__).parent / "results" / "cpu"
GOAL = 1.5
RUN_UP = 2  # steps after which a cache is as it is in the middle of a text
KERNELS = {"linear": "cpp:gemv", "attn": "cpp:attn_decode", "rmsnorm": "cpp:rmsnorm", "rope": "cpp:rope"}
KERNELS |= {"swiglu": "cpp:swiglu", "geglu": "cpp:geglu"}


def main() -> int:
    options = _parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    shape = models.load(options.model)
    layers = min(options.layers, shape.layers)
    plan = Plan(model=shape, layers=layers, dtype=options.dtype, seq=options.seq, seed=options.seed)
    weights = load_weights(plan)
    with torch.inference_mode():
        own = model_of(weights)
        ours = copy.deepcopy(own, {id(t): t for t in (*own.parameters(), *own.buffers())})
        cache = make_cache(weights.shape, weights.dtype, rows=1, room=options.seq, device="cpu")
        generator = torch.Generator().manual_seed(options.seed)
        for tensor in (*cache.k, *cache.v):
            tensor.normal_(generator=generator)
        token = torch.randint(weights.shape.V, (1, 1), generator=generator)
        with _serving(options, ours, filled_cache(ours, cache, options.seq - 1), token) as board:
            with redirect_stdout(sys.stderr):
                patched = autosel.patch(ours)
            held = options.seq - 1 - RUN_UP
            caches = {"own": filled_cache(own, cache, held), "patched": filled_cache(ours, cache, held)}
            found = _compared({"own": own, "patched": ours}, caches, token, options)
            used = sorted((u for u in board.uses() if u.calls), key=lambda u: -u.calls)
    found |= {"model": shape.name, "layers": layers, "dtype": options.dtype, "seq": options.seq, "device": fp.name}
    found |= {"served": "pinned" if options.pinned else "as decided", "replaced": dict(patched.replaced)}
    found["uses"] = [
        {"bucket": u.bucket, "candidate": u.candidate, "decision": u.decision_id, "calls": u.calls} for u in used
    ]
    found |= {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "goal": GOAL,
        "threads": fp.identity["cpus"],
    }
    found |= {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    found["load"] = round(os.getloadavg()[0], 2)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        _show(found)
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"transformers-{shape.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


@contextmanager
def _serving(options: argparse.Namespace, model: Any, cache: Any, token: Tensor) -> Iterator[dispatch.Board]:
    if not options.pinned:
        with dispatch.use(autosel.settings.home()) as board:
            yield board
        return
    from tests.cpu.serving import serve

    with tempfile.TemporaryDirectory() as folder:
        with dispatch.use(Path(folder) / "empty") as board, redirect_stdout(sys.stderr):
            autosel.patch(model)
            model(token, past_key_values=cache, use_cache=True)
            autosel.unpatch(model)
            asked: list[Workload] = list(board.asked())
        wanted = [(w, KERNELS[w.op]) for w in asked if w.op in KERNELS and ops.find(w.op)]
        with dispatch.use(serve(Path(folder) / "pinned", wanted)) as board:
            yield board


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


def _show(found: dict[str, Any]) -> None:
    lo, hi = found["interval"]
    print(f"{found['device']}: {found['model']}, {found['layers']} layers, {found['dtype']}, context {found['seq']}")
    print(f"  transformers as it comes   {found['own_ms']:8.1f} ms a token")
    print(f"  patched, {found['served']:<17} {found['patched_ms']:8.1f} ms a token")
    print(f"  speedup {found['speedup']:.2f}x ({lo:.2f} .. {hi:.2f}), {found['steps']} steps each; goal {GOAL}x")
    difference = found["largest_logit_difference"]
    print(f"  same token in {found['tokens_equal']} steps; largest logit difference {difference:.3f}")
    for use in found["uses"]:
        print(f"  {use['calls']:7} calls  {use['candidate']:<18} {use['bucket']}")


def _parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__, write="keep the result in benchmarks/results/cpu/")
    command_line.decoding(parser, seqs=(2048,), rounds=40)
    command_line.dtype(parser)
    parser.add_argument(
        "--warmup", type=int, default=CANARY + 2, help="steps before; the guard checks each of the first"
    )
    parser.add_argument("--pinned", action="store_true", help="serve the C++ kernels without a race")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
