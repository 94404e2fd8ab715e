"""The account of one tenant or key: its sliding windows, its budgets and the number of its answers in progress."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from slora_api.quotas.quota import Quota
from slora_api.quotas.quota_counters import BUCKETS, Charge, Use


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time. ms: milliseconds on the clock of the windows. day, month: consecutive numbers of the UTC day and
    the UTC month.
    """

    ms: int
    day: int
    month: int

    @property
    def second(self) -> int:
        return self.ms // 1000


@dataclass(slots=True)
class Account:
    """The use of one tenant or key.

    second: the newest second of the windows.
    requests, tokens: the charges of each second, at the index `second % BUCKETS`.
    tokens_today, tokens_this_month: tokens used in `day` and in `month`.
    is_seeded: whether `tokens_today` and `tokens_this_month` include the durable history.
    """

    second: int = 0
    day: int = 0
    month: int = 0
    tokens_today: int = 0
    tokens_this_month: int = 0
    reserved_tokens: int = 0
    answers: int = 0
    is_seeded: bool = False
    requests: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    tokens: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def advance(self, now: Moment) -> None:
        """Drops the charges that have left the windows. A new day or month starts with no tokens.

        If the date goes back, because the clock of the host was wrong, the account has to be seeded again.
        """
        second = now.second
        if second - self.second >= BUCKETS:
            self.requests, self.tokens = [0] * BUCKETS, [0] * BUCKETS
        else:
            for passed in range(self.second + 1, second + 1):
                self.requests[passed % BUCKETS] = self.tokens[passed % BUCKETS] = 0
        self.second = max(self.second, second)
        if now.day != self.day:
            self.is_seeded = self.is_seeded and now.day > self.day
            self.day, self.tokens_today = now.day, 0
        if now.month != self.month:
            self.month, self.tokens_this_month = now.month, 0

    def is_idle(self, now: Moment) -> bool:
        """Returns whether the windows are empty and no reservation is open."""
        return self.second <= now.second - BUCKETS and not self.answers and not self.reserved_tokens

    def find_obstacles(self, quota: Quota, charge: Charge, now: Moment) -> Iterator[tuple[str, int | None]]:
        """Yields each field of the quota that the charge would exceed, and the time until the charge fits (see
        `Obstacle.wait_ms`).
        """
        for name, window, added in (
            ("requests_per_minute", self.requests, charge.requests),
            ("tokens_per_minute", self.tokens, charge.tokens),
        ):
            limit = getattr(quota, name)
            if limit is not None and added and (excess := sum(window) + added - limit) > 0:
                yield name, self._wait_ms(window, excess, now)
        for name, used, added in (
            ("tokens_per_day", self.tokens_today, charge.tokens),
            ("tokens_per_month", self.tokens_this_month, charge.tokens),
            ("concurrent_answers", self.answers, charge.answers),
        ):
            limit = getattr(quota, name)
            if limit is not None and used + added > limit:
                yield name, None

    def charge(self, charge: Charge) -> None:
        bucket = self.second % BUCKETS
        self.requests[bucket] += charge.requests
        self.tokens[bucket] += charge.tokens
        self.tokens_today += charge.tokens
        self.tokens_this_month += charge.tokens
        self.reserved_tokens += charge.tokens
        self.answers += charge.answers

    def settle(self, charge: Charge, charged_at: Moment, used_tokens: int, *, counts: bool) -> None:
        """Refunds the unused part of a charge to each window and budget that still contains the charge."""
        unused = charge.tokens - used_tokens
        if self.second - charged_at.second < BUCKETS:
            bucket = charged_at.second % BUCKETS
            self.tokens[bucket] -= unused
            if not counts:
                self.requests[bucket] -= charge.requests
        if charged_at.day == self.day:
            self.tokens_today -= unused
        if charged_at.month == self.month:
            self.tokens_this_month -= unused
        self.reserved_tokens -= charge.tokens
        self.answers -= charge.answers

    def use(self, now: Moment) -> Use:
        return Use(
            sum(self.requests),
            self._reset_ms(self.requests, now),
            sum(self.tokens),
            self._reset_ms(self.tokens, now),
            self.tokens_today,
            self.tokens_this_month,
            self.reserved_tokens,
            self.answers,
        )

    def _wait_ms(self, window: list[int], excess: int, now: Moment) -> int | None:
        """Returns the time until charges of at least `excess` have left the window. None if the charges of the
        whole window are less than `excess`.
        """
        for second in range(self.second - BUCKETS + 1, self.second + 1):
            excess -= window[second % BUCKETS]
            if excess <= 0:
                return (second + BUCKETS) * 1000 - now.ms
        return None

    def _reset_ms(self, window: list[int], now: Moment) -> int:
        """Returns the time until the window is empty."""
        for second in range(self.second, self.second - BUCKETS, -1):
            if window[second % BUCKETS]:
                return (second + BUCKETS) * 1000 - now.ms
        return 0
