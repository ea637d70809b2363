"""Test the daemon as a process: socket, many clients, kill -9, the command line through it, faults, other users."""

from __future__ import annotations

import http.client
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import torch

from autosel import dispatch
from autosel.client import Client, Refused, Unreachable, connect, socket_path
from autosel.daemon.hub import this_device
from autosel.dispatch.board import Board
from autosel.errors import LedgerError
from autosel.ledger import commands, faults, open_ledger
from autosel.ledger.commands import Spend, TakeOver
from autosel.ledger.key import current_mode
from autosel.ledger.remote import RemoteLedger
from autosel.values import Workload, to_json
from tests.cpu.daemons import Daemon, cli, environment, running
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, FP, record, recording
from tests.homes import furnish
from tests.null.daemon_app import fault_of
from tests.null.test_daemon_protocol import FAR
from tests.quiet import here

HERE = this_device()


@pytest.fixture
def daemon(home: Path) -> Iterator[Daemon]:
    with running(home, "--no-tune", "--tcp", "127.0.0.1:0") as made:
        yield made


# --- a process --------------------------------------------------------------------------------------------------------


def test_the_daemon_reports_ready_is_private_and_single_and_stops_on_request(daemon: Daemon) -> None:
    path = socket_path(daemon.home)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (daemon.home / "run" / "token").stat().st_mode & 0o777 == 0o600
    second = cli(daemon.home, "serve")
    assert second.returncode == 1 and "already" in second.stderr
    assert "serving" in cli(daemon.home, "status").stdout
    with socket.create_connection(("127.0.0.1", int(daemon.url.rstrip("/").rpartition(":")[2]))) as line:
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: " + daemon.url[7:-1].encode() + b"\r\n\r\n")
        assert b"200" in line.recv(4096)  # a connection to the event stream is open
        assert daemon.stop() == 0
    assert not path.exists()
    assert cli(daemon.home, "status").returncode == 1


