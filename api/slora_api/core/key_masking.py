"""Masks API keys, and passwords of URLs, in texts that the server sends or logs.

Clients put keys in wrong places, such as the field `model`. An error that quotes the value would carry the key into
logs and error reports.
"""

import re

# A message may quote only the beginning of a value, so the end of the key may be missing.
_KEY = re.compile(r"(slora_[0-9A-Za-z]{8})_[0-9A-Za-z]{8,43}(?:_[0-9A-Za-z]{0,6})?", re.ASCII)

# Matches up to the last @ before the path, because an unescaped password may contain an @.
_PASSWORD = re.compile(r"(://[^\s/:@]*):[^\s/]*@")


def mask_keys(text: str) -> str:
    """Replaces the secret of each key by `***`. The id stays, so that the operator can find the key."""
    return _KEY.sub(r"\1_***", text)


def mask_passwords(text: str) -> str:
    """Replaces the password of each URL by `***`."""
    return _PASSWORD.sub(r"\1:***@", text)
