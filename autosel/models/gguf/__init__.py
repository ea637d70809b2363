"""Read GGUF files, the format of llama.cpp: header, metadata and the place of each tensor. Data is read elsewhere."""

from autosel.models.gguf.block import BLOCKS, Block
from autosel.models.gguf.file import GgufFile, GgufTensor, read_gguf
from autosel.models.gguf.shape import gguf_note, gguf_shape

__all__ = ["BLOCKS", "Block", "GgufFile", "GgufTensor", "gguf_note", "gguf_shape", "read_gguf"]
