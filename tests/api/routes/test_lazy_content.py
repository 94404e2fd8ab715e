"""Content that is made once, however many clients ask for it at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor

from slora_api.http.openapi import LazyContent


def test_clients_that_ask_at_the_same_time_share_one_rendering() -> None:
    """Found in review: right after a start, each client rendered the page of the documentation."""
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.05)
        return b"page"

    lazy = LazyContent(make)
    with ThreadPoolExecutor(8) as clients:
        assert {*clients.map(lambda _: lazy.content(), range(8))} == {b"page"}
    assert len(made) == 1
