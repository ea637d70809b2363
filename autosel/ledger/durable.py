"""Write files that a kill or a power failure leaves complete. Imports neither SQLAlchemy nor torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_private(path: Path, text: str) -> None:
    """Replace a file that only its owner can read, completely or not at all; its bytes are on disk on return. Raises
    OSError, leaving the old file."""
    making = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        making.unlink()  # left by a killed process with the same pid
    try:
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        with suppress(OSError):
            making.unlink()
        raise
