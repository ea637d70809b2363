"""Test the device of a verb on a machine with a GPU and a CPU, with given identities and without measuring."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from autosel import devices, extras, ops, settings
from autosel.candidates import arms, registry
from autosel.cli import device, tune
from autosel.cli.asked import Asked
from autosel.cli.main import cli
from autosel.cli.run import run_command
from autosel.cli.verify import command_of
from autosel.devices.cuda import identity as gpu
from autosel.devices.cuda import nvml
from autosel.devices.cuda.device import Cuda
from autosel.fingerprint import known
from autosel.ledger.commands import Hold, Record
from autosel.ledger.key import current_mode
from autosel.ledger.locks import device_lock
from autosel.ledger.store import open_ledger
from autosel.native import cuda
from autosel.values import Decision, Failed, Fingerprint, Knobs, Race, RaceSession, Timing, Verdict, Workload

H200 = known.load("h200")
W = ops.find("rmsnorm").workload("fp32", {"M": 1, "d": 64})
Said = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "DRIVER", "libno-such-driver.so.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a driver, a torch that can use it, and one H200 with its identity and rates."""
    arms.torch_identity()  # queried once per process, and must not be queried of this one
    monkeypatch.setattr(cuda, "DRIVER", "libc.so.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(nvml, "counted", lambda: 1)
    monkeypatch.setattr(nvml, "read", lambda _: SimpleNamespace(uuid="GPU-1f0c"))
    monkeypatch.setattr(devices, "_identified", lambda _: H200)
    monkeypatch.setattr(gpu, "take", lambda *_, **__: H200)
    monkeypatch.setattr(Cuda, "drifted", lambda *_, **__: SimpleNamespace(moved=False))


def decided(fp: Fingerprint, time_us: float, w: Workload = W, **changes: Any) -> Decision:
    """Record a tie on that device; the baseline's time tells the devices apart."""
    base = arms.arm(registry.baseline(w.op), w, fp, "", Knobs())
    timing = Timing(median_us=time_us, lo_us=time_us, hi_us=time_us, p95_us=time_us, min_us=time_us, samples=30)
    timings = {base.candidate: timing}
    tie = Verdict(outcome="tie", winner=base.candidate, reason="a tie", effect=None, next_best=None, timings=timings)
    values: dict[str, Any] = {"verdict": tie, "race": None, "parities": [], "mode": current_mode(), "state": "kept"}
    values |= {"arm": base, "baseline": base, "reason": "a tie", "idempotency_key": f"{fp.hw_id} {w.key}"}
    with open_ledger() as ledger:
        return ledger.write(Record(fp=fp, workload=w, **values | changes))


@pytest.fixture
def on_both() -> tuple[Decision, Decision]:
    """Return decisions for the same workload on this CPU, and on the GPU."""
    return decided(devices.this_device(), 50.0), decided(H200, 5.0)


def test_a_usable_gpu_is_the_default_and_the_cpu_can_be_selected(
    on_both: tuple[Decision, Decision], with_gpu: None, said: Said
) -> None:
    cpu, cuda = on_both
    for words, expected in ([], cuda), (["--device", "cuda:0"], cuda), (["--device", "cpu"], cpu):
        code, out, err = said("best", "rmsnorm", *words, "--json")
        found = json.loads(out)
        assert (code, err, found["decision_id"], len(found["all"])) == (0, "", expected.id, 1)
        (explained,) = json.loads(said("explain", "rmsnorm", *words, "--json")[1])
        assert explained["decision_id"] == expected.id
    assert "5.00" in said("best", "rmsnorm")[1] and "50.0" in said("best", "rmsnorm", "--device", "cpu")[1]


def test_without_a_gpu_the_cpu_is_used_and_a_gpu_is_refused_with_the_reason(
    on_both: tuple[Decision, Decision], cpu_alone: None, said: Said
) -> None:
    assert json.loads(said("best", "rmsnorm", "--json")[1])["decision_id"] == on_both[0].id
    for verb in (["best", "rmsnorm"], ["explain", "rmsnorm"], ["explain", "--failed"], ["tune"], ["run"], ["sweep"]):
        code, out, err = said(*verb, "--device", "cuda")
        assert (code, out) == (2, "")
        assert "error: cuda is not here" in err and "--device cpu" in err


def test_missing_decisions_of_the_gpu_are_reported_with_the_command_to_measure(with_gpu: None, said: Said) -> None:
    decided(devices.this_device(), 50.0)
    _, out, err = said("best", "rmsnorm")
    assert "no decision on cuda" in out and err.rstrip().endswith("tune --op rmsnorm")
    _, out, err = said("best", "attn", "--device", "cpu")
    assert "no decision on this device" in out and err.rstrip().endswith("tune --op attn --device cpu")
    _, _, err = said("explain", "rmsnorm")
    assert "no decision for rmsnorm on cuda" in err


def test_a_decision_for_other_conditions_is_named(cpu_alone: None, said: Said) -> None:
    here = devices.this_device()
    threads = torch.get_num_threads()
    mode = current_mode().replace(f".t{threads}.", f".t{threads + 1}.")
    told = f"tuned with {threads + 1} threads, running with {threads}"
    decided(here, 50.0, mode=mode)
    assert told in " ".join(said("best", "rmsnorm")[1].split())
    assert told in " ".join(said("explain", "rmsnorm")[1].split())
    cpus = int(here.identity["cpus"])
    other = dataclasses.replace(here, identity={**here.identity, "cpus": cpus + 1})
    decided(other, 50.0, ops.find("swiglu").workload("fp32", {"M": 1, "I": 8}))
    told = f"tuned with {cpus + 1} CPUs, running with {cpus}"
    assert told in " ".join(said("best", "swiglu")[1].split())
    assert told in json.loads(said("best", "swiglu", "--json")[1])["reason"]
    assert told in " ".join(said("explain", "swiglu")[2].split())
    assert "no decision on this device" in said("best", "geglu")[1]


@pytest.mark.parametrize("verb", ["tune", "run", "sweep", "race", "knobs", "fingerprint", "best", "explain"])
def test_every_verb_that_measures_or_derives_has_the_same_default_device(verb: str, with_gpu: None) -> None:
    needed = {"race": ["rmsnorm", "--candidate", "x:y"], "best": ["attn"]}
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert command.make_context(verb, needed.get(verb, [])).params["device"] == "cuda"


def test_tune_names_the_gpu_that_it_tunes(with_gpu: None, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tune, "report_on", lambda request, *_, **__: asked.append(request.device))
    code, _, err = said("tune", "--model", "llama-1b")
    assert (code, asked) == (0, ["cuda"])
    assert "H200" in err and "not used" not in err


def test_a_gpu_that_cannot_be_measured_is_skipped_with_the_reason(
    with_gpu: None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "DRIVER", "libc.so.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)  # not installed
    assert device.default_device() == "cpu"
    assert "needs cupy" in device.unused_gpu() and extras.gpu_command() in device.unused_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.unused_gpu() == "", "a driver's library without a GPU was used"
    monkeypatch.setattr(nvml, "counted", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in device.unused_gpu() and device.default_device() == "cpu"


@pytest.mark.parametrize(
    ("words", "meant"), [([], "cuda"), (["--device", "cpu"], "cpu"), (["--device", "cuda"], "cuda")]
)
def test_a_certificate_made_on_a_host_with_a_gpu_names_its_device(
    words: list[str], meant: str, with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = Asked(run_command.make_context("run", ["--model", "llama-1b", *words])).repro
    assert shlex.split(repro)[-2:] == ["--device", meant]
    assert command_of(SimpleNamespace(repro_cmd=repro, mode="eager.t2.highest"))["device"] == meant  # type: ignore[arg-type]


def test_a_certificate_of_a_machine_without_a_gpu_is_the_cpus_wherever_it_is_read(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cuda, "DRIVER", "libno-such-driver.so.1")
        repro = Asked(run_command.make_context("run", ["--model", "llama-1b"])).repro
    assert "--device" not in repro
    assert command_of(SimpleNamespace(repro_cmd=repro, mode="eager.t2.highest"))["device"] == "cpu"  # type: ignore[arg-type]


def test_history_names_the_device_if_there_are_several(
    on_both: tuple[Decision, Decision], cpu_alone: None, said: Said
) -> None:
    out = said("explain", "--history")[1]
    assert f"{W.bucket} on {H200.name}" in out and f"{W.bucket} on {devices.this_device().name}" in out
    assert [d["hw_id"] for d in json.loads(said("explain", "--history", "--json")[1])] == [
        d.hw_id for d in reversed(on_both)
    ]
    assert f"{W.bucket} on " not in said("explain", "--history", "-n", "1")[1]


def test_failures_and_quarantines_are_shown_for_one_device(with_gpu: None, said: Said) -> None:
    cpu = devices.this_device()
    for fp, name in ((cpu, "torch:compiled"), (H200, "cuda:rmsnorm")):
        arm = arms.arm(registry.baseline(W.op), W, fp, "", Knobs())
        other = dataclasses.replace(arm, candidate=name, digest="e" * 64)
        failed = Failed(check="bound", case="strided", evidence={}, reason="ignores the stride")
        decided(fp, 1.0, parities=[(other, failed)])
    for words, mine, not_mine in ([], "cuda:rmsnorm", "torch:compiled"), (["--device", "cpu"], "torch:compiled", ""):
        found = json.loads(said("explain", "--failed", *words, "--json")[1])
        at_parity = {f["candidate"] for f in found if f["stage"] == "parity"}
        assert at_parity == {mine} and not_mine not in at_parity
        refused = " ".join(f["reason"] for f in found if f["stage"] == "eligible" and f["candidate"].startswith("cpp:"))
        assert ("GPU" in refused or "cuda" in refused or "CPU" in refused) == (not words), refused


def test_a_change_of_device_of_the_same_kind_is_named(
    on_both: tuple[Decision, Decision], with_gpu: None, said: Said
) -> None:
    assert "another torch, another GPU" in said("explain", "rmsnorm")[1]
    assert "another torch, another CPU" in said("explain", "rmsnorm", "--device", "cpu")[1]


def test_a_decision_of_a_gpu_is_reproduced_by_a_race_there_and_not_by_a_script_for_a_cpu(
    with_gpu: None, said: Said
) -> None:
    base = arms.arm(registry.baseline(W.op), W, H200, "", Knobs())
    session = RaceSession(kind="screening", seed=1, arms=(base.candidate,), pairs=(), calls_per_sample=(1,))
    raced = Race(
        workload=W, baseline=base.candidate, incumbent=base.candidate, finalist=None,
        delta=0.05, alpha_session=0.05, pi=0.01, sessions=(session,),
    )  # fmt: skip
    made = decided(H200, 5.0, race=raced)
    command = "race rmsnorm --candidate torch:rmsnorm --shape M1.d64 --dtype fp32 --device cuda"
    assert command in said("explain", "rmsnorm")[1]
    code, _, err = said("export", "--repro", str(made.id))
    assert code == 2 and "was made on a GPU" in err and command in err


def test_the_doctor_checks_every_device(with_gpu: None, said: Said) -> None:
    decided(devices.this_device(), 50.0)
    with open_ledger() as ledger:
        arm = arms.arm(registry.baseline(W.op), W, H200, "", Knobs())
        ledger.write(Hold(arm=arm, hw_id=H200.hw_id, op=W.op, cause="crash", reason="for the test"))
    found = [(f["what"], f["text"]) for f in json.loads(said("doctor", "--json")[1])]
    assert sum(what == "device" for what, _ in found) == 2 and any("H200" in text for _, text in found)
    assert ("ledger", f"none of them was measured on {H200.name}") in found
    assert any(what == "quarantine" and "for the test" in text for what, text in found)
    assert sum(what == "margin" for what, _ in found) == 4


def test_an_import_accepts_decisions_of_every_device_of_the_machine(
    on_both: tuple[Decision, Decision], with_gpu: None, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decisions.json"
    assert said("export", str(file))[0] == 0
    for has_gpu, kept in ((True, 0), (False, 1)):
        monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / f"other{has_gpu}"))
        settings.read.cache_clear()
        if not has_gpu:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code, out, err = said("import", str(file), "--no-check", "--json")
        assert (code, len(json.loads(out)["kept"])) == (0, kept), err


def test_a_ledger_is_not_replaced_while_the_gpu_is_tuned(
    on_both: tuple[Decision, Decision], with_gpu: None, said: Said, home: Path, tmp_path: Path
) -> None:
    backup = str(tmp_path / "backup.db")
    assert said("db", "backup", backup)[0] == 0
    with ExitStack() as tuning:
        tuning.enter_context(device_lock(home, H200.hw_id, "GPU-1f0c"))
        assert said("db", "restore", backup)[0] == 1
    assert said("db", "restore", backup)[0] == 0
