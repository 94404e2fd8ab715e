"""Lone surrogates: halves of UTF-16 pairs, which a Python string can hold but no encoded text can.

JSON escapes and decoding with `surrogateescape` produce them. Tokenizers, message formats and databases fail on them.
"""

import re

from slora.core.errors import RequestRefused

__all__ = ["refuse_surrogate"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_surrogate(text: str, name: str, param: str) -> None:
    """Raises RequestRefused if `text` holds a lone surrogate. name: the name of the text in the message."""
    found = _SURROGATE.search(text)
    if found is not None:
        raise RequestRefused(
            f"{name} has the lone surrogate {found[0]!a} at character {found.start()}, which is not "
            "valid Unicode text; remove the surrogate or decode the text again",
            param,
        )
