"""Stage 3: every kernel of ours, and every library's, under checkers that see what results do not show.

On CUDA compute-sanitizer's four tools: accesses out of bounds, races in shared memory, reads of what nobody wrote,
barriers that not all threads reach. On a CPU the compiler's: addresses and undefined behaviour.
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
from benchmarks.gpu.entrants import Entry, entries, entries_of
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table

UNIT_S = 1800.0  # a sanitizer slows a kernel by a hundred times, and Python's start with it
CUDA_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CPU_TOOLS = ("address,undefined",)  # which are compiled in
COMPILED = ("CPP", "CUDA_EXT", "CUTLASS")
OURS = (*COMPILED, "TRITON")
UNCHECKED = ("TORCH", "INDUCTOR")  # PyTorch's own, and what it generates
USUAL_HOME = Path("/usr/local/cuda")
FOUND = 9  # the exit code by which compute-sanitizer says that it found something
SAID = 20  # lines of a report that are kept
NO_SANITIZER = (
    "no compute-sanitizer found that can start a program; install the CUDA toolkit's, or with pip: "
    "nvidia-cuda-sanitizer-api>=13.4.92 (the extra cuda13); then --stage sanitizer --retry"
)
# A program of the kind that it is to watch, as far as that takes no time: Python, and the driver opened.
PROGRAM = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0); print('started')"
STEP = "step "  # how the unit of the whole step begins
EXERCISE = Path(__file__).with_name("exercise.py")


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """A tool on all builds that a candidate has in a dtype: every tool on the first dtype, whose barriers and addresses
    are the others' too, then the first tool on the others. Libraries get the first tool alone."""
    first, *others = CUDA_TOOLS if scope.on_gpu else CPU_TOOLS
    there = {_unit_of(e): e for e in entries(scope, fp) if _is_checked(e, scope)}
    plain = {name: e for name, e in there.items() if e.workload.dtype == scope.dtypes[0]}
    ours = [name for name, e in plain.items() if e.candidate.backend in OURS]
    named = [f"{first} {name}" for name in plain]
    for tool in (first, *others):
        named += [f"{tool} {name}" for name in ours] if tool != first else []
        named += [] if scope.ops else [f"{tool} {step(scope)}"]
    return [*named, *(f"{first} {name}" for name in there if name not in plain)]


def _is_checked(entry: Entry, scope: Scope) -> bool:
    backend = entry.candidate.backend
    return not entry.refused and backend not in UNCHECKED and (backend in COMPILED or scope.on_gpu)


def _unit_of(entry: Entry) -> str:
    return f"{entry.candidate.op} {entry.candidate.name} {entry.workload.dtype}"


def step(scope: Scope) -> str:
    """The whole decode step as the device takes it by itself: no op, so no candidate of parity's."""
    return f"{STEP}{'cuda' if scope.on_gpu else 'cpp'}:step bf16"


def expect(units: Sequence[str], scope: Scope, fp: Fingerprint) -> None:
    """Begin with these."""
    _begun[:] = [Ahead(units, lambda unit: _timed(unit, scope, fp), threads=side_by_side())]


_begun: list[Ahead[str, Found]] = []  # this process's, of the units that are to come


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    if not _begun or unit not in _begun[0].pieces:
        expect([unit], scope, fp)
    return _begun[0].of(_begun[0].pieces.index(unit))


def _timed(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    started = time.monotonic()
    return {**checked(unit, scope, fp), "seconds": round(time.monotonic() - started, 2)}


def checked(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Hostile cases of each build under the tool, each result compared; all in one process, which starts in ten times
    what a build takes. Where something is found, halves of them tell whose it is."""
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
    """What is found of those that something is found of alone: halves of what was found guilty, down to one."""
    guilty: dict[str, Found] = {}
    middle = len(names) // 2
    for half in (names[:middle], names[middle:]):
        found = found_of(half)
        if found["outcome"] != "clean":
            guilty |= {half[0]: found} if len(half) == 1 else narrowed(half, found_of)
    return guilty


def _prefix(tool: str, scope: Scope) -> list[str]:
    """What comes before the exercise's command. Raises LookupError where there is nothing to check with."""
    if not scope.on_gpu:
        return []
    checker = find_sanitizer()
    if checker is None:
        raise LookupError(NO_SANITIZER)
    return checked_by(checker, tool)


def _found_of(tool: str, names: Sequence[str], *, scope: Scope, prefix: list[str]) -> Found:
    """These builds in one process under the tool."""
    environment = settings.passed_to_children()
    if scope.on_gpu:
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor must be an allocation, or no bound is seen
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
    """What comes before a command that is to run under a tool. Libraries ask CUDA what it may not have, and take its no
    for an answer: their calls are no errors of a kernel's."""
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return [checker, "--tool", tool, *quiet, "--error-exitcode", str(FOUND)]


def cases_in(said: list[str]) -> int:
    """What the exercise says at its end: compute-sanitizer's summary comes after it."""
    return next((int(found[1]) for line in reversed(said) if (found := re.match(r"(\d+) cases\b", line))), 0)


def is_telling(line: str) -> bool:
    """compute-sanitizer's findings, the compiler's, or the exercise's own words about a wrong result."""
    if line.startswith("========="):
        return bool(line.strip("= ")) and "COMPUTE-SANITIZER" not in line
    return any(word in line for word in ("ERROR", "runtime error", "wrong"))


def find_sanitizer() -> str | None:
    """The one on PATH, beside nvcc, of /usr/local/cuda, of pip: the first that works."""
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
    """A package may hold the tool without what it starts programs with: then each unit would fail, and say nothing."""
    asked = [checker, "--tool", "memcheck", sys.executable, "-P", "-c", PROGRAM]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "started" in done.stdout.splitlines()


def _library(name: str) -> str:
    """A library of the compiler's own."""
    from autosel.native.compile import find_compiler

    compiler = find_compiler()
    assert compiler is not None  # else no candidate of this stage is eligible
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
