"""Share code between the probes of vLLM and SGLang, whose lookups of tiles have a common origin. Uses only the standard
library."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from typing import Any


def heard(
    engine: str, kinds: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: str, wanted: str
) -> dict[str, Any]:
    """Look up every row with its kind's lookup. `device`: the engine's name for the present device, empty if it has
    none."""
    named = device or f"none that {engine} knows"
    found = [_heard(engine, kinds[row["ask"]["kind"]], row, device, named, wanted) for row in rows]
    missing = {row["ask"]["kind"] for row, said in zip(rows, found, strict=True) if not said["here"]}
    settings = [kinds[kind].setting for kind in ("gemm", "moe") if kind in missing]
    return {"device": named, "rows": found, "setting": "\n".join(settings)}


def _heard(engine: str, kind: Any, row: Mapping[str, Any], device: str, named: str, wanted: str) -> dict[str, Any]:
    there = kind.there(row)
    here = kind.here(row) if device or isinstance(kind, Flag) else False
    if here:
        why = ""
    elif not there:
        why = f"{engine} does not take {row['file']} for these sizes"
    elif device != wanted:
        why = f"the device is {named}, the files are for {wanted}"
    else:
        why = kind.elsewhere
    same = row["source"] != "default" or kind.default(row["ask"]) in (None, row["value"])
    return {"here": here, "there": there, "why": why, "same": same}


class Flag:
    """Check the attention flag, which is read from its file alone, on any device. `there` is the engine's flag."""

    elsewhere = setting = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def here(self, row: Mapping[str, Any]) -> bool:
        return self.there(row)

    def there(self, row: Mapping[str, Any]) -> bool:
        raise NotImplementedError

    def default(self, _ask: Mapping[str, Any]) -> Any:
        return None


class Products:
    """Check the tiles of products, which both engines look up in their own package. `named`: its function that returns
    the device's name."""

    def __init__(self, engine: str, module: Any, folder: Path, wanted: str, named: str) -> None:
        self.module, self.folder, self.wanted, self.named = module, folder, wanted, named
        self.elsewhere = f"{engine} looks for products in its own package alone"
        self.setting = f"export AUTOSEL_ENGINE_FILES={folder}   # the plug-in, in {engine}'s Python, hands it over"

    def here(self, row: Mapping[str, Any]) -> bool:
        ask = row["ask"]
        return taken(self.module.get_w8a8_block_fp8_configs(ask["n"], ask["k"], *ask["block"]), row)

    def there(self, row: Mapping[str, Any]) -> bool:
        """Call the function with the exported folder as its package, and the wanted device."""
        ask, package = row["ask"], str(self.folder / "gemm" / "x")
        with set_to(self.module, **{"__file__": package, self.named: lambda: self.wanted}):
            return taken(unwrap(self.module.get_w8a8_block_fp8_configs)(ask["n"], ask["k"], *ask["block"]), row)

    def default(self, _ask: Mapping[str, Any]) -> Any:
        """Return None: SGLang's default is inside the function that launches the kernel, which needs a GPU."""
        return None


class Experts:
    """Check the tiles of experts, which both engines look up in the folder of a setting. `named`: as for products."""

    variable: str  # the setting
    named: str
    no_block: tuple[Any, Any]  # the block of scales that are not blocked

    def __init__(self, module: Any, folder: Path, wanted: str) -> None:
        self.module, self.folder, self.wanted = module, folder, wanted
        self.elsewhere = f"{self.variable} does not name their folder"
        self.setting = f"export {self.variable}={folder / 'moe'}"

    def here(self, row: Mapping[str, Any]) -> bool:
        e, n, dtype, block = (row["ask"][name] for name in ("e", "n", "dtype", "block"))
        return taken(unwrap(self.module.get_moe_configs)(e, n, dtype, *(block or self.no_block)), row)

    def there(self, row: Mapping[str, Any]) -> bool:
        named = set_to(self.module, **{self.named: lambda: self.wanted})
        with named, environment(self.variable, self.folder / "moe"):
            return self.here(row)

    def default(self, ask: Mapping[str, Any], *more: Any) -> Any:
        sizes = (ask[name] for name in ("m", "e", "n", "k", "top", "dtype"))
        return dict(self.module.get_default_config(*sizes, *more, ask["block"]))


def taken(configs: Any, row: Mapping[str, Any]) -> bool:
    """Return the row of the nearest count, as the engine selects it."""
    m = row["ask"]["m"]
    return bool(configs) and configs[min(configs, key=lambda rows: abs(rows - m))] == row["value"]


@contextmanager
def set_to(module: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


@contextmanager
def environment(name: str, value: Path) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = str(value)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
