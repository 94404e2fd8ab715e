import logging

import pytest

from slora_api.core.rate_limited_log import RateLimitFilter
from tests.support.clock import Clock


def test_each_kind_of_warning_is_logged_once_a_minute_with_the_suppressed_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, logger = Clock(), logging.getLogger("tests.rare")
    rare = RateLimitFilter(clock)
    logger.addFilter(rare)
    for at_s in (0, 1, 59, 60, 61, 300):
        clock.now = at_s
        logger.warning("no room for %s", f"client {at_s}")
        logger.warning("another kind")
        logger.error("a fault of the server")
    logger.removeFilter(rare)
    lines = [record.getMessage() for record in caplog.records]
    again = "(and {} more times since this was last logged)"
    assert [line for line in lines if line.startswith("no room")] == [
        "no room for client 0",
        f"no room for client 60 {again.format(2)}",
        f"no room for client 300 {again.format(1)}",
    ]
    assert sum(line.startswith("another kind") for line in lines) == 3
    assert lines.count("a fault of the server") == 6
