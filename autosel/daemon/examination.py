"""Run `doctor` for the page Health in a child, because it loads libraries that the daemon does not; keep the result for
a while."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

from autosel import settings

log = logging.getLogger(__name__)
KEPT_S = 600.0
TAKES_S = 60.0


@dataclass(slots=True, kw_only=True)
class Examination:
    """Hold the last examination, and the running one."""

    findings: list[dict[str, Any]] | None = None
    at_s: float = 0.0
    under_way: asyncio.Task[None] | None = None


def findings(e: Examination, *, again: bool = False) -> list[dict[str, Any]] | None:
    """Return the last findings; None during the first examination."""
    old = time.monotonic() - e.at_s > KEPT_S
    if (e.findings is None or again or old) and (e.under_way is None or e.under_way.done()):
        e.under_way = asyncio.create_task(_look(e))
    return e.findings


async def _look(e: Examination) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "autosel.cli.main", "doctor", "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=settings.passed_to_children(),
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), TAKES_S)
        e.findings, e.at_s = json.loads(out), time.monotonic()
    except (TimeoutError, ValueError) as error:
        log.warning("doctor gave no answer: %s", error)
        why = f"it gave no answer within {TAKES_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        e.findings = [{"what": "doctor", "level": "bad", "text": why, "todo": f"{settings.spelling()} doctor"}]
        e.at_s = time.monotonic()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
