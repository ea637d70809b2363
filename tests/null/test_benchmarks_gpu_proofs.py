"""Test the parity stage's proofs in advance: which share a worker, and the effects of an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autosel.errors import BuildError, WorkerError
from autosel.fingerprint import known
from autosel.values import NativeRecipe
from benchmarks.gpu import proofs
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.entrants import Entry
from benchmarks.gpu.proofs import Proofs
from benchmarks.gpu.scope import scope_of


class Worker:
    """Replace a prover and its process; report which one answered."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).made += 1
        self.number = self.made

    def prove(self, proof: str) -> str:
        return f"{proof} by {self.number}"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Builds:
    def __init__(self, recipes: Any) -> None:
        self.known = list(recipes)

    def wait(self, recipe: NativeRecipe) -> None:
        assert recipe in self.known
        if recipe.source == "broken":
            raise BuildError("broken does not compile")


def way(name: str) -> Any:
    """Return an entry for `build:name`."""
    if name == "raises":
        raise ZeroDivisionError(name)
    return SimpleNamespace(build=name.partition(":")[0], recipe=NativeRecipe(source=name.partition(":")[0], entry="e"))


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    Worker.made = 0
    monkeypatch.setattr(proofs, "way_of", lambda candidate, w, fp: way(candidate))
    monkeypatch.setattr(proofs, "process_of", lambda way: way.build)
    monkeypatch.setattr(proofs, "proof_of", lambda way, w: w)
    monkeypatch.setattr(proofs, "torch_threads", lambda proofs: 0)
    monkeypatch.setattr(proofs, "Prover", Worker)
    monkeypatch.setattr(proofs, "Builds", Builds)


def entry(name: str) -> Any:
    return SimpleNamespace(name=name, candidate=name, workload=name)


def begun(*names: str) -> tuple[Proofs, dict[str, Entry]]:
    entries = {name: entry(name) for name in names}
    return Proofs(list(entries.values()), scope_of(parsed(["--device", "cpu"])), known.load("h200")), entries


def test_neighbours_of_one_build_share_a_worker_and_others_do_not() -> None:
    made, entries = begun("a:1", "a:2", "b:1", "a:3")
    workers = {name: str(made.of(one.name)).partition(" by ")[2] for name, one in entries.items()}
    assert workers["a:1"] == workers["a:2"]
    assert len({workers["a:1"], workers["b:1"], workers["a:3"]}) == 3


def test_the_number_of_proofs_in_one_worker_is_limited() -> None:
    names = [f"a:{number}" for number in range(2 * proofs.TOGETHER + 1)]
    made, _ = begun(*names)
    workers = [str(made.of(name)).partition(" by ")[2] for name in names]
    assert len(set(workers)) == 3 and workers.count(workers[0]) == proofs.TOGETHER


def test_an_error_fails_only_its_own_unit() -> None:
    made, _ = begun("a:1", "raises", "broken:1", "a:2")
    with pytest.raises(ZeroDivisionError):
        made.of("raises")
    with pytest.raises(BuildError):
        made.of("broken:1")
    assert str(made.of("a:1")).startswith("a:1 by") and str(made.of("a:2")).startswith("a:2 by")


def test_each_unit_reports_that_no_worker_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody(Worker):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise WorkerError("no worker can be started", cause="spawn")

    monkeypatch.setattr(proofs, "Prover", Nobody)
    made, entries = begun("a:1", "a:2")
    for one in entries.values():
        with pytest.raises(WorkerError, match="no worker"):
            made.of(one.name)
