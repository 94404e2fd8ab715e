"""Three attackers beside five honest tenants for a while: `python -m bench.attacks.mixed --minutes 10`.

The attackers hold valid keys and send the attacks of the table at random, except for those that need the operator or
another start of the server. The honest tenants ask for less than their share. Their goodput is compared with what it is
without the attackers, in the same run.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.attacks.catalogue import ATTACKS
from bench.attacks.honest import Harvest
from bench.attacks.memory_meter import MemoryMeter
from bench.attacks.target import ROOT, Limits, attacked_server
from bench.attacks.window import windows_of
from bench.table import Row, print_table, write_json

__all__ = ["Outcome", "run_mixed"]

_NUM_HONEST = 5
_NUM_ATTACKERS = 3
_SETTLE_S = 10.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """rss_bytes: of the API process after the warm-up, at its peak and at the end."""

    alone: Harvest
    attacked: Harvest
    rss_bytes: tuple[int, int, int]
    sent: dict[str, int]

    @property
    def goodput_ratio(self) -> float:
        return self.attacked.goodput / self.alone.goodput if self.alone.goodput else 0.0

    @property
    def server_errors(self) -> int:
        """Honest requests that were answered with a 5xx, or lost."""
        return sum(number for status, number in self.attacked.failed.items() if status[0] in "05")


def run_mixed(minutes: float, sources: Path = ROOT, seed: int = 0, api_workers: int = 1) -> Outcome:
    """Runs the honest tenants alone for a quarter of `minutes`, and then with the attackers for `minutes`."""
    flags = ("--api-workers", str(api_workers)) if api_workers > 1 else ()
    with (
        tempfile.TemporaryDirectory(prefix="slora-mixed-") as folder,
        attacked_server(Path(folder), sources, Limits(flags)) as target,
    ):
        runs = [(one.title, one.plan(target)) for one in ATTACKS if one.in_mixture]
        keys = [target.key(f"honest{at}") for at in range(_NUM_HONEST)]
        memory = MemoryMeter(target.served.process.pid)
        with windows_of("bench.attacks.honest", Harvest, [target.url, *keys]) as window:
            time.sleep(_SETTLE_S)
            with window() as alone:
                time.sleep(15 * minutes)
            attackers = _Attackers(runs, seed)
            # The first attack of each kind allocates memory that stays, so it is not counted as growth.
            time.sleep(6 * minutes)
            before = memory.reset()
            with window() as attacked:
                time.sleep(60 * minutes)
            sent = attackers.stop()
            time.sleep(_SETTLE_S)
            peak, _, after = memory.end()
        return Outcome(alone[0], attacked[0], (before, peak, after), sent)


class _Attackers:
    def __init__(self, runs: list[tuple[str, Callable[[], str]]], seed: int) -> None:
        self._runs = runs
        self._sent: dict[str, int] = {}
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._attack, args=(random.Random(seed + at),), daemon=True)
            for at in range(_NUM_ATTACKERS)
        ]
        for thread in self._threads:
            thread.start()

    def _attack(self, chance: random.Random) -> None:
        while not self._done.is_set():
            title, run = chance.choice(self._runs)
            try:
                run()
            except (AssertionError, LookupError, OSError, RuntimeError, httpx.HTTPError):
                title = f"{title} (failed)"
            self._sent[title] = self._sent.get(title, 0) + 1

    def stop(self) -> dict[str, int]:
        """How often each attack was sent. An attack that is under way ends within its minute."""
        self._done.set()
        for thread in self._threads:
            thread.join(90)
        return self._sent


def row_of(outcome: Outcome) -> Row:
    before, peak, after = (size // _MIB for size in outcome.rss_bytes)
    return {
        "goodput alone": round(outcome.alone.goodput, 3),
        "goodput attacked": round(outcome.attacked.goodput, 3),
        "ratio": round(outcome.goodput_ratio, 3),
        "honest 5xx": outcome.server_errors,
        "failed": str(outcome.attacked.failed),
        "p99 TTFT alone ms": outcome.alone.p99_ttft_ms,
        "p99 TTFT ms": outcome.attacked.p99_ttft_ms,
        "p99 ITL alone ms": outcome.alone.p99_itl_ms,
        "p99 ITL ms": outcome.attacked.p99_itl_ms,
        "RSS before MiB": before,
        "RSS peak MiB": peak,
        "RSS after MiB": after,
        "attacks": sum(outcome.sent.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-workers", type=int, default=1, help="of the server")
    parser.add_argument("--out", type=Path, help="a JSON file for the row")
    parser.add_argument(
        "--sources", type=Path, default=ROOT, help="the checkout of the server (default: this one)"
    )
    parser.add_argument("--note", default="", help="kept with the row, for example what else ran")
    arguments = parser.parse_args()
    outcome = run_mixed(arguments.minutes, arguments.sources.resolve(), arguments.seed, arguments.api_workers)
    row = row_of(outcome)
    print_table("mixed", [row])
    if arguments.out is not None:
        options = {
            "minutes": arguments.minutes,
            "seed": arguments.seed,
            "api_workers": arguments.api_workers,
            "note": arguments.note,
        }
        write_json(arguments.out, {"mixed": [{**row, "sent": outcome.sent}]}, options)


if __name__ == "__main__":
    main()
