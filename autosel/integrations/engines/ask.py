"""Run the installed engine's own lookup in a separate process, to find out which rows of an export it would use.

A probe (`probes/<engine>.py`) needs only the engine and the standard library, so it runs in any Python that serves,
with or without autosel. It starts nothing of the engine, and uses the settings of this environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autosel.errors import AutoselError, UsageError
from autosel.integrations.engines.folder import Manifest
from autosel.values import from_json, parse_json, to_json

PROBES = Path(__file__).with_name("probes")
PATIENCE_S = 300.0  # importing a serving engine from a cold disk takes a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Report one row: whether the engine finds it here, whether it would with the right device and setting, and if
    neither, why. `same`: whether a default is still this version's default."""

    here: bool
    there: bool
    why: str = ""
    same: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Hold the reply. `setting` is the setting that the rows need, as text to type; empty if it is in force."""

    version: str
    device: str
    rows: tuple[Heard, ...]
    setting: str = ""

    @property
    def here(self) -> int:
        return sum(row.here for row in self.rows)

    @property
    def there(self) -> int:
        return sum(row.there for row in self.rows)


class NotInstalled(AutoselError):
    """Raised if the engine is not installed in that Python."""


def ask(engine: str, folder: Path, made: Manifest, python: str = sys.executable) -> Reply:
    """Ask the engine. Raises NotInstalled, AutoselError with the engine's last output, UsageError."""
    question = {"folder": str(folder.resolve()), "device": made.device, "rows": to_json(made.rows)}
    words = [python, str(PROBES / f"{engine.replace('-', '_')}_probe.py")]
    try:
        ran = subprocess.run(words, input=json.dumps(question), capture_output=True, text=True, timeout=PATIENCE_S)
    except OSError as error:
        raise UsageError(f"cannot run {python}", why=error.strerror or str(error)) from error
    except subprocess.TimeoutExpired:
        raise AutoselError(f"{engine} did not answer within {PATIENCE_S:.0f} s", why=f"asked: {python}") from None
    return _reply(engine, python, made, ran.stdout, ran.stderr)


def _reply(engine: str, python: str, made: Manifest, out: str, errors: str) -> Reply:
    said = out.strip().splitlines()[-1:] or [""]
    try:
        data = parse_json(said[0], what=engine)
    except ValueError:
        last: Sequence[str] = errors.strip().splitlines()[-1:]
        raise AutoselError(
            f"{engine} of {python} cannot be asked",
            why=last[0] if last else "it ended without a word",
            todo=f"the files were made for {engine} {made.engine_version}; does it start at all there?",
        ) from None
    if isinstance(data, dict) and data.get("absent"):
        raise NotInstalled(
            f"{engine} is not installed in {python}",
            why=f"{data['absent']}; the files were made for {engine} {made.engine_version}",
            todo="name the Python that serves: --python VENV/bin/python",
        )
    try:
        reply: Reply = from_json(Reply, data)
    except ValueError as error:
        raise AutoselError(f"{engine} of {python} gave no reply to use", why=str(error)) from error
    if len(reply.rows) != len(made.rows):
        raise AutoselError(f"{engine} answered for {len(reply.rows)} rows of {len(made.rows)}")
    return reply
