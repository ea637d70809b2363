"""Test decisions as a flashinfer-bench dataset, read by flashinfer-bench's own parser if it was fetched."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import ops
from autosel.candidates import registry
from autosel.cli.dataset import elsewhere_lines
from autosel.cli.main import run
from autosel.cli.record import named_workloads
from autosel.dispatch.board import this_device
from autosel.errors import BadConfig, UsageError
from autosel.integrations import flashinfer_bench as fib
from autosel.integrations import flashinfer_traces
from autosel.ledger.commands import Demote
from autosel.ledger.store import open_ledger
from autosel.native.compile import compile_source, find_compiler
from autosel.native.load import load_entry
from autosel.ops.contract import Match, Op
from autosel.testing.serving import pinned
from autosel.values import Effect, Passed, Timing, Verdict, Workload
from tests import engines
from tests.cpu.test_ledger import PASSED, record

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
    """Call the reference with the arguments that the definition names, in order."""
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


READ = """\
import sys
from flashinfer_bench.data import TraceSet
found = TraceSet.from_path(sys.argv[1])
for name, lines in found.traces.items():
    assert all(t.is_successful() and t.evaluation.performance.latency_ms == 0.002 for t in lines)
    assert {t.solution for t in lines} <= {s.name for s in found.solutions[name]}
print(len(found.definitions), sum(map(len, found.traces.values())))
"""


@pytest.mark.skipif(bool(engines.missing("flashinfer-bench")), reason=engines.missing("flashinfer-bench"))
def test_flashinfer_benchs_own_parser_reads_all_of_it(tmp_path: Path) -> None:
    every = [decided(small(op), _baseline_of(op)) for op in SPOKEN]
    every.append(decided(small(ops.find("rmsnorm"), offset=1.0), "cpp:rmsnorm"))
    made = fib.export(every, tmp_path)
    assert made.definitions == made.solutions == made.traces == len(SPOKEN) + 1 and not made.left
    environment = {**os.environ, "PYTHONPATH": engines.paths("flashinfer-bench")}
    command = [sys.executable, "-c", READ, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == [str(made.definitions), str(made.traces)]


def _baseline_of(op: Op) -> str:
    return registry.baseline(op.name).name


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_an_exported_kernel_compiles_without_the_checkout_and_is_right(tmp_path: Path) -> None:
    """Compile with the solution's files only; the wrapper sets the arguments that the definition omits."""
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


def test_workloads_without_a_definition_are_left_out_with_the_reason(tmp_path: Path) -> None:
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


def test_a_solution_cannot_write_outside_its_folder_or_use_anothers_name(tmp_path: Path) -> None:
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


def test_a_demoted_arm_is_not_exported_as_a_solution(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d = pinned(small(ops.OPS["rmsnorm"]), "cpp:rmsnorm")
    with open_ledger(home=home) as ledger:
        device = dataclasses.replace(this_device(), environment={"torch": "2"})
        changes = {"arm": d.arm, "baseline": d.baseline, "parities": [(d.arm, PASSED)], "race": None, "verdict": None}
        made = record(ledger, fp=device, workload=d.workload, mode=d.mode, **changes)
        assert run(["export", "--to", "flashinfer", str(tmp_path / "served")]) == 0
        assert "1 definitions, 1 solutions, 0 traces" in capsys.readouterr().err
        ledger.write(Demote(decision_id=made.id, reason="a NaN was seen"))
    assert run(["export", "--to", "flashinfer", str(tmp_path / "demoted")]) == 0
    assert "0 definitions, 0 solutions, 0 traces" in capsys.readouterr().err


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", SPOKEN, ids=lambda op: op.name)
def test_a_trace_is_read_back_as_its_workload(op: Op, tmp_path: Path) -> None:
    w = small(op, offset=1.0) if op.name == "rmsnorm" else small(op)
    fib.export([decided(w, _baseline_of(op))], tmp_path)
    found = flashinfer_traces.read(tmp_path)
    assert found.calls == {w: 1} and not found.left
    (one,) = found.evidence
    assert one.workload == w and one.time_us == pytest.approx(2.0) and one.hardware == this_device().name
    assert one.origin.endswith(".jsonl:1") and one.solution.startswith("autosel_")


FOREIGN: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "rmsnorm_h4096": (
        {"batch_size": None, "hidden_size": 4096},
        {"batch_size": 7},
        "rmsnorm/M7.d4096/bf16",
    ),
    "gemm_n_28672_k_4096": ({"M": None, "N": 28672, "K": 4096}, {"M": 3}, "linear/M3.N28672.K4096/bf16"),
    "silu_and_mul_h512": ({"num_tokens": None, "hidden_size": 512}, {"num_tokens": 5}, "swiglu/M5.I256/bf16"),
    "gqa_paged_decode_h32_kv8_d128_ps16": (
        {"batch_size": None, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16},
        {"batch_size": 2, "num_kv_indices": 9, "len_indptr": 3, "num_pages": 40},
        "paged_attn/B2.Hq32.Hkv8.S1.D128.L80.page16/bf16",
    ),
}


