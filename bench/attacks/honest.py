"""Honest tenants, each with a request every two seconds: `bench.attacks.honest URL KEY ...`, told as `observer` is.

A request is good if its first token comes within six seconds and its whole answer within fifteen.
"""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from bench.simulation.request_log import SLO_S, percentile

__all__ = ["Harvest"]

_PERIOD_S = 2.0
_ANSWER_S = 15.0
_PATIENCE_S = 60.0
_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Harvest:
    """offered: requests that were due in the window. failed: how many ended with which status; 0 is no connection."""

    seconds: float
    offered: float
    good: int
    failed: dict[str, int]
    p99_ttft_ms: float
    p99_itl_ms: float

    @property
    def goodput(self) -> float:
        return self.good / self.offered if self.offered else 0.0


@dataclass(slots=True)
class _Seen:
    began_at: float = field(default_factory=time.perf_counter)
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class _Tenants:
    def __init__(self, host: str) -> None:
        self._host = host
        self._num_tenants = 0
        self._seen = _Seen()

    def begin(self) -> None:
        self._seen = _Seen()

    def end(self) -> Harvest:
        """A request that is late is offered and not good, whether it was sent or not."""
        seen, seconds = self._seen, time.perf_counter() - self._seen.began_at
        return Harvest(
            seconds=round(seconds, 1),
            offered=round(seconds / _PERIOD_S * self._num_tenants, 1),
            good=seen.good,
            failed=dict(seen.failed),
            p99_ttft_ms=round(1e3 * percentile(sorted(seen.first_s), 99), 1),
            p99_itl_ms=round(1e3 * percentile(sorted(seen.gaps), 99), 1),
        )

    def start(self, key: str) -> None:
        self._num_tenants += 1
        threading.Thread(target=self._send_for_ever, args=(key,), daemon=True).start()

    def _send_for_ever(self, key: str) -> None:
        due = time.perf_counter()
        while True:
            status = 0
            with suppress(OSError, http.client.HTTPException):
                status = self._send(key)
            if status != 200:
                self._seen.failed[str(status)] += 1
            due = max(due + _PERIOD_S, time.perf_counter())
            time.sleep(due - time.perf_counter() if due > time.perf_counter() else 0.0)

    def _send(self, key: str) -> int:
        body = {"model": "default", "prompt": "the quick brown fox", "max_tokens": _TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        start = time.perf_counter()
        connection = http.client.HTTPConnection(self._host, timeout=_PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        last, first_s, is_whole = start, None, False
        for line in answer:
            if line.startswith(b"data: "):
                now = time.perf_counter()
                if first_s is None:
                    first_s = now - start
                    self._seen.first_s.append(first_s)
                else:
                    self._seen.gaps.append(now - last)
                last = now
                is_whole = line.startswith(b"data: [DONE]")
        connection.close()
        if answer.status == 200 and not is_whole:
            return 0
        if first_s is not None and first_s <= SLO_S and time.perf_counter() - start <= _ANSWER_S:
            self._seen.good += 1
        return answer.status


def main() -> None:
    tenants = _Tenants(sys.argv[1].removeprefix("http://"))
    for key in sys.argv[2:]:
        tenants.start(key)
        time.sleep(_PERIOD_S / len(sys.argv[2:]))
    for line in sys.stdin:
        if line.strip() == "begin":
            tenants.begin()
        else:
            print(json.dumps(asdict(tenants.end())), flush=True)


if __name__ == "__main__":
    main()
