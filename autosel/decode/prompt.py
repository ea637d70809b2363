"""The prompt's tokens: random ones, or from a file of token ids or text.

An owner of a prompt can tell if it is the certificate's: `tokens_sha256` is the sha256 of the rows that ran as JSON
without spaces (`[[1,2],[3,4]]`), after cutting and repetition; `file_sha256` is `sha256sum` of the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from autosel import extras
from autosel.decode import gguf_tokenizer
from autosel.decode.run import Plan, PromptDigest, Text
from autosel.decode.weights import refuse_other_tokens
from autosel.errors import BadConfig, UsageError
from autosel.files import read_named
from autosel.models import is_gguf
from autosel.values import parse_json

FILE_LIMIT_BYTES = 256 << 20
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Rows of tokens; `digest` is of the rows and of their file, or None if they do not run."""

    rows: list[list[int]]
    digest: PromptDigest | None


def prompts(plan: Plan) -> Prompts:
    """Return one row per sequence, with the `seq` - 1 tokens before the first timed step.

    Raises BadConfig for a file that cannot be read, UsageError for one too short or with tokens of another model.
    """
    if plan.prompt in ("random", "synthetic"):
        rows, file_sha256 = _drawn(plan), ""
    else:
        path = Path(plan.prompt)
        content = read_named(path, FILE_LIMIT_BYTES)
        text, file_sha256 = _text(path, content), sha256(content).hexdigest()
        read = _token_rows(path, text) if path.suffix == ".json" else [_tokenize(text, Path(plan.weights))]
        rows = _chosen(read, plan)
    if plan.prompt == "synthetic":
        return Prompts(rows=rows, digest=None)
    return Prompts(rows=rows, digest=PromptDigest(tokens_sha256=tokens_sha256(rows), file_sha256=file_sha256))


def tokens_sha256(rows: Sequence[Sequence[int]]) -> str:
    return sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _drawn(plan: Plan) -> list[list[int]]:
    generator = torch.Generator().manual_seed(plan.seed)
    found: list[list[int]] = torch.randint(plan.model.V, (plan.batch, plan.seq - 1), generator=generator).tolist()
    return found


def _chosen(rows: list[list[int]], plan: Plan) -> list[list[int]]:
    """Return as many rows as the batch has, repeated if there are fewer, and cut to length."""
    wanted = plan.seq - 1
    chosen = [rows[b % len(rows)] for b in range(plan.batch)]
    short = min(map(len, chosen))
    if short < wanted:
        raise UsageError(
            f"{plan.prompt} has {short} tokens; --seq {plan.seq} needs {wanted}", todo="use a shorter --seq"
        )
    for row in chosen:
        refuse_other_tokens(row, plan.model)
    return [row[:wanted] for row in chosen]


def text_to_score(path: Path, plan: Plan) -> Text:
    """Return the text of --quality: token ids of a .json file, else by the tokenizer of the checkpoint or GGUF file,
    else bytes as tokens.

    Raises BadConfig for a file that cannot be read, UsageError for one too short or with tokens of another model.
    """
    text = _text(path, read_named(path, FILE_LIMIT_BYTES))
    if path.suffix == ".json":
        tokenizer, tokens = "ids", [t for row in _token_rows(path, text) for t in row]
    elif _has_tokenizer(Path(plan.weights)):
        tokenizer, tokens = "checkpoint", _tokenize(text, Path(plan.weights))
    else:
        tokenizer, tokens = "bytes", list(text.encode())
    refuse_other_tokens(tokens, plan.model)
    if len(tokens) < 2 * plan.batch:
        raise UsageError(
            f"{path} has {len(tokens)} tokens", why=f"at least {2 * plan.batch} are needed", todo="use a longer text"
        )
    digest = sha256(text.encode()).hexdigest()
    return Text(name=path.name, sha256=digest, tokenizer=tokenizer, tokens=tuple(tokens))


def _text(path: Path, content: bytes) -> str:
    """Decode a file's bytes as text, with universal newlines."""
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} cannot be read", why=str(error)) from error


def _token_rows(path: Path, text: str) -> list[list[int]]:
    """Return the rows of [1, 2, 3] or [[1, 2], [3]]."""
    try:
        data = parse_json(text, what=path.name, depth=3)
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error)) from error
    rows = data if isinstance(data, list) and data and all(isinstance(r, list) for r in data) else [data]
    for row in rows:
        if not isinstance(row, list) or not row or not all(type(t) is int for t in row):
            why = "a list of integers, or a list of such lists, is expected"
            raise BadConfig(f"{path} has no token ids", why=why)
    return rows


def _has_tokenizer(weights: Path) -> bool:
    return gguf_tokenizer.has_tokenizer(weights) if is_gguf(weights) else (weights / TOKENIZER).is_file()


def _tokenize(text: str, weights: Path) -> list[int]:
    """Tokenize by the tokenizer of a checkpoint folder or a GGUF file. Raises UsageError, BadConfig."""
    path = weights if is_gguf(weights) else weights / TOKENIZER
    if not _has_tokenizer(weights):
        raise UsageError(
            "a text prompt needs the checkpoint's tokenizer",
            why=f"{path} {'holds none' if is_gguf(weights) else 'does not exist'}",
            todo="give token ids in a .json file, or name a checkpoint folder with --weights",
        )
    if is_gguf(weights):
        return gguf_tokenizer.encode(text, weights)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise extras.missing("hf", "a text prompt", error) from error
    try:
        ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:  # the library raises plain Exceptions
        raise BadConfig(f"{path} cannot be read", why=str(error)[:200]) from error
    return ids
