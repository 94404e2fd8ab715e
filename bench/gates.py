"""Batching as it was before requests could join a running batch: gates that hold requests back outside the engine."""

from collections import deque

from bench.simulation.traces import TraceRequest


class StaticGate:
    """Whole batches: the next `size` requests pass together, when all of the former batch are answered. The last batch
    of a trace, which never fills, passes when nobody else has come for `patience_s`."""

    def __init__(self, size: int, patience_s: float = 10.0) -> None:
        self.size = size
        self._patience_s = patience_s
        self._waiting: deque[TraceRequest] = deque()
        self._last_arrival_s = 0.0

    def push(self, request: TraceRequest) -> None:
        self._waiting.append(request)
        self._last_arrival_s = request.arrival_s

    def release(self, now: float, num_unfinished: int) -> list[TraceRequest]:
        is_over = now >= self._last_arrival_s + self._patience_s
        if num_unfinished or (len(self._waiting) < self.size and not is_over):
            return []
        return [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]

    def wake_at(self) -> float | None:
        return self._last_arrival_s + self._patience_s if self._waiting else None


class DynamicGate:
    """Whole batches too, but one passes as soon as it is full or its first request has waited for `window_s`."""

    def __init__(self, size: int, window_s: float) -> None:
        self.size = size
        self._window_s = window_s
        self._waiting: deque[TraceRequest] = deque()

    def push(self, request: TraceRequest) -> None:
        self._waiting.append(request)

    def release(self, now: float, num_unfinished: int) -> list[TraceRequest]:
        if num_unfinished or not self._waiting:
            return []
        if len(self._waiting) < self.size and now < self._waiting[0].arrival_s + self._window_s:
            return []
        return [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]

    def wake_at(self) -> float | None:
        return self._waiting[0].arrival_s + self._window_s if self._waiting else None
