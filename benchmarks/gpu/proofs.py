"""Prove many entries in parallel. Entries of one build share a worker, as in a tune; builds start ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from autosel.parity.check import Proof, Prover, Terms, torch_threads
from autosel.tuning.builds import Builds
from autosel.tuning.job import Buildable
from autosel.tuning.prove import process_of, proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Fingerprint, NativeRecipe, Parity
from benchmarks.gpu.ahead import Ahead, side_by_side
from benchmarks.gpu.entrants import BuildEntry
from benchmarks.gpu.scope import Scope

TOGETHER = 8  # maximum proofs of one worker: their results arrive at its end, and a kill loses all of them

Member = tuple[BuildEntry, Buildable]
Answers = dict[str, Parity | Exception]  # by the entry's name


class Proofs:
    """Starts proofs in order at construction, and groups entries of one build."""

    def __init__(self, entries: Sequence[BuildEntry], scope: Scope, fp: Fingerprint) -> None:
        self.scope, self.fp = scope, fp
        self.hopeless: Answers = {}  # entries whose knobs or recipe raised
        members = list(self._ways(entries))
        runs = (list(run) for _, run in groupby(members, key=lambda member: process_of(member[1])))
        groups = [run[at : at + TOGETHER] for run in runs for at in range(0, len(run), TOGETHER)]
        self.group = {entry.name: number for number, group in enumerate(groups) for entry, _ in group}
        recipes = (way.recipe for _, way in members)
        self.builds = Builds(recipe for recipe in recipes if isinstance(recipe, NativeRecipe))
        self.ahead = Ahead(groups, self._prove, threads=side_by_side())

    def __contains__(self, name: str) -> bool:
        return name in self.group or name in self.hopeless

    def of(self, name: str) -> Parity:
        """Return an entry's proof. Raises BuildError, WorkerError, and any exception of the candidate's module."""
        found = self.hopeless.get(name) or self.ahead.of(self.group[name])[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _ways(self, entries: Iterable[BuildEntry]) -> Iterator[Member]:
        for entry in entries:
            try:
                yield entry, way_of(entry.candidate, entry.workload, self.fp)
            except Exception as error:  # only this entry's unit fails
                self.hopeless[entry.name] = error

    def _prove(self, members: Sequence[Member]) -> Answers:
        """Prove a group in one worker. Raises WorkerError if no worker can be started."""
        proofs = [proof_of(way, entry.workload) for entry, way in members]
        with Prover(self.fp, Terms(device=self.scope.device), threads=torch_threads(proofs)) as prover:
            pairs = zip(members, proofs, strict=True)
            return {entry.name: self._answer(prover, way, proof) for (entry, way), proof in pairs}

    def _answer(self, prover: Prover, way: Buildable, proof: Proof) -> Parity | Exception:
        try:
            if isinstance(way.recipe, NativeRecipe):
                self.builds.wait(way.recipe)
            return prover.prove(proof)
        except Exception as error:  # only this entry's unit fails
            return error
