"""autosel: which kernel should run here, and can you prove it?

`import autosel` imports neither torch nor SQLAlchemy: names resolve on first use. If torch is imported too, before or
after, every op is also `torch.ops.autosel.<op>`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosel.integrations import namespace
from autosel.version import __version__

if TYPE_CHECKING:
    from autosel.candidates.user import candidate
    from autosel.cli.explain import explain
    from autosel.dispatch import agree, best, coverage, epoch, use, uses
    from autosel.integrations.sdpa import activate, deactivate
    from autosel.integrations.transformers.patch import patch, unpatch
    from autosel.ops.weight import Weight, quantise

_HOME = {
    "agree": "autosel.dispatch",
    "best": "autosel.dispatch",
    "coverage": "autosel.dispatch",
    "epoch": "autosel.dispatch",
    "use": "autosel.dispatch",
    "uses": "autosel.dispatch",
    "candidate": "autosel.candidates.user",
    "explain": "autosel.cli.explain",
    "activate": "autosel.integrations.sdpa",
    "deactivate": "autosel.integrations.sdpa",
    "patch": "autosel.integrations.transformers.patch",
    "unpatch": "autosel.integrations.transformers.patch",
    "Weight": "autosel.ops.weight",
    "quantise": "autosel.ops.weight",
}

__all__ = [
    "Weight", "__version__", "activate", "agree", "best", "candidate", "coverage", "deactivate", "epoch",
    "explain", "patch", "quantise", "unpatch", "use", "uses",
]  # fmt: skip

namespace.offer()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'autosel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
