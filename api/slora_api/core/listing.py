"""The JSON of lists in OpenAI's form. A page has at most `limit` items, which follow the item named by `after`.

`first_id` and `last_id` identify the first and the last item of the page. The client sends `last_id` as `after` to get
the next page, even if that item has been deleted meanwhile. This module does not depend on HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import TypedDict

T = TypeVar("T", bound=Mapping[str, Any])

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000


class ListObject(TypedDict, Generic[T]):
    """A complete list in one answer."""

    object: Literal["list"]
    data: list[T]


class PageObject(ListObject[T], Generic[T]):
    """One page of a list. `first_id` and `last_id` are null if the page is empty."""

    first_id: str | int | None
    last_id: str | int | None
    has_more: bool


def list_json(found: Sequence[T], called: str, limit: int | None = None) -> PageObject[T]:
    """Makes the JSON of one page.

    found: the items of the page, and one more item if there is a next page.
    called: the field that identifies an item.
    """
    data = list(found[:limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][called] if data else None,
        "last_id": data[-1][called] if data else None,
        "has_more": len(data) < len(found),
    }
