"""Raises the limit of file descriptors at the start, and derives the number of connections from it."""

import logging
import resource

from slora_api.core.settings import Settings
from slora_api.http.http_protocol import ConnectionLimits

_log = logging.getLogger(__name__)

# Descriptors for everything but connections: the database, the store, sockets of the child processes, uploads, and
# refused connections that are being closed. A busy server needs about 60 of them (measured).
_OTHER_DESCRIPTORS = 128


def raise_descriptor_limit() -> int:
    """Raises the soft limit of this process and its future children to the hard limit. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def fit_connections(max_connections: int, num_descriptors: int) -> int:
    """Returns how many connections the descriptors allow, at most `max_connections`."""
    if shortage := explain_few_descriptors(max_connections, num_descriptors):
        _log.warning("%s", shortage)
    return min(max_connections, _allowed_connections(num_descriptors))


def explain_few_descriptors(max_connections: int, num_descriptors: int) -> str:
    """If the descriptors allow fewer connections than `max_connections`, returns the reason and the remedy. Otherwise
    returns an empty string.
    """
    allowed = _allowed_connections(num_descriptors)
    if max_connections <= allowed:
        return ""
    return (
        f"this process may open {num_descriptors} files, which is enough for {allowed} of the {max_connections} "
        "connections of max_connections: raise the limit of open files (ulimit -Hn, LimitNOFILE=, or docker's "
        "--ulimit nofile=)"
    )


def _allowed_connections(num_descriptors: int) -> int:
    return num_descriptors - min(_OTHER_DESCRIPTORS, num_descriptors // 2)


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of open files and derives the number of connections from it."""
    share = -(-settings.max_connections // settings.api_workers)
    max_connections = fit_connections(share, raise_descriptor_limit())
    return ConnectionLimits(
        max_connections, settings.max_connections_per_address, num_processes=settings.api_workers
    )
