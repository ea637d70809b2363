"""Stage 3: run every kernel of autosel and of libraries under checkers for errors that results do not show.

CUDA uses compute-sanitizer's four tools: accesses out of bounds, races in shared memory, reads of uninitialised
memory, and barriers that not all threads reach. CPU kernels use the compiler's checks for addresses and undefined
behaviour.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from autosel import settings
from autosel.values import Fingerprint
from benchmarks.gpu.ahead import Ahead, side_by_side
from benchmarks.gpu.entrants import BuildEntry, entries, entries_of
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table

UNIT_S = 1800.0  # a sanitizer slows kernels and Python's start by a factor of 100
CUDA_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CPU_TOOLS = ("address,undefined",)  # compiled in
COMPILED = ("CPP", "CUDA_EXT", "CUTLASS")
UNCHECKED = ("TORCH", "INDUCTOR")  # PyTorch's kernels, and those that it generates
USUAL_HOME = Path("/usr/local/cuda")
FOUND = 9  # compute-sanitizer's exit code after findings
SAID = 20  # report lines that are stored
NO_SANITIZER = (
    "no working compute-sanitizer found; install the CUDA toolkit's, or with pip: "
    "nvidia-cuda-sanitizer-api>=13.4.92 (the extra cuda13); then --stage sanitizer --retry"
)
# A minimal stand-in for a checked program: Python with the driver opened.
PROGRAM = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0); print('started')"
STEP = "step "  # prefix of the whole step's unit
EXERCISE = Path(__file__).with_name("exercise.py")


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """List the units: one tool on all builds of a candidate in one dtype.

    Every tool runs on the first dtype, since the other dtypes share its barriers and addresses; then the first tool
    runs on the other dtypes. Libraries get only the first tool.
    """
    first, *others = CUDA_TOOLS if scope.on_gpu else CPU_TOOLS
    there = {_unit_of(e): e for e in entries(scope, fp) if _is_checked(e, scope)}
    plain = {name: e for name, e in there.items() if e.workload.dtype == scope.dtypes[0]}
    ours = [name for name, e in plain.items() if is_ours(e.candidate.name)]
    named = [f"{first} {name}" for name in plain]
    for tool in (first, *others):
        named += [f"{tool} {name}" for name in ours] if tool != first else []
        named += [] if scope.ops else [f"{tool} {step(scope)}"]
    return [*named, *(f"{first} {name}" for name in there if name not in plain)]


def _is_checked(entry: BuildEntry, scope: Scope) -> bool:
    backend = entry.candidate.backend
    return not entry.refused and backend not in UNCHECKED and (backend in COMPILED or scope.on_gpu)


def _unit_of(entry: BuildEntry) -> str:
    return f"{entry.candidate.op} {entry.candidate.name} {entry.workload.dtype}"


def step(scope: Scope) -> str:
    """Return the unit of the whole decode step as one native call, which no candidate of parity covers."""
    return f"{STEP}{'cuda' if scope.on_gpu else 'cpp'}:step bf16"


def expect(units: Sequence[str], scope: Scope, fp: Fingerprint) -> None:
    _begun[:] = [Ahead(units, lambda unit: _timed(unit, scope, fp), threads=side_by_side())]


_begun: list[Ahead[str, Found]] = []  # the checks of this process's coming units


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    if not _begun or unit not in _begun[0].pieces:
        expect([unit], scope, fp)
    return _begun[0].of(_begun[0].pieces.index(unit))


def _timed(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    started = time.monotonic()
    return {**checked(unit, scope, fp), "seconds": round(time.monotonic() - started, 2)}


def checked(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Run hostile cases of each build under the tool and compare each result.

    All builds share one process, since its start takes ten times as long as a build's cases. A finding is narrowed to
    the builds that cause it by bisection.
    """
    tool, _, name = unit.partition(" ")
    try:
        found_of = partial(_found_of, tool, scope=scope, prefix=_prefix(tool, scope))
    except LookupError as error:
        return {"ok": False, "error": str(error)}
    names = [name] if name.startswith(STEP) else [e.name for e in entries_of(name, scope, fp) if not e.refused]
    whole = found_of(names)
    if whole["outcome"] == "clean" or len(names) == 1:
        return {"ok": whole["outcome"] == "clean" or not is_ours(name.split(" ")[1]), "builds": len(names), **whole}
    guilty = narrowed(names, found_of)
    told = next(iter(guilty.values()), whole)
    reason = f"{', '.join(guilty) or 'only together'}: {told['reason']}"
    return {"ok": not is_ours(name.split(" ")[1]), "builds": len(names), **told, "reason": reason[:300]}


