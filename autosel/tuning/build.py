"""Compile what the jobs need: every recipe once, two compilers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from autosel.errors import BuildError
from autosel.native.compile import compile_source
from autosel.tuning.job import Job, Tuning, Way
from autosel.values import NativeRecipe

COMPILERS = 2


def build_all(tuning: Tuning, jobs: Sequence[Job]) -> None:
    """A way that does not compile leaves its job, with the compiler's reason."""
    recipes = {w.build_digest: w.recipe for job in jobs for w in job.ways if isinstance(w.recipe, NativeRecipe)}
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=COMPILERS) as pool:
        futures = {pool.submit(compile_source, r.source, r.flags): (digest, r) for digest, r in recipes.items()}
        for done, future in enumerate(as_completed(futures), 1):
            digest, recipe = futures[future]
            tuning.tally.stage("build", recipe.source, done, len(recipes))
            try:
                future.result()
            except BuildError as error:
                failed[digest] = f"{error.what}: {error.why}"
    for job in jobs:
        for way in [x for x in job.ways if x.build_digest in failed]:
            drop(job, way)
            tuning.tally.rejected(job.workload, way.candidate.name, "build", failed[way.build_digest])


def drop(job: Job, way: Way) -> None:
    """Take a way out of a job; if it was the incumbent, the baseline is."""
    job.ways.remove(way)
    if way is job.incumbent:
        job.incumbent = job.baseline
