"""The format of API keys, and how a key is checked against a stored hash.

A key is `slora_<8 character id>_<43 base62 characters>_<checksum>`. The prefix and the checksum let secret scanners
recognise a leaked key reliably. The id identifies the key's row in the database. 43 base62 characters hold 256 random
bits.

A secret of this length needs no slow hash; argon2 would take 254 ms per request. The database stores the key's
HMAC-SHA256 under a pepper. The pepper is a file outside the database, so a stolen database alone is not enough to
verify a guessed key.

The bootstrap key is the operator's key that is not in the database. It is given in the environment, or generated at
the first start and stored only as a hash. With it, an operator can create further operators' keys, which are in the
database.

A given key takes precedence and is never stored. A generated key is printed once. An operator who loses the generated
key deletes the file `admin-key.hmac` and restarts the server.
"""

import hmac
import logging
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.process.durable_file import create_durably
from slora_api.keys.key_record import BOOTSTRAP_KEY_ID, OperatorKey

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


logger = logging.getLogger(__name__)

_FILE_NAME = "admin-key.hmac"

_WEAK_CHARS = 16

# The record of the bootstrap key, which identifies its requests.
BOOTSTRAP_KEY = OperatorKey(BOOTSTRAP_KEY_ID, BOOTSTRAP_KEY_ID, 0)


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The bootstrap key that is valid in this run. shown_once: the text of the key if it was generated in this run;
    otherwise None.
    """

    pepper: Pepper
    digest: bytes
    shown_once: str | None = None

    def __repr__(self) -> str:
        return "AdminKey(***)"

    def matches(self, key: str) -> bool:
        return self.pepper.matches(key, self.digest)


def explain_weak_key(given: str) -> str:
    """Returns why a given key is weak, or an empty string if the key is strong."""
    if len(given) >= _WEAK_CHARS:
        return ""
    return f"the admin key has only {len(given)} characters; use at least {_WEAK_CHARS} random ones"


def open_admin_key(given: str, directory: Path, pepper: Pepper, *, is_needed: bool = True) -> AdminKey | None:
    """Returns the key that is valid for this run: `given` if it is not empty, else the key from the first start.

    is_needed: whether to generate a key if there is none. If False, returns None in that case.
    """
    if given:
        if weakness := explain_weak_key(given):
            logger.warning("%s", weakness)
        return AdminKey(pepper, pepper.digest(given))
    path = directory / _FILE_NAME
    try:
        return AdminKey(pepper, bytes.fromhex(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if not is_needed:
            return None
        key = make_key().secret
    digest = pepper.digest(key)
    if create_durably(path, digest.hex().encode()):
        return AdminKey(pepper, digest, shown_once=key)
    # Another process has created the file in the meantime.
    return AdminKey(pepper, bytes.fromhex(path.read_text(encoding="utf-8")))