def test_garbage_headers_without_end_and_half_requests_do_no_harm(daemon: Daemon) -> None:
    path = socket_path(daemon.home)
    for sent in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
    ):
        with connect(path, 10.0) as line:
            try:
                line.sendall(sent)
                answer = line.recv(4096)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 431"))
    with connect(path, 10.0) as line:
        line.sendall(
            b"POST /v1/misses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
    with daemon.client() as ask:
        assert ask.get("/v1/health")["status"] == "ok"


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process takes root to start")
def test_another_user_is_refused_by_the_folder_and_by_peer_credentials(daemon: Daemon) -> None:
    path = socket_path(daemon.home)
    asking = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n    s.connect(sys.argv[1])\nexcept OSError as e:\n    print('connect', e.errno); raise SystemExit\n"
        "try:\n    s.sendall(b'GET /v1/health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print('got', s.recv(100))\n"
        "except OSError as e:\n    print('got', b'')\n"
    )

    def as_nobody() -> str:
        command = [sys.executable, "-S", "-c", asking, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    for folder in [path.parent, *path.parent.parents]:  # the path to the socket, except the last folder
        if folder != path.parent and folder.owner() == "root":
            folder.chmod(folder.stat().st_mode | 0o011)
    assert as_nobody().startswith("connect")
    path.parent.chmod(0o755)
    path.chmod(0o666)
    assert as_nobody().strip() == "got b''"


# --- many clients -----------------------------------------------------------------------------------------------------


def test_eight_clients_get_the_right_answers_while_others_write(daemon: Daemon) -> None:
    with open_ledger(home=daemon.home) as ledger:
        assert isinstance(ledger, RemoteLedger)
        for length in (64, 128, 256, 512):
            record(ledger, f"at {length}", fp=here(), workload=ATTN.at(L=length), mode=current_mode())

    def look(number: int) -> set[str]:
        w = ATTN.at(L=(64, 128, 256, 512)[number % 4])
        with daemon.client() as ask:
            return {str(ask.get(f"/v1/best/attn?workload={w.key}")["bucket"]) for _ in range(100)} - {w.bucket}

    def write(number: int) -> bool:
        with open_ledger(home=daemon.home) as ledger:
            return all(ledger.write(Spend(key=f"key {number}", amount=0.0001)) for _ in range(20))

    with ThreadPoolExecutor(10) as pool:
        wrong = list(pool.map(look, range(8)))
        written = list(pool.map(write, range(2)))
    assert wrong == [set()] * 8
    assert all(written)


def test_connections_beyond_the_limit_are_refused_and_open_ones_continue(daemon: Daemon) -> None:
    lines = [connect(socket_path(daemon.home), 10.0) for _ in range(70)]
    answers = []
    for line in lines:
        try:
            line.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            answers.append(line.recv(12))
        except OSError:
            answers.append(b"")
    assert answers[0] == b"HTTP/1.1 200"
    assert b"HTTP/1.1 200" not in answers[64:]
    for line in lines:
        line.close()
    assert cli(daemon.home, "status").returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process takes root to start")
def test_another_users_connections_to_the_port_do_not_count_against_ours(daemon: Daemon) -> None:
    port = daemon.url.rstrip("/").rpartition(":")[2]
    command = [sys.executable, "-S", "-c", FAR, "127.0.0.1", port, "40"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        lines = []
        for _ in range(20):
            line = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30.0)
            line.request("GET", "/v1/health")
            answer = line.getresponse()
            assert (answer.status, json.loads(answer.read())["status"]) == (200, "ok")
            lines.append(line)
        for line in lines:
            line.close()
        other.communicate("")


# --- kill -9 ----------------------------------------------------------------------------------------------------------

KILLS = 2  # docs/daemon.md has a thousand
WRITERS = 4


def _write_until_the_end(home: Path, number: int, acknowledged: Any) -> None:
    """Record decisions through the daemon until it ends; report each that was acknowledged."""
    line = Client(socket_path(home), timeout_s=30.0)
    for count in range(10_000):
        w = ATTN.at(L=(count % 8 + 1) * 700, B=number + 1)
        command = recording(f"{number}-{count}-{os.getpid()}", workload=w, verdict=None, race=None)
        try:
            acknowledged.put(line.post(commands.ADDRESS, commands.encode(command, {}))["id"])
        except (Unreachable, Refused):
            return


def test_no_acknowledged_decision_is_lost_to_kill_9(home: Path) -> None:
    context = mp.get_context("fork")
    total = 0
    for kill in range(KILLS):
        acknowledged = context.Queue()
        with running(home, "--no-tune") as daemon:
            writers = [
                context.Process(target=_write_until_the_end, args=(home, n, acknowledged)) for n in range(WRITERS)
            ]
            for writer in writers:
                writer.start()
            found = [acknowledged.get(timeout=60) for _ in range(20 + 7 * kill)]
            daemon.kill()
            for writer in writers:
                writer.join(60)
            while not acknowledged.empty():
                found.append(acknowledged.get())
        with open_ledger(home=home, alone=True) as ledger:
            stored = {d.id for d in ledger.history()}
            ledger.check()
        assert set(found) <= stored
        total += len(found)
    assert total >= KILLS * 20


def test_a_writer_continues_alone_after_the_daemon_is_killed(home: Path) -> None:
    with running(home, "--no-tune") as daemon, open_ledger(home=home) as ledger:
        assert isinstance(ledger, RemoteLedger)
        with ledger.lock(FP.hw_id):
            with ledger.trial(FP.hw_id, "attn", CPP):
                first = record(ledger, "through it")
                daemon.kill()
            second = record(ledger, "alone")
        assert second.id > first.id
        with open_ledger(home=home, alone=True) as other, ledger.lock(FP.hw_id):
            other.write(TakeOver(hw_id=FP.hw_id, holder="another"))
            with pytest.raises(LedgerError, match="taken"):
                record(ledger, "too late", workload=ATTN.at(L=64))


# --- the command line -------------------------------------------------------------------------------------------------


def test_verbs_write_through_the_daemon_and_alone_without_it(daemon: Daemon) -> None:
    with open_ledger(home=daemon.home) as ledger:
        made = record(ledger, "one", fp=here(), mode=current_mode())

    def writes() -> float:
        text = http_get(daemon, "/metrics").decode()
        return float(next(x.split()[1] for x in text.splitlines() if x.startswith("autosel_ledger_writes_total")))

    before = writes()
    assert "demoted" in cli(daemon.home, "decide", str(made.id), "--demote", "--reason", "by hand").stdout
    assert writes() == before + 1
    with daemon.client() as ask:
        assert ask.get(f"/v1/best/attn?workload={ATTN.key}")["state"] == "baseline"
    assert daemon.stop() == 0
    assert "pinned" in cli(daemon.home, "decide", str(made.id), "--pin", "--reason", "alone").stdout


def http_get(daemon: Daemon, path: str) -> bytes:
    line = http.client.HTTPConnection("127.0.0.1", int(daemon.url.rstrip("/").rpartition(":")[2]), timeout=30)
    line.request("GET", path)
    found = line.getresponse().read()
    line.close()
    return found


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["journal", "socket"])
def test_a_fault_in_one_process_demotes_in_all(daemon: Daemon, way: str) -> None:
    with open_ledger(home=daemon.home) as ledger:
        made = record(ledger, "one", fp=here(), mode=current_mode())
    gone = threading.Event()
    with daemon.client() as ask, daemon.client() as events:
        stream = _events(events)
        if way == "journal":
            faults.write(daemon.home, fault_of(made))
        else:
            told = ask.post("/v1/faults", faults.plain(to_json(fault_of(made))))
            assert told["taken_in"] is True
        for kind, _ in stream:
            if kind == "fault":
                gone.set()
                break
        found = ask.get(f"/v1/best/attn?workload={ATTN.key}")
        assert gone.is_set() and found["state"] == "baseline"
        assert ask.get("/v1/faults")["quarantines"][0]["candidate"] == CPP.candidate
    with closing(Board(daemon.home)) as board:
        q, k = torch.zeros(1, 32, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 8192, 128, dtype=torch.bfloat16)
        bound = board.bind(dispatch.ops.find("attn"), (q, k, k))
        assert bound.candidate == BASELINE.candidate


