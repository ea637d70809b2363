"""Load a compiled kernel by digest. Only workers and `dispatch` call this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autosel.errors import BuildError
from autosel.native import threads
from autosel.native.compile import find_artefact

_LOADED: dict[str, Any] = {}  # modules stay loaded, because their thread team outlives each caller


def load_entry(digest: str, entry: str) -> Callable[..., Any]:
    """Return the function `entry` of the artefact; its arguments are torch tensors, None, ints and floats.

    Raises BuildError if the artefact is missing or damaged.
    """
    if digest not in _LOADED:
        artefact = find_artefact(digest)
        if artefact is None:
            raise BuildError(f"compiled kernel {digest[:12]} is missing or damaged", todo="tune again to rebuild it")
        import tvm_ffi

        _LOADED[digest] = tvm_ffi.load_module(str(artefact.path))
        threads.adopt(_LOADED[digest])
    function: Callable[..., Any] = getattr(_LOADED[digest], entry)
    return function
