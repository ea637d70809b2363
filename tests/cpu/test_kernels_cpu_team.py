"""Test the threads of C++ kernels (kernels/cpu/team.h): PyTorch's OpenMP pool if there is one, else helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autosel import resources
from autosel.native.compile import find_compiler
from tests import drawn

SOURCE = Path(__file__).parent / "team.cpp"
CPUS = sorted(os.sched_getaffinity(0))
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler found")
    folder = tmp_path_factory.mktemp("team")

    def built(kind: str) -> Path:
        path = folder / kind
        if not path.exists():
            flags = ["-O1", "-std=c++17", "-pthread", *(["-fopenmp"] if kind == "openmp" else [])]
            command = [compiler.path, *flags, f"-I{resources.kernels() / 'cpu'}", str(SOURCE), "-o", str(path), "-ldl"]
            subprocess.run([*command, *(["-Wl,--no-as-needed", "-lgomp"] if kind == "openmp" else [])], check=True)
        return path

    return built


@pytest.fixture(params=["openmp", "helpers"])
def run(request: pytest.FixtureRequest, program: Callable[[str], Path]) -> Run:
    return runner(program(request.param))


@pytest.fixture
def on_openmp(program: Callable[[str], Path]) -> Run:
    return runner(program("openmp"))


def runner(path: Path) -> Run:
    def run(*words: object, cpus: list[int] | None = None, **environment: str) -> list[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        environment.setdefault("OMP_NUM_THREADS", "2")
        done = subprocess.run(
            ["sh", "-c", 'ulimit -s 8192; exec "$@"', "sh", str(path), *map(str, words)],
            env=kept | environment,
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.splitlines()

    return run


needs_two_cores = pytest.mark.skipif(len(CPUS) < 2, reason="needs two cores")


@pytest.mark.parametrize("size", [2, 4, 40])
def test_every_rank_runs_once_also_with_more_threads_than_cores(run: Run, size: int) -> None:
    assert run("run", size)[0].startswith(f"whole 1 threads {size} ")


def test_a_loaded_openmp_runtime_is_used(program: Callable[[str], Path]) -> None:
    assert [runner(program(kind))("run", 2)[0].split()[-1] for kind in ("openmp", "helpers")] == ["1", "0"]


def test_jobs_of_fewer_threads_keep_the_runtimes_threads(on_openmp: Run) -> None:
    assert on_openmp("sizes", 4, OMP_NUM_THREADS="4") == ["threads 4"]


@pytest.mark.parametrize("limit", [{}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_NUM_THREADS": "1"}])
def test_ranks_that_wait_for_each_other_have_a_thread_each(run: Run, limit: dict[str, str]) -> None:
    assert run("at-once", 4, **limit) == ["met 4"]


def test_with_a_thread_limit_the_ranks_share_the_available_threads(on_openmp: Run) -> None:
    assert on_openmp("callers", 4, OMP_THREAD_LIMIT="1") == ["wrong 0"]


@needs_two_cores
def test_each_worker_gets_its_own_core_and_later_its_affinity_back(run: Run) -> None:
    two = CPUS[:2]
    caller, workers, placed, released, left = run("placed", 2, cpus=two)
    assert caller == "caller unchanged"
    assert workers.removeprefix("workers ") in map(str, two)
    assert (placed, released, left) == ("placed 1", "released " + ",".join(map(str, two)), "placed 0")


@pytest.mark.parametrize(
    ("size", "cpus", "environment"),
    [
        pytest.param(2, CPUS[:1], {}, id="taskset-of-one-core"),
        pytest.param(4, CPUS[:2], {"OMP_NUM_THREADS": "4"}, id="more-threads-than-cores"),
        pytest.param(2, CPUS[:2], {"OMP_PROC_BIND": "true"}, id="bound-by-openmp"),
    ],
)
def test_workers_are_not_placed_if_disabled_bound_or_without_a_core_each(
    on_openmp: Run, size: int, cpus: list[int], environment: dict[str, str]
) -> None:
    caller, _, placed, *_ = on_openmp("placed", size, cpus=cpus, **environment)
    assert (caller, placed) == ("caller unchanged", "placed 0")


@needs_two_cores
def test_a_worker_that_another_library_has_bound_stays_there(run: Run) -> None:
    assert run("foreign", 2, cpus=CPUS[:2] if 0 in CPUS[:2] else CPUS) == ["workers 0", "placed 0"]


def test_a_forked_child_has_its_own_helpers(on_openmp: Run) -> None:
    assert on_openmp("fork", 2) == ["whole 1 threads 2 openmp 1", "whole 1 threads 2 openmp 0", "child ended"]


def test_several_threads_may_call_at_the_same_time(run: Run) -> None:
    assert run("callers", 2) == ["wrong 0"]


def test_an_exception_of_any_rank_reaches_the_caller_and_the_next_job_is_whole(run: Run) -> None:
    *raised, after = run("throws", 3)
    assert raised == ["rank 0", "rank 1", "rank 2"]
    assert after.startswith("whole 1 threads 3")


@needs_two_cores
def test_after_a_rest_short_jobs_stay_with_the_caller_and_long_ones_do_not(run: Run) -> None:
    for _ in range(3):  # other work may keep the pool's worker awake, or delay the caller like a wake-up
        short, long = (line.split(": ")[1].split() for line in run("rested", 2))
        if short[0] == "1":
            break
    assert short[0] == "1"
    assert short[-1] == "2"  # by then they have lost as much time as a wake-up costs
    assert long[0] == "2"


def test_a_call_for_which_threads_are_lacking_fails_and_the_next_one_is_whole(program: Callable[[str], Path]) -> None:
    assert runner(program("helpers"))("short-of-threads") == ["failed", "then 40"]


IN_PYTHON = """
import os, torch, threading
torch.set_num_threads(2)
from autosel import fingerprint
from autosel.candidates.cpp.rows import KERNELS
from autosel.candidates.load import load
from autosel.native import threads
from autosel.native.compile import compile_source
from autosel.ops import OPS
op, fp = OPS["rmsnorm"], fingerprint.take("cpu")
w = op.workload("bf16", {"M": 64, "d": 4096})
kernel = next(k for k in KERNELS if k.op == "rmsnorm")
knobs = kernel.knobs(w, fp)
recipe = kernel.recipe(w, fp, knobs)
big = torch.randn(512, 512)
print("none", threads.state())
function = load(op, recipe, compile_source(recipe.source, recipe.flags).digest, {**knobs.values, "threads": 2})
arguments = (*op.arguments(op.inputs(w, 1)), *op.allocate(w))
counts = set()
for _ in range(5):
    big @ big
    function(*arguments)
    counts.add(len(os.listdir("/proc/self/task")))
print("threads", len(counts))
print(threads.state())
print(threads.use(openmp=False, place=False))
"""


@pytest.mark.parametrize("placing", drawn.share(["1", "0"], days=2))
def test_kernels_run_on_the_threads_that_pytorch_has(tmp_path: Path, placing: str) -> None:
    environment = {**os.environ, "AUTOSEL_HOME": str(tmp_path), "AUTOSEL_PLACE_WORKERS": placing}
    done = subprocess.run([sys.executable, "-c", IN_PYTHON], env=environment, capture_output=True, text=True)
    none, counts, state, left = done.stdout.splitlines()
    assert (none, counts) == ("none None", "threads 1"), done.stderr
    assert f"openmp=True, place={placing == '1'}" in state
    assert "openmp=False, place=False" in left
