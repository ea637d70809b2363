"""Print a mutation score: the number of wrong kernels, how many each check kills, and which survive.

    python -m autosel.testing.mutants [--op attn]                       mutants of each op's reference
    python -m autosel.testing.mutants --source [--kernel attn_decode]   mutants of our own C++ kernels' source
    python -m autosel.testing.mutants --reverse [--op attn]             mutants that survive without each domain

`--json` prints one document. docs/generate.py reads such documents from benchmarks/results/cpu/: mutants.json,
mutants-source.json, mutants-reverse.json. `--into FILE` stores each row in such a document as soon as it is complete,
with the seed and the digest of the checks. The exit code is 1 if a mutant survives or if no mutant needs a domain.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosel import files, fingerprint
from autosel.errors import UnknownName
from autosel.json_rows import in_rows
from autosel.knobs.cpu.facts import facts
from autosel.ops import OPS, find
from autosel.testing.mutants import battery
from autosel.testing.mutants.reverse import Reverse, reverse
from autosel.testing.mutants.score import POINTS, Score, score
from autosel.testing.mutants.source import KERNELS, MUTANTS, SourceScore, score_source

MOST_BYTES = 16 << 20  # size limit of a stored document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autosel.testing.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--op", action="append", default=[], help="score only this op; repeatable")
    parser.add_argument("--source", action="store_true", help="mutate the source of our C++ kernels")
    parser.add_argument("--reverse", action="store_true", help="remove each domain and name a mutant that survives")
    parser.add_argument("--late", action="store_true", help="also try faults in the 3,000th and 10,000th call")
    parser.add_argument("--kernel", action="append", default=[], help="score only this kernel; repeatable")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="number of mutants of each kernel")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--into", type=Path, help="add each row to this document, or replace it; keep other rows")
    parser.add_argument("--seed", type=int, default=secrets.randbits(24), help="seed of mutants, cases and inputs")
    parser.add_argument(
        "--points", type=int, default=POINTS, help="number of points at which an equivalent mutant must be correct"
    )
    options = parser.parse_args(arguments)
    key, found = ("kernels", _of_kernels(options)) if options.source else ("ops", _of_ops(options))
    isa = facts(fingerprint.take("cpu")).isa
    lacking, document = False, dict[str, Any](isa=isa, **{key: []})
    for one in found:
        lacking |= bool(one.lacking if isinstance(one, Reverse) else one.survived)
        document = _with_row(document, key, one, options.seed)
        if options.into:
            before = (
                json.loads(files.read(options.into, MOST_BYTES)) if options.into.is_file() else {"isa": isa, key: []}
            )
            options.into.write_text(in_rows(_with_row(before, key, one, options.seed)) + "\n")
        if not options.json:
            _say(_line(one))
    if options.json:
        _say(json.dumps(document, indent=1))
    return int(lacking)


def _with_row(document: dict[str, Any], key: str, one: Any, seed: int) -> dict[str, Any]:
    """Return the document with the row added, or instead of an older one, sorted in the order of ops or kernels."""
    named = key.removesuffix("s")
    row = {**asdict(one), "seed": seed, "battery": battery.digest()}
    order = list(OPS) if key == "ops" else [kernel.name for kernel in KERNELS]
    rows = [*(r for r in document[key] if r[named] != row[named]), row]
    return {**document, key: sorted(rows, key=lambda r: order.index(r[named]))}


def _of_ops(options: argparse.Namespace) -> Iterator[Any]:
    for op in [find(name) for name in options.op] or OPS.values():
        if options.reverse:
            yield reverse(op, options.seed)
        else:
            yield score(op, options.seed, points=options.points, late=options.late)


def _of_kernels(options: argparse.Namespace) -> Iterator[Any]:
    known = {kernel.source: kernel for kernel in KERNELS}
    for name in options.kernel:
        if name not in known:
            raise UnknownName("kernel", name, tuple(known))
    fp = fingerprint.take("cpu")
    for name in options.kernel or known:
        yield score_source(known[name], fp, options.seed, mutants=options.mutants)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(found: Score | SourceScore | Reverse) -> str:
    if isinstance(found, Reverse):
        lines = [
            f"{found.op}: {len(found.survivors)} domains; needs {len(found.hand_made)} of {found.cases} hand-made cases"
        ]
        lines += [f"  without {n}: {s or found.redundant[n] or 'NO SURVIVOR'}" for n, s in found.survivors.items()]
        return "\n".join([*lines, *(f"  only {case} kills: {name}" for case, name in found.hand_made.items())])
    killed = ", ".join(f"{check} {n}" for check, n in found.killed.items())
    what = found.op if isinstance(found, Score) else found.kernel
    right = f"correct at {found.points} points" if isinstance(found, Score) else "a correct kernel"
    lines = [f"{what}: {found.mutants} mutants, {sum(found.killed.values())} killed ({killed})"]
    lines += [f"  equivalent: {name}: {why} ({right})" for name, why in found.equivalent.items()]
    lines += [f"  SURVIVED: {name}" for name in found.survived]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
