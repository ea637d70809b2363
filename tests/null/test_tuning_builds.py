"""Test builds in advance: each once, none after the deadline, and none without a waiting job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest

from autosel.errors import BuildError
from autosel.native.compile import Artefact
from autosel.tuning import builds
from autosel.tuning.builds import Builds
from autosel.values import NativeRecipe

A, B, C, BROKEN = (NativeRecipe(source=f"cpu/{name}.cpp", entry=name) for name in ("a", "b", "c", "broken"))


class Compiler:
    """Record requests; hold each source until the test releases it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun, self.free = Event(), Event()

    def __call__(self, source: str, flags: tuple[str, ...]) -> Artefact:
        self.asked.append(source)
        self.begun.set()
        self.free.wait(timeout=60)
        if "broken" in source:
            raise BuildError(f"{source} does not compile")
        path = Path(source)
        return Artefact(digest=source, path=path, seconds=0.0, log="", command=(), sources="")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Provide a compiler on one core."""
    made = Compiler()
    monkeypatch.setattr(builds, "compile_source", made)
    monkeypatch.setattr(builds, "at_once", lambda: 1)
    yield made
    made.free.set()


def digest_of(made: Builds, recipe: NativeRecipe) -> str:
    artefact = made.wait(recipe)
    assert artefact is not None
    return artefact.digest


def test_each_source_is_compiled_once_in_order_and_an_unexpected_one_on_request(compiler: Compiler) -> None:
    compiler.free.set()
    with Builds([A, B, A]) as made:
        assert digest_of(made, B) == "cpu/b.cpp"
        assert digest_of(made, A) == "cpu/a.cpp"
        assert digest_of(made, C) == "cpu/c.cpp"
    assert compiler.asked == ["cpu/a.cpp", "cpu/b.cpp", "cpu/c.cpp"]


def test_a_compile_error_reaches_each_waiting_job(compiler: Compiler) -> None:
    compiler.free.set()
    with Builds([BROKEN, A]) as made:
        for _ in range(2):
            with pytest.raises(BuildError, match="broken"):
                made.wait(BROKEN)
        assert digest_of(made, A) == "cpu/a.cpp"


def test_after_the_deadline_no_build_starts(compiler: Compiler) -> None:
    over = Event()
    with Builds([A, B], over=over.is_set) as made:
        assert compiler.begun.wait(timeout=60)
        over.set()
        compiler.free.set()
        assert made.wait(A) is not None  # it had started
        assert made.wait(B) is None
    assert compiler.asked == ["cpu/a.cpp"]


def test_running_compilers_end_before_the_next_timing(compiler: Compiler) -> None:
    with Builds([A, B, C]) as made:
        assert compiler.begun.wait(timeout=60)
        Timer(0.2, compiler.free.set).start()
    assert made.begun[A.source, A.flags].done()
    assert all(build.done() or build.cancelled() for build in made.begun.values())


def test_an_interrupt_does_not_wait_for_compilers(compiler: Compiler) -> None:
    made = Builds([A, B])
    assert compiler.begun.wait(timeout=60)
    made.__exit__(KeyboardInterrupt)
    assert not made.begun[A.source, A.flags].done()
    assert made.begun[B.source, B.flags].cancelled()


@pytest.mark.parametrize(("cpus", "free_gib", "expected"), [(16, 100, 16), (16, 17, 4), (8, 1, 1), (1, 100, 1)])
def test_cores_and_memory_limit_the_number_of_compilers(
    monkeypatch: pytest.MonkeyPatch, cpus: int, free_gib: int, expected: int
) -> None:
    monkeypatch.setattr(builds.machine, "identity", lambda: {"cpus": cpus})
    monkeypatch.setattr(builds.machine, "memory_left", lambda: free_gib << 30)
    monkeypatch.setattr(builds.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 200 << 30}))
    assert builds.at_once() == expected
