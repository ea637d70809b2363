"""Run the worker's side: `python -m autosel.workers.child ENTRY`, started only by the guardian.

ENTRY is `module:function`; the function takes one request (a dict) and the arenas and returns the reply (a dict). Any
exception it raises becomes a reply. This module knows no op.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from autosel.workers import protocol
from autosel.workers.arena import Arena, Arenas

Serve = Callable[[dict[str, Any], Arenas], dict[str, Any]]
MAX_TEXT = 4000  # maximum number of characters of a message or traceback


def main(entry: str, control_fd: int, threads: int) -> None:
    os.set_inheritable(control_fd, False)  # a candidate's own children must not hold the line open
    control = socket.socket(fileno=control_fd)
    faulthandler.enable()  # after a crash, stderr contains the Python frames
    arenas = Arenas()
    try:
        serve = _load(entry, threads)
    except BaseException as error:
        _reply(control, {"id": 0, "error": describe(error)})
        return
    _reply(control, {"id": 0, "ok": {}})
    while True:
        try:
            message, fds = protocol.receive(control)
        except protocol.ClosedError:
            return
        _reply(control, _answer(serve, message, fds, arenas))


def _load(entry: str, threads: int) -> Serve:
    gc.disable()  # saves a tenth of the imports' time
    if threads:
        import torch

        torch.set_num_threads(threads)
    module, _, name = entry.partition(":")
    found: Serve = getattr(import_module(module), name)
    gc.freeze()
    gc.enable()
    return found


def _answer(serve: Serve, message: dict[str, Any], fds: list[int], arenas: Arenas) -> dict[str, Any]:
    try:
        if "attach" in message:
            if len(fds) < len(message["attach"]):  # the kernel silently drops descriptors that exceed the limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            for (name, size_bytes), fd in zip(message["attach"], fds, strict=True):
                arenas[name] = Arena.attached(name, fd, size_bytes)
            result: dict[str, Any] = {}
        elif "detach" in message:
            arenas.pop(message["detach"]).close()
            result = {}
        else:
            result = serve(message["request"], arenas)
        return {"id": message["id"], "ok": result}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: a candidate may raise anything
        return {"id": message["id"], "error": describe(error)}


def _reply(control: socket.socket, reply: dict[str, Any]) -> None:
    try:
        frame = protocol.encode(reply)
    except (ValueError, TypeError) as error:
        frame = protocol.encode({"id": reply["id"], "error": describe(error)})
    protocol.send(control, frame)


def describe(error: BaseException) -> dict[str, str]:
    """Describe an exception as data. Printing a candidate's exception may itself fail."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:
        lines = ""
    found = {"type": name[:MAX_TEXT], "message": message[:MAX_TEXT], "traceback": lines[-MAX_TEXT:]}
    return {k: v.encode(errors="replace").decode() for k, v in found.items()}  # lone surrogates cannot be encoded


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
