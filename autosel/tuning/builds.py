"""Compile native kernels before they are needed, as many at once as cores and memory allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

from autosel.devices.cpu import machine
from autosel.native.compile import Artefact, compile_source
from autosel.values import NativeRecipe

# Memory of nvcc's largest process: 3,541 MiB for a tile of kernels/cutlass/gemm_sm90.cu (getrusage, CUDA 13.0).
COMPILER_BYTES = 4 << 30

Key = tuple[str, tuple[str, ...]]


class Builds:
    """Builds of recipes in the given order, each once. The constructor starts them."""

    def __init__(self, recipes: Iterable[NativeRecipe], *, over: Callable[[], bool] = lambda: False) -> None:
        """Start compiling. `over` is called before each build; once it returns True, no more builds start."""
        self.over = over
        self.executor = ThreadPoolExecutor(max_workers=at_once())
        self.begun: dict[Key, Future[Artefact | None]] = {}
        for recipe in recipes:
            self._of(recipe)

    def wait(self, recipe: NativeRecipe) -> Artefact | None:
        """Wait for the build of a recipe; return None if the time was over before it started. Raises BuildError."""
        return self._of(recipe).result()

    def _of(self, recipe: NativeRecipe) -> Future[Artefact | None]:
        key = (recipe.source, recipe.flags)
        if key not in self.begun:
            self.begun[key] = self.executor.submit(self._compile, recipe)
        return self.begun[key]

    def _compile(self, recipe: NativeRecipe) -> Artefact | None:
        return None if self.over() else compile_source(recipe.source, recipe.flags)

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Start no more builds, and wait for running compilers, which would disturb later timings.

        After an exception (Ctrl-C), do not wait: compilers end with this process.
        """
        self.executor.shutdown(wait=kind is None, cancel_futures=True)


def at_once() -> int:
    """Return the number of compilers to run at once."""
    left = machine.memory_left()
    free = min(psutil.virtual_memory().available, left if left is not None else 1 << 62)
    return int(max(1, min(machine.identity()["cpus"], free // COMPILER_BYTES)))
