"""What other tenants notice during an attack, measured by a process of its own: `bench.attacks.observer URL KEY`.

One thread asks for `/healthz` on a new connection every 50 ms, as a load balancer does. Another keeps one stream of
tokens open and times the gaps between them. A line `begin` on stdin starts a window, and a line `end` prints what was
seen in it as a line of JSON. A process of its own shares no interpreter lock with the attacker.
"""

import http.client
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from bench.simulation.request_log import percentile

__all__ = ["Noticed"]

_PROBE_EVERY_S = 0.05
_PATIENCE_S = 200.0
_STREAM_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Noticed:
    """failed_probes: connections that were refused or reset. refused: requests of the victim that got no stream."""

    seconds: float
    probes: int
    failed_probes: int
    worst_probe_ms: float
    tokens: int
    p50_itl_ms: float
    p99_itl_ms: float
    worst_itl_ms: float
    refused: int


@dataclass(slots=True)
class _Seen:
    """Of the present window. Each pending time is when what is waited for was asked for."""

    began_at: float = field(default_factory=time.perf_counter)
    probes: list[float] = field(default_factory=list)
    failed_probes: int = 0
    gaps: list[float] = field(default_factory=list)
    refused: int = 0


class _Observer:
    def __init__(self, host: str, key: str) -> None:
        self._host = host
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._seen = _Seen()
        self._probe_since: float | None = None
        self._token_since: float | None = None

    def begin(self) -> None:
        self._seen = _Seen()

    def end(self) -> Noticed:
        """What is still waited for counts with the time that it has taken within the window."""
        seen, now = self._seen, time.perf_counter()
        waits, gaps = list(seen.probes), list(seen.gaps)
        for since, found in ((self._probe_since, waits), (self._token_since, gaps)):
            if since is not None:
                found.append(now - max(since, seen.began_at))
        gaps.sort()
        return Noticed(
            seconds=round(now - seen.began_at, 2),
            probes=len(seen.probes),
            failed_probes=seen.failed_probes,
            worst_probe_ms=round(1e3 * max(waits, default=0.0), 1),
            tokens=len(seen.gaps),
            p50_itl_ms=round(1e3 * percentile(gaps, 50), 2),
            p99_itl_ms=round(1e3 * percentile(gaps, 99), 2),
            worst_itl_ms=round(1e3 * max(gaps, default=0.0), 1),
            refused=seen.refused,
        )

    def probe_for_ever(self) -> None:
        while True:
            self._probe_since = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(self._host, timeout=_PATIENCE_S)
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                connection.close()
            except OSError:
                self._seen.failed_probes += 1
            self._seen.probes.append(time.perf_counter() - self._probe_since)
            self._probe_since = None
            time.sleep(_PROBE_EVERY_S)

    def stream_for_ever(self) -> None:
        while True:
            try:
                answered = self._stream()
            except (OSError, http.client.HTTPException):
                answered = False
            self._token_since = None
            if not answered:
                self._seen.refused += 1
                time.sleep(0.2)

    def _stream(self) -> bool:
        connection = http.client.HTTPConnection(self._host, timeout=_PATIENCE_S)
        body = {
            "model": "default",
            "prompt": "the quick brown fox",
            "max_tokens": _STREAM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            connection.close()
            return False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if self._token_since is not None:
                self._seen.gaps.append(now - self._token_since)
            self._token_since = now
            if line.startswith((b"data: [DONE]", b'data: {"error"')):
                break
        connection.close()
        return b"[DONE]" in line


def main() -> None:
    observer = _Observer(sys.argv[1].removeprefix("http://"), sys.argv[2])
    for work in (observer.probe_for_ever, observer.stream_for_ever):
        threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        if line.strip() == "begin":
            observer.begin()
        else:
            print(json.dumps(asdict(observer.end())), flush=True)


if __name__ == "__main__":
    main()
