"""Mutants of our C++ kernels: a source with one fault is compiled with the usual flags and proven like any candidate.

Changes that do not compile, or that do not change the machine code, are not counted. Headers for threads, bindings and
argument checks are not mutated, because they compute no result.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from autosel import models, resources
from autosel.candidates.base import support_of
from autosel.candidates.cpp import attention, linear, rows
from autosel.candidates.cpp.base import CppKernel
from autosel.errors import BuildError
from autosel.models.workloads import ASKED_OPS, CACHE_OPS, STEP_OPS, WEIGHT_OPS
from autosel.models.workloads import step as decode_step
from autosel.native.compile import Artefact, compile_source, compiled_lines, find_sources
from autosel.ops import OPS
from autosel.parity.check import Prover, Terms
from autosel.parity.session import Proof
from autosel.testing.mutants.cpp import SourceChange, changes
from autosel.testing.mutants.equivalent import SOURCE_REASONS
from autosel.values import Accepted, DTypeName, Failed, Fingerprint, NativeRecipe, Passed, Workload

KERNELS: Sequence[CppKernel] = (*rows.KERNELS, *linear.KERNELS, *attention.KERNELS)
COMPUTES_NOTHING = ("ffi.h", "argument.h", "plain_c.h", "tensor.h", "team.h", "openmp.h", "rest.h", "placement.h")
MODELS, BATCHES, CONTEXT, PROMPT = ("llama-1b", "gemma3-1b"), (1, 4, 8, 16), 4096, 512
MOST_BYTES = 64 << 20
MOST_PROOFS = 4  # proofs of one build, each with different knobs
DTYPES: Sequence[DTypeName] = ("bf16", "fp32", "fp16")
MADE_IN = "autosel_mutants_"  # start of the name of the folder that holds the mutated sources
MUTANTS = 9
TRIES = 6  # changes drawn for each mutant: some do not compile, or compile to the same code
CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFault:
    """One change in one source file of a kernel."""

    file: str  # below kernels/
    change: SourceChange

    @property
    def name(self) -> str:
        return f"{self.file}: {self.change.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """The mutation score of a kernel's source.

    `same`: number of changes that leave the machine code unchanged. `refused`: number of changes that do not compile.
    Neither are mutants.
    """

    kernel: str
    mutants: int
    killed: Mapping[str, int]
    equivalent: Mapping[str, str]
    survived: Sequence[str]
    same: int
    refused: int


def score_source(
    kernel: CppKernel, fp: Fingerprint, seed: int, *, mutants: int = MUTANTS, dtypes: Sequence[DTypeName] = DTYPES
) -> SourceScore:
    """Draw mutants of a kernel, an equal share in each dtype, and prove each until a check refuses it."""
    killed, equivalent, survived = Counter[str](), dict[str, str](), list[str]()
    same = refused = 0
    taken = [dtype for dtype in dtypes if dtype in kernel.dtypes and proofs_of(kernel, dtype, fp)]
    for index, dtype in enumerate(taken):
        share = len(range(index, mutants, len(taken)))
        bench = MutantBench(kernel, dtype, fp, seed)
        for fault, found in bench.results(share):
            if isinstance(found, Failed):
                killed[found.check] += 1
            elif fault.name in SOURCE_REASONS:
                equivalent[fault.name] = SOURCE_REASONS[fault.name]
            else:
                survived.append(f"{dtype}: {fault.name}")
        same, refused = same + bench.same, refused + bench.refused
    return SourceScore(
        kernel=kernel.name,
        mutants=killed.total() + len(equivalent) + len(survived),
        killed=dict(killed.most_common()),
        equivalent=equivalent,
        survived=survived,
        same=same,
        refused=refused,
    )


def proofs_of(kernel: CppKernel, dtype: DTypeName, fp: Fingerprint) -> list[Proof]:
    """Return proofs that `tune` would run for MODELS: settings of a kernel's first two knobs, at most MOST_PROOFS.

    Each setting has the largest of its workloads, shrunk to MOST_BYTES.
    """
    found: dict[Any, Proof] = {}
    for w in sorted(_workloads(kernel, dtype), key=OPS[kernel.op].bytes_moved, reverse=True):
        if isinstance(support_of(kernel, w, fp), Accepted):
            knobs = kernel.knobs(w, fp)
            recipe = kernel.recipe(w, fp, knobs)
            proof = Proof(candidate=kernel, recipe=recipe, digest="", knobs=knobs, workload=_shrunk(w))
            found.setdefault(tuple(knobs.values[name] for name in kernel.knob_args[:2]), proof)
    return sorted(found.values(), key=lambda p: -int(p.knobs.values["threads"]))[:MOST_PROOFS]


def _shrunk(w: Workload) -> Workload:
    """Halve the longest dimension until the operands move at most MOST_BYTES."""
    while OPS[w.op].bytes_moved(w) > MOST_BYTES:
        name, size = max(w.dims, key=lambda dim: dim[1])
        w = w.at(**{name: size // 2})
    return w


def _workloads(kernel: CppKernel, dtype: DTypeName) -> Iterator[Workload]:
    for model in map(models.load, MODELS):
        for batch in BATCHES:
            for fmt in kernel.formats:
                weight = fmt if kernel.op in WEIGHT_OPS else "plain"
                cache = fmt if kernel.op in CACHE_OPS else "plain"
                ops = [op for op in (*STEP_OPS, *ASKED_OPS) if op == kernel.op]
                for named in decode_step(
                    model, batch=batch, context=CONTEXT, dtype=dtype, ops=ops, prompt=PROMPT, weight=weight, cache=cache
                ):
                    yield named.workload


class MutantBench:
    """A kernel in one dtype, with its faults in random order and one worker for all mutants."""

    def __init__(self, kernel: CppKernel, dtype: DTypeName, fp: Fingerprint, seed: int) -> None:
        self.kernel, self.fp = kernel, fp
        self.proofs = proofs_of(kernel, dtype, fp)
        self.rng = Random(f"{seed} {kernel.name} {dtype}")
        self.terms = Terms(inputs=f"mutants {seed}", traits=True, call_deadline_s=CALL_S)
        self.same = self.refused = 0

    def results(self, count: int) -> Iterator[tuple[SourceFault, Failed | Passed]]:
        """Compile and prove `count` mutants. The next one compiles during a proof."""
        with (
            tempfile.TemporaryDirectory(prefix=MADE_IN) as made,
            ThreadPoolExecutor(1) as pool,
            Prover(self.fp, self.terms, threads=1) as prover,
        ):
            folder = Path(made)
            own = self._compiled(folder, None)
            assert own is not None
            faults = iter(faults_of(self.kernel, self._recipe, self.rng)[: TRIES * count])
            ahead = self._next(pool, folder, faults)
            while count and ahead is not None:
                fault, artefact = ahead[0], ahead[1].result()
                ahead = self._next(pool, folder, faults) if count > 1 or artefact is None else None
                if artefact is None:
                    self.refused += 1
                elif _code(artefact) == _code(own):
                    self.same += 1
                else:
                    count -= 1
                    yield fault, self.proven(prover, artefact)
                if artefact is not None:
                    _drop(artefact)
                if ahead is None and count:
                    ahead = self._next(pool, folder, faults)
            _drop(own)

    @property
    def _recipe(self) -> NativeRecipe:
        recipe = self.proofs[0].recipe
        assert isinstance(recipe, NativeRecipe)
        return recipe

    def _next(
        self, pool: ThreadPoolExecutor, folder: Path, faults: Iterator[SourceFault]
    ) -> tuple[SourceFault, Future[Artefact | None]] | None:
        fault = next(faults, None)
        return None if fault is None else (fault, pool.submit(self._compiled, folder, fault))

    def _compiled(self, folder: Path, fault: SourceFault | None) -> Artefact | None:
        """Return the artefact, or None if the source does not compile.

        All mutants are compiled in the same folder, so that paths do not change the machine code.
        """
        for name in ("cpu", "."):
            (folder / name).mkdir(exist_ok=True)
            for file in (resources.kernels() / name).iterdir():
                if file.suffix in (".h", ".cpp"):
                    shutil.copy(file, folder / name)
        if fault is not None:
            path = folder / fault.file
            path.write_text(fault.change.apply(path.read_text()))
        try:
            return compile_source(str(folder / self._recipe.source), (*self._recipe.flags, f"-DMUTANT={folder.name}"))
        except BuildError:
            return None

    def proven(self, prover: Prover, artefact: Artefact) -> Failed | Passed:
        """Run all small steps with every setting of the knobs, then full size, whose inputs take a second to draw."""
        made = [replace(proof, digest=artefact.digest) for proof in self.proofs]
        parts = [(p, prover.steps(p)) for p in made]
        for proof, steps in [*((p, s[:-2]) for p, s in parts), *((p, s[-2:]) for p, s in parts)]:
            found = prover.take(proof, steps)
            if isinstance(found, Failed):
                return found
        return Passed(cases=0, worst=0.0, worst_case="")


def faults_of(kernel: CppKernel, recipe: NativeRecipe, rng: Random) -> list[SourceFault]:
    """Return the faults in lines that this build compiles, without those that a rule recognises as correct kernels.

    The order alternates between rules, and between the kernel's own source and its headers.
    """
    root, lines = resources.kernels(), compiled_lines(recipe.source, recipe.flags)
    queues: dict[tuple[str, bool], list[SourceFault]] = {}
    for path in find_sources(root / recipe.source):
        if path.name in COMPUTES_NOTHING:
            continue
        for change in changes(path.read_text()):
            if change.line in lines.get(path, ()):
                fault = SourceFault(file=str(path.relative_to(root)), change=change)
                queues.setdefault((change.rule, path.suffix == ".h"), []).append(fault)
    for queue in queues.values():
        rng.shuffle(queue)
    order, found = rng.sample(sorted(queues), len(queues)), list[SourceFault]()
    while any(queues.values()):
        found += [queues[name].pop() for name in order if queues[name]]
    return [fault for fault in found if not fault.change.right]


def _code(artefact: Artefact) -> str:
    return hashlib.sha256(artefact.path.read_bytes()).hexdigest()


def _drop(artefact: Artefact) -> None:
    shutil.rmtree(artefact.path.parent, ignore_errors=True)
