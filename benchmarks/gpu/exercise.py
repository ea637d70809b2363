"""Call kernels on some of their hostile cases and compare the results: `python exercise.py SCOPE CHECKS BUILD ...`.

It runs under a sanitizer. CHECKS are the sanitizers compiled into the kernels on a CPU. BUILD are names of entries.
The last line of the output is the number of cases.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from autosel import fingerprint
from autosel.candidates.load import load
from autosel.devices.cuda.timing import same_layout
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from autosel.parity.check import cases_of
from autosel.tuning.prove import proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Fingerprint, NativeRecipe, Rejected
from benchmarks.gpu.entrants import BuildEntry, entry_named
from benchmarks.gpu.graph import set_up
from benchmarks.gpu.sanitizer import STEP
from benchmarks.gpu.scope import Scope

STEP_SEQ = 256
CASES = 8  # spread over the battery: every shape class, some hostile values


def main(scope: Scope, checks: str, names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    fp = fingerprint.take(scope.device)
    if names[0].startswith(STEP):
        return whole_step(scope, fp)
    count = 0
    for name in names:
        entry = entry_named(name, scope, fp)
        wrong, cases = exercised(entry, scope, fp, checks)
        if wrong:
            print(f"wrong: {name}: {wrong}", file=sys.stderr)
            return 1
        count += cases
        print(name, flush=True)
    print(f"{count} cases")
    return 0


def exercised(entry: BuildEntry, scope: Scope, fp: Fingerprint, checks: str) -> tuple[str, int]:
    """Return the first error, or "", and the number of cases that were called."""
    way, op = way_of(entry.candidate, entry.workload, fp), OPS[entry.candidate.op]
    recipe, digest = way.recipe, ""
    if isinstance(recipe, NativeRecipe):
        if checks:
            looked_for = (f"-fsanitize={checks}", "-fno-sanitize-recover=all", "-g", "-O1")
            recipe = replace(recipe, flags=(*recipe.flags, *looked_for))
        digest = compile_source(recipe.source, recipe.flags).digest
    call = load(op, recipe, digest, way.knobs.values)
    cases = cases_of(op, proof_of(way, entry.workload), fp)
    cases = cases[:: max(1, len(cases) // CASES)]
    for case in cases:
        drawn = case.make(11)
        inputs = {n: same_layout(v, scope.device) if isinstance(v, torch.Tensor) else v for n, v in drawn.items()}
        outputs = [t.to(scope.device) for t in op.allocate(case.workload) if t is not None]
        call(*op.arguments(inputs), *outputs)
        if scope.on_gpu:
            torch.cuda.synchronize()
        written = {a.name: inputs[a.name] for a in op.args if a.role == "inout"}
        left = iter(outputs)
        got = [(written[n] if n in written else next(left)).cpu() for n in op.output_names]
        found = op.verify(drawn, got)
        if isinstance(found, Mismatch):
            return f"{case.name}: {found.check}: {found.reason}", 0
    return "", len(cases)


def whole_step(scope: Scope, fp: Fingerprint) -> int:
    """Compare one layer and the output head, run as one native call, with the same step run op by op."""
    from autosel.decode.persistent import supports, write
    from autosel.decode.scene import judged
    from autosel.decode.step import write_step

    with torch.inference_mode():
        scene = set_up(scope, scope.small_model, layers=1, seq=min(STEP_SEQ, scope.seq))
        support = supports(scene.plan)
        if isinstance(support, Rejected):
            print(f"0 cases: {support.reason}")
            return 0
        ops = write_step(scene.decoder, scene.cache, scene.place)
        ops.run()
        ops.settle()
        whole = write(scene.decoder, scene.cache, scene.place, form="whole", fp=fp)
        whole.run()
        whole.settle()
        error, bound = judged(whole.logits, ops.logits, scene.reference(), scene.plan.dtype)
    if not error <= bound:
        print(f"wrong: logits {error:.3g} from the reference, {bound:.3g} allowed", file=sys.stderr)
        return 1
    print("1 cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(Scope.from_text(sys.argv[1]), sys.argv[2], sys.argv[3:]))
