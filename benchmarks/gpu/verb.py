"""Run a verb of autosel in a child process, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from autosel import settings


def verb(*words: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Return the JSON that it prints (the last of several documents), or `error` if its exit code is not `allowed`."""
    command = [sys.executable, "-P", "-m", "autosel.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=settings.passed_to_children(), check=False)
    print(done.stderr, file=sys.stderr)
    if done.returncode not in allowed:
        last = done.stderr.strip().splitlines()[-3:]
        return {"error": f"exit code {done.returncode}: {' '.join(line.strip() for line in last)}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    return found
