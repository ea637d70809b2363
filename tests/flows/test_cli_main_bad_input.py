"""Test mistakes of users and faults of machines at the command line: a clear error or a recorded rejection, the right
exit code, and no loss of stored data."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosel import settings
from autosel.candidates import arms, registry, user
from autosel.cli.main import run
from autosel.devices.cpu import probe
from autosel.dispatch.board import this_device
from autosel.ledger import open_ledger, snapshot
from autosel.ledger import store as ledger_store
from autosel.ledger.commands import Demote, Record
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.native.compile import find_compiler
from autosel.values import Arm, Decision, Knobs, NativeRecipe, Passed, Workload, digest
from tests import drawn
from tests.homes import furnish
from tests.llama import CONFIG, write_config

pytestmark = pytest.mark.usefixtures("preforked")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = """
import ctypes, time
import torch

def good(x, weight, eps, offset):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (weight.float() + offset)).to(x.dtype)

def wrong(x, weight, eps, offset):
    return good(x, weight, eps, offset) * 1.1

def crashes(x, weight, eps, offset):
    ctypes.string_at(0)

def hangs(x, weight, eps, offset):
    time.sleep(3600)

def takes_less(x):
    return x
"""
RMS = Workload(op="rmsnorm", dims=(("M", 1), ("d", 512)), dtype="bf16", traits=())
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a separate home and folder, with a tiny model and users' kernels."""
    furnish(home)
    write_config(tmp_path / "model")
    (tmp_path / "mykernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    forget()
    yield home
    forget()


def forget() -> None:
    """Clear the state that a new process would not have."""
    settings.read.cache_clear()
    find_compiler.cache_clear()
    probe.load.cache_clear()


def decided(home: Path, key: str = "one", w: Workload = RMS) -> Decision:
    """Record a decision of this device as tune would, with a second arm that passed parity."""
    device = this_device()
    baseline = arms.arm(registry.baseline(w.op), w, device, "", Knobs())
    values: dict[str, Any] = {"verdict": None, "race": None, "mode": current_mode(), "state": "kept"}
    values |= {"parities": [(OTHER, Passed(cases=1, worst=0.1, worst_case="random"))], "reason": "for the test"}
    made = Record(fp=device, workload=w, arm=baseline, baseline=baseline, idempotency_key=key, **values)
    with open_ledger() as ledger:
        return ledger.write(made)


OTHER = Arm(
    candidate="cpp:rmsnorm",
    backend="CPP",
    recipe=NativeRecipe(source="cpu/rmsnorm.cpp", entry="rmsnorm", flags=(), knob_args=("threads",)),
    knobs={"threads": 1},
    digest=digest({"source": "d" * 64, "knobs": {"threads": 1}}),
    build="d" * 64,
)


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"hidden_size": 512,', "is not JSON"),
        ("\x80\x81", "is not JSON"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"hidden_size": None}, "hidden_size = None"),
    ],
    ids=str,
)
def test_an_invalid_model_is_refused_by_file_and_field_before_anything_starts(
    content: Any, told: str, home: Path, said: Said
) -> None:
    path = home.parent / "model" / "config.json"
    data = json.dumps({**CONFIG, **content}) if isinstance(content, dict) else content
    path.write_bytes(data.encode("latin-1"))
    for verb in (["tune", "--model", "model"], ["knobs", "--model", str(path)], race("a:b")):
        code, out, err = said(*verb, "--json")
        assert code == 2, err
        assert told in err
        assert json.loads(out)["error"]["exit_code"] == 2
    assert not (home / "ledger.db").exists()


@pytest.mark.parametrize("name", ["nonexistent/folder", ".", "llama-9b", "meta-llama/Llama-3.1-8B", "\0", "x" * 5000])
def test_a_missing_model_is_reported(name: str, home: Path, said: Said) -> None:
    code, _, err = said("tune", "--model", name)
    assert code == 2
    assert err.startswith("error: ")
    assert "bug" not in err


# --- candidates ---------------------------------------------------------------------------------------------------


