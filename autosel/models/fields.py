"""Read the fields of a model's description: a config.json, or the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from autosel import files
from autosel.errors import BadConfig
from autosel.values import parse_json

FILE_LIMIT_BYTES = 4 << 20  # the largest published config.json are about 0.1 MB


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_document(path: Path) -> dict[str, Any]:
    """Return the content of a config.json. Raises BadConfig."""
    try:
        data = parse_json(files.read(path, FILE_LIMIT_BYTES), what=str(path))
    except OSError as error:
        raise BadConfig(
            f"{path} cannot be read",
            why=error.strerror or str(error),
            todo="name the checkpoint's folder or its config.json",
        ) from error
    except ValueError as error:
        raise BadConfig(
            f"{path} is not JSON", why=str(error), todo="fetch the file again, or name another checkpoint"
        ) from error
    if not isinstance(data, dict):
        raise BadConfig(f"{path} holds {shown(data)}", why="a config.json is an object")
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Read the fields of a model's description, each with its type and range; null counts as missing."""

    path: Path
    data: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str = ""  # the object that contains the fields
    todo: str = "mend the field, or name another checkpoint"

    def inside(self, where: str, data: Mapping[str, Any]) -> Fields:
        return replace(self, data=data, where=f"{where}.")

    def refuse(self, name: str, why: str, *, seen: bool = True) -> NoReturn:
        told = "" if name in self.data else " is missing"
        if seen and name in self.data:
            told = f" = {shown(self.data[name])}"
        raise BadConfig(f"{self.path}: {self.where}{name}{told}", why=why, todo=self.todo)

    def value(self, name: str, default: Any) -> Any:
        """Return the field, else the call's default, else the family's."""
        found = self.data.get(name)
        if found is None:
            found = self.defaults.get(name) if name in self.defaults else default
        if found is None:
            self.refuse(name, "it describes the layers, and has no default")
        return found

    def size(self, name: str, high: int, *, low: int = 1, default: int | None = None) -> int:
        value = self.value(name, default)
        if value == default == 0 and self.data.get(name) is None:  # absent, and the caller handles that
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high} is expected")
        return int(value)

    def number(self, name: str, above: float, high: float, *, default: float | None = None) -> float:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= high:
            self.refuse(name, f"a number above {above:g}, up to {high:g}, is expected")
        return float(value) if math.isfinite(value) else self.refuse(name, "it is not finite")

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is expected")
        return bool(value)

    def choice(self, name: str, known: Mapping[str, Any]) -> Any:
        value = self.value(name, None)
        if not isinstance(value, str) or value not in known:
            self.refuse(name, f"supported: {', '.join(known)}")
        return known[value]
