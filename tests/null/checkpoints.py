"""Change a small checkpoint in codes, load it, and compare every matrix of its layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.decode.run import Plan
from autosel.decode.weights import Weights, load_weights
from autosel.ops.weight import Weight
from autosel.values import DTypeName

UP = "model.layers.1.mlp.up_proj"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def damage(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Replace a tensor by its change; remove it for None."""
    tensors = load_file(folder / "model.safetensors")
    made = change(tensors.pop(name))
    save_file(tensors | ({} if made is None else {name: made}), folder / "model.safetensors")


def loaded(folder: Path, dtype: DTypeName, weight: str = "") -> Weights:
    shape = models.load(folder)
    return load_weights(Plan(model=replace(shape, weight=weight or shape.weight), weights=str(folder), dtype=dtype))


def of_layer(exact: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """Return the matrices of a layer by autosel's names."""
    at = f"model.layers.{i}."
    stacked = torch.cat([exact[f"{at}self_attn.{p}_proj.weight"] for p in "qkv"])
    mlp = {p: exact[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up", "down")}
    return {"qkv": stacked, "o": exact[f"{at}self_attn.o_proj.weight"], **mlp}


def assert_read_as_codes(found: Weights, exact: dict[str, Tensor]) -> None:
    """Compare with exact matrices in float64, by Hugging Face's names."""
    for i, layer in enumerate(found.layers):
        for part, matrix in of_layer(exact, i).items():
            ours = getattr(layer, part)
            assert isinstance(ours, Weight) and torch.equal(ours.exact(), matrix), part
    assert isinstance(found.embedding, Tensor) and isinstance(found.head, Tensor)
    assert sum(w.nbytes for w in found.named.values()) == found.bytes


def assert_rounded_once(found: Weights, exact: dict[str, Tensor]) -> None:
    for i, layer in enumerate(found.layers):
        for part, matrix in of_layer(exact, i).items():
            assert torch.equal(getattr(layer, part), matrix.to(found.torch_dtype)), part
