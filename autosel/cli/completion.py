"""Shell completion of the names of ops, models and devices, without importing PyTorch, which takes a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from autosel.files import read

MOST_BYTES = 1 << 20


def ops(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an op: each is declared in autosel/ops/NAME.py."""
    files = (Path(__file__).parents[1] / "ops").glob("*.py")
    own = [path.stem for path in files if f'\n    name = "{path.stem}"\n'.encode() in read(path, MOST_BYTES)]
    return _starting([*own, "gemv", "gemm", "step"], incomplete)


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a preset, else the path of a checkpoint."""
    from autosel.models.presets import PRESETS

    return _starting(PRESETS, incomplete) or [CompletionItem(incomplete, type="file")]


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a device of this machine or a known device."""
    from autosel.fingerprint import known

    return _starting(("cpu", "cuda", *known.names()), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
