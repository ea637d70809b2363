"""Test workers with real processes and faults: each fault is contained, its cause is known, no process is left."""

import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from autosel.errors import EnvironmentFault, WorkerError
from autosel.values import to_json
from autosel.workers import Arena, Limits, RaisedError, Worker, guardian
from autosel.workers.nursery import Nursery
from tests.cpu.planting import built

FAULTY = "tests.cpu.faulty:serve"
LIMITS = Limits(memory_bytes=400 << 20, processes=16)
LONG_S, SHORT_S = 60.0, 0.3  # a deadline that must be missed, and another that must be met


@pytest.fixture(scope="session")
def library():
    return f"{built('planted')}/libplanted.so"


@pytest.fixture(params=["new", "forked"])
def worker(request, nursery):
    """Start a worker as a new interpreter, and for a second run of the test by a fork from a nursery."""
    forked = {"nursery": nursery} if request.param == "forked" else {}
    with Worker(FAULTY, limits=LIMITS, **forked) as started:
        yield started
    assert survivors(started) == []


@pytest.fixture(scope="module")
def torch_worker():
    """Return one worker for all requests that need torch, because importing it takes almost a second."""
    with Worker(FAULTY) as started:
        yield started


def survivors(worker):
    """Return processes that still have the worker's private folder in their environment, or work there."""
    mark = f"TMPDIR={worker.folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            inside = str((entry / "cwd").readlink()).removesuffix(" (deleted)") == str(worker.folder)
            if inside or mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended in the meantime
            continue
    return found


def failure(worker, fault, deadline_s=LONG_S, **request):
    with pytest.raises(WorkerError) as caught:
        worker.request({"fault": fault, **request}, deadline_s)
    return caught.value


# --- the good case ---------------------------------------------------------------------------------------------------


def test_a_worker_answers_and_sees_only_the_allowed_environment(worker, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("AUTOSEL_DB", "postgresql://user:password@host/db")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Worker(FAULTY) as second:
        seen = second.request({"fault": "none"}, LONG_S)
    assert "SOME_TOKEN" not in seen["env"]
    assert "AUTOSEL_DB" not in seen["env"]
    assert seen["env"]["OMP_NUM_THREADS"] == "1"
    assert seen["pid"] == second.pid
    assert len(seen["files"]) <= 6  # three streams, the control line, the listing itself; the arena has none
    assert not Path(seen["folder"]).exists()


def test_tensors_travel_through_shared_memory(torch_worker):
    with Arena(1 << 20) as arena:
        torch_worker.attach(arena)
        ref = arena.put(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
        torch_worker.request({"fault": "double", "ref": to_json(ref)}, LONG_S)
        assert arena.tensor(ref).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_request_to_a_closed_worker_raises(worker):
    worker.close()
    assert failure(worker, "none").cause == "closed"


def test_no_holder_can_shrink_shared_memory():
    with Arena(1 << 16) as arena, pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_a_reference_that_leaves_the_arena_is_refused(torch_worker):
    with Arena(1 << 16) as arena:
        torch_worker.attach(arena)
        ref = to_json(arena.put(torch.zeros(4))) | {"shape": [1 << 20]}
        error = failure(torch_worker, "double", ref=ref)
    assert isinstance(error, RaisedError)
    assert error.kind == "ValueError"
    assert "leave the arena" in error.message


def test_affinity_and_torch_threads_are_set():
    cpu = min(os.sched_getaffinity(0))
    with Worker(FAULTY, cpus=[cpu], threads=1) as pinned:
        assert pinned.request({"fault": "threads"}, LONG_S) == {"threads": 1, "cpus": [cpu]}


def test_a_worker_outlives_the_thread_that_started_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(Worker(FAULTY)))
    thread.start()
    thread.join()
    with made[0] as started:
        assert started.request({"fault": "none"}, LONG_S)["pid"] == started.pid


# --- exceptions: the worker lives on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raise", "ValueError"),
        ("raise_unprintable", "tests.cpu.faulty.Unprintable"),
        ("raise_system_exit", "SystemExit"),
        ("raise_interrupt", "KeyboardInterrupt"),
        ("not_json", "ValueError"),
        ("too_much_json", "ValueError"),
    ],
)
def test_an_exception_is_a_reply_and_the_worker_lives_on(worker, fault, kind):
    error = failure(worker, fault)
    assert isinstance(error, RaisedError)
    assert error.kind == kind
    assert not error.retryable
    assert worker.request({"fault": "none"}, LONG_S)["pid"] == worker.pid


def test_too_many_open_files_fail_the_request_and_the_worker_lives_on(worker):
    error = failure(worker, "descriptor_leak")
    assert isinstance(error, RaisedError)
    assert error.kind == "OSError"
    assert "Too many open files" in error.message


def test_running_out_of_private_memory_is_retryable(worker):
    error = failure(worker, "memory_hog")
    assert error.retryable
    assert error.cause in ("raised MemoryError", "memory")


# --- death -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "cause"),
    [
        ("null_read", [], "SIGSEGV"),
        ("abort_now", [], "SIGABRT"),
        ("illegal_instruction", [], "SIGILL"),
        ("stack_overflow", [0], "SIGSEGV"),
        ("heap_corruption", [], "SIGABRT"),
        ("exit_without_a_word", [], "exit 0"),
    ],
)
def test_a_crash_is_contained_and_named(worker, library, function, args, cause):
    before = os.getpid()
    error = failure(worker, "native", library=library, function=function, args=args)
    assert error.cause == cause
    assert not error.retryable
    assert os.getpid() == before
    assert failure(worker, "none").cause == cause  # a second request gives the same error
    if cause != "exit 0":
        assert "faulty.py" in error.why  # the Python frames it died under


