"""Processes that reserve and settle one quota as fast as they can. A program, because it forks and so has no threads.

    hammer FOLDER REDIS_URL PROCESSES SECONDS HOLD_S   prints what each process was granted
    kill FOLDER PROCESSES KILLS                        kills processes at random, then prints what is left reserved
    crash FOLDER                                       kills a process after each write to the file of the counters,
                                                       and prints what is left

A process holds each reservation for a random time of up to HOLD_S. Until it is refused one, it holds each for longer
than the one before, so that a slow machine reaches the quota, too.

This process is the main process of the host, and its children are the workers. The hammer's clock runs SPEED times as
fast as time, so that a window of a minute passes in seconds.
"""

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import redis.asyncio

from slora_api.quotas import host_counters
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import Quota
from slora_api.quotas.quota_counters import Charge, QuotaCounters, Reservation, Subject
from slora_api.quotas.redis_counters import RedisCounters

SPEED = 60
QUOTA = Quota(requests_per_minute=300, tokens_per_minute=20_000, concurrent_answers=12)
TENANT = Subject("acme", "", QUOTA)
KEYS = tuple(Subject("acme", f"key{number}", Quota(tokens_per_minute=12_000)) for number in range(3))


def fast_ns() -> int:
    return time.monotonic_ns() * SPEED


def fork(work: Callable[[], None]) -> int:
    """Runs `work` in a child process and returns its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def open_host(path: Path, process: int = 0) -> HostCounters:
    return HostCounters(path, process, clock_ns=fast_ns, max_accounts=64, max_reservations=128)


def open_counters(folder: Path, url: str, process: int) -> QuotaCounters:
    if not url:
        return open_host(folder / "quotas", process)
    host = open_host(folder / f"host{process}")
    # A lease must outlast a process that waits for the processor.
    return RedisCounters(redis.asyncio.Redis.from_url(url), host, lambda: fast_ns() // 10**6, 1e6)


@dataclass
class Granted:
    """What one process got. grants: for each reservation the moments before and after it, in milliseconds, its used
    tokens, and the moment before it was settled."""

    grants: list[list[int]] = field(default_factory=list)
    num_refused: int = 0


async def reserve_again_and_again(
    counters: QuotaCounters, number: int, granted: Granted, seconds: float, hold_s: float = 0.004
) -> None:
    draw = random.Random(number)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        subjects = (TENANT, KEYS[draw.randrange(len(KEYS))])
        before = fast_ns() // 10**6
        made = await counters.reserve(subjects, Charge(draw.randrange(1, 400), 1))
        after = fast_ns() // 10**6
        await asyncio.sleep(draw.random() * hold_s * (1 if granted.num_refused else 1 + len(granted.grants)))
        if not isinstance(made, Reservation):
            granted.num_refused += 1
            continue
        used = draw.randrange(made.charge.tokens + 1)
        granted.grants.append([before, after, used, fast_ns() // 10**6])
        counters.settle(made, used)


def hammer(folder: Path, url: str, processes: str, seconds: str, hold_s: str) -> None:
    if not url:
        open_host(folder / "quotas")

    def work(number: int) -> None:
        async def run() -> None:
            counters = open_counters(folder, url, number)
            granted = Granted()
            await reserve_again_and_again(counters, number, granted, float(seconds), float(hold_s))
            (folder / f"grants{number}.json").write_text(json.dumps(asdict(granted)), encoding="utf-8")
            await counters.close()

        asyncio.run(run())

    children = [fork(partial(work, number)) for number in range(1, int(processes) + 1)]
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("grants*.json")]
    grants = list(chain.from_iterable(one["grants"] for one in found))
    refused = sum(one["num_refused"] for one in found)
    json.dump({"failed": len(failed), "grants": grants, "refused": refused}, sys.stdout)


def kill(folder: Path, processes: str, kills: str) -> None:
    counters = open_host(folder / "quotas")

    def work(number: int) -> None:
        own = open_host(folder / "quotas", number)
        asyncio.run(reserve_again_and_again(own, os.getpid(), Granted(), math.inf))

    def kill_worker(number: int) -> None:
        os.kill(children[number], signal.SIGKILL)
        os.waitpid(children[number], 0)

    numbers = range(1, int(processes) + 1)
    children = {number: fork(partial(work, number)) for number in numbers}
    for _ in range(int(kills)):
        time.sleep(random.random() * 0.03)
        number = random.choice(numbers)
        kill_worker(number)
        children[number] = fork(partial(work, number))
    time.sleep(0.2)
    for number in numbers:
        kill_worker(number)
    json.dump(left_over(counters, numbers), sys.stdout)


def left_over(counters: HostCounters, dead: Iterable[int]) -> list[dict[str, Any]]:
    """What is reserved when every other process is dead."""

    async def read() -> list[dict[str, Any]]:
        for number in dead:
            counters.release(number)
        uses = await counters.read((TENANT, *KEYS))
        await counters.close()
        return [
            {
                "answers": use.answers,
                "reserved": use.reserved_tokens,
                "requests": use.requests,
                "tokens": use.tokens,
            }
            for use in uses
        ]

    return asyncio.run(read())


def crash(folder: Path) -> None:
    """For each number of writes: a process that dies after so many of a reservation and its settlement."""
    results = []
    for writes in range(1, 1000):
        (folder / "quotas").unlink(missing_ok=True)
        main = open_host(folder / "quotas")

        def work(writes: int = writes) -> None:
            async def run() -> None:
                counters = open_host(folder / "quotas", 1)
                left, content = writes, (folder / "quotas").read_bytes()

                def count(frame: FrameType, _: str, __: Any) -> Any:
                    nonlocal left, content
                    if frame.f_code.co_filename != host_counters.__file__:
                        return None
                    before, content = content, (folder / "quotas").read_bytes()
                    if content != before:
                        left -= 1
                        if left == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                    return count

                sys.settrace(count)
                made = await counters.reserve((TENANT, KEYS[0]), Charge(100, 2))
                assert isinstance(made, Reservation)
                counters.settle(made, 40)
                sys.settrace(None)

            asyncio.run(run())

        _, status = os.waitpid(fork(work), 0)
        results.append(left_over(main, [1])[:2])
        if status == 0:
            break
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    what, folder, *arguments = sys.argv[1:]
    {"hammer": hammer, "kill": kill, "crash": crash}[what](Path(folder), *arguments)