def race(*arguments: str) -> list[str]:
    return ["race", "rmsnorm", "--model", "model", "--candidate", *arguments]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mykernels:wrong"], 'check "elements"'),
        (["mykernels:crashes"], "SIGSEGV"),
        (["mykernels:hangs", "--deadline", "1"], 'check "timeout"'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_candidate_that_misbehaves_fails_parity_with_code_4_and_how_to_see_it(
    arguments: list[str], told: str, home: Path, said: Said
) -> None:
    code, out, err = said(*race(*arguments), "--json")
    assert code == 4, err
    found = json.loads(out)
    assert found["races"][0]["parity"]["outcome"] == "failed"
    assert told in err
    limit = " --deadline 1.0" if "--deadline" in arguments else ""
    assert f"race rmsnorm --candidate {arguments[0]} --model model{limit} --case" in found["error"]["todo"]
    assert not (home / "ledger.db").exists(), "race records nothing"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("mykernels:wrogn", "did you mean wrong?"),
        ("mykernels:takes_less", "rmsnorm passes (x, weight, eps, offset)"),
        ("mykernel:good", "no module mykernel"),
        ("./mykernels.py", "the form module:function is expected"),
        ("broken:good", "is not Python"),
        ("cpp:rmsnrom", "did you mean cpp:rmsnorm"),
    ],
)
def test_a_missing_candidate_is_refused(target: str, told: str, home: Path, said: Said) -> None:
    (home.parent / "broken.py").write_text("def good(:")
    code, out, err = said(*race(target))
    assert (code, out) == (2, "")
    assert told in err


def test_the_baseline_cannot_race_against_itself_and_the_other_candidates_are_named(home: Path, said: Said) -> None:
    for name in ("torch:rmsnorm", "Torch:RMSNorm"):
        code, out, err = said(*race(name))
        assert (code, out) == (2, ""), err
        assert "torch:rmsnorm is the baseline of rmsnorm" in err
        assert "cpp:rmsnorm" in err


def test_one_case_can_be_run_and_a_wrong_name_lists_the_cases(home: Path, said: Said) -> None:
    code, _, err = said(*race("mykernels:good", "--case", "random M2 d513"))
    assert code == 2
    assert "did you mean random M2 d512" in err
    code, _, err = said(*race("mykernels:wrong", "--case", "random M2 d512"))
    assert code == 4
    assert "allowed ±" in err
    code, out, _ = said(*race("mykernels:good", "--case", "random M2 d512", "--json"))
    assert code == 0
    assert "worst error" in json.loads(out)["passed"]


def test_a_candidate_without_supported_shapes_gets_the_reason(home: Path, said: Said) -> None:
    head = "import autosel\n@autosel.candidate('rmsnorm', dtypes=('fp32',))\n"
    (home.parent / "single.py").write_text(f"{head}def single(x, weight, eps, offset): return x\n")
    code, out, err = said(*race("single:single"))
    assert code == 2
    assert "not eligible" in out
    assert "supports fp32; the workload is bf16" in err


def test_a_good_candidate_is_proven_timed_and_not_recorded(home: Path, said: Said) -> None:
    code, out, err = said(*race("mykernels:good", "--json"))
    found = json.loads(out)
    assert found["races"][0]["parity"]["outcome"] == "passed", err
    assert found["races"][0]["verdict"]["timings"]["user:good"]["median_us"] > 0
    assert code == (5 if found["races"][0]["verdict"]["outcome"] == "undecided" else 0)
    assert (found["error"] is None) == (code == 0)
    assert not (home / "ledger.db").exists()


