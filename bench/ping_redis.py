"""PINGs a Redis on a connection of its own: what whoever shares it with loads notices of them.

A process of its own, so that nothing else of a bench delays it: `ping_redis URL` goes on until its standard input ends,
and then prints when each was sent, on `time.perf_counter`, and how long it took.
"""

import json
import os
import subprocess
import sys
import threading
import time

import redis

from bench.contender import SOURCES

_INTERVAL_S = 0.005


class RedisPinger:
    """Pings from the start until `stop`."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.ping_redis", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCES},
            encoding="utf-8",
        )

    def stop(self) -> list[tuple[float, float]]:
        """(sent at, seconds) of each ping."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0, "the pinging process failed"
        return [(sent_at, seconds) for sent_at, seconds in json.loads(output)]


def main() -> None:
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    pings = []
    with redis.Redis.from_url(sys.argv[1]) as client:
        client.ping()
        while not ended.wait(_INTERVAL_S):
            start = time.perf_counter()
            client.ping()
            pings.append((start, time.perf_counter() - start))
    print(json.dumps(pings))


if __name__ == "__main__":
    main()
