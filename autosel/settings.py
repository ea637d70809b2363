"""Every environment variable autosel reads, with type, default and help; nothing else in the code reads one.

A settings file (`config.toml` below AUTOSEL_HOME) may give the same names in lower case without the prefix; the
environment wins. `origin` says where each value came from.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autosel.errors import BadConfig


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
    Setting(name="home", kind=Path, default=None, help="where the ledger, builds and snapshot live"),
    Setting(name="db", kind=str, default=None, help="SQLAlchemy URL of the ledger (default: SQLite below the home)"),
    Setting(name="guard", kind=str, default="on", help="check served kernels on some calls", choices=("on", "off")),
    Setting(
        name="shadow_rate", kind=float, default=0.0005, help="share of calls the guard checks; 0: first calls only"
    ),
    Setting(name="disable", kind=bool, default=False, help="1: best() serves the baseline everywhere"),
    Setting(name="allow", kind=str, default="", help="entry points of autosel.candidates that may be imported: a,b"),
    Setting(name="effort", kind=str, default="quick", help="how hard `tune` tries", choices=("quick", "full")),
    Setting(name="budget", kind=float, default=0.0, help="seconds `tune` may take; 0: as long as it needs"),
    Setting(name="cxx", kind=str, default="", help="C++ compiler (default: $CXX, g++, c++)"),
    Setting(name="threads", kind=int, default=0, help="threads for kernels; 0: by the closed form"),
    Setting(name="log", kind=str, default="warning", help="log level", choices=("debug", "info", "warning", "error")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    value: Any
    origin: str  # "default", "environment" or the settings file's path


@cache
def read() -> Mapping[str, Value]:
    """All settings, once per process. Raises BadConfig naming the variable or file line at fault."""
    home = _home(os.environ)
    return resolve(os.environ, _file(home / "config.toml"), home)


def resolve(environment: Mapping[str, str], file: tuple[str, Mapping[str, Any]], home: Path) -> Mapping[str, Value]:
    path, entries = file
    unknown = set(entries) - {s.name for s in SETTINGS}
    if unknown:
        known = ", ".join(s.name for s in SETTINGS)
        raise BadConfig(f"{path}: unknown settings {', '.join(sorted(unknown))}", why=f"known: {known}")
    if "home" in entries:
        raise BadConfig(f"{path}: home = {entries['home']!r}", why="the file lies in the home: set AUTOSEL_HOME")
    found: dict[str, Value] = {}
    for setting in SETTINGS:
        if environment.get(setting.variable):
            found[setting.name] = Value(
                value=_parse(setting, environment[setting.variable], setting.variable), origin="environment"
            )
        elif setting.name in entries:
            found[setting.name] = Value(value=_parse(setting, entries[setting.name], path), origin=path)
        else:
            found[setting.name] = Value(value=setting.default, origin="default")
    found["home"] = Value(value=home, origin=found["home"].origin)
    return found


def get(name: str) -> Any:
    return read()[name].value


def home() -> Path:
    """The folder everything autosel writes lives in (not created here)."""
    return Path(get("home"))


def db_url() -> str:
    return get("db") or f"sqlite:///{home() / 'ledger.db'}"


def compiler() -> str:
    """The C++ compiler the user asked for, or the empty string."""
    return get("cxx") or os.environ.get("CXX", "")


# What a worker process may see of our environment: enough to find programs and libraries; no secret, and no variable by
# which a library would load code from elsewhere (private caches are set instead).
PASSED_NAMES = ("PATH", "HOME", "USER", "LANG", "TZ", "CXX", "CC", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
PASSED_PREFIXES = ("AUTOSEL_", "LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_")
SECRET_ENDINGS = ("_DB", "_TOKEN", "_KEY", "_SECRET", "_PASSWORD")  # a database URL holds a password


def passed_to_workers() -> dict[str, str]:
    """The environment a worker process starts with: an allow-list, and the home and caches that it is to use."""
    allowed = {n: v for n, v in os.environ.items() if n in PASSED_NAMES or n.startswith(PASSED_PREFIXES)}
    passed = {n: v for n, v in allowed.items() if not n.endswith(SECRET_ENDINGS)}
    caches = home() / "cache"
    return passed | {
        "AUTOSEL_HOME": str(home()),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def colour() -> bool | None:
    """False where the user wants none (NO_COLOR, a dumb terminal); None: wherever the output is a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def unknown_variables() -> tuple[str, ...]:
    """Names in the environment that look like ours and are not: most likely misspelt."""
    known = {s.variable for s in SETTINGS} | {"AUTOSEL_SPELLING"}
    return tuple(sorted(name for name in os.environ if name.startswith("AUTOSEL_") and name not in known))


def spelling() -> str:
    """How the caller started us, for the commands we print: `./run` or `autosel`."""
    return os.environ.get("AUTOSEL_SPELLING") or "autosel"


def _home(environment: Mapping[str, str]) -> Path:
    if environment.get("AUTOSEL_HOME"):
        return Path(environment["AUTOSEL_HOME"]).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("autosel", appauthor=False))


def _file(path: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        return str(path), tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return str(path), {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        todo = "mend it, or delete it to use the defaults"
        raise BadConfig(f"{path} is not TOML", why=str(error), todo=todo) from error
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=str(error)) from error


def _parse(setting: Setting, raw: Any, where: str) -> Any:
    text = str(raw).strip()
    try:
        if setting.kind is bool:
            value: Any = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        elif setting.kind is Path:
            value = Path(text).expanduser().absolute()
        else:
            value = setting.kind(text)
    except (ValueError, KeyError) as error:
        kind = {bool: "yes or no", int: "a whole number", float: "a number"}.get(setting.kind, "text")
        raise BadConfig(f"{where}: {setting.name} = {text!r}", why=f"{kind} is expected: {setting.help}") from error
    if setting.kind in (int, float) and not 0 <= value < float("inf"):
        raise BadConfig(f"{where}: {setting.name} = {text!r}", why=f"a number from 0 is expected: {setting.help}")
    if setting.choices and value not in setting.choices:
        raise BadConfig(f"{where}: {setting.name} = {text!r}", why=f"one of {', '.join(setting.choices)}")
    return value
