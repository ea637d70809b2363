"""Run a command in a child process: a verb of autosel as a user types it, or a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any

from autosel import settings

ANY = range(-256, 256)  # exit codes


def verb(*words: str, allowed: Container[int] = (0,)) -> dict[str, Any]:
    return answered("-m", "autosel.cli.main", *words, allowed=allowed)


def answered(
    *words: str, allowed: Container[int] = ANY, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run Python with these words and additions to the environment. Return the JSON that it prints (the last of several
    documents), or `error` if there is none or its exit code is not `allowed`."""
    command, environment = [sys.executable, "-P", *words], settings.passed_to_children() | dict(environment or {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stderr, file=sys.stderr)
    if done.returncode in allowed:
        for text in (done.stdout, *done.stdout.strip().splitlines()[-1:]):
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(text)
                return found
    last = done.stderr.strip().splitlines()[-3:]
    return {"error": f"exit code {done.returncode}: {' '.join(line.strip() for line in last)}"[:500]}
