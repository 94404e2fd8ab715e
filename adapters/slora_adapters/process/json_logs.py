"""Log records as JSON, formatted by structlog. Only processes that log JSON import structlog."""

import logging
from datetime import UTC, datetime

from structlog.processors import EventRenamer, JSONRenderer, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, WrappedLogger

# Attributes that a log filter adds to the records of a request.
_REQUEST_FIELDS = ("request_id", "tenant")


def make_json_formatter(process: str) -> logging.Formatter:
    """Returns a formatter that writes each record as one JSON object on one line.

    process: the name of this process, which every line contains. The fields are those of docs/monitoring.md.
    """

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"time": _format_time(event["_record"]), "process": process, **event}

    return ProcessorFormatter(
        processors=[
            add_process,
            add_log_level,
            add_logger_name,
            ExtraAdder(_REQUEST_FIELDS),
            ProcessorFormatter.remove_processors_meta,
            format_exc_info,
            EventRenamer("message"),
            JSONRenderer(),
        ]
    )


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