@pytest.mark.parametrize("how", ["new", "forked"])
def test_an_endless_recursion_is_a_crash_though_this_process_has_no_limit_of_its_stack(library, how):
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (before[1], before[1]))
    try:
        with ExitStack() as stack:
            forked = {"nursery": stack.enter_context(Nursery())} if how == "forked" else {}
            worker = stack.enter_context(Worker(FAULTY, limits=LIMITS, **forked))
            error = failure(worker, "native", library=library, function="stack_overflow", args=[0])
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)
    assert error.cause == "SIGSEGV"


@pytest.mark.parametrize("function", ["spin", "signal_proof_spin"])
def test_a_spin_that_holds_the_interpreter_ends_at_the_deadline(worker, library, function):
    error = failure(worker, "native", SHORT_S, library=library, function=function, args=[])
    assert error.cause == "timeout in request"
    assert worker.exit.signal == signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "deadline_s", "causes"),
    [
        ("hang_up", LONG_S, ["hung up"]),
        ("endless_reply", SHORT_S, ["timeout in request", "protocol"]),
        *((fault, LONG_S, ["protocol"]) for fault in ("garbage_reply", "huge_reply", "forged_reply")),
    ],
)
def test_a_worker_that_replies_slowly_or_invalidly_or_not_at_all_is_ended(worker, fault, deadline_s, causes):
    assert failure(worker, fault, deadline_s).cause in causes


@pytest.mark.parametrize("then", ["hang", "crash"])
def test_a_process_that_left_the_session_is_found_and_killed(worker, then):
    error = failure(worker, "escape", LONG_S if then == "crash" else SHORT_S, then=then)
    assert error.cause == ("SIGSEGV" if then == "crash" else "timeout in request")
    assert (worker.exit.escaped, worker.exit.left) == (1, 0)


def test_a_hog_of_shared_memory_is_stopped(worker, library):
    error = failure(worker, "native", library=library, function="shared_hog", args=[6 << 30])
    assert error.cause == "memory"
    assert error.retryable


def test_a_flood_of_output_neither_blocks_nor_grows(worker):
    assert worker.request({"fault": "output_flood"}, LONG_S)["written"] == 40_000_000
    ended = worker.close()
    assert ended.stdout.startswith("first words")
    assert ended.stdout.endswith("last words\n")
    assert len(ended.stdout) < 50_000
    assert "bytes left out" in ended.stderr


def test_a_worker_dies_with_a_guardian_that_is_killed(worker):
    handle = os.pidfd_open(worker.pid)
    assert failure(worker, "kill_parent").cause == "unknown"
    assert ended(handle)


# --- start -----------------------------------------------------------------------------------------------------------


def test_an_import_that_hangs_ends_at_the_deadline_for_starting():
    with (
        Worker("tests.cpu.hangs_at_import:serve", start_deadline_s=SHORT_S) as started,
        pytest.raises(EnvironmentFault, match=r"no reply by the deadline \(start\)"),
    ):
        started.request({"fault": "none"}, LONG_S)
    assert survivors(started) == []


def test_a_worker_that_does_not_start_is_a_fault_of_the_environment_and_gone():
    with Worker("no_such_module:serve") as started:
        with pytest.raises(EnvironmentFault, match="no_such_module") as caught:
            started.request({"fault": "none"}, LONG_S)
        assert started.exit is not None
    assert caught.value.exit_code == 6
    assert "nothing was recorded against any candidate" in caught.value.why
    assert survivors(started) == []


def test_a_worker_that_does_not_fit_is_a_fault_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(EnvironmentFault, match="cannot be created"):
        Worker(FAULTY)


def test_an_interpreter_that_is_gone_is_a_fault_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentFault, match="cannot be created"):
        Worker(FAULTY)
    assert len(os.listdir("/proc/self/fd")) == before


# --- the parent ends -------------------------------------------------------------------------------------------------


def test_an_interrupt_passes_through_and_leaves_nothing(worker):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.request({"fault": "interrupt", "pid": os.getpid()}, LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert worker.exit.why == "killed"
    assert survivors(worker) == []


OWNER = """
from autosel.workers import Worker
worker = Worker("tests.cpu.faulty:serve")
worker.wait_ready()
print(worker.pid, flush=True)
worker.request({"fault": "escape"}, 600)
"""


def test_a_worker_and_its_escaped_children_end_when_the_parent_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    family = [os.pidfd_open(p) for p in {pid, *escaped_child_of(pid)}]
    owner.kill()
    owner.wait()
    assert len(family) == 2
    assert all(ended(handle) for handle in family)


def escaped_child_of(pid):
    """Wait for the grandchild, which the guardian adopts when its parent has ended."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        if adopted := set(guardian.children_of(guardian._parent_of(str(pid)))) - {pid}:
            return adopted
    raise AssertionError("no escaped child was seen")


def ended(handle):
    """Return True if the process of this pidfd has ended, or ends within the guardian's time limit."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(10_000))
