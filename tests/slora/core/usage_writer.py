"""Writes usage records until it is killed. Prints the number of each record that is durable."""

import itertools
import sys
from concurrent.futures import Future
from pathlib import Path

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageJournal, UsageRecord


def main() -> None:
    journal = UsageJournal(Path(sys.argv[1]), segment_bytes=16 << 10)
    for first in itertools.count(step=20):
        waiting: list[Future[None]] = []
        for number in range(first, first + 20):
            usage = RequestUsage(prompt_tokens=number, page_seconds=number / 8)
            waiting.append(
                journal.append(UsageRecord(f"request-{number}", "acme", "key", "ab" * 32, 1.5, usage))
            )
        for future in waiting:
            future.result()
        print(first + 19, flush=True)


main()
