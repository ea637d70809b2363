"""Have the compiler read the system's headers once for all kernels for this CPU, instead of in each compilation.

Reading them takes a second, as long as the rest of a small kernel. GCC keeps what it has read in a file of 60 MB
(https://gcc.gnu.org/onlinedocs/gcc/Precompiled-Headers.html), and reads the text instead if its version or a flag that
matters is another. kernels/cpu/system.h comes first in each kernel, so that the machine code is the same with and
without; tests compare the bytes.

The command in a kernel's receipt, without and with `-include`, timed on an idle core of Emerald Rapids, 2026-11-29:
rmsnorm 2.0 and 1.05 s, attn_decode 3.6 and 2.8, gemv_coded 4.2 and 3.4, step 10.9 and 10.5; to read them: 2.6 s.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autosel import files, settings

NAME = "system.h"
WORTH_IT = 3  # compilations with the same flags: reading the headers for later takes as long as three of them save
AGAIN = 64  # compilations until it is tried again, if it failed or was interrupted
READ_S = 120.0
MOST_BYTES = 1 << 20


def include(compiler: str, version: str, source: Path, flags: Sequence[str]) -> list[str]:
    """Return the flags that make the compiler use the headers it has read; at the third compilation with the same flags
    it reads them first. [] before, for other compilers than GCC, and for sources without system.h.
    """
    header = source.parent / NAME
    if "clang" in version.lower() or source.suffix != ".cpp" or not header.is_file():
        return []
    relevant = [f for f in flags if f.startswith(("-m", "-f", "-O", "-std=", "-pthread", "-g"))]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = files.read(header, MOST_BYTES)
        key = hashlib.sha256("\0".join((compiler, version, *relevant)).encode() + b"\0" + text).hexdigest()
        kept = settings.home() / "headers" / key / NAME
        if not _read(kept).is_file():
            if _uses(kept.parent) % AGAIN != WORTH_IT:
                return []
            _make(kept, text, [compiler, *relevant])
        return ["-include", str(kept)]
    return []


def _read(kept: Path) -> Path:
    """Return the file that GCC looks for next to a header."""
    return kept.with_name(f"{NAME}.gch")


def _uses(kept: Path) -> int:
    """Count this compilation; return how many have been counted."""
    kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (kept / "uses").open("ab") as file:
        file.write(b".")
        return file.tell()


def _make(kept: Path, text: bytes, command: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".making-") as temporary:
        header = Path(temporary) / NAME
        header.write_bytes(text)
        words = [*command, "-x", "c++-header", str(header), "-o", str(_read(header))]
        subprocess.run(words, check=True, capture_output=True, timeout=READ_S)
        header.replace(kept)
        _read(header).replace(_read(kept))
