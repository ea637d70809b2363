"""Offer `torch.ops.autosel` once torch and autosel are both imported, in either order.

Neither imports the other. The first op that is asked for makes all of them (`torch_ops`). An entry point of PyTorch's
group `torch.backends` would do as much, but in every process of the environment, and its failure ends `import torch`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

NAME = "autosel"


def offer() -> None:
    """Offer it now, if torch has been imported, else as soon as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "ops"):
        _put(torch)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """A finder that finds torch as the others do, and is told when its import has ended."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            with suppress(AttributeError):  # a loader that takes no attributes: then torch is imported as ever
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
    """PyTorch's class of namespaces, which makes our ops when it is asked for what it does not have."""

    class Namespace(kind):  # type: ignore[misc]
        offers = True

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                import_module("autosel.integrations.torch_ops")
            return super().__getattr__(name)

    Namespace.__module__ = kind.__module__  # it goes into the names of ops
    return Namespace
