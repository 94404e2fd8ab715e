"""Checks names that become file names and Redis keys, so that no name can escape its folder or key prefix."""

import re

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_digest(digest: str) -> str:
    """Returns the digest. Raises ValueError unless it is 64 lower-case hexadecimal digits."""
    if not is_digest(digest):
        raise ValueError(f"{digest[:80]!r} is not a digest; a digest has 64 lower-case hexadecimal digits")
    return digest


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def check_member_name(name: str) -> str:
    """Returns the name. Raises ValueError unless it is a plain file name."""
    if not _MEMBER.fullmatch(name):
        raise ValueError(
            f"{name[:140]!r} is not a valid member name; a name has at most 128 letters, digits, '.', "
            "'_' and '-'"
        )
    return name
