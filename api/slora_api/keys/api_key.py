"""The format of API keys, and how a key is checked against a stored hash.

A key is `slora_<8 character id>_<43 base62 characters>_<checksum>`. The prefix and the checksum let secret scanners
recognise a leaked key reliably. The id identifies the key's row in the database. 43 base62 characters hold 256 random
bits.

A secret of this length needs no slow hash; argon2 would take 254 ms per request. The database stores the key's
HMAC-SHA256 under a pepper. The pepper is a file outside the database, so a stolen database alone is not enough to
verify a guessed key.

This module does not depend on tenants or the database.
"""

import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.process.durable_file import create_durably

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 8, 43, 6
_KEY = re.compile(r"(slora_([0-9A-Za-z]{8})_[0-9A-Za-z]{43})_([0-9A-Za-z]{6})", re.ASCII)
PEPPER_BYTES = 32


def _checksum(body: str) -> str:
    """Returns the CRC32 of `body` in base62. Six characters suffice, because 62**6 > 2**32."""
    value, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, len(_BASE62))
        digits = _BASE62[digit] + digits
    return digits


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


@dataclass(frozen=True, slots=True)
class NewKey:
    """A newly generated key. Its repr hides the secret, so that logs do not reveal it."""

    key_id: str
    secret: str

    def __repr__(self) -> str:
        return f"NewKey({self.key_id!r}, '***')"


def make_key() -> NewKey:
    """Generates a key from the operating system's random numbers."""
    key_id = _random_text(_ID_CHARS)
    body = f"slora_{key_id}_{_random_text(_SECRET_CHARS)}"
    return NewKey(key_id, f"{body}_{_checksum(body)}")


def read_key_id(text: str) -> str | None:
    """Returns the id of a well-formed key, or None for any other string. Does not check whether the key is valid."""
    match = _KEY.fullmatch(text)
    return match[2] if match and _checksum(match[1]) == match[3] else None


class Pepper:
    """The server's secret for hashing keys."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def from_file(path: Path) -> "Pepper":
        """Reads the pepper, or creates it at the first start (mode 0600). Raises ValueError if the file is damaged."""
        if not path.exists():
            create_durably(path, secrets.token_bytes(PEPPER_BYTES))
        # Read the file even after creating it: if two processes start together, either may have created the file.
        secret = path.read_bytes()
        if len(secret) != PEPPER_BYTES:
            raise ValueError(
                f"{path} has {len(secret)} bytes instead of {PEPPER_BYTES}; restore the file from a "
                "backup, or delete it and create all keys again"
            )
        return Pepper(secret)

    def digest(self, key: str) -> bytes:
        """Returns the 32 bytes that are stored in place of `key`."""
        return hmac.digest(self._secret, key.encode(), "sha256")

    def matches(self, key: str, stored: bytes) -> bool:
        """Returns whether `stored` is the digest of `key`. The comparison takes constant time."""
        return hmac.compare_digest(self.digest(key), stored)
