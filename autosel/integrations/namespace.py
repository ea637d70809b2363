"""Offer `torch.ops.autosel` once torch and autosel are both imported, in either order.

Neither imports the other. The first use of an op creates all of them (`torch_ops`). An entry point of PyTorch's group
`torch.backends` would do the same, but in every process of the environment, and its failure would end `import torch`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

NAME = "autosel"


def offer() -> None:
    """Offer it now if torch is imported, else as soon as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "ops"):
        _put(torch)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Find torch through the other finders, and notice the end of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            with suppress(AttributeError):  # a loader that accepts no attributes: torch is imported normally
                _tell(spec.loader, self)
        return spec


def _tell(loader: Any, watch: _Watch) -> None:
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        run(module)
        with suppress(ValueError):
            sys.meta_path.remove(watch)
        _put(module)

    loader.exec_module = exec_module


def _put(torch: Any) -> None:
    kind: Any = type(getattr(torch.ops, NAME))
    if not getattr(kind, "offers", False):
        setattr(torch.ops, NAME, _namespace(kind)(NAME))


def _namespace(kind: Any) -> Any:
    """Replace PyTorch's class of namespaces, which creates the ops when a missing one is used."""

    class Namespace(kind):  # type: ignore[misc]
        offers = True

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                import_module("autosel.integrations.torch_ops")
            return super().__getattr__(name)

    Namespace.__module__ = kind.__module__  # it becomes part of the names of ops
    return Namespace
