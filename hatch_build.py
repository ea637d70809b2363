"""Ship kernels/, fingerprints/ and db/ inside the wheel as autosel/_data; an editable install reads the checkout.

Plain `force-include` would also copy them into editable installs, where the copy goes stale.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = ("kernels", "fingerprints", "db")


class ShipData(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            for folder in SHIPPED:
                build_data["force_include"][folder] = f"autosel/_data/{folder}"
