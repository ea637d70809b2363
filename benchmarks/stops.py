"""Count how often a reader changes files when following how the timed step is chosen ("stops").

    export AUTOSEL_HOME=$(mktemp -d)
    python benchmarks/stops.py             # raced; a second run in the same home: decided
    python benchmarks/stops.py --draw      # also print the path, one file a line
    python benchmarks/stops.py --wins ops  # the step op by op wins the race instead of the thread team

Only the first call of each function of `decode` since the command started is followed. Each change of file is a stop,
by a call or by a return; `down` counts only calls, since after a return the file is already open. The model has one
layer; C++ kernels serve all ops, regardless of decisions. The race's times are synthetic, so that the same form always
wins.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
from bench_step import _serve_our_kernels

import autosel
from autosel import fingerprint
from autosel.cli.run import Asked, measured, run_command
from autosel.decode import race

ROOT = Path(autosel.__file__).parent
FIRST, LAST = "choose", "our_arm"  # the path starts at the first function and ends before the second
STEP_NS, GAIN = 20e6, 1.1
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


class Walk:
    """Follows calls and returns. A function that was followed once is skipped, with all calls inside it."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()  # file, line
        self.stack: list[tuple[str, str]] = []
        self.steps: list[tuple[str, str, bool]] = []  # file, function, by a call
        self.below = 0  # depth of calls inside a skipped function

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        where = os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else ""
        if event not in ("call", "return") or not where.startswith("decode/") or where == "decode/run.py":
            return
        here, at = (where, frame.f_code.co_qualname), (where, frame.f_code.co_firstlineno)
        if event == "call":
            if self.below or at in self.seen:
                self.below += 1
                return
            self.seen.add(at)
            self.stack.append(here)
            self.steps.append((*here, True))
        elif self.below:
            self.below -= 1
        elif self.stack and self.stack[-1] == here:
            self.stack.pop()
            self.steps += [(*last, False) for last in self.stack[-1:]]


def _draw_times(wins: str) -> None:
    noise = Random(3)

    def sample(self: race.StepSeat, arm: str, calls: int) -> float:
        self.written[arm].run()
        faster = arm.startswith("cpp:step") == (wins == "team")
        return STEP_NS / (GAIN if faster else 1.0) * noise.gauss(1.0, 0.001)

    race.__dict__["watch"] = lambda: None
    for name, function in (("_sample", sample), ("probe", lambda _: 1e12)):
        setattr(race.StepSeat, name, function)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="print the path, one file a line")
    parser.add_argument("--wins", choices=("team", "ops"), default="team", help="winner of the race  [default: team]")
    options = parser.parse_args()
    _draw_times(options.wins)
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    _serve_our_kernels(fp)
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        words = ["--model", folder, "--seq", "30", "--iters", "2", "--warmup", "0"]
        asked = Asked(run_command.make_context("run", words))
        sys.setprofile(walk)
        try:
            made, _ = measured(asked, asked.plan(), ())
        finally:
            sys.setprofile(None)
    names = [name for _, name, _ in walk.steps]
    chosen = walk.steps[names.index(FIRST) : names.index(LAST)]
    files = [(where, list(steps)) for where, steps in groupby(chosen, key=lambda step: step[0])]
    if options.draw:
        for where, steps in files:
            print(f"{where:24} {', '.join(name for _, name, called in steps if called) or '(back)'}")
    down = sum(steps[0][2] for _, steps in files)
    taken, raced = made.mode.partition(".")[0], any(name == "decide" for name in names)
    print(f"{'raced' if raced else 'decided'}, {taken}: {len(files)} stops, {down} down, in {len(dict(files))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
