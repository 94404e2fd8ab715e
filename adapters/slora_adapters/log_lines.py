"""Sets up logging as text lines, or as JSON with one object per line. Every process of a server uses this module."""

import importlib
import logging
import sys
from collections.abc import Callable

__all__ = ["LOG_FORMATS", "set_up_logging"]

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
        lines = importlib.import_module("slora_adapters.json_lines").make_json_formatter(process)
    else:
        lines = logging.Formatter(f"%(asctime)s {label}%(name)s %(levelname)s %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_MaskedLines(lines, mask))
    for one in filters:
        handler.addFilter(one)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
