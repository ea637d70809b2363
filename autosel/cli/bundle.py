"""Signed bundles: what serves on one host, for hosts without a common database. Needs the extra `sign` (cryptography).

    {"format": "autosel.bundle", "version": 1, "host": {"id", "name"}, "created_at", "decisions": <an export>,
     "signer": <public key, hex>, "signature": {"algorithm": "Ed25519", "value": <hex>}}

The signed message is `autosel bundle v1` and the sha256 of the canonical JSON of all fields except the signature,
including the signer's public key. A signature shows who vouches for a bundle; each host still proves its decisions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import rfc8785

from autosel import settings
from autosel.certify import sign
from autosel.errors import BadConfig
from autosel.ledger import snapshot
from autosel.ledger.host import Host, here
from autosel.values import from_json, parse_json, to_json

FORMAT, VERSION = "autosel.bundle", 1
MOST_BYTES = snapshot.MOST_BYTES + (1 << 20)  # the decisions, host and signature
CONTEXT = b"autosel bundle v1\n"
FIELDS = {"format", "version", "host", "created_at", "decisions", "signer", "signature"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Decisions of a file. A plain export has neither host nor signer."""

    decisions: Mapping[str, Any]
    host: Host | None = None
    signer: str = ""


def make(decisions: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """Return this host's bundle, signed with an Ed25519 private key."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "host": to_json(here(settings.home())),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "decisions": decisions,
        "signer": sign.public_hex(key),
    }
    return {**body, "signature": {"algorithm": sign.ALGORITHM, "value": key.sign(_message(body)).hex()}}


def _message(body: Mapping[str, Any]) -> bytes:
    return CONTEXT + sha256(rfc8785.dumps(body)).digest()


def read(content: bytes, where: str, *, signer: str = "") -> Bundle:
    """Return a bundle with a valid signature, or a plain export; with `signer` (hex), only a bundle signed by it.

    Raises BadConfig.
    """
    try:
        data = parse_json(content, what=where)
    except ValueError as error:
        raise BadConfig(f"{where} is not a snapshot or bundle of decisions", why=str(error)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = snapshot.validate(data, where)
        if signer:
            raise BadConfig(f"{where} is not signed", todo="import it without --key, or have it exported with --sign")
        assert found.digest
        return Bundle(decisions=data)
    if data.get("version") != VERSION or set(data) != FIELDS:
        raise BadConfig(f"{where} is not a bundle of version {VERSION}", todo="upgrade autosel")
    made = _believed(data, where)
    if signer and made.signer != signer:
        raise BadConfig(f"{where} is signed by another key", why=f"by {made.signer}, not {signer}")
    snapshot.validate(made.decisions, where)
    return made


def _believed(data: Mapping[str, Any], where: str) -> Bundle:
    signature, signer = data["signature"], data["signer"]
    body = {name: value for name, value in data.items() if name != "signature"}
    try:
        host = from_json(Host, data["host"])
        value = signature["value"]
        if signature != {"algorithm": sign.ALGORITHM, "value": value} or not re.fullmatch("[0-9a-f]{64}", signer):
            raise ValueError("not an Ed25519 signature")
        if not sign.holds(signer, value, _message(body)):
            raise ValueError("its signature does not match its content")
    except (ValueError, TypeError, KeyError) as error:  # RFC 8785 refuses integers above 2^53 and lone surrogates
        raise BadConfig(f"{where} was damaged or edited", why=str(error)) from error
    return Bundle(decisions=data["decisions"], host=host, signer=signer)


def text(made: Mapping[str, Any]) -> str:
    return json.dumps(made, separators=(",", ":"), allow_nan=False) + "\n"


def own_key(path: Path | None) -> Any:
    """Return the key to sign with: the given file, or this home's, which is made on first use."""
    default = settings.home() / "keys" / "bundles.pem"
    if path is not None or default.exists():
        return sign.private_key(path or default)
    return sign.make_key(default)
