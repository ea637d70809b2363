"""Count the stops of a plan: how often a reader who follows `run` changes files until the step that is timed is chosen.

    AUTOSEL_HOME=$(mktemp -d) python benchmarks/stops.py      # run it twice in one home: raced, then decided

Functions of `cli` and `decode` are followed when they are called for the first time; each change of file, by a call or
a return, is a stop. The model has one layer; all ops are served by C++ kernels, whatever is decided.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from bench_step import _serve_our_kernels

import autosel
from autosel import fingerprint
from autosel.cli.run import Asked, measured, run_command

ROOT = Path(autosel.__file__).parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


class Walk:
    """Follows calls and returns; a function that was followed once is passed over, with all that it calls."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.stack: list[tuple[str, str]] = []
        self.steps: list[tuple[str, str]] = []
        self.below = 0  # calls inside a function that is passed over

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        where = os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else ""
        if event not in ("call", "return") or not where.startswith(("cli/", "decode/")) or where == "decode/run.py":
            return
        here = (where, frame.f_code.co_qualname)
        if event == "call":
            if self.below or here in self.seen:
                self.below += 1
                return
            self.seen.add(here)
            self.stack.append(here)
            self.steps.append(here)
        elif self.below:
            self.below -= 1
        elif self.stack and self.stack[-1] == here:
            self.stack.pop()
            self.steps += self.stack[-1:]


def main() -> int:
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    _serve_our_kernels(fp)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        words = ["--model", folder, "--seq", "30", "--iters", "2", "--warmup", "0"]
        walk = Walk()
        sys.setprofile(walk)
        try:
            measured(Asked(run_command.make_context("run", words)).plan())
        finally:
            sys.setprofile(None)
    names = [name for _, name in walk.steps]
    chosen = walk.steps[names.index("choose") : names.index("our_arm")]
    for what, steps in (("run", walk.steps), ("choosing the step", chosen)):
        files = [where for where, _ in groupby(where for where, _ in steps)]
        print(f"{what}: {len(files)} stops in {len(set(files))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
