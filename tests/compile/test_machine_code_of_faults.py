"""Compile the faults of `./run gpu`'s containment stage for a GPU, as that stage does."""

from __future__ import annotations

from autosel.fingerprint import known
from autosel.native.compile import find_artefact
from benchmarks.gpu import containment


def test_the_faults_of_the_containment_stage_compile_for_a_gpu() -> None:
    """Compile all three in one build, with the names of the stage's table."""
    proofs = [containment.faulty(entry, known.load("h200")) for entry in containment.FAULTS]
    assert [proof.recipe.entry for proof in proofs] == list(containment.FAULTS)
    (digest,) = {proof.digest for proof in proofs}
    assert find_artefact(digest) is not None