def foreign(folder: Path, name: str, **changed: Any) -> Path:
    """Write a foreign dataset, with one workload that was evaluated twice and failed once, and one without a
    solution."""
    axes, variable, _ = FOREIGN[name]
    first = {"rmsnorm_h4096": "hidden_states", "gemm_n_28672_k_4096": "A", "silu_and_mul_h512": "input"}.get(name, "q")
    meant = {
        "name": name,
        "op_type": "any",
        "axes": {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in axes.items()},
        "inputs": {first: {"shape": ["a"], "dtype": "bfloat16"}},
    }
    asked = {"axes": variable, "inputs": {}, "uuid": "one"}
    ran = {"environment": {"hardware": "NVIDIA H100", "libs": {}}, "timestamp": "2026-01-01"}
    times = {"latency_ms": 0.5, "reference_latency_ms": 1.5, "speedup_factor": 3.0}
    passed = {**ran, "status": "PASSED", "correctness": {}, "performance": times}
    lines: list[dict[str, Any]] = [
        {"definition": name, "workload": asked, "solution": "theirs", "evaluation": passed | changed},
        {"definition": name, "workload": asked, "solution": "broken", "evaluation": {**ran, "status": "TIMEOUT"}},
        {"definition": "moe_fp8", "workload": asked},
    ]
    asking = [{"definition": name, "workload": {**asked, "uuid": uuid}} for uuid in ("one", "two")]
    for kind in ("definitions/group", "traces/group", "workloads"):
        (folder / kind).mkdir(parents=True)
    (folder / "workloads/w.jsonl").write_text("\n".join(map(json.dumps, asking)))
    (folder / "definitions/group/d.json").write_text(json.dumps(meant))
    (folder / "traces/group/t.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.mark.parametrize("name", FOREIGN)
def test_flashinfers_own_definitions_are_known_by_name(name: str, tmp_path: Path) -> None:
    found = flashinfer_traces.read(foreign(tmp_path, name))
    assert {w.key: n for w, n in found.calls.items()} == {FOREIGN[name][2]: 2}  # inputs of two kinds
    assert [(e.solution, e.status, e.time_us, e.speedup) for e in found.evidence] == [
        ("theirs", "PASSED", 500.0, 3.0),
        ("broken", "TIMEOUT", None, None),
    ]
    assert found.left == ("moe_fp8: its definition is not in the dataset",)


def test_imported_traces_decide_nothing_and_can_be_tuned(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, traffic = foreign(tmp_path / "theirs", "rmsnorm_h4096"), tmp_path / "traffic.json"
    assert run(["import", str(dataset), "--into", str(traffic)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "theirs 500 3.0x NVIDIA H100" in said and "2 of them new; they do not affect decisions" in said
    assert run(["import", str(dataset)]) == 0  # importing again changes nothing
    assert "0 of them new;" in capsys.readouterr().out
    (named,) = named_workloads(traffic)
    assert named.workload.key == "rmsnorm/M7.d4096/bf16" and named.calls_per_step == 2
    decision = pinned(named.workload, "torch:rmsnorm")
    text = " ".join(t for _, t in elsewhere_lines(decision))
    assert "theirs, 3.0x over its reference, on NVIDIA H100" in text and "t.jsonl:1" in text and "1 more" in text
    assert run(["best", "rmsnorm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "baseline"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"performance": {"latency_ms": -1}}, "a time of -1 ms"),
        ({"performance": {"latency_ms": "fast"}}, "a time of 'fast' ms"),
        ({"environment": {}}, "hardware"),
        ({"status": 5}, "status"),
    ],
)
def test_an_invalid_trace_is_refused_by_its_line(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"t\.jsonl:1 is not a trace") as error:
        flashinfer_traces.read(foreign(tmp_path, "rmsnorm_h4096", **changed))
    assert why in str(error.value)


def test_an_invalid_dataset_is_refused(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(tmp_path)]) == 2
    assert "it has no folder definitions" in capsys.readouterr().err
    dataset = foreign(tmp_path / "theirs", "rmsnorm_h4096")
    (dataset / "traces/group/t.jsonl").write_text('{"definition": "rmsnorm_h4096", "workload": {"axes": {"M": 0}}}\n')
    assert run(["import", str(dataset)]) == 2
    assert "t.jsonl:1" in capsys.readouterr().err
    assert run(["import", str(dataset), "--definition", str(dataset / "definitions/group/d.json")]) == 2
    assert not (home / "elsewhere.jsonl").exists()