def narrowed(names: Sequence[str], found_of: Callable[[Sequence[str]], Found]) -> dict[str, Found]:
    """Return the findings by build: halve the builds until each finding belongs to one."""
    guilty: dict[str, Found] = {}
    middle = len(names) // 2
    for half in (names[:middle], names[middle:]):
        found = found_of(half)
        if found["outcome"] != "clean":
            guilty |= {half[0]: found} if len(half) == 1 else narrowed(half, found_of)
    return guilty


def _prefix(tool: str, scope: Scope) -> list[str]:
    """Return the command prefix of the tool. Raises LookupError without a usable tool."""
    if not scope.on_gpu:
        return []
    checker = find_sanitizer()
    if checker is None:
        raise LookupError(NO_SANITIZER)
    return checked_by(checker, tool)


def _found_of(tool: str, names: Sequence[str], *, scope: Scope, prefix: list[str]) -> Found:
    """Run these builds in one process under the tool."""
    environment = settings.passed_to_children()
    if scope.on_gpu:
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # one allocation a tensor, so that bounds are checked
    else:
        environment |= {"LD_PRELOAD": _library("libasan.so"), "ASAN_OPTIONS": "detect_leaks=0"}
    checks = "" if scope.on_gpu else tool
    command = [*prefix, sys.executable, "-P", str(EXERCISE), scope.text, checks, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return {"outcome": "clean", "cases": cases_in(said)}
    telling = [line for line in said if is_telling(line)]
    reason = next((line.strip("= ") for line in telling), said[-1] if said else "")
    return {"outcome": "found", "reason": reason[:300], "said": (telling or said)[:SAID]}


def checked_by(checker: str, tool: str) -> list[str]:
    """Return the command prefix that runs a program under a tool.

    API errors are not reported: libraries call CUDA functions that may fail and handle the failure.
    """
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return [checker, "--tool", tool, *quiet, "--error-exitcode", str(FOUND)]


def cases_in(said: list[str]) -> int:
    """Return the number of cases from the exercise's last line, which precedes compute-sanitizer's summary."""
    return next((int(found[1]) for line in reversed(said) if (found := re.match(r"(\d+) cases\b", line))), 0)


def is_telling(line: str) -> bool:
    """Return True for a finding by compute-sanitizer or the compiler, or a wrong result from the exercise."""
    if line.startswith("========="):
        return bool(line.strip("= ")) and "COMPUTE-SANITIZER" not in line
    return any(word in line for word in ("ERROR", "runtime error", "wrong"))


def find_sanitizer() -> str | None:
    """Return the first working tool: on PATH, next to nvcc, in /usr/local/cuda, from pip."""
    return next((path for path in _places() if starts(path)), None)


def _places() -> Iterator[str]:
    from autosel.native.cuda import find_nvcc, pips

    nvcc = find_nvcc()
    homes = [nvcc.home] if nvcc else []
    homes.append(USUAL_HOME)
    for folder in pips():
        homes += sorted(home for home in folder.iterdir() if home.is_dir())
    found = (shutil.which("compute-sanitizer"), *(str(home / "bin" / "compute-sanitizer") for home in homes))
    yield from dict.fromkeys(path for path in found if path and os.access(path, os.X_OK))


@cache
def starts(checker: str) -> bool:
    """Return True if the tool can start a program. Some packages lack a part, and every unit would fail silently."""
    asked = [checker, "--tool", "memcheck", sys.executable, "-P", "-c", PROGRAM]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "started" in done.stdout.splitlines()


def _library(name: str) -> str:
    """Return the path of a library that belongs to the compiler."""
    from autosel.native.compile import find_compiler

    compiler = find_compiler()
    assert compiler is not None  # otherwise no candidate of this stage is eligible
    asked = [compiler.path, f"-print-file-name={name}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def table(found: Mapping[str, Found]) -> Table:
    rows = []
    for name, one in sorted(found.items(), key=lambda item: item[0].split(" ")[1:]):
        tool, op, candidate, dtype = name.split(" ")
        outcome = one.get("outcome", "not run")
        counted = (str(one.get("builds", "")), str(one.get("cases", "")), f"{one.get('seconds', 0):.1f}")
        rows.append((op, candidate, dtype, tool, outcome, *counted))
    return Table(columns=("op", "kernel", "dtype", "tool", "outcome", "builds", "cases", "s"), rows=tuple(rows))
