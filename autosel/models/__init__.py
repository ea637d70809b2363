"""Load models by preset name, checkpoint folder, config.json or GGUF file, and list the workloads of their steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autosel.errors import BadConfig, UnknownName
from autosel.models.config import read_config
from autosel.models.gguf import gguf_note, gguf_shape, read_gguf
from autosel.models.presets import PRESETS
from autosel.models.quantised import scheme_of
from autosel.models.shape import SIZES, ModelShape, Rope
from autosel.models.workloads import Named, labels, step, workloads

GGUF = ".gguf"


def load(name_or_path: str | Path) -> ModelShape:
    """Return a preset (`llama-8b`), or the model of a Hugging Face checkpoint folder, config.json or GGUF file.

    A preset's name takes precedence over a folder of that name: write `./llama-8b` for the folder. Raises UnknownName
    or BadConfig.
    """
    text = str(name_or_path)
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _no_namesake(_from_folder(path), path)
        if path.exists():
            return _no_namesake(gguf_shape(read_gguf(path)) if is_gguf(path) else read_config(path), path)
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder without permission, an unknown ~user
        raise BadConfig(f"{text[:200]} cannot be read", why=str(error)[:200], todo="check the path") from error
    if text.endswith((".json", GGUF)) or text.startswith(("/", ".", "~")):
        raise BadConfig(f"no such checkpoint folder, config.json or GGUF file: {text}", todo="check the path")
    if "/" in text:
        raise BadConfig(
            f"{text} is neither a preset nor a folder here",
            why=f"nothing is downloaded; presets: {', '.join(PRESETS)}",
            todo=f"fetch the checkpoint (hf download {text}) and name its folder",
        )
    raise UnknownName("model", text, tuple(PRESETS))


def weights_of(name_or_path: str) -> str:
    """Return the GGUF file, or the folder if it holds weights or declares them, else "random". Invalid weights are an
    error: random weights never replace them silently."""
    folder = Path(name_or_path).expanduser()
    if is_gguf(folder):
        return str(folder)
    held = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")
    return str(folder) if folder.is_dir() and any(any(folder.glob(name)) for name in held) else "random"


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF


def stored_as(shape: ModelShape, format: str | None) -> ModelShape:
    """Return the model with all its matrices in another format; None, or their own, leaves them as they are stored."""
    return shape if format in (None, shape.weight) else replace(shape, weight=format, table="", others=())


def weights_note(name_or_path: str, shape: ModelShape, dtype: str) -> str:
    """Describe the formats of a GGUF file or a checkpoint in codes, and what its weights are read as; else ""."""
    path = Path(name_or_path).expanduser()
    if is_gguf(path):
        return gguf_note(read_gguf(path), shape, dtype)
    scheme = scheme_of(path) if name_or_path.lower() not in PRESETS else None
    return scheme.note(path.name, shape.weight, dtype) if scheme else ""


def _no_namesake(shape: ModelShape, path: Path) -> ModelShape:
    """Refuse a checkpoint with the name of a preset of other sizes, because tables and certificates identify models by
    name."""
    preset = PRESETS.get(shape.name.lower())
    other = next((size for size in SIZES if preset and getattr(shape, size) != getattr(preset, size)), None)
    if preset is None or other is None:
        return shape
    raise BadConfig(
        f"{path} has the name of the preset {preset.name}, and is another model",
        why=f"{other} is {getattr(shape, other)!r:.60}; the preset's is {getattr(preset, other)!r:.60}",
        todo="give the folder another name",
    )


def _from_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    if path.is_file():
        return read_config(path)
    if (folder / "params.json").is_file():
        raise BadConfig(
            f"{folder} has no config.json",
            why="it holds the publisher's original format (params.json)",
            todo="name the Hugging Face version of the checkpoint",
        )
    held = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
    raise BadConfig(f"{folder} has no config.json", why=f"it holds {held}", todo="name a checkpoint's own folder")


__all__ = ["PRESETS", "ModelShape", "Named", "Rope", "is_gguf", "labels", "load", "read_config", "step",
           "stored_as", "weights_note", "weights_of", "workloads"]  # fmt: skip
