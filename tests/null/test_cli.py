"""Test the command line without a device: help, mistakes, tables, the progress line, settings, exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from autosel import settings
from autosel.cli import figures
from autosel.cli import race as race_verb
from autosel.cli import tune as tune_verb
from autosel.cli.main import FORMER, VERBS, cli
from autosel.cli.options import VerbGroup, given_options
from autosel.cli.output import report, table
from autosel.cli.progress import QUIET_S, Progress
from autosel.cli.serve import _show_coverage
from autosel.cli.tune import parse_budget, parse_threads
from autosel.errors import UsageError
from autosel.ledger.describe import decision_json
from autosel.models.workloads import Named
from autosel.ops import OPS
from autosel.tuning.job import Rejection
from autosel.tuning.trial import Tried
from autosel.values import (
    Arm,
    Conditions,
    Decision,
    Effect,
    Failed,
    Passed,
    PythonRecipe,
    Timing,
    Verdict,
    Workload,
)

ROOT = Path(__file__).resolve().parents[2]
ALL_VERBS = [(v,) for v in VERBS] + [
    ("db", sub) for sub in ("info", "check", "upgrade", "backup", "restore", "release")
]


@pytest.fixture(autouse=True)
def own_home(home: Path) -> None:
    home.mkdir()


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `doctor --settings` raise the error after its document."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(settings, "unknown_variables", fail)


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ALL_VERBS, ids=" ".join)
def test_help_of_every_verb_fits_80_columns_and_ends_with_valid_examples(
    verb: tuple[str, ...], said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSEL_SPELLING", "./run")
    code, text, trouble = said(*verb, "--help")
    assert (code, trouble) == (0, "")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "..." not in text.partition("Examples:")[0].replace("attn ...", "").replace("l4 ...", "").replace(
        "[ARGS]...", ""
    )
    examples = text.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.startswith(f"  ./run {verb[0]}") for line in examples)


def test_the_examples_are_accepted_by_the_verbs_they_are_for() -> None:
    """Parse each example, which fails if an option has been renamed."""
    import shlex

    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        commands = [command, *(command.commands.values() if isinstance(command, VerbGroup) else ())]
        for one in commands:
            for example in one.examples:  # type: ignore[attr-defined]
                words = shlex.split(example)[1:]
                words = words[1:] if one is not command else words
                one.make_context(verb, words)


def test_help_loads_neither_a_tensor_library_nor_a_database(tmp_path: Path) -> None:
    code = f"""
import sys
from autosel.cli.main import run
for verb in {ALL_VERBS!r}:
    assert run([*verb, "--help"]) == 0
