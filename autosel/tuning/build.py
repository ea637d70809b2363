"""Compile what the jobs need: every recipe once, two compilers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import as_completed

from autosel.errors import BuildError
from autosel.native.compile import compile_source
from autosel.tuning.job import Job, Tuning, Way
from autosel.tuning.pool import pool
from autosel.values import NativeRecipe

COMPILERS = 2


def build_all(tuning: Tuning, jobs: Sequence[Job]) -> None:
    """A way that does not compile leaves its job, with the compiler's reason. At the deadline no compiler starts, and
    a job with a way left unbuilt is late."""
    recipes = {w.build_digest: w.recipe for job in jobs for w in job.ways if isinstance(w.recipe, NativeRecipe)}
    failed: dict[str, str] = {}
    missing = set(recipes)
    with pool(COMPILERS) as executor:
        futures = {}
        for digest, recipe in recipes.items():
            futures[executor.submit(_build, tuning, recipe)] = digest
        if recipes:
            tuning.tally.stage("build", next(iter(recipes.values())).source, 0, len(recipes))
        for done, future in enumerate(as_completed(futures), 1):
            digest = futures[future]
            try:
                missing -= {digest} if future.result() else set()
            except BuildError as error:
                failed[digest] = f"{error.what}: {error.why}"
            tuning.tally.stage("build", recipes[digest].source, done, len(recipes))
    for job in jobs:
        for way in [x for x in job.ways if x.build_digest in failed]:
            drop(job, way)
            tuning.tally.rejected(job.workload, way.candidate.name, "build", failed[way.build_digest])
        job.late = job.late or any(way.build_digest in missing for way in job.ways)


def _build(tuning: Tuning, recipe: NativeRecipe) -> bool:
    """False where the time was over before it began."""
    if tuning.over:
        return False
    compile_source(recipe.source, recipe.flags)
    return True


def drop(job: Job, way: Way) -> None:
    """Take a way out of a job; if it was the incumbent, the baseline is."""
    job.ways.remove(way)
    if way is job.incumbent:
        job.incumbent = job.baseline
