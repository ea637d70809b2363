"""Run a stage's child process. It reads unit names from stdin, one a line, after one JSON line that lists them all.

Each result is written to stdout as one line of JSON. All other output (compilers, libraries at import) goes to stderr,
which the parent stores in a log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback

from autosel import fingerprint
from autosel.errors import AutoselError
from autosel.values import to_json
from benchmarks.gpu.held import held_for
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import stage

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The watch process's input ends when this process ends, however it ends; then the watch kills the whole group.
WATCH = "import os, signal; os.read(0, 1); os.killpg(0, signal.SIGKILL)"


def serve(name: str, scope: Scope) -> int:
    """Write one line with the list of units and their key; then one line for each requested unit."""
    end_together()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(value: object) -> None:
        replies.write(json.dumps(value) + "\n")

    try:
        work, fp = stage(name), fingerprint.take(scope.device)
        shown = {"name": fp.name, "kind": fp.kind, "hw_id": fp.hw_id, "env_id": fp.env_id, "contended": fp.contended}
        shown |= {"environment": to_json(fp.environment), "rates": {n: r.value for n, r in fp.rates.items()}}
        reply({"listed": work.units(scope, fp), "key": held_for(scope, fp), "device": shown})
    except AutoselError as error:
        reply({"error": str(error)})
        return 1
    coming, expect = sys.stdin.readline(), getattr(work, "expect", None)
    if coming and expect is not None:
        expect(json.loads(coming), scope, fp)
    for line in sys.stdin:
        print(f"== {line.rstrip()}", file=sys.stderr, flush=True)
        try:
            found = work.run(line.rstrip("\n"), scope, fp)
        except Exception as error:  # a candidate's module may raise anything; only its unit fails
            traceback.print_exc()
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        broken = fault_of_device()
        if broken:  # no call in this process will ever succeed again
            reply({**found, "ok": False, "error": found.get("error") or broken, "leaving": True})
            return 1
        reply(found)
    return 0


def end_together() -> None:
    """End this process and its children (verbs, sanitizers, compilers) when its parent ends.

    Otherwise they would continue and disturb the next run. Only for the leader of a process group: the whole group is
    killed.
    """
    assert os.getpgrp() == os.getpid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    input_of_watch, _ = os.pipe()  # the other end is never closed, and no other process has it
    subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH], stdin=input_of_watch, stdout=subprocess.DEVNULL)
    os.close(input_of_watch)


def fault_of_device() -> str:
    """Return the sticky error that this process caused on its device, or "". Waits for enqueued work."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
