"""Ed25519 signatures of certificates. Needs the extra `sign` (cryptography).

The signed message is `autosel certificate v1` and the checksum, which covers everything else, including the signer's
public key. A signature cannot be removed, moved to another document or replaced by another key's without notice.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autosel import extras, files
from autosel.certify.certificate import Certificate, Signature, seal
from autosel.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "Ed25519"
CONTEXT = b"autosel certificate v1\n"
MOST_KEY_BYTES = 1 << 16


def sign(made: Certificate, key: Ed25519PrivateKey) -> Certificate:
    """Return the certificate sealed again with the signer inside, and signed."""
    sealed = seal(dataclasses.replace(made, signer=public_hex(key)))
    value = key.sign(CONTEXT + bytes.fromhex(sealed.checksum)).hex()
    return dataclasses.replace(sealed, signature=Signature(algorithm=ALGORITHM, value=value))


def trouble(made: Certificate) -> str:
    """Return why a signature cannot be trusted; "" if it can, or if there is none."""
    if not made.signer and made.signature is None:
        return ""
    if made.signature is None:
        return "signature: it names a signer, but has no signature"
    if not made.signer:
        return "signature: it names no signer"
    if made.signature.algorithm != ALGORITHM:
        return f"signature: algorithm {made.signature.algorithm!r:.40} is not {ALGORITHM}"
    if not re.fullmatch(r"[0-9a-f]{64}", made.signer) or not re.fullmatch(r"[0-9a-f]{128}", made.signature.value):
        return "signature: not 32 and 64 bytes of lower-case hex"
    message = CONTEXT + bytes.fromhex(made.checksum)
    return "" if holds(made.signer, made.signature.value, message) else "signature: it does not match"


def holds(signer: str, value: str, message: bytes) -> bool:
    """Return True if the signature (hex) of the message is by this public key (hex)."""
    crypto = _cryptography()
    try:
        key = crypto.ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        key.verify(bytes.fromhex(value), message)
    except (crypto.InvalidSignature, ValueError):
        return False
    return True


def make_key(path: Path) -> Ed25519PrivateKey:
    """Write a new private key to a file that only its owner can read. The file is complete when it appears.

    Raises UsageError if the file exists; it stays unchanged.
    """
    crypto = _cryptography()
    key: Ed25519PrivateKey = crypto.ed25519.Ed25519PrivateKey.generate()
    serial = crypto.serialization
    text = key.private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_once(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"cannot make the key {path}", why=why, todo=_how_to_make(path)) from error
    return key


def _write_once(path: Path, text: bytes) -> None:
    """Write a temporary file and link it to its path: unlike a rename, a link replaces nothing. Raises OSError."""
    descriptor, making = tempfile.mkstemp(dir=path.parent, prefix=".making-")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.link(making, path)
    finally:
        Path(making).unlink()
    files.sync_folder(path.parent)


def private_key(path: Path) -> Ed25519PrivateKey:
    """Return the key of a PEM file (PKCS 8, or OpenSSH's). Raises UsageError for others, or if it is open to others."""
    crypto = _cryptography()
    text = _read_key(path, private=True)
    load = crypto.serialization
    key: Any
    try:
        key = load.load_ssh_private_key(text, None) if b"OPENSSH" in text else load.load_pem_private_key(text, None)
    except TypeError as error:
        raise UsageError(f"{path} is encrypted", todo="decrypt it first, or make a key for this purpose") from error
    except (ValueError, crypto.UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} has no private key", why="a PEM file is expected", todo=_how_to_make(path)) from error
    if not isinstance(key, crypto.ed25519.Ed25519PrivateKey):
        raise UsageError(f"{path} is not an Ed25519 key", todo=_how_to_make(path))
    found: Ed25519PrivateKey = key
    return found


def public_key(text: str) -> str:
    """Return the public key (hex) that the user named: hex digits, or a PEM file of either half. Raises UsageError."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return text.lower()
    path = Path(text)
    content = _read_key(path, private=False)
    if b"PRIVATE KEY" in content:
        return public_hex(private_key(path))
    crypto = _cryptography()
    load = crypto.serialization
    try:
        ssh = content.startswith(b"ssh-")
        key = load.load_ssh_public_key(content) if ssh else load.load_pem_public_key(content)
    except (ValueError, crypto.UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} has no key", why="a PEM file, or 64 hex digits, is expected") from error
    if not isinstance(key, crypto.ed25519.Ed25519PublicKey):
        raise UsageError(f"{path} is not an Ed25519 key")
    return _hex(key)


def public_hex(key: Ed25519PrivateKey) -> str:
    return _hex(key.public_key())


def _hex(key: Any) -> str:
    text: str = key.public_bytes_raw().hex()
    return text


def _read_key(path: Path, *, private: bool) -> bytes:
    try:
        file = files.opened(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"cannot read the key {path}", why=why, todo=_how_to_make(path)) from error
    with file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if private and mode & 0o077:
            why = f"mode {mode:04o}: every reader can sign in your name"
            raise UsageError(f"the key {path} is open to others", why=why, todo=f"chmod 600 {path}")
        return file.read(MOST_KEY_BYTES)


def _how_to_make(path: Path) -> str:
    return f"make one:  openssl genpkey -algorithm ed25519 -out {path}"


def _cryptography() -> Any:
    """Return the parts of cryptography that are used here, by name. Raises UsageError without the extra."""
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise extras.missing("sign", "a signature", error) from error
    return SimpleNamespace(
        ed25519=ed25519,
        serialization=serialization,
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
    )
