"""Test `verify`, and the refusals and output of `run`, without measuring."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from autosel import settings
from autosel.certify import rerun, slo, suite
from autosel.certify.audit import audit
from autosel.certify.certificate import Certificate
from autosel.certify.command import command
from autosel.certify.issue import IssueRequest, issue
from autosel.certify.physics import ImpossibleRun
from autosel.certify.report import page
from autosel.certify.run import append, failed
from autosel.certify.words import prompted
from autosel.cli.asked import MEASURED, Asked
from autosel.cli.certificate import summary, where_line
from autosel.cli.run import run_command
from autosel.cli.suite import TAKEN
from autosel.cli.verify import command_of, located, rerun_words, run_again
from autosel.cli.writable import refuse_file, refuse_folder
from autosel.decode.prompt import prompts
from autosel.decode.run import DecodeRun, Plan
from autosel.errors import AutoselError, BadConfig, ParityError, UsageError
from tests.llama import write_config
from tests.null.certificates import GROUNDS, certificate, decode_run, fingerprint
from tests.null.test_certify_verify_lies import of_mine
from tests.null.test_cli_run_refusals import SIZES

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of two certificates."""
    path = tmp_path / "f.jsonl"
    for seed in (1, 2):
        append(path, certificate(decode_run(iters=3, seed=seed)))
    return path


def asked(text: str) -> Asked:
    return Asked(run_command.make_context("run", shlex.split(text)))


# --- verify -------------------------------------------------------------------------------------------------------


def test_verify_prints_the_result_and_its_limits(file: Path, said: Any) -> None:
    code, text, _ = said("verify", str(file))
    assert code == 0
    assert "2 certificates hold, none signed" in text and "head sha256:" in text
    assert "truncated file looks complete" in " ".join(text.split()) and "No check proves" in " ".join(text.split())
    code, text, _ = said("verify", f"{file}:1", "--json")
    found = json.loads(text)
    assert (code, found["certificates"], found["rerun"], found["error"]) == (0, 2, None, None)
    assert said("verify", str(file), "--head", f"sha256:{found['head']}")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("{file}:3",), 1, "has no line 3"),
        (("{file}:0",), 2, "no line 0"),
        (("absent.jsonl",), 2, "cannot read"),
        (("{file}", "--head", "12"), 2, "--head"),
        (("{file}", "--head", "ab" * 32), 1, "does not end with"),
        (("{file}", "--key", "absent.pem"), 2, "cannot read the key"),
        (("{file}", "--key", "ab" * 32), 1, "cannot be trusted"),
        ((), 2, "cannot read"),
    ],
)
def test_verify_refuses_with_the_right_exit_code(
    arguments: tuple[str, ...], code: int, what: str, file: Path, said: Any
) -> None:
    found, text, trouble = said("verify", *(a.format(file=file) for a in arguments), "--json")
    assert found == code and what in trouble
    assert what in json.loads(text)["error"]["what"]


def test_verify_never_reports_uncheckable_certificates_as_proven(file: Path, said: Any) -> None:
    append(file, of_mine())
    code, text, trouble = said("verify", str(file))
    assert code == 5 and "2 of 3 certificates hold, 1 not checkable, none signed" in text
    assert trouble.startswith(f"undecided: {file}: 1 of 3 certificates not checkable") and "version 5" in trouble
    code, text, _ = said("verify", str(file), "--json")
    found = json.loads(text)
    (told,) = found["not_checkable"]
    assert code == found["error"]["exit_code"] == 5
    assert (told["line"], told["fields"]) == (3, ["bytes_per_step", "flops_per_step", "weights_bytes"])
    code, _, trouble = said("verify", str(file), "--strict")
    assert code == 1 and f"{file}:3 cannot be trusted" in trouble


def test_a_line_is_selected_after_a_colon_unless_a_file_has_that_name(tmp_path: Path) -> None:
    assert located("a.jsonl:7") == (Path("a.jsonl"), 7)
    assert located("a.jsonl") == (Path("a.jsonl"), 0)
    (tmp_path / "b:7").touch()
    assert located(str(tmp_path / "b:7")) == (tmp_path / "b:7", 0)
    assert located(f"{'n' * 300}:7") == (Path("n" * 300), 7)
    assert located("") == (settings.home() / "certificates.jsonl", 0)


