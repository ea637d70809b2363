"""Test the stored results of `./run gpu`: valid files are read again, broken ones are not; tables have every stage."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autosel import models
from autosel.candidates import registry
from autosel.candidates.base import Candidate
from autosel.candidates.libraries.base import Library
from autosel.candidates.registry import eligible, own_candidates
from autosel.errors import BadArguments
from autosel.fingerprint import known
from autosel.models.workloads import step
from autosel.native import cuda, cutlass
from autosel.native.cuda import Nvcc
from autosel.native.cutlass import Headers
from autosel.ops import OPS
from autosel.values import Accepted, NativeRecipe, Scalar
from benchmarks.gpu import decode, tune
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.entrants import BuildEntry, entries
from benchmarks.gpu.scope import is_ours, scope_of
from benchmarks.gpu.stages import stage
from benchmarks.gpu.variants import feature_of, variants

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", [("--device", "cuda"), ("--device", "cpu"), ("--device", "cuda", "--op", "attn")])
def test_every_decode_was_tuned_before(words: tuple[str, ...]) -> None:
    """Check that the tune contains every workload of every run once, for the ops in its scope, and no other."""
    scope = scope_of(parsed([*words]))

    def asked(model: str, batch: int, seq: int, *ops: str) -> set[str]:
        return {n.workload.key for n in step(models.load(model), batch=batch, context=seq, ops=ops or None)}

    runs, jobs = decode.runs(scope).values(), tune.jobs(scope).values()
    decoded = set().union(*(asked(r.model, r.batch, r.seq, *scope.tuned_ops) for r in runs))
    assert set().union(*(asked(j.model, j.batch, j.seq, j.op) for j in jobs)) == decoded
    assert {r.batch for r in runs} == {j.batch for j in jobs} and {r.model for r in runs} == {j.model for j in jobs}
    assert len(set(jobs)) == len(jobs)


def test_decodes_have_the_options_with_which_they_were_tuned() -> None:
    scope = scope_of(parsed(["--device", "cuda"]))
    for unit, asked in decode.runs(scope).items():
        said = [word for word in asked.words if word in ("--batch", "--small-batch")]
        assert asked.batch == (int(asked.words[1]) if said else 1), unit
        assert not {"--model", "--seq"} & set(asked.words)


# --- every candidate is covered --------------------------------------------------------------------------------------

ON_GPU = scope_of(parsed(["--device", "cuda"]))
DEVICES = ("h200", "b200", "rtx-5070-ti")
UNTIMED = {"flash_attn:paged_attn": "takes pages of 256 tokens; a serving engine's have 16"}
WITHOUT_CANDIDATE = {
    "cuda/grid_sync.cu": "the fingerprint stage runs it",
    "cuda/probes.cu": "the fingerprint stage runs it",
    "cuda/step.cu": "a whole step is no op: the decode stage runs it",
}


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `supports` find compilers, headers, Triton and each library."""
    nvcc = Nvcc(path="nvcc", version="release 13.0", home=Path("/"), architectures=(80, 86, 89, 90, 100, 120))
    monkeypatch.setattr(cuda, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(cutlass, "find_headers", lambda: Headers(include=Path("/include"), version=(4, 2, 0)))
    monkeypatch.setattr("autosel.candidates.cuda.base.find_compiler", lambda: "g++")
    monkeypatch.setattr("autosel.candidates.triton.base.find_spec", lambda name: name)
    monkeypatch.setattr(registry, "registered", lambda op: ())  # without candidates that other tests defined
    monkeypatch.setattr(Library, "why_not", lambda self, cc: "" if cc >= self.least_cc else "too old a device")


def for_gpus() -> list[Candidate]:
    """Return the candidates that are neither PyTorch's own nor for CPUs."""
    return [c for c in own_candidates() if c.backend not in ("TORCH", "INDUCTOR", "CPP")]


@cache
def listed(name: str) -> list[BuildEntry]:
    """Return the entries of a device; every caller uses `everything_installed`."""
    return list(entries(ON_GPU, known.load(name)))


def accepted(name: str) -> list[BuildEntry]:
    return [e for e in listed(name) if not e.refused]


def candidates_in(units: list[str], skip: int = 0) -> set[tuple[str, str]]:
    return {(words[skip], words[skip + 1]) for words in (unit.split(" ") for unit in units)}


@pytest.mark.usefixtures("everything_installed")
def test_parity_lists_every_candidate_there_is() -> None:
    listed = candidates_in(stage("parity").units(ON_GPU, known.load("h200")))
    assert listed == {(c.op, c.name) for c in own_candidates()}


@pytest.mark.usefixtures("everything_installed")
def test_parity_runs_every_gpu_candidate_on_some_device() -> None:
    met = {(e.candidate.op, e.candidate.name) for device in DEVICES for e in accepted(device)}
    assert {c.name for c in for_gpus() if (c.op, c.name) not in met} == set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("everything_installed")
def test_the_sanitizer_checks_every_kernel_that_parity_runs(device: str) -> None:
    units = stage("sanitizer").units(ON_GPU, known.load(device))
    there = {(e.candidate.op, e.candidate.name) for e in accepted(device) if e.candidate in for_gpus()}
    steps = [unit for unit in units if " step " in unit]
    assert [unit.split(" ")[0] for unit in steps] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    units = [unit for unit in units if unit not in steps]
    assert candidates_in(units, skip=1) == there
    ours = {(c.op, c.name) for c in for_gpus() if c.backend in ("CUDA_EXT", "CUTLASS", "TRITON")}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert candidates_in([u for u in units if u.startswith(tool)], skip=1) >= there & ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("everything_installed")
def test_the_bench_has_every_candidate_that_parity_runs(device: str) -> None:
    fp, asked = known.load(device), {n.workload.key: n.workload for n in ON_GPU.everything()}
    met = set()
    for key in stage("bench").units(ON_GPU, fp):
        met |= {(c.op, c.name) for c, s in eligible(asked[key], fp, "full") if isinstance(s, Accepted)}
    there = {(e.candidate.op, e.candidate.name) for e in accepted(device) if e.workload.dtype == "bf16"}
    assert {name for _, name in there - met} == set(UNTIMED)


@pytest.mark.usefixtures("everything_installed")
def test_every_gpu_source_is_reached_or_has_its_reason() -> None:
    reached = set()
    for device in DEVICES:
        for e in accepted(device):
            fp = known.load(device)
            recipe = e.candidate.recipe(e.workload, fp, e.candidate.knobs(e.workload, fp))
            if isinstance(recipe, NativeRecipe):
                reached.add(recipe.source)
            elif e.candidate.backend == "TRITON":
                reached.add(f"triton/{recipe.target.partition(':')[0].rpartition('.')[2]}.py")
    there = {f"{path.parent.name}/{path.name}" for path in (ROOT / "kernels").glob("c*/*.cu")}
    there |= {
        f"triton/{path.name}"
        for path in (ROOT / "kernels" / "triton").glob("*.py")
        if "\n@triton.jit" in path.read_text()
    }
    used_by_others = {
        "control/empty.cu",
        "triton/attention.py",
        "triton/common.py",
        "triton/gated.py",
        "triton/project.py",
        "triton/tiles.py",
    }
    assert there - reached - used_by_others == set(WITHOUT_CANDIDATE)


@pytest.mark.usefixtures("everything_installed")
def test_the_graph_stage_captures_every_build_that_parity_runs() -> None:
    units = stage("graph").units(ON_GPU, known.load("h200"))
    assert units == [*(e.name for e in accepted("h200")), "a whole step"]


@pytest.mark.usefixtures("everything_installed")
def test_every_build_of_a_kernel_is_proven_not_only_its_first() -> None:
    """Prove each build: the CUTLASS tiles for few rows, for many and for a large product are different code."""
    built = [e for e in accepted("h200") if e.candidate.name == "cutlass:gemm_sm90" and e.workload.dtype == "bf16"]
    assert {e.workload["M"] for e in built} >= {8, 64, 256}
    names = [e.name for e in listed("h200")]
    assert len(names) == len(set(names))
    firsts = [e.further for e in listed("h200")]
    assert firsts == sorted(firsts)


# --- every trait of every contract ------------------------------------------------------------------------------------


def values_named(op: str, trait: str) -> set[Scalar]:
    """Return the values of a trait, except its default, that a contract names; none if any number is allowed, or if the
    trait is not an argument."""
    of = OPS[op]
    if trait not in {a.name for a in of.args if a.kind in ("int", "float")}:
        return set()
    some = next(w for w in (e.workload for e in accepted("h200")) if w.op == op)
    inputs = of.cases(of.workload(some.dtype, dict(some.dims)))[0].make(1)
    taken = {number for number in range(10) if takes(op, inputs | {trait: number})}
    return set() if len(taken) == 10 else taken - {of.trait_defaults[trait]}


FORMATS = {"weight": "formats", "cache": "cache_formats"}  # trait -> argument of a candidate


def takes(op: str, inputs: dict[str, object]) -> bool:
    try:
        OPS[op].workload_of(inputs)
    except BadArguments:
        return False
    return True


@pytest.mark.parametrize(("op", "trait"), [(op.name, trait) for op in OPS.values() for trait in op.trait_defaults])
@pytest.mark.usefixtures("everything_installed")
def test_a_kernel_of_ours_is_proven_at_every_trait_that_a_contract_knows(op: str, trait: str) -> None:
    own = [e for e in accepted("h200") if e.workload.op == op and is_ours(e.candidate.name)]
    default = OPS[op].trait_defaults[trait]
    met = {e.workload.trait(trait, default) for e in own}
    assert default in met
    if trait in FORMATS:
        assert met == {name for e in own for name in getattr(e.candidate, FORMATS[trait])}, "a format has no kernel"
        return
    assert met - {default}
    assert met >= values_named(op, trait)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("everything_installed")
def test_every_candidate_is_proven_once_at_each_feature_it_takes(device: str) -> None:
    """Check that a candidate without a workload in the model is one unit, not one per dtype and shape."""
    fp, there = known.load(device), accepted(device)
    usual = {(n.workload.op, feature_of(n.workload)) for n in ON_GPU.everything()}
    units: dict[tuple[str, str, object], int] = {}
    for e in there:
        named = (e.candidate.op, e.candidate.name, feature_of(e.workload))
        units[named] = units.get(named, 0) + 1
    for w in variants(ON_GPU, ON_GPU.dtypes[0]):
        for candidate, support in eligible(w, fp, ON_GPU.effort):
            if isinstance(support, Accepted):
                met = units.get((w.op, candidate.name, feature_of(w)), 0)
                assert met == 1 or (met and (w.op, feature_of(w)) in usual), (candidate.name, w.key)