def _events(line: Client) -> Iterator[tuple[str, Any]]:
    """Yield (kind, value) of each event from now on."""
    wire = connect(line.path, 30.0)
    wire.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
    text = wire.makefile("r", encoding="utf-8")
    while "retry:" not in text.readline():  # the header, until the stream has started
        pass

    def following() -> Iterator[tuple[str, Any]]:
        kind = ""
        with wire, text:
            for part in text:
                if part.startswith("event: "):
                    kind = part[7:].strip()
                elif part.startswith("data: "):
                    yield kind, json.loads(part[6:])

    return following()


def test_misses_of_a_serving_process_are_queued_and_reported_to_the_next_daemon_too(home: Path) -> None:
    from autosel.ops import find

    op, x, weight = find("rmsnorm"), torch.zeros(1, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    home.mkdir(mode=0o700)
    with closing(Board(home)) as board:
        board.selection(op)(x, weight)
        board.hand_over()  # without a reader, nothing happens
        for _ in range(2):
            with running(home, "--busy", "0") as daemon, daemon.client() as ask:
                board.hand_over()
                jobs = [j for j in ask.get("/v1/jobs")["jobs"] if j["state"] != "cancelled"]
                assert [(j["op"], j["source"], j["state"]) for j in jobs] == [("rmsnorm", "miss", "queued")]
                assert jobs[0]["calls"] >= 1
                ask.delete(f"/v1/jobs/{jobs[0]['id']}")


CALLING = """
import torch, autosel
norm = autosel.best("rmsnorm")
for _ in range(7):
    norm(torch.zeros(1, 64), torch.ones(64))
"""


def test_counts_of_served_calls_are_reported_to_the_daemon_and_shown(daemon: Daemon) -> None:
    """Report counts periodically, and when a process ends; name decisions for other conditions."""
    from autosel.ops import find

    threads = torch.get_num_threads()
    other = current_mode().replace(f".t{threads}", f".t{threads + 6}")
    with open_ledger(home=daemon.home) as ledger:
        record(ledger, fp=here(), mode=other, workload=find("rmsnorm").workload("fp32", {"M": 1, "d": 64}))
    with closing(Board(daemon.home)) as board:
        norm = board.selection(find("rmsnorm"))
        for _ in range(3):
            norm(torch.zeros(1, 64), torch.ones(64))
        board.hand_over(last=True)
        norm(torch.zeros(2, 64), torch.ones(64))
        board.hand_over(last=True)
        board.hand_over(last=True)
    subprocess.run([sys.executable, "-c", CALLING], env=environment(daemon.home), check=True, timeout=120)
    with daemon.client() as ask:
        found = ask.get("/v1/uses")
        served = {(u["op"], u["candidate"], u["decision_id"], u["conditions"]): u["calls"] for u in found["uses"]}
        why = f"tuned with {threads + 6} threads, running with {threads}"
        alike = ("rmsnorm", "torch:rmsnorm", None)
        assert served == {(*alike, why): 10, (*alike, ""): 1} and found["processes"] == 2
    shown = cli(daemon.home, "status").stdout
    told = "11 since it started, 0% of them by a decision; 2 processes in the last minute; 10 without a decision:"
    assert f"{told} {why}" in " ".join(shown.split())
    assert re.search(r"rmsnorm +torch:rmsnorm +none +10", shown)
    assert json.loads(cli(daemon.home, "status", "--json").stdout)["uses"] == found
    covered = json.loads(cli(daemon.home, "status", "--coverage", "--json").stdout)["processes"]
    calls = [sum(part["calls"] for part in p["parts"]) for p in covered]
    assert calls == [7, 4] and covered[1]["process"] == os.getpid()
    assert {part["why"] for part in covered[0]["parts"]} == {why}
    shown = " ".join(cli(daemon.home, "status", "--coverage").stdout.split())
    assert f"process {os.getpid()}, {current_mode()}: decisions serve " in shown and f"missed: {why}" in shown


def test_a_fault_that_cannot_be_written_to_the_journal_goes_to_the_daemon(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_ledger(home=daemon.home) as ledger:
        made = record(ledger, "one", fp=here(), mode=current_mode())

    def full(*_: Any) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(faults, "write", full)
    with closing(Board(daemon.home)) as board:
        board.report(fault_of(made))
        board.hand_over()
    with daemon.client() as ask:
        assert ask.get("/v1/faults")["quarantines"][0]["reason"] == "row 3 is wrong"


def test_on_a_full_disk_writes_fail_and_reads_continue(home: Path) -> None:
    """Cause a real I/O error by a limit on file sizes, as on a full disk."""
    with open_ledger(home=home, alone=True) as ledger:
        record(ledger, "one", fp=here(), mode=current_mode())
    script = (
        "import resource, signal, sys\n"
        "from autosel.cli.main import main\n"
        "import autosel.daemon.serve as s\n"
        "said = s.say\n"
        "def say(hub):\n"
        "    said(hub)\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    size = (hub.home / 'ledger.db').stat().st_size\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))\n"
        "s.say = say\n"
        "main(['serve', '--no-tune'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script], env=environment(home), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving")
        with Client(socket_path(home), timeout_s=30.0) as ask:
            refused = 0
            for number in range(40):
                spend = commands.Spend(key=f"k{number}", amount=0.001, reason="x" * 2000)
                try:
                    ask.post(commands.ADDRESS, commands.encode(spend, {}))
                except LedgerError:
                    refused += 1
            assert refused
            assert ask.get(f"/v1/best/attn?workload={ATTN.key}")["decision_id"] == 1
            assert ask.get("/v1/health")["status"] == "read-only"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_a_requested_workload_is_tuned_in_a_child_and_serves(home: Path) -> None:
    furnish(home)
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", 256)), dtype="fp32")
    with running(home, "--busy", "1000") as daemon, daemon.client() as ask:
        stream = _events(ask)
        job = ask.post("/v1/jobs", {"workloads": [to_json(w)]})["jobs"][0]
        stages = set()
        for kind, value in stream:
            if kind == "live" and value:
                stages.add(value["stage"].split(" ")[0])
            if kind == "job" and value["id"] == job["id"] and value["state"] not in ("queued", "running", "paused"):
                break
        ended = ask.get(f"/v1/jobs/{job['id']}")
        assert ended["state"] in ("done", "undecided"), ended
        assert {"parity", "screening"} <= stages
        found = ask.get(f"/v1/best/rmsnorm?workload={w.key}")
        assert found["decision_id"] == ended["decision_id"]
        assert ask.get("/v1/serving")["hw_id"] == HERE
        health = ask.get("/v1/health")
        assert health["tuning"] is None
