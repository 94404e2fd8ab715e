"""Sets up logging as text lines, or as JSON with one object per line. Every process of a server uses this module."""

import importlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

LOG_FORMATS = ("text", "json")


class _MaskedLines(logging.Formatter):
    def __init__(self, lines: logging.Formatter, mask: Callable[[str], str]) -> None:
        super().__init__()
        self._lines = lines
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(self._lines.format(record))


def set_up_logging(
    log_format: str,
    process: str,
    *filters: logging.Filter,
    label: str = "",
    mask: Callable[[str], str] = lambda line: line,
) -> None:
    """Makes this process log to standard error.

    log_format: one of LOG_FORMATS. process: the name of the process in JSON lines. filters: applied to each record
    before it is formatted. label: part of each text line, such as the number of a worker. mask: maps a formatted line
    to the line that is written.
    """
    if log_format == "json":
        lines = importlib.import_module("slora_adapters.process.json_logs").make_json_formatter(process)
    else:
        lines = logging.Formatter(f"%(asctime)s {label}%(name)s %(levelname)s %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_MaskedLines(lines, mask))
    for added in filters:
        handler.addFilter(added)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # They log a line for each request, as the hub's client sends them, and for each revision and plugin.
    for name in ("httpx", "httpx2", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Prints a line for people, by default on standard output. A stream that cannot be written, such as a pipe without
    a reader, is given up: what this process does must not depend on its readers.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream)
        logging.getLogger("slora").warning("nothing more is printed on %s: %s", stream.name, error.strerror)


def give_up(stream: TextIO) -> None:
    """Discards what the stream has not written yet, and everything that is written to it from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def open_missing_streams() -> None:
    """Makes the standard streams usable in every environment. One that is closed becomes /dev/null: otherwise, the next
    file that this process opens would take its place. Letters that an encoding lacks are written as escapes.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free number, which is this one. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif name != "stdin" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
