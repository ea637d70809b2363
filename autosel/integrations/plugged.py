"""What plug-ins of serving engines do where the engine is not the one they were written for: leave it, and say so."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)


def leave(engine: str, written_for: str, error: Exception) -> None:
    """Warn with both versions and the next step. A server shall start without us."""
    if not isinstance(error, (ImportError, AttributeError)):
        log.warning("autosel leaves %s as it is: %s: %s", engine, type(error).__name__, error, exc_info=error)
        return
    try:
        found = version(engine.lower())
    except PackageNotFoundError:
        found = "of an unknown version"
    log.warning(
        "autosel leaves %s as it is: %s %s has another interface than %s, for which this plug-in was written (%s); "
        "install a %s near %s, or an autosel that knows yours",
        *(engine, engine, found, written_for, error, engine, written_for),
    )
