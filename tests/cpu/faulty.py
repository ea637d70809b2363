"""Provide worker entries that fail in a requested way."""

import ctypes
import importlib
import os
import signal
import socket
import struct
import sys
import time


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


RAISED = {
    "raise": ValueError("seven is not even"),
    "raise_unprintable": Unprintable(),
    "raise_system_exit": SystemExit(0),
    "raise_interrupt": KeyboardInterrupt(),
}


def serve(request, arenas):
    fault = request["fault"]
    if fault in RAISED:
        raise RAISED[fault]
    return globals()[f"_{fault}"](request, arenas)


def _none(request, arenas):
    return {
        "pid": os.getpid(),
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "files": sorted(os.listdir("/proc/self/fd")),
    }


def _imported(request, arenas):
    before = request["name"] in sys.modules
    importlib.import_module(request["name"])
    return {"before": before}


def _native(request, arenas):
    library = ctypes.PyDLL(request["library"])  # PyDLL: the call keeps the interpreter lock
    function = getattr(library, request["function"])
    function.argtypes = [ctypes.c_ulong] * len(request["args"])
    return {"value": function(*request["args"])}


def _not_json(request, arenas):
    return {"value": float("nan")}


def _too_much_json(request, arenas):
    return {"value": "x" * (2 << 20)}


def _control():
    """The line to the parent: the one stream socket this process has."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
            if found.family == socket.AF_UNIX:
                return found
        except OSError:
            continue
    raise AssertionError("no control line")


def _garbage_reply(request, arenas):
    _control().send(struct.pack("<I", 4) + b"\x80\x04K\x01")


def _endless_reply(request, arenas):
    line = _control()
    line.send(struct.pack("<I", 1 << 20))
    while True:
        line.send(b" ")


def _huge_reply(request, arenas):
    _control().send(struct.pack("<I", 1 << 31))
    _wait()


def _forged_reply(request, arenas):
    body = b'{"id":99999,"ok":{}}'
    _control().send(struct.pack("<I", len(body)) + body)
    _wait()


def _hang_up(request, arenas):
    line = _control()
    line.shutdown(socket.SHUT_RDWR)
    _wait()


def _escape(request, arenas):
    """Leave a grandchild in a new session, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _wait()
        os._exit(0)
    os.wait()
    if request.get("then") == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    _wait()


def _memory_hog(request, arenas):
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def _output_flood(request, arenas):
    sys.stdout.write("first words\n")
    line = "x" * 9999 + "\n"
    for _ in range(2000):
        sys.stdout.write(line)
        sys.stderr.write(line)
    sys.stdout.write("last words\n")
    sys.stdout.flush()
    return {"written": 2000 * 10000 * 2}


def _descriptor_leak(request, arenas):
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def _kill_parent(request, arenas):
    os.kill(os.getppid(), signal.SIGKILL)
    _wait()


def _interrupt(request, arenas):
    os.kill(request["pid"], signal.SIGINT)
    _wait()


def _double(request, arenas):
    arenas.tensor(request["ref"]).mul_(2)
    return {}


def _threads(request, arenas):
    import torch

    return {"threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0))}


def _wait(request=None, arenas=None):
    while True:
        time.sleep(3600)
