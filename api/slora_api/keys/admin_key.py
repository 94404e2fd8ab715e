"""The bootstrap key: the operator's key that is not in the database.

The key is given in the environment, or generated at the first start and stored only as a hash. With it, an operator can
create further operators' keys, which are in the database.

A given key takes precedence and is never stored. A generated key is printed once. An operator who loses the generated
key deletes the file `admin-key.hmac` and restarts the server.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.process.durable_file import create_durably
from slora_api.keys.api_key import Pepper, make_key
from slora_api.keys.key_record import BOOTSTRAP_KEY_ID, OperatorKey

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
