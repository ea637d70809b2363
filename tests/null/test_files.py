"""Test reading files of a home or of a user: only regular files, without waiting, up to a limit."""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autosel import files
from autosel.errors import BadConfig

ROOT = Path(__file__).resolve().parents[2]


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [device, pipe, folder, unix_socket], ids=lambda make: make.__name__)
def test_a_file_that_is_not_regular_is_refused_at_once_with_a_message(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "it")
    with pytest.raises(OSError) as caught:
        files.read(tmp_path / "it", 10)
    assert caught.value.strerror
    with pytest.raises(BadConfig, match=r"cannot read .*/it\n.+\ncheck the path"):
        files.read_named(tmp_path / "it", 10)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"x" * (3 << 20))
    assert files.read(path, 3 << 20) == path.read_bytes()
    with pytest.raises(OSError, match="3145728 bytes are more than the limit of 2 MiB"):
        files.read(path, 2 << 20)
    with pytest.raises(BadConfig, match="more than the limit of 3145727 bytes"):
        files.read_named(path, (3 << 20) - 1)


def test_a_link_to_a_regular_file_is_followed_if_allowed(tmp_path: Path) -> None:
    """Follow it, because a ConfigMap of Kubernetes mounts its files as links."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert files.read(tmp_path / "link", 1) == b"x"
    with pytest.raises(OSError):
        files.read(tmp_path / "link", 1, follow=False)


@pytest.mark.parametrize("mode", [0o620, 0o602], ids=oct)
def test_a_file_that_decides_what_runs_is_not_read_if_others_can_write_it(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.touch()
    assert files.read_own(path, 1) == b""
    path.chmod(mode)
    with pytest.raises(BadConfig, match=f"owner {os.getuid()}, mode {mode:04o}"):
        files.read_own(path, 1)
    with pytest.raises(FileNotFoundError):
        files.read_own(tmp_path / "none", 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_that_decides_what_runs_is_not_read_if_another_user_owns_it(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.touch()
    os.chown(path, 65534, 65534)
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    with pytest.raises(BadConfig, match="owner 65534"):
        files.read_own(path, 1)


# The readers of files: a path in the home, or of a user's file, and code that reads it.
READERS = {
    "decisions.json, published": (
        "decisions.json",
        "from autosel.ledger import snapshot; snapshot.publish(path, snapshot.document(0, []))",
    ),
    "decisions.json, served from": ("decisions.json", "from autosel.ledger import snapshot; snapshot.read(path)"),
    "the ledger": ("ledger.db", "from autosel.ledger.store import open_ledger; open_ledger()"),
    "a fault": ("fault.json", "from autosel.ledger import faults; faults.read(path)"),
    "the settings file": ("config.toml", "from autosel import settings; settings.read()"),
    "this host's name": ("host", "from autosel.ledger import host; host.here(home)"),
    "a backup": ("backup", "from autosel.ledger import restore; restore.restore(path, home / 'ledger.db')"),
    "measured rates": ("fingerprint/x.json", "from autosel.devices import store; print(store.read('x'))"),
    "a known device": ("h.json", "from autosel.fingerprint import known; known.read(path)"),
    "the daemon's queue": (
        "jobs.json",
        "from autosel.daemon.jobs import Jobs; j = Jobs.__new__(Jobs); j.path = path; j._load()",
    ),
    "a compiled kernel": (
        "native/x/receipt.json",
        "from autosel.native import compile as c; print(c.find_artefact('x'))",
    ),
    "a probe's answer": ("kept.json", "from autosel.candidates import probe; print(probe._kept(path))"),
    "certificates": ("runs.jsonl", "from autosel.certify import store; list(store.lines(path))"),
    "a key": ("key.pem", "from autosel.certify import sign; sign.public_key(str(path))"),
    "traffic": ("traffic.txt", "from autosel.certify import sweep; sweep.read_traffic(path)"),
    "a report": ("report.json", "from autosel.certify import compare; compare._json(path)"),
    "a recording": ("recorded.json", "from autosel.dispatch import recorded; recorded.read(path)"),
    "a bundle": (
        "bundle.json",
        "from autosel.cli import transfer; transfer._taken_in(None, path, '')",
    ),
    "a model's config.json": ("config.json", "from autosel.models import fields; fields.read_document(path)"),
    "a checkpoint": ("model.safetensors", "from autosel.decode import safetensors; safetensors.read_header(path)"),
    "a GGUF file": ("model.gguf", "from autosel.models import gguf; gguf.read_gguf(path)"),
    "its index": ("index.json", "from autosel.decode import safetensors; safetensors._json(path, 1 << 20)"),
    "a prompt": ("prompt.txt", "from autosel.decode import prompt; prompt.text_to_score(path, None)"),
    "a kernel's source": (
        "kernel.cpp",
        "from autosel.candidates import user_source as u; u.from_source(str(path), '')",
    ),
    "a kernel's module": ("kernel.py", "from autosel.candidates import user; user._in_source(path, 'f')"),
    "an export's manifest": (
        "autosel.json",
        "from autosel.integrations.engines import folder; folder.read(home)",
    ),
    "a model with experts": (
        "config.json",
        "from autosel.integrations.engines import experts; experts.read(str(path))",
    ),
    "a flashinfer-bench file": ("it.json", "from autosel.integrations import flashinfer_bench as f; f._read(path)"),
}
# Each reader runs in a fork with 1 GiB: endless reads run out of memory, and waits time out.
ATTEMPTS = """
import json, os, resource, signal, sys, torch
from pathlib import Path
from autosel import settings
from autosel.errors import AutoselError
import autosel.cli.bundle, autosel.decode.prompt, autosel.decode.safetensors, autosel.models.gguf
import autosel.integrations.flashinfer_bench
import autosel.ledger.restore, autosel.daemon.jobs

