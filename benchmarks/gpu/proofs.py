"""Proofs of many entries: several side by side, of one build in one worker, as in a tune; builds are made ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

from autosel.parity.check import Proof, Prover, Terms, torch_threads
from autosel.tuning.builds import Builds
from autosel.tuning.job import Way
from autosel.tuning.prove import process_of, proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Fingerprint, NativeRecipe, Parity
from benchmarks.gpu.ahead import side_by_side
from benchmarks.gpu.entrants import Entry
from benchmarks.gpu.scope import Scope

Member = tuple[Entry, Way]


class Proofs:
    """Begun in their order from the moment it is made. Not ended: the process that has it is."""

    def __init__(self, entries: Sequence[Entry], scope: Scope, fp: Fingerprint) -> None:
        self.scope, self.fp = scope, fp
        self.found: dict[str, Future[Parity]] = {entry.name: Future() for entry in entries}
        members = list(self._ways(entries))
        recipes = (way.recipe for _, way in members)
        self.builds = Builds(recipe for recipe in recipes if isinstance(recipe, NativeRecipe))
        self.executor = ThreadPoolExecutor(max_workers=side_by_side())
        for _, group in groupby(members, key=lambda member: process_of(member[1])):
            self.executor.submit(self._prove, list(group))

    def of(self, entry: Entry) -> Parity:
        """Raises BuildError, WorkerError, and whatever the candidate's module raised where its knobs were asked for."""
        return self.found[entry.name].result()

    def _ways(self, entries: Iterable[Entry]) -> Iterator[Member]:
        for entry in entries:
            try:
                yield entry, way_of(entry.candidate, entry.workload, self.fp)
            except Exception as error:  # it costs its unit
                self.found[entry.name].set_exception(error)

    def _prove(self, members: Sequence[Member]) -> None:
        proofs = [proof_of(way, entry.workload) for entry, way in members]
        try:
            with Prover(self.fp, Terms(device=self.scope.device), threads=torch_threads(proofs)) as prover:
                for (entry, way), proof in zip(members, proofs, strict=True):
                    self._take(prover, entry, way, proof)
        except Exception as error:  # no worker can be started
            for entry, _ in members:
                if not self.found[entry.name].done():
                    self.found[entry.name].set_exception(error)

    def _take(self, prover: Prover, entry: Entry, way: Way, proof: Proof) -> None:
        try:
            if isinstance(way.recipe, NativeRecipe):
                self.builds.wait(way.recipe)
            found = prover.prove(proof)
        except Exception as error:
            self.found[entry.name].set_exception(error)
        else:
            self.found[entry.name].set_result(found)
