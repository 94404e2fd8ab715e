"""A logger for events that any client can cause. It writes at most one line per minute for each kind of event, so
clients cannot fill the log.
"""

import logging
import time
from collections.abc import Callable

_PERIOD_S = 60.0


class RateLimitFilter(logging.Filter):
    """Suppresses a message if a message with the same format string has passed in the last minute. The next message
    that passes states how many messages were suppressed. Errors always pass, because they are faults of the server
    itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Format string -> the time at which it last passed, and the number of messages suppressed since then.
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now_s, text = self._clock(), str(record.msg)
        passed_at, num_held_back = self._seen.get(text, (now_s - _PERIOD_S, 0))
        if now_s - passed_at < _PERIOD_S:
            self._seen[text] = (passed_at, num_held_back + 1)
            return False
        self._seen[text] = (now_s, 0)
        if num_held_back:
            record.msg = f"{text} (and {num_held_back} more times since this was last logged)"
        return True


def get_rate_limited_logger(name: str) -> logging.Logger:
    """Returns the logger of that name with the filter. Callers must use constant format strings, by which the filter
    tells kinds of messages apart.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(one, RateLimitFilter) for one in logger.filters):
        logger.addFilter(RateLimitFilter())
    return logger
