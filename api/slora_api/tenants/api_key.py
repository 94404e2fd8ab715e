"""What an API key looks like, and how one is recognised without being stored.

`slora_<8 character id>_<43 base62 characters>_<checksum>`: the prefix and the checksum let secret scanners find a
leaked key without guessing; the id finds its row; 43 base62 characters are 256 random bits. A secret this long
needs no slow hash (argon2 would cost 254 ms a request): stored is its HMAC-SHA256 under a pepper, a file that the
database does not hold, so that a stolen database alone cannot even confirm a guess.

Knows no tenant and no database.
"""

import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.durable_file import create_durably

__all__ = ["NewKey", "Pepper", "make_key", "read_key_id"]

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 8, 43, 6
_KEY = re.compile(r"(slora_([0-9A-Za-z]{8})_[0-9A-Za-z]{43})_([0-9A-Za-z]{6})", re.ASCII)
PEPPER_BYTES = 32


def _checksum(body: str) -> str:
    """CRC32 in base62; 62**6 > 2**32, so six characters hold it."""
    value, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, len(_BASE62))
        digits = _BASE62[digit] + digits
    return digits


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made. Its repr does not show the secret, so that a log line cannot."""

    key_id: str
    secret: str

    def __repr__(self) -> str:
        return f"NewKey({self.key_id!r}, '***')"


def make_key() -> NewKey:
    """Draws a fresh key from the system's randomness."""
    key_id = _random_text(_ID_CHARS)
    body = f"slora_{key_id}_{_random_text(_SECRET_CHARS)}"
    return NewKey(key_id, f"{body}_{_checksum(body)}")


def read_key_id(text: str) -> str | None:
    """The id inside a well-formed key; None for anything else. Says nothing about whether the key is valid."""
    match = _KEY.fullmatch(text)
    return match[2] if match and _checksum(match[1]) == match[3] else None


class Pepper:
    """The server's secret under which keys are hashed."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def from_file(path: Path) -> "Pepper":
        """Reads the pepper, or makes it at the first start (mode 0600). Raises ValueError if the file is damaged."""
        if not path.exists():
            create_durably(path, secrets.token_bytes(PEPPER_BYTES))
        # Read even after a creation: of two processes that start together, one made the file.
        secret = path.read_bytes()
        if len(secret) != PEPPER_BYTES:
            raise ValueError(
                f"{path} holds {len(secret)} bytes, not {PEPPER_BYTES}; restore it from a backup, or delete it and "
                "make every key anew"
            )
        return Pepper(secret)

    def digest(self, key: str) -> bytes:
        """What is stored in place of `key`: 32 bytes."""
        return hmac.digest(self._secret, key.encode(), "sha256")

    def matches(self, key: str, stored: bytes) -> bool:
        """Whether `stored` is the digest of `key`, in time that does not depend on where they differ."""
        return hmac.compare_digest(self.digest(key), stored)
