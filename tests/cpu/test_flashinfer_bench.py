"""Decisions as a flashinfer-bench dataset, read by flashinfer-bench's own parser where it is installed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import ops
from autosel.candidates import registry
from autosel.cli.main import run
from autosel.dispatch.board import this_device
from autosel.errors import BadConfig, UsageError
from autosel.integrations import flashinfer_bench as fib
from autosel.native.compile import compile_source, find_compiler
from autosel.native.load import load_entry
from autosel.ops.contract import Match, Op
from autosel.values import Effect, Passed, Timing, Verdict, Workload
from tests.cpu.serving import pinned

DIMS = {"M": 2, "N": 24, "K": 16, "B": 1, "Hq": 4, "Hkv": 2, "S": 1, "D": 16, "L": 20, "I": 24, "V": 32, "R": 16}
SPOKEN = [op for op in ops.OPS.values() if op.name in fib.SHAPES]


def small(op: Op, **traits: Any) -> Workload:
    sizes = {**DIMS, "d": 16} | ({"S": 5} if op.name == "prefill_attn" else {})
    return op.workload("fp32", {n: sizes[n] for n in op.dim_names}, **traits)


def decided(w: Workload, name: str, *, raced: bool = True) -> fib.Decided:
    def timing(us: float) -> Timing:
        return Timing(median_us=us, lo_us=us, hi_us=us, p95_us=us, min_us=us, samples=9)

    d = pinned(w, name)
    verdict = Verdict(
        outcome="promote",
        winner=name,
        reason="for the test",
        effect=Effect(median=2.0, lo=1.9, hi=2.1),
        timings={d.baseline.candidate: timing(4.0), name: timing(2.0)},
    )
    d = dataclasses.replace(d, verdict=verdict if raced else None)
    return fib.Decided(decision=d, device=this_device(), parity=Passed(cases=9, worst=0.5, worst_case="random"))


def executed(source: str) -> Any:
    scope: dict[str, Any] = {"__name__": "executed"}
    exec(compile(source, "reference", "exec"), scope)
    return scope["run"]


@pytest.mark.parametrize("op", SPOKEN, ids=lambda op: op.name)
def test_a_definitions_reference_computes_the_op(op: Op) -> None:
    """Called with what the definition names, in its order."""
    w = small(op)
    meant, inputs = fib.definition(w), op.inputs(w, 1)
    made = executed(meant["reference"])(*(inputs[n] for n in meant["inputs"]))
    got = made if isinstance(made, tuple) else (made,)
    assert isinstance(op.verify(inputs, got), Match)
    for name, spec in meant["inputs"].items():
        axes = spec["shape"]
        assert (axes is None) == (not isinstance(inputs[name], torch.Tensor))
        if axes:
            sizes = [meant["axes"][a].get("value", dict(w.dims).get(a)) for a in axes]
            assert list(inputs[name].shape) == sizes and str(inputs[name].dtype) == f"torch.{spec['dtype']}"
    assert [list(t.shape) for t in got] == [list(t.shape) for t in op.allocate(w) if t is not None]


def test_flashinfer_benchs_own_parser_reads_all_of_it(tmp_path: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="needs flashinfer-bench", exc_type=ImportError)
    every = [decided(small(op), _baseline_of(op)) for op in SPOKEN]
    every.append(decided(small(ops.find("rmsnorm"), offset=1.0), "cpp:rmsnorm"))
    made = fib.export(every, tmp_path)
    assert made.definitions == made.solutions == made.traces == len(SPOKEN) + 1 and not made.left
    found = data.TraceSet.from_path(str(tmp_path))
    assert len(found.definitions) == made.definitions
    for name, lines in found.traces.items():
        assert all(t.is_successful() and t.evaluation.performance.latency_ms == 0.002 for t in lines)
        assert {t.solution for t in lines} <= {s.name for s in found.solutions[name]}


def _baseline_of(op: Op) -> str:
    return registry.baseline(op.name).name


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_an_exported_kernel_compiles_alone_and_is_right(tmp_path: Path) -> None:
    """The wrapper fixes what the definition leaves out; only what the solution holds is there to include."""
    op = ops.find("linear")
    w = op.workload("fp32", {"M": 1, "N": 24, "K": 16}, bias=True)
    made = fib.export([decided(w, "cpp:gemv")], tmp_path / "dataset")
    assert made.solutions == 1
    (solution,) = (tmp_path / "dataset" / "solutions").glob("*.json")
    (definition,) = (tmp_path / "dataset" / "definitions").glob("*.json")
    found = fib.unpack(solution, definition, tmp_path / "mine")
    assert found.op == "linear"
    spec = json.loads(solution.read_text())["spec"]
    assert spec["language"] == "cpp" and spec["destination_passing_style"] is True
    flags = json.loads(solution.read_text())["description"].partition("flags ")[2].split()
    built = compile_source(found.target.rpartition(":")[0], tuple(flags))
    entry, inputs = load_entry(built.digest, "run"), op.inputs(w, 1)
    out = torch.empty(1, 24)
    entry(inputs["x"], inputs["w"], inputs["bias"], out)
    assert isinstance(op.verify(inputs, (out,)), Match)


def test_a_pinned_decision_claims_no_measurement(tmp_path: Path) -> None:
    made = fib.export([decided(small(ops.find("swiglu")), "torch:swiglu", raced=False)], tmp_path)
    assert (made.solutions, made.traces) == (1, 0)
    assert not (tmp_path / "traces").exists()


def test_what_has_no_words_there_is_left_out_with_the_reason(tmp_path: Path) -> None:
    w = ops.find("kv_append").workload("fp32", {"B": 1, "Hkv": 2, "S": 1, "D": 16})
    made = fib.export([decided(w, _baseline_of(ops.find("kv_append")))], tmp_path)
    assert made.definitions == 0
    assert "writes its arguments" in made.left[0]


def documents(folder: Path, changes: Mapping[str, Any]) -> tuple[Path, Path]:
    w = small(ops.find("swiglu"))
    one = decided(w, "torch:swiglu")
    meant, made = fib.definition(w), fib.solution(w, one.decision.arm)
    (folder / "d.json").write_text(json.dumps(meant | changes.get("definition", {})))
    (folder / "s.json").write_text(json.dumps(made | changes.get("solution", {})))
    return folder / "s.json", folder / "d.json"


def test_a_solution_cannot_leave_its_folder_or_pass_for_another(tmp_path: Path) -> None:
    good = documents(tmp_path, {})
    found = fib.unpack(*good, tmp_path / "mine")
    assert found.target == f"{tmp_path / 'mine' / 'main.py'}:run"
    for path in ("../evil.py", "/etc/evil.py", "a/../../evil.py", "", "a\\b.py"):
        odd = {"solution": {"sources": [{"path": path, "content": ""}]}}
        with pytest.raises(BadConfig, match="leads elsewhere"):
            fib.unpack(*documents(tmp_path, odd), tmp_path / "mine")
    for changes, error in (
        ({"solution": {"definition": "other"}}, UsageError),
        ({"definition": {"tags": []}}, UsageError),
        ({"solution": {"sources": []}}, BadConfig),
        ({"solution": {"spec": {"language": "python", "entry_point": "absent.py::run"}}}, BadConfig),
        ({"solution": {"spec": {"language": "shell", "entry_point": "main.py::run"}}}, BadConfig),
    ):
        with pytest.raises(error):
            fib.unpack(*documents(tmp_path, changes), tmp_path / "mine")


def test_the_verbs_write_and_unpack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solution, definition = documents(tmp_path, {})
    assert run(["import", str(solution), "--definition", str(definition), "--into", str(tmp_path / "mine")]) == 0
    assert f"race swiglu --candidate {tmp_path / 'mine' / 'main.py'}:run" in capsys.readouterr().out
    assert run(["import", str(solution), "--into", str(tmp_path / "mine")]) == 2
    assert run(["export", "--to", "flashinfer"]) == 2