def test_a_certificates_command_is_read_as_options_and_nothing_else() -> None:
    def command(text: str) -> Asked:
        return command_of(dataclasses.replace(certificate(), repro_cmd=text))

    plan = command("./run run --model llama-1b --seq 300 --layers 4 --seed 3").plan()
    assert (plan.model.name, plan.seq, plan.layers, plan.seed) == ("llama-1b", 300, 4, 3)
    for hostile in ("rm -rf /", "autosel run --help", "autosel run --modle x", "autosel run 'x", "autosel tune", ""):
        with pytest.raises(BadConfig):
            command(hostile)


def test_a_rerun_is_shown_with_both_figures_and_the_interval() -> None:
    first, again = (certificate(decode_run(seed=s, iters=40)) for s in (1, 2))
    text = rerun_words(first, rerun.compare(first, again))
    assert ": reproduced" in text and f"certified {first.speedup:.3g}x" in text
    assert max(map(len, text.splitlines())) <= 80


# --- run: arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "todo"),
    [
        (("--speculate", "ngram:2", "--batch", "2"), "speculation excludes a batch"),
        (("--speculate", "ngram:2", "--temperature", "1"), "speculation excludes a batch"),
        (("--prompt", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--persistent", "--step", "ops"), "--persistent is --step whole"),
        (("--persistent", "--paged", "16"), "reads a contiguous cache"),
        (("--step", "whole", "--batch", "9"), "multiplies at most 8 rows"),
        (("--persistent", "--no-prealloc"), "preallocated buffers"),
        (("--persistent", "--speculate", "ngram:2"), "several tokens per sequence"),
        (("--step", "graph", "--persistent"), "remove one of them"),
        (("--step", "graph"), "graphs are captured on a GPU"),
        (("--step", "persistent"), "known: auto, ops, graph, whole"),
        (("--weights-layout", "packed"), "known: auto, plain"),
        (("--iters", "0"), "--iters"),
        (("--seq", "1"), "--seq"),
        (("--seq", "999999"), "supports contexts of at most 131072"),
        (("--layers", "17"), "llama-1b has 16"),
        (("--small-batch", "2", "--batch", "2"), "--small-batch and --batch are mutually exclusive"),
        (("--speculate", "4"), "ngram:K"),
        (("--speculate", "ngram:0"), "ngram:K"),
        (("--slo", "ttft"), "is not an objective"),
        (("--slo", "ttft<1s", "--layers", "4"), "--slo and --layers are mutually exclusive"),
        (("--slo", "ttft<1s", "--prompt", "synthetic"), "a synthetic prompt is not run"),
        (("--price-per-hour", "0"), "price-per-hour"),
        (("--price-per-hour", "nan"), "nan is not between"),
        (("--price-per-hour", "inf"), "inf is not between"),
        (("--price-per-hour", "1e-320"), "1e-320 is not between"),
        (("--seed", "9007199254740993"), "9007199254740993 is not between"),
        (("--seed", str(-(2**70))), "is not between -(2^53 - 1) and 2^53 - 1"),
        (("--weights", "n" * 300), "has no model.safetensors"),
        (("--key", "k.pem"), "--key needs --sign"),
        (("--sign", "--key", "absent.pem"), "cannot read the key"),
        (("--device", "cuda"), "cuda"),
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "2"), "top-p"),
        (("--suite", "huge"), "quick"),
        (("--suite", "quick", "--slo", "tps>1"), "--suite excludes --slo"),
        (("--suite", "quick", "--batch", "1", "--temperature", "0.5"), "--suite excludes --batch, --temperature"),
        (("--suite", "quick", "--prompt", "synthetic"), "--suite excludes --prompt"),
        (
            ("--suite", "quick", "--persistent", "--price-per-hour", "2"),
            "--suite excludes --persistent, --price-per-hour",
        ),
        (("--suite", "quick", "--plan"), "--suite excludes --plan"),
        (("--audit", "/nonexistent/a.json"), "does not exist"),
        (("--trace", "/nonexistent/t.json"), "does not exist"),
        (("--compare", "absent.json"), "cannot read"),
        (("--compare", "n" * 300), "cannot read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_impossible_run_is_refused_before_loading(
    options: tuple[str, ...], todo: str, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    measured_until(monkeypatch, 0, AssertionError("it was measured first"))
    context = () if "--suite" in options else ("--seq", "128")
    code, text, trouble = said("run", "--model", "llama-1b", *context, *options, "--json")
    assert code == 2 and todo in trouble
    assert json.loads(text)["error"]["exit_code"] == 2
    assert not list(tmp_path.glob("*.json"))


def test_a_certificate_file_that_was_touched_is_refused_before_minutes_of_measuring(said: Any, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text("{}\n")
    code, _, trouble = said("run", "--model", "llama-1b", "--seq", "64", "--certify", str(tmp_path / "f.jsonl"))
    assert code == 1 and "is not a certificate" in trouble


def test_the_command_of_a_certificate_measures_the_same_plan_again() -> None:
    text = (
        "--model llama-1b --weights random --dtype fp32 --seq 300 --iters 7 --warmup 0 --layers 4 --no-prealloc "
        "--paged 32 --advance --temperature 0.5 --top-k 9 --top-p 0.9 --repetition-penalty 1.2 --seed 5 --small-batch 3"
    )
    first = asked(f"{text} --certify /tmp/x --price-per-hour 3 --audit y --json")
    again = asked(shlex.join(shlex.split(first.repro)[2:]))
    assert again.plan() == first.plan() and again.repro == first.repro
    assert "--certify" not in first.repro and "--price" not in first.repro and "--warmup 0" in first.repro
    assert asked("").repro == "autosel run"


@pytest.mark.parametrize(
    "options", ["", "--no-prealloc --step ops", "--weights-layout plain --dtype fp32", "--model {own} --seed -2"]
)
def test_each_trial_of_a_suite_can_be_repeated_alone(options: str, tmp_path: Path) -> None:
    write_config(tmp_path, **{**SIZES, "max_position_embeddings": 4096})
    (tmp_path / "model.safetensors").touch()
    for weights in ("", "--weights random") if "own" in options else ("",):
        base = asked(f"--model llama-1b --layers 1 --seed 4 {options.format(own=tmp_path)} {weights}")
        for config in suite.CONFIGURATIONS:
            plan = suite.plan_of(base.plan(), config)
            again = asked(shlex.join(shlex.split(command(base.model, plan))[2:])).plan()
            assert again == plan


@pytest.mark.parametrize(
    ("options", "step", "layout"),
    [
        ("", "auto", "auto"),
        ("--step ops", "ops", "auto"),
        ("--step graph", "graph", "auto"),
        ("--step whole", "whole", "auto"),
        ("--persistent", "whole", "auto"),
        ("--persistent --step whole", "whole", "auto"),
        ("--weights-layout plain", "auto", "plain"),
    ],
)
def test_options_name_the_form_of_the_step(
    options: str, step: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cli.asked.refuse_absent", lambda device: None)
    for device in ("cpu", "cuda"):
        first = asked(f"--model llama-1b --device {device} {options}")
        again = asked(shlex.join(shlex.split(first.repro)[2:]))
        assert (first.plan().step, first.plan().layout) == (step, layout)
        assert again.plan() == dataclasses.replace(first.plan(), device=again.plan().device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--no-persistent", "--step ops"),
        ("--no-packed", "--weights-layout plain"),
        ("--graph", "--step graph"),
        ("--no-graph", "--step ops, or --step whole"),
    ],
)
def test_a_former_option_is_refused_with_its_replacement(old: str, new: str, said: Any) -> None:
    code, text, trouble = said("run", "--model", "llama-1b", old, "--json")
    assert code == 2 and f"{old} is now {new}" in trouble and f"use {new}" in trouble
    assert json.loads(text)["error"]["todo"] == f"use {new}"
    assert old not in said("run", "--help")[1]


@pytest.mark.parametrize(
    ("flags", "ran", "on_cpu", "on_gpu"),
    [
        ("", "eager", "auto", "auto"),
        ("--persistent", "team", "whole", "whole"),
        ("--persistent --no-graph", "team", "whole", "whole"),
        ("--no-persistent", "eager", "ops", "ops"),
        ("--no-persistent", "graph", "graph", "graph"),
        ("--no-persistent --no-graph", "eager", "ops", "ops"),
        ("--graph", "graph", "graph", "graph"),
        ("--graph --no-persistent", "graph", "graph", "graph"),
        ("--no-graph", "eager", "auto", "ops"),
        ("--no-graph", "team", "auto", "whole"),
    ],
)
def test_an_earlier_certificates_command_selects_the_form_that_ran(
    flags: str, ran: str, on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.cli.asked.refuse_absent", lambda device: None)
    for device, form in (("cpu", on_cpu), ("cuda", on_gpu)):
        for packed, layout in (("", "auto"), (" --no-packed", "plain")):
            text = f"./run run --model llama-1b --device {device} {flags}{packed} --seq 9"
            made = dataclasses.replace(certificate(), repro_cmd=text, mode=f"{ran}.t2.highest")
            plan = command_of(made).plan()
            assert (plan.step, plan.layout, plan.device, plan.seq) == (form, layout, device, 9)


def test_a_suite_refuses_options_that_its_trials_commands_would_not_have() -> None:
    known = {p.name for p in run_command.params}
    measured = set(MEASURED) & set(TAKEN)
    assert set(TAKEN) <= known
    assert measured == {
        "model", "weights", "dtype", "layers", "step", "weights_layout", "no_prealloc", "device", "seed",
    }  # fmt: skip


def test_every_layer_of_a_model_is_the_whole_model() -> None:
    assert asked("--model llama-1b --layers 16").plan() == asked("--model llama-1b").plan()


def test_a_key_is_made_once_below_the_home_and_used_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography", reason="signatures need the extra `sign`")
    from autosel.certify import sign

    first = asked("--sign").key()
    assert sign.public_hex(first) in capsys.readouterr().err
    assert sign.public_hex(asked("--sign").key()) == sign.public_hex(first)
    assert (home / "keys" / "certificates.pem").stat().st_mode & 0o777 == 0o600


# --- run: output --------------------------------------------------------------------------------------------------


def test_the_summary_fits_80_columns_and_shows_a_part_a_miss_and_a_failure() -> None:
    made = certificate(decode_run(batch=4, step_ms=90.0), objectives=slo.parse("ttft<500ms"), price_per_hour=1.5)
    text = summary(made, audit(made))
    assert max(map(len, text.splitlines())) <= 80
    assert all(part in text for part in (f"{made.speedup:.2f}x", "16 of 16 layers", "missed", "tokens a dollar"))
    part = certificate(decode_run(layers=4, max_logit_error=1.0))
    text = summary(part, audit(part))
    assert "llama-1b[4/16 layers]" in text and "4 of 16 layers only" in text and "NOT verified" in text
    assert "verify --rerun f.jsonl:1" in where_line(made, Path("f.jsonl"))


def test_the_summary_of_a_run_without_a_baseline_has_no_speedup() -> None:
    made = certificate(decode_run(baseline=False))
    text = summary(made, audit(made))
    assert "speedup" not in text and "baseline  none" in text and "50 of 50 tokens as in untimed passes" in text
    assert max(map(len, text.splitlines())) <= 80
    again = rerun_words(made, rerun.compare(made, made))
    assert ": reproduced" in again and "speedup" not in again and "roofline" in again


@pytest.mark.parametrize(("prompt", "batch"), [("random", 1), ("folder/a text of one word.txt", 4), ("x" * 30, 64)])
def test_the_summary_names_the_prompt(prompt: str, batch: int) -> None:
    made = certificate(decode_run(prompt=prompt, batch=batch, step_ms=65.0 * batch))
    assert made.prompt is not None
    lines = summary(made, audit(made)).splitlines()
    words = " ".join(" ".join(lines).split())
    name = "drawn at random" if prompt == "random" else Path(prompt).name
    each = " a sequence" if batch > 1 else ""
    assert f"prompt {name}, 2047 tokens{each}, sha256:{made.prompt.tokens_sha256[:12]}" in words
    assert ("file sha256:" + made.prompt.file_sha256[:12] in words) is (prompt != "random")
    assert max(map(len, lines)) <= 80 and prompted(made) in page(made, {})
    unrun = certificate(decode_run(prompt="synthetic"))
    assert "sha256" not in summary(unrun, audit(unrun))


def test_a_rerun_reads_the_prompt_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "prompt.json"
    text.write_text(json.dumps([1, 2, 3, 4, 5]))
    words = f"./run run --model llama-1b --seq 5 --iters 20 --prompt {text}"
    digest = prompts(command_of(dataclasses.replace(certificate(), repro_cmd=words)).plan()).digest
    run = decode_run(iters=20, seq=5, prompt=str(text), prompt_digest=digest)
    made = certificate(run, repro_cmd=words)
    monkeypatch.setattr("autosel.fingerprint.take", lambda device: run.fingerprint)
    monkeypatch.setattr("autosel.certify.run.load_weights", lambda *_: "weights")
    monkeypatch.setattr("autosel.certify.run.measure", lambda *_, **__: run)
    monkeypatch.setattr("autosel.certify.run.grounds", lambda run, ledger: GROUNDS)
    assert run_again(made).notes == ()
    text.write_text(json.dumps([1, 2, 3, 9, 5]))
    monkeypatch.setattr("autosel.certify.run.measure", lambda *_, **__: pytest.fail("it was measured first"))
    with pytest.raises(UsageError, match="is not the prompt that was certified"):
        run_again(made)


def test_a_run_without_decisions_prints_the_command_to_tune() -> None:
    eager: dict[str, Any] = {"backend": "TORCH", "decision_id": None, "state": "baseline", "served": ()}
    undecided = tuple(dataclasses.replace(c, candidate=f"torch:{c.op}", **eager) for c in decode_run().choices)
    run = decode_run(choices=undecided, ttft_ns=123_456_789_000)
    made = certificate(run, repro_cmd="./run run --model 'a b' --seq 9")
    text = summary(made, audit(made))
    assert "no decisions for these ops" in text and "tune --model 'a b'" in text and "--format" not in text
    rounded = certificate(decode_run(choices=undecided), repro_cmd="./run run --model 'a b' --format q4_0")
    assert "tune --model 'a b' --format q4_0" in summary(rounded, audit(rounded))
    assert "first token 123 457 ms" in text and max(map(len, text.splitlines())) <= 80
    assert "no decisions for" not in summary(certificate(), audit(certificate()))
    told = "tuned with 2 threads, running with 1"
    elsewhere = tuple(dataclasses.replace(c, reason=told) for c in undecided)
    made = certificate(decode_run(choices=elsewhere))
    assert {o.reason for o in made.per_op.values()} == {told}
    text = summary(made, audit(made))
    assert f"{told}: PyTorch serves all of them" in text and "tune first:" in text
    assert "no decisions for" not in text


def test_wrong_results_weigh_more_than_missed_objectives() -> None:
    missed = certificate(objectives=slo.parse("ttft<1ms"))
    wrong = certificate(decode_run(max_logit_error=1.0), objectives=slo.parse("ttft<1ms"))
    assert failed(certificate()) is None
    errors = [failed(missed), failed(wrong)]
    assert [e.exit_code for e in errors if isinstance(e, AutoselError)] == [3, 4]
    assert isinstance(errors[1], ParityError)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (certificate(decode_run(max_logit_error=1.0)), "from the reference"),
        (certificate(decode_run(tokens_equal=48, tokens_open=1)), "1 of 50 tokens are not the baseline's"),
        (certificate(decode_run(tokens_checked=0, tokens_equal=0)), "no token was compared"),
        (issue(decode_run(), {}, IssueRequest(repro_cmd="x")), "no proof of parity is known here for "),
    ],
)
def test_an_unverified_run_states_the_reason(made: Certificate, why: str) -> None:
    found = failed(made)
    assert isinstance(found, ParityError) and why in found.why and not found.why.endswith("for ")


def test_the_default_context_is_the_models_maximum(tmp_path: Path) -> None:
    def context(*words: str) -> int:
        return asked(shlex.join(words)).plan().seq

    assert context("--model", "llama-1b") == 8192 and context("--model", "llama-1b", "--seq", "300") == 300
    write_config(tmp_path, **{**SIZES, "max_position_embeddings": 512})
    assert context("--model", str(tmp_path)) == 512
    assert context("--model", str(tmp_path), "--advance", "--iters", "100") == 412
    assert context("--model", str(tmp_path), "--speculate", "ngram:4", "--iters", "100") == 408


# --- a suite, stopped ---------------------------------------------------------------------------------------------


def measured_until(monkeypatch: pytest.MonkeyPatch, most: int, ends: BaseException) -> None:
    """Replace runs by one without a cost; after this many runs, raise the error."""
    calls = iter(range(100))

    def measure(plan: Plan, *_: Any, **__: Any) -> DecodeRun:
        if next(calls) == most:
            raise ends
        return decode_run(model=plan.model, layers=plan.layers, seq=plan.seq, iters=plan.iters, advance=True)

    for module in ("autosel.certify.run", "autosel.certify.run_suite"):
        monkeypatch.setattr(f"{module}.measure", measure)
        monkeypatch.setattr(f"{module}.load_weights", lambda *_: "weights")
        monkeypatch.setattr(f"{module}.grounds", lambda run, ledger: GROUNDS)
    monkeypatch.setattr("autosel.fingerprint.take", lambda *_: fingerprint())
    monkeypatch.setattr("autosel.devices.cpu.machine.free_memory", lambda: 1 << 40)


@pytest.mark.parametrize(("measured", "code"), [(0, 130), (18, 130), (63, 0)])
def test_a_stopped_suite_keeps_and_prints_finished_configurations(
    measured: int, code: int, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop the quick suite, nine runs per configuration, by Ctrl-C after this many runs."""
    measured_until(monkeypatch, measured, KeyboardInterrupt())
    report, file = tmp_path / "report", tmp_path / "c.jsonl"
    words = ("--suite", "quick", "--layers", "2", "--report", str(report), "--certify", str(file))
    got, text, trouble = said("run", *words)
    assert got == code
    if not measured:
        assert "stopped before" in trouble and not report.exists() and not file.exists()
        return
    rows = json.loads((report / "report.json").read_text())["suite"]["rows"]
    assert len(rows) == measured // 9 == len(file.read_bytes().splitlines())
    assert rows[0]["model"] == "llama-1b[2/16 layers]" and "quick suite of" in text
    if code:
        assert "5 configurations not measured" in " ".join(text.split())
        assert "stopped; 2 of 7 configurations measured and certified" in trouble
        again = said("run", *words, "--compare", str(report))
        told, _, where = again[1].partition("certificates:")
        assert again[0] == 0 and told.count(" 1x (1.00 .. 1.00)\n") == 2 and max(map(len, told.splitlines())) <= 80
        assert str(file) in where


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImpossibleRun("the optimised step is faster than the memory: not certified"), "faster than the memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "not enough memory"),
    ],
)
def test_a_failed_run_ends_a_suite(
    error: Exception, told: str, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", "--suite", "quick", "--layers", "2", "--certify", str(tmp_path / "c.jsonl"), "--json")
    measured_until(monkeypatch, 20, error)
    code, text, trouble = said(*words)
    found = json.loads(text)
    assert code == 1 and told in found["error"]["what"] and told in trouble
    assert (len(found["suite"]["rows"]), found["suite"]["left"]) == (2, 5)
    assert len((tmp_path / "c.jsonl").read_bytes().splitlines()) == 2
    measured_until(monkeypatch, 0, error)
    code, text, trouble = said(*words)
    assert code == 1 and told in json.loads(text)["error"]["what"] and "bug" not in trouble


# --- errors in addition to a result -------------------------------------------------------------------------------


UNWRITABLE = [
    ("--certify", "/sys/x.jsonl", "cannot write /sys/x.jsonl"),
    ("--certify", "{long}", "File name too long"),
    ("--certify", ".", "it is a folder"),
    ("--report", "{file}", "it is a file"),
    ("--report", "{file}/below", "Not a directory"),
    ("--report", "/sys/below", "cannot write /sys/below"),
    ("--report", "{long}", "File name too long"),
    ("--audit", ".", "it is a folder"),
    ("--audit", "/dev/null", "it is not a regular file"),
    ("--trace", "{long}", "File name too long"),
]


@pytest.mark.parametrize(
    ("level", "option", "place", "why"),
    [((), *place) for place in UNWRITABLE] + [(("--suite", "quick"), *place) for place in UNWRITABLE[:7]],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str,
    place: str,
    why: str,
    level: tuple[str, ...],
    said: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    measured_until(monkeypatch, 0, AssertionError("it was measured first"))
    place = place.format(file=tmp_path / "afile", long=tmp_path / ("n" * 300))
    code, text, trouble = said("run", "--model", "llama-1b", *level, option, place, "--json")
    found = json.loads(text)["error"]
    assert code == 2 == found["exit_code"] and why in f"{found['what']} {found['why']}" and "bug" not in trouble
    assert sorted(p.name for p in tmp_path.iterdir()) == ["afile"]


def test_a_new_folder_for_a_report_is_created_only_with_the_report(tmp_path: Path) -> None:
    refuse_folder(tmp_path / "a" / "b")
    refuse_file(tmp_path / "f.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    refuse_folder(tmp_path / "kept")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("trouble", ["compare", "report", "certify"])
def test_measurements_are_printed_despite_later_errors(
    trouble: str, as_json: bool, file: Path, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="a report needs the extra `plots`")

    def full(*_: Any) -> Any:
        raise AutoselError("cannot write it", why="No space left on device")

    measured_until(monkeypatch, 9, AssertionError())
    made, page = tmp_path / "c.jsonl", tmp_path / "page"
    words = ["--model", "llama-1b", "--seq", "300", "--iters", "3", "--certify", str(made), "--report", str(page)]
    code, what = (2, "nothing to compare") if trouble == "compare" else (1, "cannot write")
    if trouble == "compare":
        words += ["--compare", str(file)]
    elif trouble == "report":
        monkeypatch.setattr("autosel.certify.report.write", full)
    else:
        monkeypatch.setattr("autosel.certify.store.append", full)
    got, text, err = said("run", *words, *(["--json"] if as_json else []))
    assert got == code and what in err and made.exists() is (trouble != "certify")
    assert (page / "index.html").exists() is (trouble != "report")
    if as_json:
        found = json.loads(text)
        assert found["certificate"]["shape"]["seq"] == 300 and what in found["error"]["what"]
        assert found["file"] == (None if trouble == "certify" else str(made))
    else:
        assert "optimised" in text and ("appended" in text) is (trouble != "certify")


def test_the_report_of_a_suite_is_its_rows_and_needs_no_package_that_plots(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise AutoselError("a report needs the package matplotlib")

    monkeypatch.setattr("autosel.certify.plots.refuse_without", missing)
    measured_until(monkeypatch, 99, AssertionError())
    assert said("run", "--suite", "quick", "--layers", "2", "--report", str(tmp_path / "page"))[0] == 0
    assert [p.name for p in (tmp_path / "page").iterdir()] == ["report.json"]
    assert "for a suite, its rows as JSON" in " ".join(said("run", "--help")[1].split())


@pytest.mark.parametrize("as_json", [True, False])
def test_a_suite_is_printed_even_if_the_earlier_report_is_not_comparable(
    as_json: bool, file: Path, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_until(monkeypatch, 99, AssertionError())
    words = ("--suite", "quick", "--layers", "2", "--compare", str(file), "--report", str(tmp_path / "page"))
    code, text, err = said("run", *words, *(["--json"] if as_json else []))
    assert code == 2 and "nothing to compare" in err and (tmp_path / "page" / "report.json").exists()
    if as_json:
        found = json.loads(text)
        assert len(found["suite"]["rows"]) == 7 and "nothing to compare" in found["error"]["what"]
    else:
        assert "quick suite of" in text and "certificates:" in text
