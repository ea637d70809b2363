"""Find the serving engines of this environment, by their distributions, and whether they load autosel's plug-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from autosel.integrations import sglang_plugin, vllm_plugin
from autosel.integrations.plugged import DISTRIBUTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Describe an installed engine. `plugged`: its group of entry points names autosel's plug-in."""

    engine: str
    distribution: str
    version: str
    plugged: bool
    written_for: str


# engine -> its group of entry points, and the version for which the plug-in was written
GROUPS = {
    "vLLM": ("vllm.general_plugins", vllm_plugin.WRITTEN_FOR),
    "SGLang": ("sglang.srt.plugins", sglang_plugin.WRITTEN_FOR),
}


def installed() -> Iterator[Engine]:
    for engine, (group, written_for) in GROUPS.items():
        plugged = any(point.name == "autosel" for point in entry_points(group=group))
        for name in DISTRIBUTIONS[engine]:
            with suppress(PackageNotFoundError):
                found = version(name)
                yield Engine(engine=engine, distribution=name, version=found, plugged=plugged, written_for=written_for)