def attempt(home, name, code):
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    signal.alarm(20)
    path = home / name
    os.environ["AUTOSEL_HOME"] = str(home)
    settings.read.cache_clear()
    try:
        exec(code)
    except (AutoselError, OSError):
        pass

found = {}
for reader, (home, name, code) in json.load(sys.stdin).items():
    if (child := os.fork()) == 0:
        try:
            attempt(Path(home), name, code)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{reader}: {error!r}\\n")
        os._exit(1)
    found[reader] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[device, pipe], ids=lambda make: make.__name__)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return the exit code of each reader: 0 if it refused, or continued without the file."""
    root, asked = tmp_path_factory.mktemp("readers"), {}
    for number, (reader, (name, code)) in enumerate(READERS.items()):
        home = root / str(number)
        (home / name).parent.mkdir(parents=True)
        request.param(home / name)
        asked[reader] = (str(home), name, code)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ATTEMPTS],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_follows_a_link_to_a_device_or_waits_at_a_pipe(reader: str, outcomes: dict[str, int]) -> None:
    assert outcomes[reader] == 0


# These modules read files of the kernel, of autosel or of another package.
OTHERS = {
    "cli/repro.py",
    "daemon/idle.py",
    "daemon/pages.py",
    "daemon/peers.py",
    "daemon/shown.py",
    "devices/cpu/device.py",
    "devices/cpu/idle.py",
    "devices/cpu/machine.py",
    "devices/cpu/neighbours.py",
    "devices/cuda/cost.py",
    "devices/cuda/nvml.py",
    "devices/cuda/bench.py",
    "devices/energy.py",
    "devices/stack.py",
    "integrations/flashinfer_bench.py",
    "testing/mutants/battery.py",
    "ledger/containment.py",
    "ledger/host.py",
    "ledger/locks.py",
    "native/cutlass.py",
    "parity/session.py",
    "parity/state.py",
    "race/bench.py",
    "race/waits.py",
    "testing/mutants/source.py",
    "testing/subject.py",
    "workers/guardian.py",
    "workers/registers.py",
}


def test_every_module_reads_files_through_the_reader() -> None:
    """Exclude only scripts that run in engines' environments, which read files that autosel wrote."""
    package = ROOT / "autosel"
    found = set()
    for path in package.rglob("*.py"):
        if "probes" in path.parts or path.name == "files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                mode = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
                of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
                opens = node.func.attr == "open" and mode in ([], ["r"], ["rb"]) and not of_os
                if node.func.attr in ("read_text", "read_bytes") or opens:
                    found.add(path.relative_to(package).as_posix())
    assert found <= OTHERS, f"these read files themselves: {sorted(found - OTHERS)}"
    assert found >= OTHERS, f"these no longer do: {sorted(OTHERS - found)}"
