"""Tests build kernels and measure rates in a home of their own, kept between runs; never in the user's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings as property_settings

property_settings.register_profile("untimed", property_settings(), deadline=None)  # no test judges by the clock
property_settings.load_profile("untimed")

os.environ.setdefault("AUTOSEL_HOME", str(Path(__file__).resolve().parents[1] / ".autosel" / "tests"))

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as a shell's background job starts, and hands on to its children
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with nothing in it yet, and an environment in which nothing else of autosel's is set."""
    from autosel import settings

    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    settings.read.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.read.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _leaves_the_process_as_found() -> Iterator[None]:
    """What a file of tests sets for the whole process would fail another file, and only where both happen to meet."""
    before = _of_the_process()
    yield
    after = _of_the_process()
    left = {name: (before.get(name), now) for name, now in after.items() if before.get(name, now) != now}
    left |= {name: (was, "gone") for name, was in before.items() if name not in after}
    assert not left, f"left behind for the next file (before, after): {left}"


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
    signals = {f"on {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return of_torch | signals | {"folder": os.getcwd()} | {f"${n}": os.environ.get(n, "") for n in ENVIRONMENT}
