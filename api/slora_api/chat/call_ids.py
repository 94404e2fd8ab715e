"""Ids of tool calls."""

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

# The number of letters and digits that Mistral's templates require in an id.
_SHORT_CHARS = 9


def make_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def shorten_call_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces each call id that Mistral's templates refuse by a short hash of the id. messages: as
    `ChatMessage.for_template` makes them; changed in place.
    """
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _shorten(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _shorten(message["tool_call_id"])


def _shorten(call_id: str) -> str:
    if len(call_id) == _SHORT_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_CHARS]
