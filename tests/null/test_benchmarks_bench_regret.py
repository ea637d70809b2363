"""Test the arithmetic of regrets: noise must not look like regret. Rounds are drawn with known times."""

from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autosel.candidates.registry import find, own_candidates
from autosel.fingerprint import known
from autosel.knobs import gpu as gpu_knobs
from autosel.knobs.cpu import linear
from autosel.knobs.cpu.facts import FORK_JOIN_S, facts, worthwhile_threads
from autosel.knobs.gpu import gemm, gemv
from autosel.knobs.gpu.facts import facts as facts_of_gpu
from autosel.ops import OPS
from autosel.values import Fingerprint, Rate
from benchmarks.bench_regret import (
    MOST_COMPILED,
    MOST_SETTINGS,
    WAYS,
    RegretCell,
    cells,
    changed_since,
    is_legal,
    kernel,
    routed,
    settings,
)
from benchmarks.gpu import decode
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.scope import scope_of
from benchmarks.halving import final, held_out, interval, nominate

ROOT = Path(__file__).resolve().parents[2]


# --- a whole cell, on a simulated machine ----------------------------------------------------------------------------


class Machine:
    """Settings with known times on a simulated machine whose speed drifts; its clock advances only while it works."""

    def __init__(self, truth: dict[str, float], seed: int, *, noise: float = 0.02, busy_s: float = 0.0) -> None:
        self.truth, self.rng, self.noise, self.busy_s = truth, Random(seed), noise, busy_s
        self.clock_s = self.level = 1.0
        self.disturbed = False
        self.read = 0

    def visit(self, order: Sequence[str]) -> dict[str, float]:
        self.level = min(2.0, max(0.5, self.level * self.rng.gauss(1, 0.03)))
        beside = self.clock_s % 3 < self.busy_s  # seconds out of three in which other processes work
        self.disturbed = self.disturbed or beside
        found = {}
        for name in order:
            time_us = self.truth[name] * self.level * self.rng.gauss(1, self.noise)
            found[name] = time_us * (3 if beside and name == "closed" else 1)
            self.clock_s += 2 * time_us / 1e6
            self.read += 1
        return found

    def quiet(self) -> bool:
        was, self.disturbed = self.disturbed, False
        return not was

    def now(self) -> float:
        return self.clock_s


def judged(machine: Machine, seconds: float = 8.0) -> tuple[float, float, float]:
    """Return (regret, low, high) of a cell."""
    rng = Random(5)
    rivals = {name: {"knob": name} for name in machine.truth if name != "closed"}
    swept = nominate(machine, "closed", rivals, {"knob": "closed"}, seconds=0.4 * seconds, rng=rng)
    arms = ["closed", *swept.nominees]
    times = final(machine, arms, "closed", arms, seconds=0.6 * seconds, rng=rng)
    return held_out(times, "closed", arms), *interval(times, "closed", arms, rng)


def equal(count: int, **truth: float) -> dict[str, float]:
    return {"closed": 4000.0, **{f"s{i}": 4000.0 for i in range(count)}} | truth


def test_a_sweep_of_many_equal_settings_finds_no_regret() -> None:
    found = [judged(Machine(equal(60), seed))[0] for seed in range(30)]
    assert abs(statistics.fmean(found)) < 0.004


def test_the_one_good_setting_of_two_hundred_is_found() -> None:
    for seed in range(10):
        truth = equal(200, s77=3200.0, **{f"s{i}": 4400.0 for i in range(0, 200, 3)})
        regret, low, high = judged(Machine(truth, seed))
        assert regret == pytest.approx(0.25, abs=0.03)
        assert low <= 0.25 <= high or high - low < 0.04


# --- settings ---------------------------------------------------------------------------------------------------------


def cpu(**rates: float) -> Fingerprint:
    identity = {
        "cpus": 2, "cores": 2, "isa": ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_bf16"),
        "l1d_bytes": 48 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20, "l3_domains": 1,
    }  # fmt: skip
    found = {name: Rate(value=value, unit="", spread=0.0, source="test") for name, value in rates.items()}
    return Fingerprint(kind="cpu", name="test", identity=identity, environment={}, rates=found)


@pytest.mark.parametrize("cell", cells("cpu"), ids=lambda c: c.name)
def test_a_sweep_contains_the_closed_form_and_is_legal_and_bounded(cell: object) -> None:
    fp, w = cpu(), cell.workload  # type: ignore[attr-defined]
    for name in cell.kernels:  # type: ignore[attr-defined]
        closed, legal = settings(find(w.op, name), w, fp)
        assert closed in legal
        assert len(legal) <= MOST_SETTINGS + 1
        assert all(is_legal(one, w, fp) for one in legal if one != closed)


OURS = [c for c in own_candidates() if c.backend in ("CUDA_EXT", "TRITON", "CUTLASS")]
# Settings of a step as a whole: the decode stage runs it in each of its forms.
WHOLE_STEP = {"persistent", "step"}
NO_FORMULAS = {"__init__", "facts"}


