"""The times at which one unfinished request passed the stages of the engine."""

from slora.core.request import RequestTiming


class RequestTimes:
    """The times of one request, which all of its sequences share. Seconds on the clock of `Scheduler.schedule`.

    fetch_s: time that the request waited for its adapters to be on the host, before its first admission.
    is_cold: whether the request waited for an adapter to be fetched to the host or to be loaded into the pool.
    admitted_at: None until the request is admitted.
    computed_at: None until the request's first tokens are computed.
    first_token_at: None until a token is sampled; for a beam search always None.
    """

    __slots__ = (
        "_fetching_since",
        "admitted_at",
        "arrived_at",
        "computed_at",
        "fetch_s",
        "first_token_at",
        "is_cold",
        "num_preemptions",
    )

    def __init__(self) -> None:
        self.arrived_at = 0.0
        self.fetch_s = 0.0
        self.is_cold = False
        self.admitted_at: float | None = None
        self.computed_at: float | None = None
        self.first_token_at: float | None = None
        self.num_preemptions = 0
        self._fetching_since: float | None = None

    def begin_fetch(self, now: float) -> None:
        """Starts to measure the wait for the request's adapters. A wait after the first admission is not counted."""
        if self.admitted_at is None:
            self.is_cold = True
            # `now` may be the time of the last step, before the request arrived.
            self._fetching_since = max(now, self.arrived_at)

    def end_fetch(self, now: float) -> None:
        """Ends the measured wait for the request's adapters. A no-op if the request does not wait."""
        if self._fetching_since is not None:
            self.fetch_s += now - self._fetching_since
            self._fetching_since = None

    def end(self, now: float) -> RequestTiming:
        self.end_fetch(now)
        return RequestTiming(
            self.arrived_at,
            self.fetch_s,
            self.is_cold,
            self.admitted_at,
            self.computed_at,
            self.first_token_at,
            max(now, self.arrived_at),
            self.num_preemptions,
        )
