"""Every environment variable that autosel reads, with type, default and help; no other module reads any.

A settings file (`config.toml` below AUTOSEL_HOME) may contain the same names in lower case without the prefix; the
environment takes precedence. `origin` is the source of each value.
"""

from __future__ import annotations

import os
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import files
from autosel.errors import BadConfig

FILE_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str  # in lower case, as in config.toml; the variable is AUTOSEL_<NAME>
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return f"AUTOSEL_{self.name.upper()}"


SETTINGS: tuple[Setting, ...] = (
    Setting(name="home", kind=Path, default=None, help="the folder of the ledger, builds and snapshot"),
    Setting(name="db", kind=str, default=None, help="SQLAlchemy URL of the ledger (default: SQLite below the home)"),
    Setting(name="guard", kind=str, default="on", help="check served kernels on some calls", choices=("on", "off")),
    Setting(
        name="shadow_rate", kind=float, default=0.0005, help="share of calls the guard checks; 0: first calls only"
    ),
    Setting(
        name="spot_rate",
        kind=float,
        default=0.04,
        help="share of calls in which the guard recomputes a few elements; at most 0.11 % of the time",
    ),
    Setting(name="disable", kind=bool, default=False, help="1: best() serves the baseline everywhere"),
    Setting(
        name="mode",
        kind=str,
        default="tune",
        help="off: the baseline everywhere; replay: stored decisions only; tune: a daemon also tunes missed workloads",
        choices=("off", "replay", "tune"),
    ),
    Setting(name="lock", kind=Path, default=None, help="a lock file: best() serves only what it pins"),
    Setting(name="frozen", kind=bool, default=False, help="1: refuse to start where the lock file cannot be kept"),
    Setting(name="record", kind=Path, default=None, help="a file to record this process's workloads in"),
    Setting(name="engine_files", kind=Path, default=None, help="export that a plug-in gives to its serving engine"),
    Setting(name="allow", kind=str, default="", help="entry points of autosel.candidates that may be imported: a,b"),
    Setting(name="effort", kind=str, default="quick", help="how much `tune` tries", choices=("quick", "full")),
    Setting(name="budget", kind=float, default=0.0, help="seconds that `tune` may take; 0: no limit"),
    Setting(
        name="place_workers", kind=bool, default=True, help="keep each worker thread of the CPU pool on its own core"
    ),
    Setting(
        name="layout_gb",
        kind=float,
        default=None,
        help="GB of prepared weights that a process keeps (default: as much as leaves 1 GiB of memory free; 0: none)",
    ),
    Setting(name="cxx", kind=str, default="", help="C++ compiler (default: $CXX, g++, c++)"),
    Setting(name="log", kind=str, default="warning", help="log level", choices=("debug", "info", "warning", "error")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    value: Any
    origin: str  # "default", "environment" or the settings file's path


class _Once:
    """Keep a function's result until `cache_clear`. Unlike functools.cache, it drops a result that another thread began
    to compute before that."""

    def __init__(self, function: Callable[[], Mapping[str, Value]]) -> None:
        self._function = function
        self._result: Mapping[str, Value] | None = None
        self._one = threading.RLock()

    def __call__(self) -> Mapping[str, Value]:
        found = self._result
        if found is None:
            with self._one:
                found = self._result = self._result or self._function()
        return found

    def cache_clear(self) -> None:
        with self._one:
            self._result = None


@_Once
def read() -> Mapping[str, Value]:
    """Return all settings, read once per process. Raises BadConfig that names the variable or the file's line."""
    home = _home(os.environ)
    return resolve(os.environ, _file(home / "config.toml"), home)


def resolve(environment: Mapping[str, str], file: tuple[str, Mapping[str, Any]], home: Path) -> Mapping[str, Value]:
    path, entries = file
    unknown = set(entries) - {s.name for s in SETTINGS}
    if unknown:
        known, odd = ", ".join(s.name for s in SETTINGS), _shortened(_plain(", ".join(sorted(unknown))))
        raise BadConfig(f"{path}: unknown settings {odd}", why=f"known: {known}")
    if "home" in entries:
        raise BadConfig(f"{path}: home = {_shown(entries['home'])}", why="the file is in the home: set AUTOSEL_HOME")
    found: dict[str, Value] = {}
    for setting in SETTINGS:
        value, origin = setting.default, "default"
        if setting.variable in environment:
            value, origin = _parse(setting, environment[setting.variable], setting.variable), "environment"
        elif setting.name in entries:
            value, origin = _parse(setting, entries[setting.name], path), path
        found[setting.name] = Value(value=value, origin=origin)
    found["home"] = Value(value=home, origin=found["home"].origin)
    return found


def get(name: str) -> Any:
    return read()[name].value


def visible_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, a setting of CUDA's; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def mps_share() -> float:
    """Return the share of a GPU's SMs that NVIDIA's multi-process service grants this process.

    It is 1 unless CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set.
    """
    try:
        percentage = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    except ValueError:
        return 1.0
    return percentage / 100 if 0 < percentage <= 100 else 1.0


def home() -> Path:
    """Return the folder of everything that autosel writes (not created here)."""
    return Path(get("home"))


def db_url() -> str:
    return get("db") or f"sqlite:///{home() / 'ledger.db'}"


def compiler() -> str:
    """Return the C++ compiler that the user set, or ""."""
    return get("cxx") or os.environ.get("CXX", "")


def cuda_home() -> str:
    """Return the folder of the CUDA toolkit that the user set, or ""."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH", "")


# The variables that a worker process may see: enough to find programs and libraries, but no secret, and none by which a
# library would load other code (private caches are set instead).
PASSED_NAMES = ("PATH", "HOME", "USER", "LANG", "TZ", "CXX", "CC", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
PASSED_PREFIXES = ("AUTOSEL_", "LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_")
SECRET_ENDINGS = ("_DB", "_TOKEN", "_KEY", "_SECRET", "_PASSWORD")  # a database URL contains a password


def passed_to_workers() -> dict[str, str]:
    """Return the environment of a worker process: the allowed variables, and the home and caches that it uses."""
    allowed = {n: v for n, v in os.environ.items() if n in PASSED_NAMES or n.startswith(PASSED_PREFIXES)}
    passed = {n: v for n, v in allowed.items() if not n.endswith(SECRET_ENDINGS)}
    caches = home() / "cache"
    return passed | {
        "AUTOSEL_HOME": str(home()),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "MAX_JOBS": "4",  # for libraries that compile with ninja: a job per core exceeds a worker's process limit
    }


def passed_to_children() -> dict[str, str]:
    """Return the environment of a process that runs autosel: this one, with the resolved home."""
    return {**os.environ, "AUTOSEL_HOME": str(home())}


def notify_socket() -> str:
    """Return the service manager's socket for the ready message, or ""."""
    return os.environ.get("NOTIFY_SOCKET", "")


def colour() -> bool | None:
    """Return False if the user wants no colour (NO_COLOR, a dumb terminal); None means on terminals only."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def unknown_variables() -> tuple[str, ...]:
    """Return unknown variables with autosel's prefix, which are probably misspelt."""
    known = {s.variable for s in SETTINGS} | {"AUTOSEL_SPELLING"}
    return tuple(sorted(name for name in os.environ if name.startswith("AUTOSEL_") and name not in known))


def spelling() -> str:
    """Return how the caller started autosel, for printed commands: `./run`, `python -m autosel` or `autosel`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    started = "python -m autosel" if spec is not None and spec.name == "autosel.__main__" else "autosel"
    return os.environ.get("AUTOSEL_SPELLING") or started


def _home(environment: Mapping[str, str]) -> Path:
    """Return the home. Raises BadConfig if it is not a folder and cannot become one."""
    if "AUTOSEL_HOME" in environment:
        return _folder(_path(environment["AUTOSEL_HOME"], "AUTOSEL_HOME"), "AUTOSEL_HOME")
    import platformdirs

    return _folder(Path(platformdirs.user_data_dir("autosel", appauthor=False)), "the default home")


def _folder(path: Path, where: str) -> Path:
    """Return the path if it is a folder or can become one. Raises BadConfig."""
    try:
        there = next(p for p in (path, *path.parents) if p.is_symlink() or p.exists())
        kind = "" if there.is_dir() else "a file" if there.exists() else "a link to nothing"
        why = f"{there} is {kind}, not a folder" if kind else ""
    except PermissionError:  # opening a file there raises a clear error
        return path
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise BadConfig(f"{where} = {_shown(str(path))}", why=why, todo="set AUTOSEL_HOME to a folder")
    return path


def _path(text: str, where: str) -> Path:
    try:
        if not text.strip():
            raise ValueError("it is empty")
        if "\0" in text:
            raise ValueError("a path has no NUL in it")
        return Path(text).expanduser().absolute()
    except (RuntimeError, ValueError) as error:  # ~nobody
        todo = "name a path, or leave it unset for the default"
        raise BadConfig(f"{where} = {_shown(text)}", why=str(error), todo=todo) from error


def _file(path: Path) -> tuple[str, Mapping[str, Any]]:
    todo = "correct it, or delete it to use the defaults"
    try:
        content = files.read(path, FILE_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return str(path), {}
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=error.strerror or str(error), todo=todo) from error
    try:
        return str(path), tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # more than TOMLDecodeError: bytes, huge numbers, deep nesting
        raise BadConfig(f"{path} is not TOML", why=_shortened(str(error)), todo=todo) from error


def _parse(setting: Setting, raw: Any, where: str) -> Any:
    """Return a setting's value from text or TOML's own type. Raises BadConfig."""
    text = str(raw).strip()
    told = f"{where}: {setting.name} = {_shown(text)}"
    if not text and setting.default != "":
        todo = "give it a value, or leave it unset for the default"
        raise BadConfig(told, why=f"it is empty: {setting.help}", todo=todo)
    try:
        if not isinstance(raw, str if setting.kind in (str, Path) else (str, int, float, bool)):
            raise TypeError
        if setting.kind is bool:
            value: Any = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        elif setting.kind is Path:
            value = _path(text, where)
        else:
            value = setting.kind(text)
    except (TypeError, ValueError, KeyError) as error:
        kind = {bool: "yes or no", int: "a whole number", float: "a number"}.get(setting.kind, "text")
        raise BadConfig(told, why=f"{kind} is expected: {setting.help}") from error
    if setting.kind in (int, float) and not 0 <= value < float("inf"):
        raise BadConfig(told, why=f"a number from 0 is expected: {setting.help}")
    if setting.choices and value not in setting.choices:
        raise BadConfig(told, why=f"one of {', '.join(setting.choices)}")
    return value


def _shown(value: Any) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
