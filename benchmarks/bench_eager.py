"""Compare the eager baseline's decode step with Hugging Face's own model class, in turn, on the same weights.

    python benchmarks/bench_eager.py [--model llama-1b ...] [--layers 4] [--seq 128 --seq 2048] [--dtype bf16]
                                     [--rounds 40] [--json]

Hugging Face's model runs under torch.inference_mode with SDPA and its default cache, exactly as `generate` calls it.
DynamicCache concatenates; it is restored after each step, untimed. autosel's arm is autosel.decode.eager, the baseline
of every certificate's speedup. Both get the same token in the same state, in random order. Every step waits until the
other arm's threads sleep, and the chosen tokens are compared.

The figure is autosel's time over Hugging Face's: median over median, with the interval of resampled pairs. Above 1.05
the baseline is too slow and overstates every speedup by that factor; below 1 it is a stricter baseline than Hugging
Face's model.

At long contexts only the cache makes autosel's step faster: DynamicCache copies all keys and values into new memory at
each step, while autosel's appends in place. A third arm shows it: Hugging Face's model with a cache that appends in
place (hugging_face.in_place_cache) takes as long as autosel's step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hugging_face import filled_cache, in_place_cache, model_of, rewinding
from torch import Tensor

from autosel import fingerprint, models
from autosel.certify.statistics import median, speedup_interval
from autosel.decode.cache import make_cache
from autosel.decode.eager import Eager
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.devices.cpu.idle import wait_until_idle

LIMIT = 1.05


def main() -> int:
    options = _parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    rows = []
    for name in options.model or ["llama-1b"]:
        model = models.load(name)
        layers = min(options.layers, model.layers)
        plan = Plan(model=model, layers=layers, dtype=options.dtype, seq=max(options.seq or [2048]), seed=options.seed)
        weights = load_weights(plan)
        with torch.inference_mode():
            theirs = model_of(weights)
            for seq in options.seq or [128, 2048]:
                print(f"{name} {seq}", file=sys.stderr, flush=True)
                rows.append({"model": name, "layers": plan.layers_run, **compared(weights, theirs, seq, options)})
    if options.json:
        json.dump({"device": fp.name, "torch": torch.__version__, "limit": LIMIT, "rows": rows}, sys.stdout, indent=1)
        print()
    else:
        _table(rows, fp.name)
    return 0


def compared(weights: Any, theirs: Any, seq: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time all steps at one context; return medians in milliseconds, and ratios with their intervals."""
    generator = torch.Generator().manual_seed(options.seed)
    ours_cache = make_cache(weights.shape, weights.dtype, rows=1, room=seq, device="cpu")
    for tensor in (*ours_cache.k, *ours_cache.v):
        tensor.normal_(generator=generator)
    token = torch.randint(weights.shape.V, (1, 1), generator=generator)
    eager = Eager(weights)
    caches = {"hugging_face": filled_cache(theirs, ours_cache, seq - 1)}
    caches["in_place"] = in_place_cache(theirs, ours_cache, seq - 1)
    rewinds = [rewinding(cache) for cache in caches.values()]

    def ours() -> Tensor:
        return eager.logits(token, ours_cache, seq - 1)

    def hugging_face(cache: Any) -> Tensor:
        return theirs(token, past_key_values=cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    steps: dict[str, Callable[[], Tensor]] = {"ours": ours}
    steps |= {name: partial(hugging_face, cache) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    distance, equal, rng = 0.0, 0, random.Random(options.seed)
    for i in range(options.warmup + options.rounds):
        made: dict[str, Tensor] = {}
        for name in rng.sample(list(steps), len(steps)):
            wait_until_idle()
            begin = time.perf_counter_ns()
            made[name] = steps[name]()
            made[name].argmax(-1).tolist()
            took = time.perf_counter_ns() - begin
            if i >= options.warmup:
                times[name].append(took / 1e6)
        for rewind in rewinds:
            rewind()
        distance = max(distance, *((made["ours"].float() - made[n].float()).abs().max().item() for n in caches))
        equal += len({int(logits.argmax()) for logits in made.values()}) == 1
    interval, same = (speedup_interval(times["ours"], times[n]) for n in caches)
    return {
        "seq": seq,
        "ours_ms": median(times["ours"]),
        "hugging_face_ms": median(times["hugging_face"]),
        "ours_over_theirs": median(times["ours"]) / median(times["hugging_face"]),
        "interval": [interval.lo, interval.hi],
        "in_place_ms": median(times["in_place"]),
        "ours_over_in_place": median(times["ours"]) / median(times["in_place"]),
        "in_place_interval": [same.lo, same.hi],
        "steps": options.rounds,
        "tokens_equal": f"{equal} of {options.warmup + options.rounds}",
        "largest_logit_difference": distance,
    }


def _table(rows: list[dict[str, Any]], device: str) -> None:
    print(f"{device}: autosel's eager step over Hugging Face's (SDPA), in milliseconds, with 95 % intervals")
    print(f"{'model':<12} {'layers':>6} {'context':>8} {'ours':>8}   {'DynamicCache':<32} in-place cache")
    for r in rows:
        columns = [("hugging_face_ms", "ours_over_theirs", "interval")]
        columns.append(("in_place_ms", "ours_over_in_place", "in_place_interval"))
        told = [f"{r[ms]:.2f}: {r[ratio]:.3f} ({r[span][0]:.3f} .. {r[span][1]:.3f})" for ms, ratio, span in columns]
        verdict = "" if r["ours_over_theirs"] <= LIMIT else "  above the limit"
        sizes = f"{r['layers']:>6} {r['seq']:>8} {r['ours_ms']:>8.2f}"
        print(f"{r['model']:<12} {sizes}   {told[0]:<32} {told[1]}{verdict}")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="a preset or checkpoint folder; repeatable  [llama-1b]")
    parser.add_argument("--layers", type=int, default=1 << 10, help="use only the first N layers")
    parser.add_argument("--seq", type=int, action="append", help="context; repeatable  [128 and 2048]")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
