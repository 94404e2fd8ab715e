"""Shows the progress of a long operation on standard error: completed units, rate, and remaining time.

Nothing is shown unless standard error is a terminal, so logs and pipes stay free of control characters.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TypeVar

from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

T = TypeVar("T")


@contextmanager
def show_progress(
    label: str, total: int | None, unit: str = "B", *, is_quiet: bool = False
) -> Iterator[Callable[[int], Any]]:
    """Shows a bar during the block. Yields a function that advances the bar by a number of units.

    total: number of units; None if it is not known. unit: name of the unit, such as "B" for bytes. is_quiet: show
    nothing, even on a terminal.
    """
    with tqdm(
        total=total,
        desc=label,
        unit=unit,
        unit_scale=unit == "B",
        leave=False,
        disable=is_quiet or not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def track_progress(label: str, items: Sequence[T], unit: str = "case") -> Iterator[T]:
    """Yields the items. Shows a bar, which advances when the caller has finished with an item."""
    with show_progress(label, len(items), unit) as advance:
        for item in items:
            yield item
            advance(1)


def count_reads(file: IO[bytes], advance: Callable[[int], Any]) -> IO[bytes]:
    """Wraps the file, so that each read calls `advance` with the number of bytes that were read."""
    counted: IO[bytes] = CallbackIOWrapper(advance, file, "read")
    return counted