def test_every_kernel_of_ours_on_a_gpu_has_its_cells() -> None:
    """Fail for a new kernel without cells."""
    met = {(c.workload.op, name) for c in cells("cuda") if c.kind != "route" for name in c.kernels}
    assert met == {(c.op, c.name) for c in OURS}


def test_every_closed_form_of_a_gpu_has_its_cells() -> None:
    families = {name for name, _ in gpu_knobs.FAMILIES.values()} | {"route", *gpu_knobs.ROUTES}
    h200 = facts_of_gpu(known.load("h200"))
    assert families == {name for c in cells("cuda") for name in gpu_knobs.derive(c.workload, h200)}
    folder = Path(gpu_knobs.__file__).parent
    modules = {path.stem: path.read_text() for path in folder.glob("*.py") if path.stem not in WHOLE_STEP | NO_FORMULAS}
    formulas = {inspect.getmodule(inspect.unwrap(f)).__name__.rpartition(".")[2] for f in _formulas()}  # type: ignore[union-attr]
    assert formulas == set(modules) and all("-> Knobs:" in text for text in modules.values())
    assert {decode.WHOLE, decode.GRAPH, decode.CALLS} <= set(decode.runs(scope_of(parsed(["--device", "cuda"]))))


def _formulas() -> list[Any]:
    """Return the formulas of the kernels that have cells; Triton's kernels have the same ones."""
    return [c.formula for c in OURS if c.backend != "TRITON"] + list(WAYS.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("cell", cells("cuda"), ids=lambda c: c.name)
def test_a_gpus_sweep_holds_the_closed_form_and_is_bounded(cell: RegretCell) -> None:
    """Bound the sweep, with fewer builds for each kind of knob."""
    fp = known.load("h200")
    if cell.kind == "route":
        assert routed(cell.workload, fp, cell.kernels) in cell.kernels
        return
    (name,) = cell.kernels
    found = find(cell.workload.op, name)
    closed, legal = settings(found, cell.workload, fp)
    assert closed in legal
    assert len(legal) <= (MOST_COMPILED if found.backend == "TRITON" else MOST_SETTINGS) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_route_is_judged_at_every_m_that_it_could_go_wrong_at(device: str) -> None:
    """Check M from 1 to 16 and larger ones, with both kernels per cell; no known device changes routes elsewhere."""
    routes = [c for c in cells(device) if c.kind == "route"]
    found: dict[tuple[str, ...], dict[tuple[int, int], set[int]]] = {}
    for c in routes:
        w = c.workload
        found.setdefault(c.kernels, {}).setdefault((w["N"], w["K"]), set()).add(w["M"])
    by_dots = next(shapes for kernels, shapes in found.items() if kernels[0].endswith(":gemv"))
    assert len(by_dots) == 2
    for rows in by_dots.values():
        assert set(range(1, 17)) <= rows and max(rows) >= 64
    if device == "cpu":
        fp = cpu()
        assert all(kernel(c, name, fp) is not None for c in routes for name in c.kernels)
        assert {linear.by_dots(m) for m in range(1, 17)} == {True, False}
        return
    tiled = sorted(next(shapes for kernels, shapes in found.items() if kernels[0].endswith("@stream"))[4096, 4096])
    for name in known.names():
        f = facts_of_gpu(known.load(name))
        for shape, rows in by_dots.items():
            w = OPS["linear"].workload("bf16", {"M": 1, "N": shape[0], "K": shape[1]})
            first = gemm.crossover(gemv.projection(w), f)
            assert {max(1, first - 1), first, first + 1} <= rows, name
        second = gemm.large_from("bf16", f)
        below, above = max(m for m in tiled if m <= second), min(m for m in tiled if m > second)
        assert above <= 1.25 * below, name


# --- the sources of measured cells -----------------------------------------------------------------------------------


def test_every_committed_cell_names_its_sources() -> None:
    text, files = (ROOT / "docs" / "formulas.md").read_text(), ROOT.glob("benchmarks/results/cpu/regret-*.json")
    for found in [list(json.loads(path.read_text())["cells"].values()) for path in files]:
        assert found and all(c["sources"] for c in found)
        assert changed_since(found) in text


# --- rules of the formulas that come from sweeps ---------------------------------------------------------------------


def test_a_fork_join_measured_on_a_busy_machine_is_ignored() -> None:
    """Ignore such a rate: it was 194 us on a machine at load 4, and 3 us an hour later. Using it left one of two cores
    idle for products of 160 us, which then took 1.3 to 1.9 times as long."""
    disturbed = replace(cpu(**{"fork_join_s@2": 194e-6}), contended=True)
    assert facts(disturbed).fork_join_s == FORK_JOIN_S
    assert worthwhile_threads(facts(disturbed), 160e-6) == 2
    quiet = cpu(**{"fork_join_s@2": 194e-6})
    assert worthwhile_threads(facts(quiet), 160e-6) == 1
