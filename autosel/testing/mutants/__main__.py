"""Print the mutation score of each op: its mutants, how many each check kills, and those that survive.

    python -m autosel.testing.mutants [--op attn] [--json] [--seed N] [--points N]
    python -m autosel.testing.mutants --json > benchmarks/results/cpu/mutants.json    # docs/generate.py prints it

Exit code 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict

from autosel.ops import OPS, find
from autosel.testing.mutants.score import POINTS, Score, score


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autosel.testing.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--op", action="append", default=[], help="only this op; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seed", type=int, default=secrets.randbits(24), help="draw cases and inputs from N")
    parser.add_argument("--points", type=int, default=POINTS, help="where an equivalent mutant must be right")
    options = parser.parse_args(arguments)
    scores = []
    for op in [find(name) for name in options.op] or OPS.values():
        scores.append(score(op, options.seed, points=options.points))
        if not options.json:
            _say(_line(scores[-1]))
    if options.json:
        _say(json.dumps({"seed": options.seed, "ops": [asdict(s) for s in scores]}, indent=1))
    return int(any(s.survived for s in scores))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(found: Score) -> str:
    killed = ", ".join(f"{check} {n}" for check, n in found.killed.items())
    lines = [f"{found.op}: {found.mutants} mutants, {sum(found.killed.values())} killed ({killed})"]
    lines += [f"  equivalent: {name}: {why} (right at {found.points} points)" for name, why in found.equivalent.items()]
    lines += [f"  SURVIVED: {name}" for name in found.survived]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
