"""Arguments shared by the benchmarks."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

DTYPES = ("bf16", "fp16", "fp32")
KEPT = "benchmarks/results/cpu/"


def parser(doc: str | None, *, write: str = "") -> argparse.ArgumentParser:
    """Return a parser described by the module's first line, with --json. `write` is the help of --write, if any."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    if write:
        made.add_argument("--write", action="store_true", help=write)
    return made


def show(options: argparse.Namespace, found: Any, text: Callable[[Any], str]) -> None:
    """Print the results as one JSON document with --json, else as `text`."""
    print(json.dumps(found, indent=1) if options.json else text(found))


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def dtype(made: argparse.ArgumentParser) -> None:
    made.add_argument("--dtype", default="bf16", choices=DTYPES)


def decoding(made: argparse.ArgumentParser, *, seqs: Sequence[int], rounds: int, models: bool = False) -> None:
    """Add the options of decode steps; --seq is repeatable with several `seqs`, --model with `models`."""
    folder = "a preset or checkpoint folder"
    if models:
        made.add_argument("--model", action="append", help=f"{folder}; repeatable  [llama-1b]")
    else:
        made.add_argument("--model", default="llama-1b", help=folder)
    made.add_argument("--layers", type=int, default=1 << 10, help="use only the first N layers")
    if len(seqs) > 1:
        made.add_argument("--seq", type=int, action="append", help=f"context; repeatable  {list(seqs)}")
    else:
        made.add_argument("--seq", type=int, default=seqs[0], help="context")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seed", type=int, default=0)
