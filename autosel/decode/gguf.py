"""A GGUF file as named tensors: Hugging Face's names, shapes and order of rows, dequantised while they are read.

llama.cpp stores three things differently: names; the rows of Llama's query and key projections, in the order of a rope
that turns neighbours; Gemma's norm weights, with the 1 that the model adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from autosel import files
from autosel.decode.dequantise import DEQUANTISED, codes_of, dequantise
from autosel.errors import BadConfig
from autosel.models.gguf import GgufFile, GgufTensor, gguf_note, gguf_shape, read_gguf
from autosel.models.gguf.shape import DIVISORS
from autosel.models.shape import ModelShape
from autosel.ops.scales import SCALES
from autosel.ops.weight import Weight

ReadCodes = Callable[[str, Weight], None]
CHUNK = 1 << 20  # weights dequantised at a time
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# In Gemma, the norm before the feed-forward part has another name, and two norms follow the parts of a block.
GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensors:
    """Tensors of a GGUF file, by Hugging Face's names."""

    described_by: ClassVar[str] = "its metadata"
    file: GgufFile
    shape: ModelShape
    entries: Mapping[str, GgufTensor]

    @property
    def place(self) -> Path:
        return self.file.path

    def note(self, shape: ModelShape, dtype: str) -> str:
        """Describe the formats, and what weights are served in."""
        return gguf_note(self.file, shape, dtype)

    def codes(self, shape: ModelShape) -> ReadCodes | None:
        """Return the function that reads a matrix as it is stored, if the model has the file's own formats."""
        own = (self.shape.weight, self.shape.others)
        return self._read_codes if (shape.weight, shape.others) == own else None

    def _read_codes(self, name: str, out: Weight) -> None:
        """Read the codes and scales of a matrix. Raises BadConfig."""
        tensor = self.entries[name]
        self._refuse_shape(tensor, tuple(out.shape))
        at, per_row = 0, out.shape[1] // tensor.block.weights
        for raw in self._blocks(tensor, per_row):
            codes, scales = codes_of(tensor.block.name, raw, out.format.name)
            if not SCALES[out.format.scaling].numbers(scales).isfinite().all():
                raise BadConfig(
                    f"{self.file.path}: {tensor.name} has a scale that is not finite",
                    why=f"in the rows from {at} on",
                    todo="fetch the file again, or convert the model again",
                )
            rows = len(raw) // per_row
            out.scales[at : at + rows] = scales.reshape(rows, -1)
            out.codes[at : at + rows, : codes.numel() // rows] = codes.reshape(rows, -1)
            at += rows
        heads = self._turned_heads(name)
        if heads:
            for part in out.parts().values():
                part.copy_(halves_from_neighbours(part, heads))

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, rounded once to its dtype. Raises BadConfig."""
        tensor = self.entries[name]
        self._refuse_shape(tensor, tuple(out.shape))
        offset = self.shape.norm_offset if name.endswith("norm.weight") else 0.0
        flat, at = out.view(-1), 0
        for raw in self._blocks(tensor, 1):
            values = dequantise(tensor.block.name, raw).flatten()
            part = flat[at : at + values.numel()].copy_(values - offset if offset else values)
            if not part.isfinite().all():
                self._refuse_number(tensor, values, part, at)
            at += values.numel()
        if heads := self._turned_heads(name):
            out.copy_(halves_from_neighbours(out, heads))

    def _turned_heads(self, name: str) -> int:
        """Return the heads of a projection whose rows llama.cpp stores for a rope of neighbours; 0 for any other."""
        heads = {"q_proj.weight": self.shape.Hq, "k_proj.weight": self.shape.Hkv}
        return heads.get(name.rpartition(".self_attn.")[2], 0) if self.shape.family == "llama" else 0

    def _refuse_shape(self, tensor: GgufTensor, expected: tuple[int, ...]) -> None:
        if tensor.shape != expected:
            raise BadConfig(
                f"{self.file.path}: {tensor.name} is {list(tensor.shape)}, {list(expected)} is expected",
                todo="fetch the file again, or name the model that belongs to it",
            )

    def _blocks(self, tensor: GgufTensor, per_row: int) -> Iterator[Tensor]:
        """Yield bytes [n, bytes of a block], about CHUNK weights at a time, a multiple of `per_row` blocks."""
        block = tensor.block
        left, most = math.prod(tensor.shape) // block.weights, max(1, CHUNK // block.weights // per_row) * per_row
        try:
            with files.opened(self.file.path) as file:
                file.seek(tensor.start)
                while left:
                    count = min(left, most)
                    data = bytearray(file.read(count * block.bytes))
                    if len(data) != count * block.bytes:
                        why = "it was truncated after it was opened"
                        raise BadConfig(f"{self.file.path} ended while it was read", why=why)
                    yield torch.frombuffer(data, dtype=torch.uint8).view(count, block.bytes)
                    left -= count
        except OSError as error:
            raise BadConfig(f"{self.file.path} cannot be read", why=error.strerror or str(error)) from error

    def _refuse_number(self, tensor: GgufTensor, values: Tensor, part: Tensor, at: int) -> None:
        first = int(part.isfinite().logical_not().nonzero()[0, 0])
        value, dtype = float(values[first]), str(part.dtype).removeprefix("torch.")
        raise BadConfig(
            f"{self.file.path}: {tensor.name} has the weight {value:g} at {at + first}",
            why=f"it is not finite in {dtype}; block {(at + first) // tensor.block.weights} of {tensor.block.name}",
            todo="use --dtype bf16" if math.isfinite(value) else "fetch the file again, or convert the model again",
        )


def open_gguf(path: Path) -> GgufTensors:
    """Return every tensor of the file. Only its header is read. Raises BadConfig for a format that is not supported."""
    file = read_gguf(path)
    shape = gguf_shape(file)
    for tensor in file.tensors.values():
        if tensor.block.name not in DEQUANTISED:
            raise BadConfig(
                f"{path}: {tensor.name} is in the format {tensor.block.name}",
                why=f"supported: {', '.join(DEQUANTISED)}",
                todo="convert the model to one of them (llama-quantize), or name the checkpoint it was made from",
            )
    entries = {_name(file, name, shape): tensor for name, tensor in file.tensors.items() if name != DIVISORS}
    return GgufTensors(file=file, shape=shape, entries=entries)


def _name(file: GgufFile, name: str, shape: ModelShape) -> str:
    """Return Hugging Face's name of a tensor. An unknown one of a layer gets a name there that no model has."""
    base, _, kind = name.rpartition(".")
    if base in TOP and kind == "weight":
        return f"{TOP[base]}.weight"
    block, _, rest = base.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or not layer.isdecimal():
        raise BadConfig(
            f"{file.path}: unexpected tensor {name}",
            why=f"{shape.family} has no such tensor; without it the model would give other results",
            todo="name the checkpoint that the file was made from",
        )
    names = LAYER | GEMMA if shape.sandwich else LAYER
    return f"model.layers.{layer}.{names.get(part, name)}.{kind}"


def halves_from_neighbours(rows: Tensor, heads: int) -> Tensor:
    """Return rows [heads * D, K] for a rope that pairs i with i + D/2, from rows in the order 0, D/2, 1, ..."""
    found: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
    return found
