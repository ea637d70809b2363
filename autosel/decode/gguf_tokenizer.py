"""The tokenizer inside a GGUF file (`tokenizer.ggml.*`): byte-level BPE ("gpt2") and SentencePiece ("llama").

transformers makes it from the file's vocabulary and merges. Two things follow llama.cpp instead: whether a text begins
with the token BOS if the file does not say so, and that Llama 3 takes a whole word that is in the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosel import extras
from autosel.errors import BadConfig
from autosel.models.gguf import GgufFile, read_gguf

MODEL, PRE, ADD_BOS, BOS = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "add_bos_token", "bos_token_id"))
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
# How transformers splits text before BPE, by llama.cpp's names. SmolLM's vocabulary has no token of two digits, so
# splitting them first, as llama.cpp does, changes nothing.
SPLITS = (*LLAMA3, "gpt-2", "smollm", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o", "llama4", "dbrx", "smaug-bpe")


def has_tokenizer(path: Path) -> bool:
    """Return True if a GGUF file holds a tokenizer. Raises BadConfig."""
    return MODEL in read_gguf(path).metadata


def encode(text: str, path: Path) -> list[int]:
    """Return the tokens of a text by the tokenizer inside a GGUF file. Raises BadConfig, UsageError."""
    file = read_gguf(path)
    _refuse_unknown(file)
    try:
        ids: list[int] = _made(path).encode(text, add_special_tokens=False).ids
    except ImportError as error:
        raise extras.missing("hf", "the tokenizer inside a GGUF file", error) from error
    except Exception as error:  # the libraries raise plain Exceptions
        raise BadConfig(
            f"{path}: its tokenizer cannot be read",
            why=f"{type(error).__name__}: {error!s:.200}",
            todo="give token ids in a .json file",
        ) from error
    return [*_beginning(file), *ids]


def _made(path: Path) -> Any:
    """Return a tokenizers.Tokenizer."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, stored, _ = get_gguf_tokenizer(str(path))
    made, _ = convert_gguf_tokenizer(architecture, stored)
    if stored.get("pre_tokenizer_type") in LLAMA3:
        made.model.ignore_merges = True
    return made


def _beginning(file: GgufFile) -> list[int]:
    """Return BOS if a text begins with it, by the file or by llama.cpp's defaults."""
    default = file.metadata[MODEL] == "llama" or file.metadata.get(PRE) in LLAMA3
    bos = file.metadata.get(BOS)
    return [bos] if file.metadata.get(ADD_BOS, default) is True and type(bos) is int else []


def _refuse_unknown(file: GgufFile) -> None:
    """Raise BadConfig for a tokenizer that would split texts in another way."""
    known = {MODEL: ("gpt2", "llama")} | ({PRE: SPLITS} if file.metadata.get(MODEL) == "gpt2" else {})
    for key, supported in known.items():
        if file.metadata.get(key) not in supported:
            raise BadConfig(
                f"{file.path}: {key} = {file.metadata.get(key)!r:.60}",
                why=f"supported: {', '.join(supported)}",
                todo="give token ids in a .json file",
            )
