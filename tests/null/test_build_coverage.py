"""What the GPU formulas can ask a compiler for, on every known device and model: each is a build that some test of
tests/compile makes, or is named here as one that none does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from autosel import models
from autosel.candidates.registry import own_candidates
from autosel.fingerprint.known import load, names
from autosel.models.presets import PRESETS
from autosel.models.workloads import ASKED_OPS, STEP_OPS, step
from autosel.native import cuda, cutlass
from autosel.native.cuda import Nvcc
from autosel.native.cutlass import Headers
from autosel.values import Accepted, NativeRecipe, Workload
from tests.compile.test_emulated_cutlass import BUILDS as EMULATED_TILES
from tests.compile.test_emulated_linear import BUILDS as EMULATED_PROJECTIONS
from tests.compile.test_machine_code import BUDGETS
from tests.compile.test_machine_code_cutlass import BUILDS as HOPPER_AND_AMPERE
from tests.compile.test_machine_code_cutlass import BY_NAME

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
STAGES_EMULATED = range(2, 11)  # rings of other lengths are the same code
# Of gemm_sm90.cu: swap, tile_m, tile_n, cluster, stream_k. A minute each; `./run gpu` meets those its model asks for.
NOT_COMPILED = {
    (0, 64, 64, 2, 0),
    (0, 128, 64, 2, 1),
    (0, 128, 256, 1, 0),
    (0, 128, 256, 1, 1),
    (0, 256, 64, 2, 0),
    (0, 256, 128, 1, 1),
    (1, 64, 32, 1, 0),
    (1, 64, 64, 1, 0),
    (1, 64, 128, 1, 0),
    (1, 128, 32, 1, 1),
    (1, 128, 64, 1, 1),
    (1, 128, 128, 1, 1),
    (1, 128, 256, 1, 0),
    (1, 128, 256, 1, 1),
}


@pytest.fixture(autouse=True)
def _any_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = Nvcc(path="nvcc", version="release 13.0", home=Path("/"), architectures=(80, 86, 89, 90, 100, 120))
    monkeypatch.setattr(cuda, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(cutlass, "find_headers", lambda: Headers(include=Path("/include"), version=(4, 2, 0)))
    monkeypatch.setattr("autosel.candidates.cuda.base.find_compiler", lambda: "g++")


@cache
def workloads() -> tuple[Workload, ...]:
    """Of every preset's step at these batches; one context, for none is compiled in."""
    found: dict[str, Workload] = {}
    for preset in PRESETS:
        for batch in BATCHES:
            for named in step(models.load(preset), batch=batch, context=128, dtype="bf16", ops=(*STEP_OPS, *ASKED_OPS)):
                found.setdefault(named.workload.key, named.workload)
    return tuple(found.values())


def asked(backend: str) -> dict[str, set[tuple[str, ...]]]:
    """Source -> the settings that are compiled in, as macros without the dtype."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for device in names():
        fp = load(device)
        for c in (c for c in own_candidates() if c.backend == backend):
            for w in workloads():
                if w.op == c.op and isinstance(c.supports(w, fp), Accepted):
                    recipe = c.recipe(w, fp, c.knobs(w, fp))
                    assert isinstance(recipe, NativeRecipe)
                    macros = (flag.removeprefix("-DAUTOSEL_") for flag in recipe.flags if flag.startswith("-DAUTOSEL_"))
                    found.setdefault(Path(recipe.source).stem, set()).add(tuple(m for m in macros if "=" in m))
    return found


def test_every_build_of_a_cuda_kernel_has_its_machine_code_looked_at() -> None:
    for source, builds in asked("CUDA_EXT").items():
        looked_at = {tuple(sorted(m.removeprefix("AUTOSEL_") for m in b)) for b in BUDGETS[source].builds}
        assert {tuple(sorted(b)) for b in builds} <= looked_at, source


def test_every_build_of_a_projection_is_emulated() -> None:
    emulated = {(f"ROWS={rows}", f"UNROLL={unroll}") for rows, unroll in EMULATED_PROJECTIONS}
    for source, builds in asked("CUDA_EXT").items():
        assert {tuple(sorted(b)) for b in builds if b} <= emulated, source


def test_every_tile_for_mma_is_emulated() -> None:
    tiles = {(f"ROWS={rows}", f"COLUMNS={columns}") for rows, columns, _ in EMULATED_TILES}
    for rows, columns, stages in asked("CUTLASS")["gemm_sm80"]:
        assert (rows, columns) in tiles
        assert int(stages.partition("=")[2]) in STAGES_EMULATED


def test_every_tile_for_wgmma_is_compiled_or_named_as_one_that_is_not() -> None:
    compiled = set()
    for b in HOPPER_AND_AMPERE:
        if b.source == "gemm_sm90":
            candidate, fp = BY_NAME[b.source], load(b.device)
            w = Workload(op="linear", dims=(("M", b.m), ("N", b.n), ("K", b.k)), dtype=b.dtype)
            flags = candidate.recipe(w, fp, candidate.knobs(w, fp)).flags  # type: ignore[union-attr]
            compiled.add(tile(m.removeprefix("-DAUTOSEL_") for m in flags if "=" in m and "AUTOSEL" in m))
    wanted = {tile(macros) for macros in asked("CUTLASS")["gemm_sm90"]}
    left = wanted - compiled
    assert left == NOT_COMPILED, (
        f"not named: {sorted(left - NOT_COMPILED)}; named and compiled: {sorted(NOT_COMPILED - left)}"
    )


def tile(macros: Iterable[str]) -> tuple[int, ...]:
    """Of macros as NAME=VALUE, the values; a ring's length apart."""
    return tuple(int(m.partition("=")[2]) for m in macros if not m.startswith("STAGES"))
