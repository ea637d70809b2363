"""Read GGUF files, the format of llama.cpp: header, metadata and the place of each tensor. Data is read elsewhere."""

from autosel.models.gguf.block import BLOCKS, Block
from autosel.models.gguf.file import GgufFile, GgufTensor, read_gguf

__all__ = ["BLOCKS", "Block", "GgufFile", "GgufTensor", "read_gguf"]