def test_without_a_compiler_tune_keeps_pytorch_and_records_candidates_that_could_not_race(
    home: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune once without a compiler, and with a user's candidate that crashes."""
    for name, value in {"AUTOSEL_CXX": "/nonexistent", "PATH": "/nonexistent", "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    forget()
    monkeypatch.setattr(user, "_REGISTERED", {})
    user.register(user.from_target("mykernels:crashes", "rmsnorm"))
    code, out, err = said("tune", "--model", "model", "--op", "rmsnorm", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [d["candidate"] for d in found["decisions"]] == ["torch:rmsnorm"]
    reasons = {(r["candidate"], r["stage"]): r["reason"] for r in found["rejected"]}
    assert "no C++ compiler found" in reasons["cpp:rmsnorm", "eligible"]
    assert "SIGSEGV" in reasons["user:crashes", "parity"]
    code, out, _ = said("explain", "--failed", "--json")
    failed = {(f["candidate"], f["stage"]) for f in json.loads(out)}
    assert {("cpp:rmsnorm", "eligible"), ("user:crashes", "parity")} <= failed
    code, out, _ = said("explain", "--failed")
    assert max(len(line) for line in out.splitlines()) <= 80
    code, out, _ = said("tune", "--model", "model", "--op", "rmsnorm", "--json")
    assert (code, json.loads(out)["measured"]) == (0, 0), "a failed candidate was tried again without a change"
    code, out, _ = said("doctor")
    assert "none: the C++ kernels are not eligible" in out
    assert "/nonexistent does not exist" in out
    assert said("best", "rmsnorm")[0] == said("knobs", "--fingerprint", "h200", "--op", "attn")[0] == 0


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_budget_too_small_leaves_everything_undecided_and_exits_5(home: Path, said: Said) -> None:
    before = decided(home, w=RMS.at(d=1024))
    code, out, err = said("tune", "--model", "model", "--op", "rmsnorm", "--op", "rope", "--budget", "0.001s", "--json")
    found = json.loads(out)
    assert code == found["error"]["exit_code"] == 5
    assert (found["measured"], len(found["undecided"])) == (0, 2)
    assert "the budget ended" in err
    assert "continue:  autosel tune --model model --op rmsnorm --op rope" in err
    assert [d["decision_id"] for d in json.loads(said("explain", "--history", "--json")[1])] == [before.id]


@pytest.mark.parametrize("verb", [["tune", "--op", "attn"], ["race", "attn", "--candidate", "torch:packed"]])
def test_more_memory_than_there_is_is_refused_before_anything_is_drawn(
    verb: list[str], home: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = said(*verb, "--model", "llama-70b", "--batch", "4096", "--seq", "1048576")
    assert code == 2
    assert "GiB of memory" in err
    assert "use a smaller model, batch or context" in err


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_a_damaged_ledger_is_refused_and_kept_and_a_backup_restores_it(home: Path, said: Said) -> None:
    made = decided(home)
    assert said("db", "backup", str(home / "backup.db"))[0] == 0
    damaged = bytearray((home / "ledger.db").read_bytes())
    damaged[:200] = bytes(200)
    (home / "ledger.db").write_bytes(damaged)
    for verb in ("explain --history", "best rmsnorm", "tune --model model --op rmsnorm", "db check"):
        code, out, err = said(*verb.split())
        assert (code, out) == (1, "")
        assert "is damaged" in err
        assert "db restore FILE" in err
    assert (home / "ledger.db").read_bytes() == damaged
    served = snapshot.read(home / snapshot.FILE)
    assert served is not None
    assert [row.decision.id for row in served.rows] == [made.id], "the serving decision is unchanged"
    code, out, _ = said("doctor")
    assert code == 1
    assert "BAD   ledger" in out
    for bad in ("mykernels.py", "nonexistent", "home/decisions.json"):
        assert said("db", "restore", bad)[0] == 1
    assert (home / "ledger.db").read_bytes() == damaged
    code, out, _ = said("db", "restore", str(home / "backup.db"), "--json")
    assert code == 0
    assert Path(json.loads(out)["replaced"]).read_bytes() == damaged
    assert [d["decision_id"] for d in json.loads(said("explain", "--history", "--json")[1])] == [made.id]


def test_a_backup_that_is_damaged_inside_is_not_restored(home: Path, said: Said) -> None:
    made = decided(home)
    assert said("db", "backup", str(home / "backup.db"))[0] == 0
    data = bytearray((home / "backup.db").read_bytes())
    data[4096 : 4096 + 2000] = b"\x5a" * 2000
    (home / "backup.db").write_bytes(data)
    code, _, err = said("db", "restore", str(home / "backup.db"))
    assert code == 1
    assert "damaged" in err
    assert [d["decision_id"] for d in json.loads(said("explain", "--history", "--json")[1])] == [made.id]
    assert not list(home.glob(".restoring-*"))


@pytest.mark.parametrize("last", drawn.share(["kept", "demoted"], days=2))
def test_on_a_full_disk_everything_that_only_reads_works(last: str, home: Path) -> None:
    """Allow no file to grow, so that SQLite cannot create the index of its log, which reading needs too. The demotion
    is only in the log, because its writer was killed before it moved the log into the file."""
    made = decided(home)
    if last == "demoted":
        killed_after(lambda ledger: ledger.write(Demote(decision_id=made.id, reason="in the log alone")))
        (home / "ledger.db-shm").unlink()
        assert (home / "ledger.db-wal").stat().st_size
    for words in ("explain --history --json", "export -"):
        done = without_room("-m", "autosel", *words.split())
        assert done.returncode == 0, done.stderr
        if words.startswith("explain --history"):
            assert json.loads(done.stdout)[0]["state"] == last
    program = "import torch, autosel; x = torch.ones(1, 64); autosel.best('rmsnorm')(x, x[0], 1e-6, 0.0)"
    served = without_room("-c", program)
    assert served.returncode == 0, served.stderr


def test_on_a_full_disk_a_change_is_refused_with_the_reason(home: Path) -> None:
    made = decided(home)
    done = without_room("-m", "autosel", "decide", str(made.id), "--demote", "--reason", "x")
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "free some space" in done.stderr


def killed_after(write: Callable[[Ledger], object]) -> None:
    """Write like the daemon, and kill the writer between the commit and its checkpoint."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            ledger = open_ledger(alone=True)
            ledger.keep_line()
            write(ledger)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def without_room(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with every write to a file failing, as on a full disk."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Return a folder that other users can reach; they cannot enter pytest's folders."""
    folder = Path(tempfile.mkdtemp(prefix="autosel-test-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_home_is_read_and_every_change_is_refused(
    home: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decided(home)
    own = shared_folder / "home"
    shutil.copytree(home, own)
    for path in (own, *own.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code, out, err = as_nobody(own, "explain", "--history")
    assert code == 0, err
    assert f"{made.id:2}" in out
    assert as_nobody(own, "best", "rmsnorm")[0] == 0
    code, _, err = as_nobody(own, "decide", str(made.id), "--demote", "--reason", "x")
    assert code == 1
    assert "read-only" in err
    code, _, err = as_nobody(own, "tune", "--model", "llama-8b", "--op", "rmsnorm")
    assert code == 1
    assert "error: " in err
    assert "bug" not in err
    code, _, err = as_nobody(own / "below", "explain", "--history")
    assert code == 1
    assert "set AUTOSEL_HOME to a folder you can write" in err


def as_nobody(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a verb as a user who may not write the home, because root may write anything."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                sys.stdout, sys.stderr = out, err
                os.environ["AUTOSEL_HOME"] = str(home)
                forget()
                if os.getuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                code = run(list(arguments))
                out.flush()
                err.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


@pytest.mark.parametrize(
    "words", [["import", "{long}"], ["export", "{long}/it"], ["record", "--output", "{long}/it", "--", "true"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_name_that_is_too_long_for_a_file_is_refused_with_a_message(words: list[str], said: Said) -> None:
    code, _, err = said(*(word.format(long="x" * 5000) for word in words))
    assert code in (1, 2) and err.startswith("error: cannot ") and "bug" not in err


# --- changes by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["7", "0", "9" * 30], ids=["7", "0", "more than a database's integers hold"])
@pytest.mark.parametrize("verb", [["--demote"], ["--promote", "x"], ["--pin"], ["--release"]], ids=" ".join)
def test_a_missing_decision_is_reported_and_nothing_changes(
    verb: list[str], number: str, home: Path, said: Said
) -> None:
    made = decided(home)
    code, out, err = said("decide", number, *verb, "--reason", "x", "--json")
    assert (code, json.loads(out)["error"]["what"]) == (1, f"no such decision: {number}")
    assert f"the last one is {made.id}" in err
    assert len(json.loads(said("explain", "--history", "--json")[1])) == 1


def test_a_decision_is_named_by_its_op_or_its_key_and_several_are_listed(home: Path, said: Said) -> None:
    first, other = decided(home), decided(home, "two", replace(RMS, dims=(("M", 7), ("d", 64))))
    code, _, err = said("decide", "rmsnorm", "--pin", "--reason", "x")
    assert code == 2 and "rmsnorm names 2 decisions" in err
    assert all(f"{d.id}: {d.workload.key}" in err for d in (first, other)) and f"decide {first.id} ..." in err
    code, out, _ = said("decide", other.workload.key, "--pin", "--reason", "x", "--json")
    assert (code, json.loads(out)["state"], json.loads(out)["workload"]) == (0, "pinned", other.workload.key)
    code, _, err = said("decide", "rmsnorm/M99.d64/bf16", "--demote", "--reason", "x")
    assert code == 2 and "names 0 decisions" in err
    assert said("decide", "attn", "--demote", "--reason", "x")[0] == 1


def test_only_a_candidate_that_passed_parity_can_be_promoted(home: Path, said: Said) -> None:
    made = decided(home)
    code, _, err = said("decide", str(made.id), "--promote", "cpp:rmsnrom", "--reason", "x")
    assert code == 2
    assert "did you mean cpp:rmsnorm" in err
    code, out, _ = said("decide", str(made.id), "--promote", "cpp:rmsnorm", "--reason", "because", "--json")
    assert (code, json.loads(out)["candidate"]) == (0, "cpp:rmsnorm")
    code, out, _ = said("best", "rmsnorm", "--json")
    assert (code, json.loads(out)["state"]) == (0, "baseline"), "without its build the baseline must run"
    assert "missing or damaged" in json.loads(out)["reason"]
    code, out, _ = said("best", "rmsnorm")
    assert "stale" in out
    code, out, _ = said("explain", "rmsnorm")
    assert code == 0
    assert "because" in out
    assert "the baseline runs instead" in out.replace("\n            ", " ")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is not a snapshot"),
        ("{}", "is not a snapshot"),
        ('{"format": "autosel.decisions", "version": 99}', "of version 99"),
        ("damaged", "was damaged or edited"),
    ],
)
def test_an_import_of_an_incomplete_export_changes_nothing(content: str, told: str, home: Path, said: Said) -> None:
    made, path = decided(home), home / "export.json"
    assert said("export", str(path))[0] == 0
    path.write_text(path.read_text().replace("for the test", "for another") if content == "damaged" else content)
    code, out, err = said("import", str(path), "--json")
    assert code == json.loads(out)["error"]["exit_code"] == 2
    assert told in err
    assert [d["decision_id"] for d in json.loads(said("explain", "--history", "--json")[1])] == [made.id]


def test_an_export_to_a_missing_folder_is_reported_and_makes_no_folders(home: Path, said: Said) -> None:
    made = decided(home)
    for folder in (home / "none", home / "decisions.json"):
        for arguments in (["x.json"], ["--repro", str(made.id), "x.py"]):
            code, _, err = said("export", *arguments[:-1], str(folder / arguments[-1]))
            assert code == 2
            assert f"cannot write {folder}" in err
    assert not (home / "none").exists()


# --- an empty home ------------------------------------------------------------------------------------------------


def test_without_decisions_verbs_name_the_baseline_and_the_command_to_tune(home: Path, said: Said) -> None:
    code, out, err = said("best", "attn")
    assert code == 0
    assert "the baseline serves, torch:" in out
    assert "autosel tune --op attn" in err
    found = json.loads(said("best", "attn", "--json")[1])
    assert (found["state"], found["decision_id"], found["backend"]) == ("baseline", None, "TORCH")
    assert "no decisions yet" in said("explain", "--history")[1]
    assert json.loads(said("explain", "--history", "--json")[1]) == []
    assert said("explain", "--failed")[0] == 0
    code, _, err = said("explain", "attn")
    assert code == 1
    assert "no decision for attn on this device" in err
    assert json.loads(said("export")[1])["rows"] == []
    assert ledger_store.open_ledger().history() == []
