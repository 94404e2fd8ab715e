"""Lists in OpenAI's form, a page at a time: at most `limit` items, those behind the one that `after` names.

`first_id` and `last_id` are what the first and the last item of the page are called; `last_id` is the next page's
`after`, whether or not that item is still there by then. Knows no HTTP.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["DEFAULT_LIMIT", "MAX_LIMIT", "list_json"]

Json = dict[str, Any]

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000


def list_json(found: Sequence[Json], called: str, limit: int | None = None) -> Json:
    """found: of a page one item more than `limit`, if there are so many. called: the field that an item is known by."""
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][called] if data else None,
        "last_id": data[-1][called] if data else None,
        "has_more": len(data) < len(found),
    }
