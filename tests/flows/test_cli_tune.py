"""Test the main job end to end on this machine: one real tune of a tiny model, then the verbs that use its decisions.

test_pipeline_durability.py kills tunes at any moment; tests/soak also kills tunes with real proofs and races."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import drawn, verbs
from tests.homes import furnish
from tests.llama import write_config

pytestmark = pytest.mark.usefixtures("preforked")

OPS = ("--op", "rmsnorm", "--op", "swiglu")  # a proof of attention takes as long as those of all other ops


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("tuned") / "home")
    write_config(folder / "model")
    return folder


@pytest.fixture(scope="module")
def tuned(home: Path) -> dict[str, Any]:
    """Return the JSON of the first tune."""
    return verb(home, "tune", "--model", str(home / "model"), *OPS, "--json")


def verb(home: Path, *arguments: str) -> Any:
    too_noisy = (5,) if arguments[0] == "tune" else ()
    return verbs.verb(*arguments, home=home, codes=(0, *too_noisy))


def test_tune_decides_every_workload_with_its_evidence(tuned: dict[str, Any]) -> None:
    assert {d["op"] for d in tuned["decisions"]} == {"rmsnorm", "swiglu"}
    assert tuned["measured"] == len(tuned["decisions"]) >= 2
    for decision in tuned["decisions"]:
        assert decision["state"] in ("promoted", "kept")
        assert decision["reason"]
        if decision["state"] == "promoted":
            assert decision["speedup"]["lo"] > 1.0
            assert decision["time_us"] < decision["baseline_us"]


def test_a_second_tune_measures_nothing(home: Path, tuned: dict[str, Any]) -> None:
    """Measure no settled workload; race only those again that this machine was too noisy to decide."""
    again = verb(home, "tune", "--model", str(home / "model"), *OPS, "--json")
    settled = {d["decision_id"] for d in settled_in(tuned)}
    assert settled <= {d["decision_id"] for d in again["decisions"]}
    assert again["measured"] <= len(again["decisions"]) - len(settled)


def settled_in(tuned: dict[str, Any]) -> list[dict[str, Any]]:
    return [d for d in tuned["decisions"] if d["outcome"] != "undecided"]


def test_best_names_the_serving_candidate(home: Path, tuned: dict[str, Any]) -> None:
    found = verb(home, "best", "swiglu", "--json")
    fields = {
        "op", "workload", "state", "backend", "candidate", "decision_id", "speedup", "next_best", "baseline_us",
        "time_us", "roofline", "reason",
    }  # fmt: skip
    assert fields <= set(found)
    assert found["op"] == "swiglu"


def test_the_library_serves_the_decision(home: Path, tuned: dict[str, Any]) -> None:
    import torch

    import autosel

    best = verb(home, "best", "rmsnorm", "--json")
    with autosel.use(home):
        x, weight = torch.randn(1, 512).bfloat16(), torch.ones(512).bfloat16()
        step = autosel.best("rmsnorm", like=(x, weight))
        assert step.candidate == best["candidate"]
        reference = torch.nn.functional.rms_norm(x.float(), (512,), weight.float(), 1e-6)
        torch.testing.assert_close(step(x, weight).float(), reference, rtol=2**-7, atol=1e-6)


def test_explain_shows_parity_race_effect_and_how_to_reproduce(home: Path, tuned: dict[str, Any]) -> None:
    text = verb(home, "explain", "rmsnorm")
    for word in ("parity", "race", "verdict", "median", "tail", "changes", "reproduce"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_demotion_by_hand_serves_the_baseline_and_stays_in_the_history(home: Path, tuned: dict[str, Any]) -> None:
    decision = verb(home, "best", "rmsnorm", "--json")
    demoted = verb(home, "decide", str(decision["decision_id"]), "--demote", "--reason", "a test", "--json")
    assert demoted["backend"] == "TORCH"
    assert verb(home, "best", "rmsnorm", "--json")["backend"] == "TORCH"
    assert verb(home, "explain", "rmsnorm", "--history", "--json")[0]["reason"] == "a test"
    back = verb(home, "decide", decision["workload"], "--promote", decision["candidate"], "--reason", "back", "--json")
    assert back["candidate"] == decision["candidate"]


def test_a_pin_holds_until_it_is_removed(home: Path, tuned: dict[str, Any]) -> None:
    decision = verb(home, "best", "rmsnorm", "--json")
    pinned = verb(home, "decide", "rmsnorm", "--pin", "torch:rmsnorm", "--reason", "freeze", "--json")
    assert pinned["state"] == "pinned"
    assert verb(home, "best", "rmsnorm", "--json")["candidate"] == "torch:rmsnorm"
    verb(home, "decide", str(pinned["decision_id"]), "--release", "--reason", "thaw", "--json")
    assert verb(home, "best", "rmsnorm", "--json")["candidate"] == decision["candidate"]


def test_a_reproduction_script_needs_only_torch(home: Path, tuned: dict[str, Any], tmp_path: Path) -> None:
    promoted = [d for d in tuned["decisions"] if d["backend"] == "CPP"]
    if not promoted:
        pytest.skip("no kernel won on this machine this time")
    verb(home, "export", "--repro", str(promoted[0]["decision_id"]), str(tmp_path / "race.py"))
    done = subprocess.run(
        [sys.executable, "-P", "race.py", "--pairs", "4"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "speedup" in done.stdout
    head = (tmp_path / "race.py").read_text().partition("import torch")[0]
    assert "autosel" not in head.replace("autosel export", "").replace("autosel-repro", "")


def test_the_second_of_two_tuners_of_a_device_names_the_first(home: Path) -> None:
    from autosel.cli.device import identity
    from autosel.ledger.store import open_ledger

    with open_ledger(home=home) as ledger, ledger.lock(identity("cpu").hw_id):
        said = verbs.verb("tune", "--model", str(home / "model"), "--op", "rmsnorm", home=home, codes=(1,))
    assert "in use by another process" in said


@pytest.mark.parametrize("sent", drawn.share([signal.SIGINT, signal.SIGTERM], days=2))
def test_a_stopped_tune_reports_what_was_kept_and_how_to_continue(
    home: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Stop a tune in a separate process, with real workers."""
    words = ["tune", "--model", str(home / "model"), "--op", "rmsnorm"]
    child = subprocess.Popen(
        [sys.executable, "-m", "autosel.cli.main", *words],
        env={**os.environ, "AUTOSEL_HOME": str(furnish(tmp_path / "stopped"))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    said = []
    for line in child.stderr:
        said.append(line)
        if "screening" in line:
            break
    started = time.monotonic()
    if sent == signal.SIGINT:
        os.killpg(child.pid, sent)  # as a terminal does
    else:
        child.send_signal(sent)
    rest, _ = child.stderr.read(), child.wait(timeout=60)
    child.stderr.close()
    assert child.returncode == 130, "".join(said) + rest
    assert "stopped; 0 of 1 decided and stored" in rest
    assert "continue with `" in rest
    assert time.monotonic() - started < 60
