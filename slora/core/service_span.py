"""What an engine charged to one tenant between two reports, for the other engines."""

from typing import NamedTuple


class ServiceSpan(NamedTuple):
    """start, end: the tokens that the engine had charged to the account since its start, at the last report and now.

    A receiver adds a span once, however often it arrives: it remembers the largest end. If it does not know the
    account's counter, it adds only this span, and not what the tenant received before.
    """

    tenant: str
    is_background: bool
    start: float
    end: float
