"""Lists in OpenAI's form, one page at a time: at most `limit` items that follow the item named by `after`.

`first_id` and `last_id` identify the first and the last item of the page. The client sends `last_id` as `after` to get
the next page, even if that item has been deleted meanwhile. This module does not depend on HTTP.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["DEFAULT_LIMIT", "MAX_LIMIT", "list_json"]

Json = dict[str, Any]

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000


def list_json(found: Sequence[Json], called: str, limit: int | None = None) -> Json:
    """Makes the JSON of one page.

    found: the items of the page, and one more if there is a next page.
    called: the field that identifies an item.
    """
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][called] if data else None,
        "last_id": data[-1][called] if data else None,
        "has_more": len(data) < len(found),
    }
