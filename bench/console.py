"""What the console costs: the engine's tokens per second while operators watch, and the first paint in a browser.

    python -m bench.console [--parts viewers paint] [--quick] [--json FILE]

viewers  rounds of 64 streams of the base model, in turn without viewers and with 50 that read `/admin/live`. The engine
         has one thread, so that the API process and all clients share the other core.
paint    the console in Chromium, with an empty cache: the time to the first paint, and the bytes of all files.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from bench.adapter_depot import Depot
from bench.bars import Bar
from bench.live_platform import Platform, Setup, Sizes, completion, live_platform
from bench.parts import Tables, run_parts
from bench.serving import MODEL
from bench.sse_client import SseClient
from bench.table import Row
from bench.workload import prompts
from slora_adapters.process.progress_bar import track_progress
from tests.api.console.browser import open_page, running_browser
from tests.api.served import ADMIN_KEY, EOS

__all__ = ["paint_tables", "viewer_tables"]

_SETUP = Setup(MODEL)
_STREAMS, _VIEWERS = 64, 50
_READ_BYTES = 1 << 16
_RATIO = "with viewers / without"
_VIEWER_BAR = Bar(_RATIO, lambda row: row["case"] == _RATIO, "median", 0.98)
_PAINT_BARS = (
    Bar("first paint, ms", lambda row: True, "first paint ms", 1000.0, at_most=True),
    Bar("files, KB", lambda row: True, "files KB", 300.0, at_most=True),
)
# The time to the first paint, and the bytes of the page and of all that it loaded.
_PAINT = """() => {
  const files = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return [performance.getEntriesByName("first-contentful-paint")[0].startTime,
          files.reduce((sum, file) => sum + file.transferSize, 0)];
}"""


def viewer_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    """One round's rate varies by a tenth, so the median of the ratios of many pairs is held against the bar."""
    pairs, output_tokens = (1, 4) if quick else (15, 64)
    drawn = prompts((2 * pairs + 1) * _STREAMS, 16, EOS)
    runs: dict[str, list[float]] = {"without viewers": [], f"{_VIEWERS} viewers": []}
    num_bytes: list[int] = []
    with _platform(setup, 16 + output_tokens) as platform:
        for number in track_progress("Rounds", range(2 * pairs + 1), "round"):
            asked = drawn[number * _STREAMS : (number + 1) * _STREAMS]
            name = list(runs)[number % 2]
            tokens_per_s, read = asyncio.run(
                _measure(platform, asked, output_tokens, _VIEWERS * (number % 2))
            )
            # The first round is a warm-up.
            if number:
                runs[name].append(tokens_per_s)
                num_bytes += [read] * (number % 2)
    without, beside = runs.values()
    runs[_RATIO] = [b / a for a, b in zip(without, beside, strict=True)]
    rows: list[Row] = [
        {"case": name, "median": statistics.median(figures), "min": min(figures), "max": max(figures)}
        for name, figures in runs.items()
    ]
    rows[1]["KB to each viewer in a round"] = statistics.median(num_bytes) / _VIEWERS / 1000
    # A quick round ends before the next frame.
    assert quick or all(num_bytes), "no frame arrived in a round"
    return {
        f"{_STREAMS} streams of the base model, tokens/s in {pairs} pairs of rounds": rows,
        "bar of the viewers": [*_VIEWER_BAR.verdicts(rows)],
    }


async def _measure(
    platform: Platform, asked: list[list[int]], output_tokens: int, num_viewers: int
) -> tuple[float, int]:
    """Returns the tokens per second of all streams, and the bytes that the viewers read meanwhile."""
    key = platform.key("bench")
    async with _viewers(platform.url, num_viewers) as count_bytes, SseClient(platform.url) as client:
        await client.connect(len(asked))
        before, start = count_bytes(), time.perf_counter()
        bodies = [{**completion("model", output_tokens), "prompt": prompt} for prompt in asked]
        answers = await asyncio.gather(*(client.complete(key, body) for body in bodies))
        seconds, num_bytes = time.perf_counter() - start, count_bytes() - before
    if failed := [answer for answer in answers if answer.num_tokens != output_tokens]:
        raise RuntimeError(f"{len(failed)} streams were not complete: {failed[0].error}")
    return len(asked) * output_tokens / seconds, num_bytes


@asynccontextmanager
async def _viewers(url: str, count: int) -> AsyncIterator[Callable[[], int]]:
    """Viewers that read the operator's live feed. Yields a function that counts the bytes that they have read."""
    host, port = url.removeprefix("http://").split(":")
    num_read = 0

    async def watch(opened: asyncio.Event) -> None:
        nonlocal num_read
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"GET /admin/live?frames=1000000 HTTP/1.1\r\nHost: {host}\r\n"
            writer.write(f"{head}Authorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
            while content := await reader.read(_READ_BYTES):
                if not opened.is_set() and not content.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the live feed was refused: {content[:200]!r}")
                opened.set()
                num_read += len(content)
            raise RuntimeError("the live feed ended")
        finally:
            writer.close()

    events = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(watch(event)) for event in events]
    try:
        await asyncio.gather(*(event.wait() for event in events))
        yield lambda: num_read
        if ended := [task for task in tasks if task.done()]:
            await ended[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def paint_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    """Each round has a browser context of its own, whose cache is empty."""
    figures: list[tuple[float, float]] = []
    with _platform(setup, 16) as platform, running_browser() as browser:
        for _ in track_progress("Paints", range(1 if quick else 9), "paint"):
            with open_page(browser, platform.url) as console:
                console.sign_in(ADMIN_KEY, "pool")
                console.page.wait_for_load_state("load")
                figures.append(tuple(console.page.evaluate(_PAINT)))
    paint_ms, num_bytes = zip(*figures, strict=True)
    rows: list[Row] = [
        {
            "case": "the console in an empty browser",
            "first paint ms": statistics.median(paint_ms),
            "slowest ms": max(paint_ms),
            "files KB": max(num_bytes) / 1000,
        }
    ]
    return {
        "first paint on the same machine": rows,
        "bars of the paint": [verdict for bar in _PAINT_BARS for verdict in bar.verdicts(rows)],
    }


@contextmanager
def _platform(setup: Setup, num_tokens: int) -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        depot = Depot(Path(directory), setup.model)
        try:
            sizes = Sizes.with_room(depot, depot.add(8, [("tenant", "unused")]), _STREAMS, num_tokens)
            with live_platform(depot, sizes, *setup.flags, threads=1) as platform:
                yield platform
        finally:
            depot.close()


PARTS: Mapping[str, Callable[..., Tables]] = {"viewers": viewer_tables, "paint": paint_tables}

if __name__ == "__main__":
    assert __doc__ is not None
    run_parts(__doc__, PARTS)
