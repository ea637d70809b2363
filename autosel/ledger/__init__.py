"""Store every decision with its evidence, appended and never edited; and the snapshot from which `best()` serves.

`autosel.ledger.snapshot` loads without SQLAlchemy, so these names resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosel.ledger.store import Evidence, Ledger, open_ledger

__all__ = ["Evidence", "Ledger", "open_ledger"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("autosel.ledger.store"), name)
    raise AttributeError(f"module 'autosel.ledger' has no attribute {name!r}")
