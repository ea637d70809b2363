"""The tokens a run is fed: drawn at random, or from a file of token ids or of text."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

from autosel.decode.run import Plan, Text
from autosel.decode.weights import refuse_other_tokens
from autosel.errors import BadConfig, UsageError
from autosel.values import parse_json

FILE_LIMIT_BYTES = 256 << 20
TOKENIZER = "tokenizer.json"


def prompts(plan: Plan) -> list[list[int]]:
    """One row a sequence, each of the `seq` - 1 tokens that come before the first timed step.

    Raises BadConfig for a file that cannot be read, UsageError for one too short or with tokens of another model.
    """
    wanted = plan.seq - 1
    if plan.prompt in ("random", "synthetic"):
        generator = torch.Generator().manual_seed(plan.seed)
        drawn: list[list[int]] = torch.randint(plan.model.V, (plan.batch, wanted), generator=generator).tolist()
        return drawn
    rows = _read(Path(plan.prompt), plan)
    chosen = [rows[b % len(rows)] for b in range(plan.batch)]
    short = min(map(len, chosen))
    if short < wanted:
        raise UsageError(
            f"{plan.prompt} gives {short} tokens; --seq {plan.seq} takes {wanted}", todo="use a shorter --seq"
        )
    for row in chosen:
        refuse_other_tokens(row, plan.model)
    return [row[:wanted] for row in chosen]


def text_to_score(path: Path, plan: Plan) -> Text:
    """The text of --quality: token ids of a .json file, else the checkpoint's tokenizer, else bytes as tokens.

    Raises BadConfig for a file that cannot be read, UsageError for one too short or with tokens of another model.
    """
    text = _text(path)
    if path.suffix == ".json":
        tokenizer, tokens = "ids", [t for row in _token_rows(path, text) for t in row]
    elif (Path(plan.weights) / TOKENIZER).is_file():
        tokenizer, tokens = "checkpoint", _tokenize(text, Path(plan.weights))
    else:
        tokenizer, tokens = "bytes", list(text.encode())
    refuse_other_tokens(tokens, plan.model)
    if len(tokens) < 2 * plan.batch:
        raise UsageError(f"{path} gives {len(tokens)} tokens", why=f"at least {2 * plan.batch} are scored")
    digest = sha256(text.encode()).hexdigest()
    return Text(name=path.name, sha256=digest, tokenizer=tokenizer, tokens=tuple(tokens))


def _read(path: Path, plan: Plan) -> list[list[int]]:
    text = _text(path)
    if path.suffix == ".json":
        return _token_rows(path, text)
    return [_tokenize(text, Path(plan.weights))]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise BadConfig(f"{path} is {path.stat().st_size} bytes", why=f"a text is below {FILE_LIMIT_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read", why=str(error)) from error


def _token_rows(path: Path, text: str) -> list[list[int]]:
    """[1, 2, 3] or [[1, 2], [3]]."""
    try:
        data = parse_json(text, what=path.name, depth=3)
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error)) from error
    rows = data if isinstance(data, list) and data and all(isinstance(r, list) for r in data) else [data]
    for row in rows:
        if not isinstance(row, list) or not row or not all(type(t) is int for t in row):
            raise BadConfig(f"{path} holds no token ids", why="a list of whole numbers is expected, or a list of such")
    return rows


def _tokenize(text: str, folder: Path) -> list[int]:
    path = folder / TOKENIZER
    if not path.is_file():
        raise UsageError(
            "a prompt in words needs the checkpoint's tokenizer",
            why=f"{path} does not exist",
            todo="give token ids in a .json file, or name a checkpoint folder with --weights",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "a prompt in words needs the tokenizers package", why=str(error), todo="pip install 'autosel-kernels[hf]'"
        ) from error
    try:
        ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:  # its own errors are plain Exceptions
        raise BadConfig(f"{path} cannot be read", why=str(error)[:200]) from error
    return ids
