"""Shortens values for error messages."""

from reprlib import Repr

_MAX_CHARS = 80
_MAX_ITEMS = 20

_SHORT = Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _MAX_CHARS
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _MAX_ITEMS


def abbreviate(value: object) -> str:
    """Returns `repr(value)`, shortened to 80 characters. The time is bounded, even for very large values."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
