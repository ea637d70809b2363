"""Handle an engine with an unexpected interface in a plug-in: change nothing, and warn."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)


def leave(engine: str, written_for: str, error: Exception) -> None:
    """Warn with both versions and the next step. A server must start even without autosel."""
    if not isinstance(error, (ImportError, AttributeError)):
        log.warning("autosel does not change %s: %s: %s", engine, type(error).__name__, error, exc_info=error)
        return
    try:
        found = version(engine.lower())
    except PackageNotFoundError:
        found = "of an unknown version"
    log.warning(
        "autosel does not change %s: %s %s has another interface than %s, for which this plug-in was written (%s); "
        "install a %s near %s, or an autosel that knows yours",
        *(engine, engine, found, written_for, error, engine, written_for),
    )
