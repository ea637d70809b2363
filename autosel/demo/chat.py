"""Questions and answers of a chat model in the ChatML format: text to token ids and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from autosel import extras
from autosel.decode.prompt import TOKENIZER
from autosel.errors import BadConfig

END = "<|im_end|>"
# SmolLM2's own template, with its system message.
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True)
class Chat:
    tokenizer: Any  # tokenizers.Tokenizer

    def tokens(self, question: str) -> list[int]:
        """Return the prompt that asks the question."""
        found: list[int] = self.tokenizer.encode(TEMPLATE.format(question=question), add_special_tokens=False).ids
        return found

    def text(self, tokens: list[int]) -> str:
        """Return the tokens' text without special tokens, and without a character that is not complete yet."""
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return found.rstrip("\N{REPLACEMENT CHARACTER}").strip()

    @property
    def stop(self) -> frozenset[int]:
        """Return the token that ends an answer; empty if the model has none."""
        found = self.tokenizer.token_to_id(END)
        return frozenset() if found is None else frozenset((found,))


def open_chat(folder: Path) -> Chat:
    """Return the chat of a checkpoint folder. Raises UsageError (no package tokenizers), BadConfig."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise extras.missing("hf", "the demo", error) from error
    try:
        return Chat(Tokenizer.from_file(str(folder / TOKENIZER)))
    except Exception as error:  # the library raises plain Exceptions
        todo = f"remove the folder {folder}; the next demo fetches the model again"
        raise BadConfig(f"{folder / TOKENIZER} cannot be read", why=str(error)[:200], todo=todo) from error


def write_prompt(place: Path, tokens: list[int]) -> Path:
    """Write the prompt's token ids to a file that `verify --rerun` reads later; equal prompts share a file."""
    content = json.dumps(tokens)
    path = place / f"prompt-{sha256(content.encode()).hexdigest()[:12]}.json"
    path.write_text(content)
    return path
