"""Give tests a separate home for kernels and rates, kept between runs, never the user's.

    @pytest.mark.in_turns(choices)                                        choices() returns a list
    @pytest.mark.in_turns({"gemv": choices_of_gemv, ...}, label=named)    one list for each group
    @pytest.mark.in_turns({"gemv": choices_of_gemv, ...}, days=2)         half of the groups each day

runs a test that has an argument `choice` once (once a group), with the choice whose turn it is on the day of --on-day;
with --every-target once with each choice, under the name it is given, so that they run side by side and fail by name.
"""

from __future__ import annotations

import datetime
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as property_settings

from tests import drawn, homes, thirds  # noqa: F401  (homes: sets AUTOSEL_HOME and OMP_WAIT_POLICY)

if TYPE_CHECKING:
    from autosel.workers.nursery import Nursery

# Tests have no deadlines; in CI the examples are the same in each run.
property_settings.register_profile(
    "untimed", property_settings(), deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
property_settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job, and inherited by its children
    signal.signal(signal.SIGINT, signal.default_int_handler)

ENVIRONMENT = (
    "AUTOSEL_HOME",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "CXX",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-target", action="store_true", help="tests that go in turns: every choice, not today's")
    parser.addoption("--on-day", metavar="YYYY-MM-DD", help="the day whose share rotating tests take [default: today]")
    parser.addoption("--remaining", action="append", default=[], help="what this run leaves out, for its last lines")
    parser.addoption("--seed", type=int, metavar="N", help="draw random inputs from N [default: another N each time]")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own option
def pytest_configure(config: pytest.Config) -> None:
    """Put the values into `option`, which pytest-xdist passes to its workers."""
    option = config.option
    try:
        drawn.day = datetime.date.fromisoformat(option.on_day or drawn.day).isoformat()
    except ValueError as error:
        raise pytest.UsageError(f"--on-day {option.on_day}: a day is meant, as 2026-11-24") from error
    drawn.seed = drawn.seed if option.seed is None else option.seed
    option.on_day, option.seed, drawn.every = drawn.day, drawn.seed, option.every_target
    if option.hypothesis_seed is None:
        option.hypothesis_seed = str(drawn.seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for at, tier in enumerate(config.getoption("remaining")):
        terminalreporter.write_line(f"{'' if at else 'not run':<9}{tier}")
    if any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.write_line(f"the same cases and inputs again: {drawn.options()}", yellow=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("in_turns"):
        (asked,) = mark.args
        groups = asked if isinstance(asked, Mapping) else {"today": asked}
        if metafunc.config.getoption("--every-target"):
            label = mark.kwargs.get("label", str)
            found = [pytest.param(lambda one=one: one, id=label(one)) for g in groups.values() for one in g()]
        else:
            days, shift = mark.kwargs.get("days", 1), mark.kwargs.get("shift", 0)
            some = drawn.share(list(enumerate(groups.items())), days, shift)
            found = [pytest.param(partial(_todays, g, n), id=name) for n, (name, g) in some]
        metafunc.parametrize("choice", found, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse test names that contain an address, because pytest-xdist's processes must collect the same names; skip the
    files of another part's day."""
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:
        raise pytest.UsageError(f"a name with an address in it: give the parameter an id: {addressed[0]}")
    thirds.skip_resting(items)


def pytest_collection_finish() -> None:
    """Exempt what collection made from garbage collection: it stays until the end, and takes seconds to search."""
    gc.collect()
    gc.freeze()


def _todays(choices: Callable[[], Sequence[Any]], turn: int) -> Any:
    """Choose in the process that runs the test, because listing all choices takes time."""
    return drawn.todays(choices(), turn)


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty home, and remove all other settings of autosel from the environment."""
    from autosel import settings

    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    settings.read.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.read.cache_clear()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; return (exit code, stdout, stderr)."""
    from autosel.cli.main import run

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Use one thread: for small operands a pool's barriers take longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return the nursery of this pytest worker, already started: its first test may have an environment of its own."""
    from autosel.workers import Worker
    from autosel.workers.nursery import Nursery

    with Nursery("torch", "autosel.ops", "autosel.candidates.load") as made:
        with Worker("autosel.candidates.probe:serve", nursery=made) as first:
            first.wait_ready()
        yield made


@pytest.fixture(scope="module")
def preforked(nursery: Nursery) -> Iterator[Nursery]:
    """Fork all workers of a file of tests from one nursery, those of races too, for tests that do not test how a worker
    starts."""
    from autosel.tuning import complete, prove, renew
    from autosel.workers import process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_guardian", nursery.start_guardian)
        for module in (complete, prove, renew):
            patch.setattr(module, "nursery", nullcontext)
        yield nursery


@pytest.fixture(autouse=True, scope="module")
def _leaves_the_process_as_found() -> Iterator[None]:
    """Undo changes to the process, which would make another file fail, but only if both files run in one process."""
    before = _of_the_process()
    yield
    _close_boards()
    after = _of_the_process()
    left = {name: (before.get(name), now) for name, now in after.items() if before.get(name, now) != now}
    left |= {name: (was, "gone") for name, was in before.items() if name not in after}
    assert not left, f"left behind for the next file (before, after): {left}"


def _close_boards() -> None:
    """Close the boards that serve: a process keeps that of its first home, and the next file has another home."""
    dispatch = sys.modules.get("autosel.dispatch")
    while dispatch is not None and dispatch._stack:
        dispatch._stack.pop().close()


def _of_the_process() -> dict[str, object]:
    torch = sys.modules.get("torch")
    of_torch = {
        "gradients": torch.is_grad_enabled() if torch else True,
        "default dtype": str(torch.get_default_dtype()) if torch else "torch.float32",
        "default device": str(torch.get_default_device()) if torch else "cpu",
        "deterministic": torch.are_deterministic_algorithms_enabled() if torch else False,
    }
    if torch:  # not imported: how many it will take is its own affair
        of_torch["PyTorch's threads"] = torch.get_num_threads()
    limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
    signals = {f"on {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return of_torch | limits | signals | {"folder": os.getcwd()} | {f"${n}": os.environ.get(n, "") for n in ENVIRONMENT}
