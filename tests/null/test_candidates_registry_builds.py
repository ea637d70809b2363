"""Check that tests/compile covers each build of the GPU formulas, for every known device and model, on some day."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from autosel import models
from autosel.candidates.cuda.step import StepBuild
from autosel.candidates.registry import own_candidates
from autosel.fingerprint.known import load, names
from autosel.knobs.gpu.facts import facts
from autosel.models.presets import PRESETS
from autosel.models.workloads import ASKED_OPS, STEP_OPS, step
from autosel.values import Accepted, NativeRecipe, Workload
from tests.compile.cutlass_asked import BY_NAME, builds
from tests.compile.test_emulated_cutlass import SIDES
from tests.compile.test_emulated_cutlass import choices as emulated_tiles
from tests.compile.test_emulated_linear import BUILDS as EMULATED_PROJECTIONS
from tests.compile.test_machine_code import BUDGETS

pytestmark = pytest.mark.usefixtures("any_compiler")
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)

Build = tuple[str, ...]  # macros as NAME=VALUE, sorted, without the dtype


@cache
def workloads() -> tuple[Workload, ...]:
    """Return every preset's step at these batches; one context, because none is compiled in."""
    found: dict[str, Workload] = {}
    for preset in PRESETS:
        for batch in BATCHES:
            for named in step(models.load(preset), batch=batch, context=128, dtype="bf16", ops=(*STEP_OPS, *ASKED_OPS)):
                found.setdefault(named.workload.key, named.workload)
    return tuple(found.values())


def asked(backend: str) -> dict[tuple[str, tuple[int, int]], set[Build]]:
    """Return the compiled-in settings by source and compute capability."""
    found: dict[tuple[str, tuple[int, int]], set[Build]] = {}
    for device in names():
        fp = load(device)
        for c in (c for c in own_candidates() if c.backend == backend):
            for w in workloads():
                if w.op == c.op and isinstance(c.supports(w, fp), Accepted):
                    recipe = c.recipe(w, fp, c.knobs(w, fp))
                    assert isinstance(recipe, NativeRecipe)
                    found.setdefault((Path(recipe.source).stem, facts(fp).cc), set()).add(build(recipe.flags))
    return found


def looked_at(source: str, cc: tuple[int, int]) -> set[Build]:
    return {build(macros) for _, macros in BUDGETS[source].builds(cc)}


def build(flags: Iterable[str]) -> Build:
    macros = (flag.removeprefix("-D").removeprefix("AUTOSEL_") for flag in flags if "AUTOSEL_" in flag)
    return tuple(sorted(m for m in macros if "=" in m))


def test_the_machine_code_of_every_build_of_a_cuda_kernel_is_tested_for_its_target() -> None:
    for (source, cc), wanted in asked("CUDA_EXT").items():
        assert wanted <= looked_at(source, cc), (source, cc)


def test_the_machine_code_of_every_build_of_a_whole_step_is_tested_for_its_target() -> None:
    for device, preset, rows in itertools.product(names(), PRESETS, range(1, 9)):
        fp, model = load(device), models.load(preset)
        named = step(model, batch=rows, context=128, dtype="bf16")
        (attn, *_), products = ([n.workload for n in named if n.workload.op == op] for op in ("attn", "linear"))
        wanted = build(StepBuild.of(attn, products[0], fp).recipe.flags)
        assert wanted in looked_at("step", facts(fp).cc), (device, preset, rows)


def test_every_build_of_a_projection_is_emulated() -> None:
    emulated = {(f"ROWS={rows}", f"UNROLL={unroll}") for rows, unroll in EMULATED_PROJECTIONS}
    for key, wanted in asked("CUDA_EXT").items():
        assert {b for b in wanted if b} <= emulated, key


def test_every_tile_for_mma_is_emulated_with_every_length_of_its_ring() -> None:
    emulated = {build(f"AUTOSEL_{n}={v}" for n, v in zip(SIDES, tile, strict=True)) for _, tile in emulated_tiles()}
    for key, wanted in asked("CUTLASS").items():
        assert key[0] != "gemm_sm80" or wanted <= emulated, key


def test_every_build_on_cutlass_is_compiled_for_its_target() -> None:
    compiled: dict[tuple[str, tuple[int, int]], set[Build]] = {}
    for b in builds():
        fp = load(b.device)
        recipe = BY_NAME[b.source].recipe(b.workload, fp, b.knobs)
        assert isinstance(recipe, NativeRecipe)
        compiled.setdefault((b.source, facts(fp).cc), set()).add(build(recipe.flags))
    for key, wanted in asked("CUTLASS").items():
        assert wanted <= compiled[key], key