assert run(["--help"]) == 0
heavy = {{"torch", "numpy", "sqlalchemy", "alembic", "rich", "psutil", "tvm_ffi"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_overview_names_every_verb_of_this_version_on_one_screen(said: Any) -> None:
    _, text, _ = said("--help")
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert len(text.splitlines()) <= 45
    assert max(len(line) for line in text.splitlines()) <= 80


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "todo"),
    [
        (["tun"], "no verb 'tun'", "did you mean tune"),
        (["tune", "--modle", "x"], "no option --modle", "did you mean --model?"),
        (["tune", "--dtype", "bf61"], "unknown dtype 'bf61'", "did you mean bf16"),
        (["tune", "--effort", "ful"], "unknown effort 'ful'", "did you mean full?"),
        (["tune", "--model", "lama-8b"], "lama-8b", "did you mean llama-8b"),
        (["tune", "--op", "atn"], "unknown op 'atn'", "did you mean attn"),
        (["best", "atn"], "unknown op 'atn'", "did you mean attn"),
        (["explain", "rmsnrom"], "unknown op 'rmsnrom'", "did you mean rmsnorm"),
        (["race", "atn", "--candidate", "x:y"], "unknown op 'atn'", "did you mean attn"),
        (["tune", "--device", "cpus"], "unknown device 'cpus'", "did you mean cpu"),
        (["tune", "--device", "h200"], "h200 is not here", "knobs --fingerprint h200"),
        (["tune", "--device", "cuda:0"], "cuda:0 is not here", "knobs --fingerprint"),
        (["fingerprint", "h20"], "unknown device 'h20'", "did you mean h200"),
        (["knobs", "--fingerprint", "h20"], "unknown device 'h20'", "did you mean h200"),
        (["tune", "--budget", "soon"], "--budget 'soon' is not a duration", "90s, 5m or 1h30m"),
        (["tune", "--batch", "0"], "'--batch'", "tune --help"),
        (["tune", "--op", "gemm"], "--op gemm with batch 1", "use gemv"),
        (["tune", "--seq", "many"], "'--seq'", "tune --help"),
        (["decide", "one", "--demote", "--reason", "x"], "unknown op 'one'", "known: linear"),
        (["decide", "1", "--demote"], "missing option '--reason'", "decide --help"),
        (["decide", "1", "--reason", "x"], "decide what about 1?", "--promote, --demote, --pin and --release"),
        (["decide", "1", "--demote", "--pin", "--reason", "x"], "decide what about 1?", "name one of"),
        (["doctor", "--settings", "--ranks"], "mutually exclusive", "name one of them"),
        (["export", "--check"], "need --lock", "add --lock"),
        (["export", "--lock", "--bake", "x"], "--lock and --bake are mutually exclusive", "name one of them"),
        (["export", "--lock", "--frozen"], "--frozen needs a COMMAND", "export --lock --frozen -- python serve.py"),
        (["best"], "missing argument 'OP'", "best --help"),
        (["explain"], "explain what?", "explain OP, --id N, --history or --failed"),
        (["db", "chek"], "no command 'chek'", "did you mean check?"),
        (["import", "/nonexistent.json"], "cannot read /nonexistent.json", "check the path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_with_a_fix_and_as_one_json_document(
    arguments: list[str], what: str, todo: str, said: Any
) -> None:
    code, out, err = said(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert what in err.splitlines()[0]
    assert todo in err
    code, out, _ = said(*arguments, "--json")
    error = json.loads(out)["error"]
    assert error["exit_code"] == code == 2
    assert error["what"]


def test_no_verb_at_all_shows_the_overview_and_is_a_usage_error(said: Any) -> None:
    code, out, err = said()
    assert code == 2
    assert "Measure:" in out + err


@pytest.mark.parametrize("verb", FORMER)
def test_a_former_verb_is_answered_with_what_does_the_same_now(verb: str, said: Any) -> None:
    code, out, err = said(verb, "--json")
    assert (code, json.loads(out)["error"]["what"]) == (2, f"no verb '{verb}'")
    assert f"use autosel {FORMER[verb]}" in err
    command = cli.get_command(click.Context(cli), FORMER[verb].split()[0])
    options = {o for p in command.params for o in p.opts}  # type: ignore[union-attr]
    assert {word for word in FORMER[verb].split() if word.startswith("-")} <= options


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("autosel ex", {"explain", "export"}),
        ("autosel explain at", {"attn"}),
        ("autosel tune --op ", {*OPS, "gemv", "gemm", "step"}),
        ("autosel run --model qwen3-1", {"qwen3-1.7b"}),
        ("autosel fingerprint c", {"cpu", "cuda"}),
        ("autosel knobs --fingerprint h2", {"h200"}),
        ("autosel decide attn --pi", {"--pin"}),
        ("autosel nothing at", set()),
    ],
)
def test_the_shell_completes_verbs_options_ops_models_and_devices(words: str, names: set[str]) -> None:
    _, *given, last = words.split(" ")
    found = ShellComplete(cli, {}, "autosel", "_AUTOSEL_COMPLETE").get_completions(given, last)
    assert {item.value for item in found} == names


def test_a_bug_is_reported_with_the_file_of_details(said: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("seven"))
    code, out, err = said("doctor", "--settings", "--json")
    assert (code, len(out.splitlines())) == (0, 1), "the document stays the only one"
    code, _, err = said("doctor", "--settings")
    assert code == 1
    assert "this is a bug in autosel" in err
    assert str(home / "crash.log") in err
    assert "ZeroDivisionError: seven" in (home / "crash.log").read_text()


def test_running_out_of_memory_is_not_a_bug_for_any_type_of_error(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
    for error in (MemoryError("99 bytes"), RuntimeError(f"{allocator}\nException raised from alloc_cpu")):
        failing(monkeypatch, error)
        code, _, err = said("doctor", "--settings")
        assert code == 1 and "not enough memory" in err and "99 bytes" in err and "smaller model" in err
        assert "bug" not in err and "Exception raised" not in err


def test_ctrl_c_anywhere_exits_with_130_and_no_error(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    code, _, err = said("doctor", "--settings")
    assert (code, err.strip()) == (130, "stopped")


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTOSEL_BUDGET", "soon"),
        ("AUTOSEL_BUDGET", "-5"),
        ("AUTOSEL_BUDGET", "nan"),
        ("AUTOSEL_BUDGET", "inf"),
        ("AUTOSEL_DISABLE", "maybe"),
        ("AUTOSEL_EFFORT", "utmost"),
        ("AUTOSEL_LOG", "loud"),
        *((f"AUTOSEL_{name}", "") for name in ("DB", "GUARD", "SHADOW_RATE", "DISABLE", "MODE", "LOCK", "EFFORT")),
    ],
)
def test_an_invalid_variable_is_named_with_its_allowed_values(
    name: str, value: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    settings.read.cache_clear()
    code, out, err = said("doctor", "--settings")
    assert (code, out) == (2, "")
    assert f"{name}: {name.removeprefix('AUTOSEL_').lower()} = '{value}'" in err
    assert len(err.splitlines()) >= 2, "and why"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("{home}/file", "{home}/file is a file, not a folder"),
        ("{home}/file/below", "{home}/file is a file, not a folder"),
        ("{home}/link", "{home}/link is a link to nothing, not a folder"),
        ("{home}/" + "x" * 300, "File name too long"),
    ],
)
def test_a_home_that_cannot_be_a_folder_is_named_with_the_reason(
    value: str, told: str, said: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    (home / "link").symlink_to("nowhere")
    monkeypatch.setenv("AUTOSEL_HOME", value.format(home=home))
    settings.read.cache_clear()
    code, out, err = said("doctor", "--settings")
    assert (code, out) == (2, "")
    assert err.startswith("error: AUTOSEL_HOME = '")
    assert told.format(home=home) in " ".join(err.split())
    assert len(err.splitlines()) > 2, "the message has no fix"


def test_an_empty_value_is_valid_if_the_default_is_empty(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSEL_ALLOW", "")
    monkeypatch.setenv("AUTOSEL_CXX", "")
    settings.read.cache_clear()
    found = json.loads(said("doctor", "--settings", "--json")[1])
    assert found["allow"] == found["cxx"] == {"value": "", "origin": "environment"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("budget = ", "is not TOML"),
        ("lock = ''", "it is empty"),
        ("\x00", "is not TOML"),
        ("budgte = 5", "unknown settings budgte"),
        ("budget = 'soon'", "budget = 'soon'"),
        ("budget = [1]", "budget = '[1]'"),
        ("home = '/elsewhere'", "set AUTOSEL_HOME"),
    ],
)
def test_a_broken_settings_file_is_named_and_help_and_doctor_still_work(
    text: str, told: str, said: Any, home: Path
) -> None:
    (home / "config.toml").write_text(text)
    settings.read.cache_clear()
    code, _, err = said("doctor", "--settings")
    assert code == 2
    assert str(home / "config.toml") in err
    assert told in err
    assert said("tune", "--help")[0] == 0
    code, out, _ = said("doctor")
    assert code == 1
    assert "BAD   settings" in out


def test_every_setting_is_shown_with_its_origin(said: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config.toml").write_text("budget = 30\n")
    monkeypatch.setenv("AUTOSEL_EFFORT", "full")
    monkeypatch.setenv("AUTOSEL_EFORT", "full")
    settings.read.cache_clear()
    found = json.loads(said("doctor", "--settings", "--json")[1])
    assert found["effort"] == {"value": "full", "origin": "environment"}
    assert found["budget"] == {"value": 30.0, "origin": str(home / "config.toml")}
    assert found["disable"] == {"value": False, "origin": "default"}
    _, out, err = said("doctor", "--settings")
    assert all(s.variable in out for s in settings.SETTINGS)
    assert "AUTOSEL_EFORT is not a setting" in err


# --- output -------------------------------------------------------------------------------------------------------


def test_a_table_too_wide_gets_narrow_gaps_then_continues_in_one_column_and_loses_nothing() -> None:
    rows = [["gemv down+res", "M1 K14336 N4096", "a" * 20, "25 900 ±1.1%"], ["x", "word " * 20, "b", "1"]]
    text = table(("op", "workload", "who", "time us"), rows, right=(3,), wrap=1)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("word") == 20
    assert "25 900 ±1.1%" in text
    assert "a" * 20 in text


def test_colour_is_for_terminals_and_never_where_the_user_wants_none(
    said: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in said("tun")[2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert settings.colour() is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert settings.colour() is False
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert settings.colour() is False


def test_a_command_to_type_is_never_broken_over_lines(capsys: pytest.CaptureFixture[str]) -> None:
    command = "autosel race rmsnorm --candidate mykernels:fast_rmsnorm --model /a/long/path --case 'random M2 d512' x"
    report(UsageError("w" * 100, why="because " * 30, todo=command))
    err = capsys.readouterr().err
    assert f"  {command}\n" in err
    assert all(len(line) <= 80 for line in err.splitlines() if "because" in line)


def test_python_m_autosel_is_the_command_and_is_used_in_fixes(tmp_path: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        variables, whole = {**os.environ, "PYTHONPATH": str(ROOT)}, [sys.executable, "-m", "autosel", *words]
        return subprocess.run(whole, cwd=tmp_path, env=variables, capture_output=True, text=True)

    shown = call("doctor", "--settings", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    wrong = call("doctor", "--zzzzzzzzz")
    assert wrong.returncode == 2
    assert "python -m autosel doctor --help" in wrong.stderr


def test_a_reader_that_goes_away_and_a_full_disk_behind_stdout_are_handled() -> None:
    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)

    me = f"{sys.executable} -m autosel.cli.main"
    gone = shell(f"set -o pipefail; {me} doctor --settings | true")
    assert "Traceback" not in gone.stderr
    assert "BrokenPipe" not in gone.stderr
    full = shell(f"{me} doctor --settings > /dev/full")
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr


def test_a_stream_that_cannot_encode_a_character_still_gets_the_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autosel.cli.main", "doctor", "--settings"],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "AUTOSEL_CXX": "/opt/größer/g++"},
    )
    assert done.returncode == 0, done.stderr
    assert b"/opt/gr" in done.stdout


# --- the text of a decision ---------------------------------------------------------------------------------------

TORCH = Arm(candidate="torch:linear", backend="TORCH", recipe=PythonRecipe(target="a:b"), knobs={}, digest="b" * 64)
CPP = Arm(candidate="cpp:gemv", backend="CPP", recipe=PythonRecipe(target="a:c"), knobs={"rows": 8}, digest="c" * 64)
ATTN = Workload(
    op="attn", dims=(("B", 1), ("Hq", 32), ("Hkv", 8), ("S", 1), ("D", 128), ("L", 8192)), dtype="bf16", traits=()
)


def timing(us: float) -> Timing:
    return Timing(median_us=us, lo_us=0.99 * us, hi_us=1.011 * us, p95_us=1.1 * us, min_us=0.9 * us, samples=60)


def decision(outcome: Any = "promote", arm: Arm = CPP, state: Any = "promoted", **verdict: Any) -> Decision:
    values: dict[str, Any] = {
        "effect": Effect(median=23.4, lo=22.1, hi=24.0),
        "next_best": ("torch:packed", 2.94),
        "timings": {"cpp:gemv": timing(1010), "torch:linear": timing(24000)},
        "read_bytes_per_s": 46e9,
        "roofline": 0.72,
    }
    made = Verdict(outcome=outcome, winner=arm.candidate, reason="a reason", **(values | verdict))
    return Decision(
        id=41, state=state, hw_id="h" * 64, op="attn", bucket=ATTN.bucket, mode="eager.t2.highest", workload=ATTN,
        arm=arm, baseline=TORCH, verdict=made, reason="a reason", created_at="2026-11-20T11:17:24+00:00",
    )  # fmt: skip


def row(made: Decision, **options: Any) -> str:
    return click.unstyle(figures.decision_table([made], {}, **options)).splitlines()[1]


def test_a_promotion_shows_the_lower_bound_it_rests_on() -> None:
    expected = "attn B1 H32/8 D128 L8192 CPP 1 010 ±1.1% 23x ≥22 2.9x 72%"
    assert row(decision()).split() == expected.split()


def test_undecided_pinned_demoted_and_stale_decisions_are_labelled() -> None:
    assert "undecided" in row(decision("undecided", TORCH, "kept"))
    assert "pinned" in row(decision(state="pinned"))
    assert "demoted" in row(decision(arm=TORCH, state="demoted"))
    stale = row(decision(), stale={41: "another torch"})
    assert "stale" in stale
    assert "TORCH" in stale
    assert "23x" not in stale


def test_the_verdict_table_of_long_names_fits_80_columns() -> None:
    labels = {ATTN.key: "attn window"}
    wide = decision(next_best=("x", 1.91), effect=Effect(median=1.91, lo=1.85, hi=1.99))
    inductor = dataclasses.replace(CPP, backend="INDUCTOR")
    text = click.unstyle(figures.decision_table([wide, decision(arm=inductor)], labels))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "1.91x ≥1.85" in text


def test_the_json_of_a_decision_has_the_documented_fields() -> None:
    made = decision_json(decision())
    assert made["state"] == "promoted"
    assert made["speedup"] == {"median": 23.4, "lo": 22.1, "hi": 24.0}
    assert made["next_best"] == {"candidate": "torch:packed", "speedup": 2.94}
    assert (made["baseline_us"], made["time_us"], made["roofline"]) == (24000, 1010, 0.72)
    assert decision_json(decision(arm=TORCH, state="demoted"))["state"] == "baseline"


# --- the progress line --------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A stderr that is a terminal, or whose reader has closed it."""

    def __init__(self, *, terminal: bool = True, broken: bool = False) -> None:
        super().__init__()
        self.terminal, self.broken = terminal, broken

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.broken:
            raise BrokenPipeError
        return super().write(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    return Clock()


@pytest.fixture
def progress(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Progress]:
    """Return a function that shows progress on a screen."""

    def shown(screen: Screen, budget_s: float = 0.0) -> Progress:
        monkeypatch.setattr(sys, "stderr", screen)
        return Progress(budget_s, clock=clock)

    return shown


def test_the_progress_line_is_updated_fits_and_names_the_present_work(clock: Any, progress: Any) -> None:
    shown = progress(Screen())
    shown.stage("parity", "cpp:attn_decode", 2, 9)
    clock.now = 30.0
    first = shown.line()
    assert first.startswith("parity 2/9  cpp:attn_decode")
    assert "30s, about " in first
    clock.now = 31.0
    assert shown.line() != first
    shown.stage("confirming 2", "13 pairs  cpp:" + "x" * 90, 3, 9)
    assert len(shown.line()) == 79
    assert "13 pairs" in shown.line()


def test_the_eta_falls_with_work_done_is_plausible_and_within_the_budget(clock: Any, progress: Any) -> None:
    shown = progress(Screen(), budget_s=70.0)
    shown.stage("fingerprint", "cpu", 0, 1)
    clock.now = 5.0
    assert "left" not in shown.line()
    clock.now = 60.0
    for stage in ("screening", "confirming 1", "confirming 2", "confirming 3"):
        shown.stage(stage, "", 0, 4)
        assert seconds_left(shown) <= 10
    free = progress(Screen())
    clock.now = 120.0
    left = []
    for number in (1, 2, 3):
        free.stage(f"confirming {number}", "", 0, 4)
        left.append(seconds_left(free))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[2] > 0


def test_the_eta_falls_while_one_contest_takes_its_time(clock: Any, progress: Any) -> None:
    shown = progress(Screen())
    clock.now = 40.0
    shown.stage("screening", "1 pairs  attn", 0, 4)
    left = [seconds_left(shown)]
    for pairs in range(2, 12):
        clock.now += 5.0
        shown.stage("screening", f"{pairs} pairs  attn", 0, 4)
        left.append(seconds_left(shown))
    assert left == sorted(left, reverse=True)
    assert left[-1] > 0


def seconds_left(shown: Progress) -> int:
    minutes, _, seconds = shown.line().partition("about ")[2].removesuffix("s left").rpartition("m")
    return 60 * int(minutes or 0) + int(seconds)


def test_a_pipe_gets_a_line_per_stage_and_decision_without_control_characters(progress: Any) -> None:
    screen = Screen(terminal=False)
    with progress(screen) as shown:
        for done in range(5):
            shown.stage("build", "cpu/gemv.cpp", done, 5)
        shown.stage("parity", "cpp:gemv", 0, 5)
        shown.decided(decision(), settled_before=False)
        shown.decided(decision(), settled_before=True)
        shown.rejected(Rejection(workload=ATTN, candidate="user:x", stage="parity", reason="wrong " * 30))
        shown.rejected(Rejection(workload=ATTN, candidate="user:y", stage="eligible", reason="no"))
        busy = Conditions(watched=True, again=179, busy_cores=1.5, stolen=0.02, by=("python 1.5 cores", "cc1plus 0.9"))
        shown.decided(decision(conditions=busy), settled_before=False)
    text = screen.getvalue()
    assert "\x1b" not in text
    assert "179 samples taken again" in text
    assert text.count("build ...") == text.count("parity ...") == 1
    assert "attn B1 H32/8 D128 L8192: promoted cpp:gemv, 23x ≥22" in text
    assert "rejected (parity): user:x" in text
    assert "user:y" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert (shown.decided_now, shown.settled) == (2, 1)


def test_a_pipe_gets_a_line_from_time_to_time_during_a_stage(clock: Any, progress: Any) -> None:
    screen = Screen(terminal=False)
    shown = progress(screen)
    shown.stage("screening", "3 pairs  attn", 1, 4)
    clock.now = QUIET_S + 1
    shown.beat()
    shown.beat()
    assert screen.getvalue().count("3 pairs  attn") == 1


def test_a_tune_continues_if_the_reader_of_its_progress_closes_the_pipe(progress: Any) -> None:
    with progress(Screen(broken=True)) as shown:
        shown.stage("build", "cpu/gemv.cpp", 0, 5)
        shown.decided(decision(), settled_before=False)
    assert shown.decided_now == 1


# --- options and exit codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("45", 45), ("1.5s", 1.5)])
def test_a_budget_is_read_in_common_spellings(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


def test_coverage_is_shown_with_the_origin_of_times_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    part = {"op": "rmsnorm", "candidate": "cpp:rmsnorm", "calls": 10}
    parts = [
        part | {"bucket": "a", "why": "", "us_per_call": 3.0, "origin": "raced"},
        part | {"bucket": "b", "why": "tuned with 2 threads, running with 1", "us_per_call": 1.0, "origin": "derived"},
        part | {"bucket": "", "why": "no workload", "us_per_call": None, "origin": "unknown"},
    ]
    told = {"engine": "vLLM 1", "process": 7, "mode": "eager.t1", "share": 0.75, "left_out": 5, "parts": parts}
    _show_coverage([told])
    shown = " ".join(capsys.readouterr().out.split())
    assert "vLLM 1, process 7, eager.t1: decisions serve 75% of the time in ops, 35 calls" in shown
    assert "75% raced, 25% derived; 10 calls have no known time" in shown
    assert "missed: tuned with 2 threads, running with 1" in shown


@pytest.mark.parametrize(("text", "counts"), [("1", (1,)), ("2,1", (1, 2)), ("1-2", (1, 2)), ("1, 1-2", (1, 2))])
def test_numbers_of_threads_are_a_list_or_a_range(
    text: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert parse_threads(text, "cpu", "") == counts


@pytest.mark.parametrize("text", ["0", "x", "1,", "1-", "-1", "3-1", "99999", "1;2"])
def test_invalid_numbers_of_threads_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="numbers from 1 to"):
        parse_threads(text, "cpu", "")


@pytest.mark.parametrize(("device", "ray"), [("cuda", ""), ("cpu", "local")])
def test_numbers_of_threads_are_for_this_cpu(device: str, ray: str) -> None:
    with pytest.raises(UsageError, match="mutually exclusive"):
        parse_threads("1", device, ray)


@pytest.mark.parametrize("text", ["", " ", "0", "0s", "-5", "5x", "m", "1e3", "nan", "5m 3"])
def test_an_invalid_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_budget(text)


def test_the_command_that_continues_has_the_options_that_choose_the_work() -> None:
    words = ["--model", "my model", "--op", "attn", "--op", "gemv", "--seq", "200", "--budget", "5s", "--json"]
    ctx = tune_verb.tune_command.make_context("tune", words)
    assert tune_verb.again_command(ctx) == "autosel tune --model 'my model' --op attn --op gemv --seq 200"
    assert given_options(tune_verb.tune_command.make_context("tune", []), ("ops", "batch", "seq", "effort")) == []


def test_the_command_to_repeat_a_race_names_the_format_of_its_weights() -> None:
    words = ["linear", "--candidate", "k.cpp", "--format", "q4_0", "--shape", "M1.N64.K64", "--deadline", "5"]
    ctx = race_verb.race_command.make_context("race", words)
    told = "autosel race linear --candidate k.cpp --format q4_0 --shape M1.N64.K64 --deadline 5.0"
    assert race_verb.again_command(ctx) == told


NAMED = Named(workload=ATTN, label="attn", calls_per_step=1)
PASSED = Passed(cases=3, worst=0.5, worst_case="random")


def tried(**values: Any) -> Tried:
    return Tried(**({"named": NAMED, "parity": PASSED} | values))


@pytest.mark.parametrize(
    ("found", "code", "told"),
    [
        (tried(verdict=decision().verdict), None, ""),
        (tried(verdict=decision("tie").verdict), None, ""),
        (tried(verdict=decision("lose").verdict), None, ""),
        (tried(verdict=decision("undecided").verdict), 5, "race again:  AGAIN"),
        (tried(verdict=decision().verdict, reason="crash: SIGSEGV"), 4, "crash: SIGSEGV"),
        (tried(parity=None, reason="takes bf16"), 2, "takes bf16"),
        (
            tried(parity=Failed(check="elements", case="strided", evidence={}, reason="row 3")),
            4,
            '--case "strided" --inputs 5eed',
        ),
        (tried(parity=Failed(check="raised", case="load", evidence={}, reason="no module")), 4, "no module"),
    ],
)
def test_a_race_ends_with_the_exit_code_of_its_result(found: Tried, code: int | None, told: str) -> None:
    error = race_verb.judge([found], "AGAIN", "5eed")
    assert (error.exit_code if error else None) == code
    assert told in str(error or "")
    if isinstance(found.parity, Failed) and found.parity.case == "load":
        assert "--case" not in str(error), "a failure to load is not a case that --case can repeat"
