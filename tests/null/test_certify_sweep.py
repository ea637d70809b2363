"""Test sweeps: arguments, changes of winners, the verdict for the user's traffic."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import OutOfMemoryError

from autosel import models
from autosel.certify import plots, run_sweep, sweep
from autosel.certify.physics import ImpossibleRun
from autosel.certify.statistics import Interval
from autosel.certify.sweep import (
    CellServing,
    Figures,
    Lengths,
    OpServing,
    Sweep,
    SweepCell,
    changes_of,
    middles,
    served,
    span,
    weigh,
)
from autosel.certify.sweep_plots import pictures
from autosel.cli import sweep as verb
from autosel.cli.main import run
from autosel.decode.run import DecodeRun, Plan
from autosel.errors import AutoselError, BadConfig, UsageError
from tests.null.certificates import decode_run, fingerprint


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))


def serving(label: str, candidate: str, decision: int | None = 1) -> OpServing:
    return OpServing(
        op="linear", label=label, bucket="", calls=1, candidate=candidate, state="promoted", decision_id=decision
    )


def point(batch: int, context: int, **by_label: str) -> CellServing:
    return CellServing(batch=batch, context=context, serving=tuple(serving(k, v) for k, v in by_label.items()))


def cell(batch: int, context: int, ms: float, baseline_ms: float = 100.0, *, candidate: str = "cpp:a") -> SweepCell:
    figures = Figures(
        p50_ms=ms,
        p95_ms=ms * 1.1,
        tokens_per_s=1e3 * batch / ms,
        baseline_ms=baseline_ms,
        speedup=baseline_ms / ms,
        speedup_interval=Interval(lo=1.0, hi=3.0),
        roofline=0.9,
        read_bytes_per_s=4e10,
        verified=True,
        chain="",
        serving=(serving("gemv o" if batch == 1 else "gemm o", candidate),),
    )
    return SweepCell(batch=batch, context=context, need_bytes=1, figures=figures)


def swept(*cells: SweepCell, **more: Any) -> Sweep:
    where = {"device": "A CPU", "hw_id": "h", "env_id": "e", "git_sha": "", "timestamp": "2026-01-01T00:00:00+00:00"}
    return Sweep(model="m", dtype="bf16", **where, memory_bytes=1 << 30, iters=5, cells=cells, changes=(), **more)


def test_a_span_doubles_from_the_first_and_ends_with_the_last() -> None:
    assert span("256:2048", "--context", 2, 1 << 24) == (256, 512, 1024, 2048)
    assert span("100:300", "--context", 2, 1 << 24) == (100, 200, 300)
    assert span("8", "--batch", 1, 4096) == (8,)


@pytest.mark.parametrize("text", ["", "a", "8:4", "0:4", "1:99999999999", "1:2:3", "-1:4", "4:9999"])
def test_an_invalid_span_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        span(text, "--batch", 1, 4096)


def test_lengths_are_read_from_lines_and_from_json(tmp_path: Path) -> None:
    lines, pairs = tmp_path / "l.txt", tmp_path / "l.json"
    lines.write_text("# prompt output\n40 30\n\n100,\t60  # long\n")
    pairs.write_text("[[40, 30], [100, 60]]")
    expected = (Lengths(prompt=40, output=30), Lengths(prompt=100, output=60))
    assert sweep.read_traffic(lines) == sweep.read_traffic(pairs) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("l.txt", "40 30\n40\n", "line 2"),
        ("l.txt", "40 x\n", "line 1"),
        ("l.txt", "0 3\n", "at least 1"),
        ("l.txt", "# nothing\n", "no request"),
        ("l.json", "[[1, 2.5]]", "entry 1"),
        ("l.json", "{", "not JSON"),
        ("l.json", "[[1, true]]", "entry 1"),
    ],
)
def test_invalid_lengths_are_refused_with_the_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadConfig) as refused:
        sweep.read_traffic(tmp_path / name)
    assert said in f"{refused.value.what} {refused.value.why}"


def test_a_winner_that_changes_with_the_batch_is_one_op_on_either_side() -> None:
    points = [point(1, 64, **{"gemv o": "cpp:gemv"}), point(4, 64, **{"gemm o": "torch:linear"})]
    (found,) = changes_of(points)
    assert (found.label, found.axis, found.last, found.first) == ("linear o", "batch", 1, 4)
    assert (found.below, found.above, found.decided) == ("cpp:gemv", "torch:linear", True)


def test_batches_in_between_are_tuned_only_if_there_is_a_bucket_in_between() -> None:
    def of(*batches: int) -> list[int]:
        points = [point(b, 64, attn="a" if b < batches[-1] else "b") for b in batches]
        return middles(changes_of(points))

    assert of(1, 2, 4, 8) == [6]
    assert of(1, 2) == [] and of(8, 16) == []
    assert of(4, 16) == of(4, 9) == [6] and of(6, 12) == [7] and of(7, 16) == [8]  # each M up to 8 is a bucket


def test_a_change_along_the_context_is_found_at_every_batch() -> None:
    points = [point(b, c, attn="sdpa" if c < 256 else "cpp") for b in (1, 2) for c in (64, 128, 256)]
    changes = changes_of(points)
    assert [(c.last, c.first) for c in changes] == [(128, 256)]  # the same for both, printed once
    said = verb.text(replace(swept(cell(1, 64, 1.0)), changes=changes))
    assert said.count("crossover: attn: sdpa -> cpp at context 128 .. 256") == 1


def test_cells_without_a_decision_are_not_called_decided() -> None:
    points = [CellServing(batch=1, context=c, serving=(serving("attn", n, None),)) for c, n in ((64, "a"), (128, "b"))]
    assert not changes_of(points)[0].decided


def test_undecided_changes_are_not_crossovers_and_are_not_tuned() -> None:
    cells = [cell(1, 64, 1.0, candidate="cpp:a"), cell(8, 64, 1.0, candidate="torch:b")]
    assert changes_of(served(cells))[0].decided and middles(changes_of(served(cells))) == [4]
    marked = sweep.with_doubts(cells, {1})
    (found,) = changes_of(served(marked))
    assert not found.decided and middles([found]) == []
    assert "(not decided)" in verb.text(replace(swept(*marked), changes=(found,)))


def test_undecided_cells_continue_with_the_same_options() -> None:
    words = ["--model", "llama-1b", "--layers", "1", "--batch", "1:2", "--budget", "9s", "--context", "64"]
    with verb.sweep_command.make_context("sweep", words):
        assert verb._again() == "--model llama-1b --context 64 --batch 1:2 --layers 1"
    assert verb._again() == ""


def test_a_change_along_the_batch_is_bisected_by_tuning_between(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []

    def decided(asked: Any, named: Any, *_: Any) -> Any:
        batch = named[0].workload["M"]
        tuned.append(batch)
        return [], None

    def would_serve(batch: int, context: int, *_: Any) -> CellServing:
        return point(batch, context, **{"gemm o": "cpp:a" if batch < 6 else "torch:b"})

    monkeypatch.setattr(run_sweep, "_decided", decided)
    monkeypatch.setattr(run_sweep, "_would_serve", would_serve)
    cells = [cell(4, 64, 1.0, candidate="cpp:a"), cell(8, 64, 1.0, candidate="torch:b")]
    asked = run_sweep.Grid(model=models.load("llama-1b"), contexts=(64,), batches=(1,), dtype="bf16")
    changes, trouble = run_sweep._narrowed(asked, cells, (), None, verb.Told())
    assert tuned == [6, 5] and trouble is None
    assert [(c.last, c.first) for c in changes] == [(5, 6)]


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 3000)), min_size=1, max_size=20))
def test_every_token_after_the_first_is_counted_once(lengths: list[tuple[int, int]]) -> None:
    requests = [Lengths(prompt=p, output=o) for p, o in lengths]
    counts = sweep.contexts_of(requests)
    assert sum(counts.values()) == sum(o - 1 for _, o in lengths)
    assert all(min(p for p, _ in lengths) + 2 <= c <= max(p + o for p, o in lengths) for c in counts)


def test_step_times_are_interpolated_between_measured_contexts() -> None:
    row = [cell(1, 100, 10.0), cell(1, 200, 20.0), cell(1, 400, 30.0)]
    assert [sweep.step_ms(row, c, "p50_ms") for c in (50, 100, 150, 200, 300, 400)] == [10, 10, 15, 20, 25, 30]


def test_traffic_is_weighed_by_its_own_tokens_and_names_the_best_batch() -> None:
    cells = [cell(1, 128, 10.0), cell(1, 256, 10.0), cell(4, 128, 20.0), cell(4, 256, 20.0)]
    found = weigh([Lengths(prompt=100, output=101)], cells, "f")
    assert found.best_batch == 4
    assert [w.tokens_per_s for w in found.by_batch] == pytest.approx([100.0, 200.0])
    assert [w.baseline_tokens_per_s for w in found.by_batch] == pytest.approx([10.0, 40.0])
    assert all(w.covered == 1 for w in found.by_batch)


def test_tokens_beyond_the_measured_contexts_are_left_out_with_a_note() -> None:
    found = weigh([Lengths(prompt=20, output=11), Lengths(prompt=1000, output=31)], [cell(1, 128, 10.0)], "f")
    assert found.by_batch[0].covered == pytest.approx(10 / 40)
    assert "25% of its tokens are in the measured range" in verb.text(swept(cell(1, 128, 10.0), traffic=found))
    beyond = weigh([Lengths(prompt=1000, output=5)], [cell(1, 128, 10.0)], "f")
    assert (beyond.requests, beyond.by_batch, beyond.best_batch) == (1, (), None)
    said = verb.text(swept(cell(1, 128, 10.0), traffic=beyond))
    assert "your traffic: 1 requests" in said and "0% of its tokens are in the measured range" in said


def test_cells_that_do_not_fit_are_reported() -> None:
    why = "takes 1 TB of memory; 1 GB are free"
    without = SweepCell(batch=64, context=8192, need_bytes=1 << 40, figures=None, why=why)
    said = verb.text(swept(cell(1, 128, 10.0), without))
    assert "batch 64, context 8192: not measured, takes 1 TB of memory" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_pictures_are_drawn_only_along_axes_with_several_values() -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plots`")
    found = pictures(swept(*(cell(b, c, 1.0 * b + c / 100) for b in (1, 2) for c in (64, 128))))
    assert set(found) == {"step-against-context", "rate-against-batch"}
    assert len(found["step-against-context"].axes[0].containers) == 4  # two arms at two batches, with intervals
    assert set(pictures(swept(cell(1, 64, 1.0), cell(1, 128, 2.0)))) == {"step-against-context"}
    assert set(pictures(swept(cell(1, 64, 1.0), cell(2, 64, 2.0)))) == {"rate-against-batch"}
    assert pictures(swept(cell(1, 64, 1.0))) == pictures(swept()) == {}


NAME = 0.055


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_names_of_lines_stay_apart_in_order_and_inside(wanted: list[float]) -> None:
    placed = plots.apart(sorted(wanted), NAME)
    assert all(b - a >= NAME - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= NAME / 2 - 1e-9 and placed[-1] <= 1 - NAME / 2 + 1e-9
    if all(b - a >= NAME for a, b in pairwise(sorted(wanted))):
        inside = [at for at in wanted if 6 * NAME < at < 1 - 6 * NAME]
        assert all(min(abs(at - p) for p in placed) < 1e-9 for at in inside), "moved without need"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--context", "9:4"), "--context '9:4'"),
        (("--context", "2:16777216"), "contexts of at most"),
        (("--context", "2:131072", "--batch", "1:4096", "--iters", "1", "--layers", "1"), ""),
        (("--layers", "99"), "llama-1b has 16"),
        (("--seed", str(2**53)), "is not between"),
        (("--trace-file", "nowhere.txt"), "cannot be read"),
        (("--model", "lama-1b"), "llama-1b"),
    ],
)
def test_an_impossible_sweep_is_refused_before_anything_is_loaded(
    asked: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosel.certify.run_sweep.memory_need", lambda plan: 1 << 60)
    code = run(["sweep", "--model", "llama-1b", "--no-tune", *asked, "--json"])
    out, err = capsys.readouterr()
    if not said:  # a grid without a fitting cell is a result, not an error
        cells = json.loads(out)["sweep"]["cells"]
        assert code == 0 and len(cells) == 17 * 13
        assert all(c["figures"] is None and "are free" in c["why"] for c in cells)
    else:
        assert code == 2 and said in err


def sweep_by(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., DecodeRun], *more: str) -> int:
    """Sweep over three contexts with unlimited memory, measuring each cell by `measure`; return the exit code."""
    monkeypatch.setattr("autosel.certify.run_sweep.measure", measure)
    monkeypatch.setattr("autosel.certify.run_sweep.load_weights", lambda *_: "weights")
    monkeypatch.setattr("autosel.devices.cpu.machine.free_memory", lambda: 1 << 40)
    monkeypatch.setattr("autosel.fingerprint.take", lambda *_: fingerprint())
    return run(["sweep", "--model", "llama-1b", "--no-tune", "--context", "64:256", "--json", *more])


def measured(plan: Plan, *_: Any, **__: Any) -> DecodeRun:
    return decode_run(model=plan.model, seq=plan.seq, iters=plan.iters)


def test_a_cell_names_the_bucket_of_the_decision_that_serves() -> None:
    plan = Plan(model=models.load("llama-1b"), batch=16, seq=200)
    named = models.step(plan.shape, batch=16, context=200, dtype="bf16")
    other = decode_run().choices[0]
    choices = [replace(other, op=n.workload.op, label=n.label, workload_key=n.workload.key) for n in named]
    buckets = [s.bucket for s in run_sweep.figures_of(decode_run(batch=16, seq=200, choices=(*choices, other))).serving]
    assert buckets[:-1] == [n.workload.bucket for n in named]
    assert any("M9-16" in b for b in buckets) and any("L129-256" in b for b in buckets)
    assert buckets[-1] == other.workload_key  # a step of this model has no such field


def test_an_unusable_folder_is_refused_first_and_a_failed_page_loses_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plots`")

    def never(*_: Any, **__: Any) -> DecodeRun:
        raise AssertionError("it was measured first")

    def full(*_: Any) -> Any:
        raise AutoselError("cannot write it", why="No space left on device")

    (tmp_path / "afile").touch()
    assert sweep_by(monkeypatch, never, "--report", str(tmp_path / "afile")) == 2
    assert "it is a file" in json.loads(capsys.readouterr().out)["error"]["why"]
    monkeypatch.setattr("autosel.certify.sweep_plots.replace_file", full)
    assert sweep_by(monkeypatch, measured, "--report", str(tmp_path / "page")) == 1
    found = json.loads(capsys.readouterr().out)
    assert all(c["figures"] for c in found["sweep"]["cells"]) and found["error"]["what"] == "cannot write it"


def test_a_stopped_sweep_reports_measured_and_skipped_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(100))

    def measure(plan: Plan, *_: Any, **__: Any) -> DecodeRun:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return measured(plan)

    code = sweep_by(monkeypatch, measure)
    out, err = capsys.readouterr()
    cells = json.loads(out)["sweep"]["cells"]
    assert code == 130 and "stopped; 1 of 3 cells measured" in err and next(calls) == 2
    assert [c["why"] for c in cells] == ["", "stopped before it was measured", "stopped before it was measured"]
    assert cells[0]["figures"] and not cells[1]["figures"]


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB."), 0, "ran out of memory: CUDA out of memory"),
        (RuntimeError(NO_MEMORY), 0, "DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        (MemoryError(), 0, "the device ran out of memory"),
        (ImpossibleRun("the optimised step is faster than the memory", why="9 GB/s"), 1, "than the memory; 9 GB/s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_cell_that_fails_or_runs_out_of_memory_fails_alone(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(plan: Plan, *_: Any, **__: Any) -> DecodeRun:
        if plan.seq == 128:
            raise error
        return measured(plan)

    assert sweep_by(monkeypatch, measure) == code
    found = json.loads(capsys.readouterr().out)
    cells = found["sweep"]["cells"]
    assert [bool(c["figures"]) for c in cells] == [True, False, True] and said in cells[1]["why"]
    assert ("1 of 3 cells failed" in found["error"]["what"]) if code else found["error"] is None


def test_bugs_and_faults_of_the_weights_end_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any, **__: Any) -> DecodeRun:
        raise RuntimeError("expected scalar type Float")

    def unreadable(*_: Any) -> Any:
        raise BadConfig("x.safetensors is cut short")

    assert sweep_by(monkeypatch, measure) == 1 and "this is a bug in autosel" in capsys.readouterr().err
    monkeypatch.setattr("autosel.certify.run_sweep.load_weights", unreadable)
    assert run(["sweep", "--model", "llama-1b", "--no-tune", "--context", "64:256"]) == 2
    assert "error: x.safetensors is cut short" in capsys.readouterr().err
