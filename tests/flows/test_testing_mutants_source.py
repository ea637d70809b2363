"""Test that source mutants of our kernels are compiled and refused, and that the unchanged kernel passes."""

from __future__ import annotations

import pytest

from autosel.fingerprint import take
from autosel.native.compile import artefacts, compiled_lines
from autosel.parity.check import Prover, Terms
from autosel.resources import kernels
from autosel.testing.mutants.equivalent import SOURCE_REASONS
from autosel.testing.mutants.source import KERNELS, MADE_IN, MutantBench, faults_of, proofs_of, score_source
from autosel.values import NativeRecipe

pytestmark = pytest.mark.usefixtures("preforked")

RMSNORM = next(kernel for kernel in KERNELS if kernel.source == "rmsnorm")


def test_mutants_of_a_kernel_are_killed_and_leave_nothing_behind() -> None:
    found = score_source(RMSNORM, take("cpu"), 26, mutants=3, dtypes=("bf16",))
    assert found.mutants == 3
    assert found.survived == []
    assert sum(found.killed.values()) + len(found.equivalent) == 3
    built = [receipt.read_text() for receipt in artefacts().glob("*/receipt.json")]  # also by other tests meanwhile
    assert built
    assert not [text for text in built if MADE_IN in text]


def test_every_kernel_has_proofs_with_the_knobs_of_real_workloads() -> None:
    fp = take("cpu")
    for kernel in KERNELS:
        proofs = proofs_of(kernel, "bf16", fp)
        assert proofs, kernel.name
        assert len({str(p.knobs.values) for p in proofs}) == len(proofs)


def test_mutants_are_in_compiled_lines_and_alternate_between_rules() -> None:
    bench = MutantBench(RMSNORM, "bf16", take("cpu"), 26)
    recipe = bench.proofs[0].recipe
    assert isinstance(recipe, NativeRecipe)
    lines = compiled_lines(recipe.source, recipe.flags)
    found = faults_of(RMSNORM, recipe, bench.rng)
    assert {fault.file for fault in found} == {"cpu/rmsnorm.cpp", "cpu/simd.h"}
    assert all(fault.change.line in lines[kernels() / fault.file] for fault in found)
    assert len({fault.change.rule for fault in found[:14]}) > 5


def test_reasons_are_about_lines_that_exist() -> None:
    for name in SOURCE_REASONS:
        file, _, line = name.partition(": ")
        source = " ".join((kernels() / file).read_text().split())
        assert line.partition(" | ")[0] in source, f"the line was edited, so check the reason again: {name}"


def test_an_unchanged_copy_passes() -> None:
    bench = MutantBench(RMSNORM, "bf16", take("cpu"), 26)
    with Prover(bench.fp, Terms(traits=True), threads=1) as prover:
        from autosel.native.compile import compile_source

        recipe = bench.proofs[0].recipe
        assert isinstance(recipe, NativeRecipe)
        found = bench.proven(prover, compile_source(recipe.source, recipe.flags))
    assert type(found).__name__ == "Passed", found
