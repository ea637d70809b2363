"""Run command lines in the process of a test, without starting Python and importing torch for each."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from autosel import settings
from autosel.cli.main import run


def verb(*arguments: str, home: Path | None = None, codes: Sequence[int] = (0,)) -> Any:
    """Return its JSON with --json, else its output; check that it ends with one of these exit codes."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        if home is not None:
            patch.setenv("AUTOSEL_HOME", str(home))
        settings.read.cache_clear()
        code = run(list(arguments))
    settings.read.cache_clear()
    assert code in codes, err.getvalue()
    return json.loads(out.getvalue()) if "--json" in arguments else out.getvalue() + err.getvalue()
