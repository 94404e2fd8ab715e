"""The child's side of a sandbox: a process that runs templates and forms of tenants, and answers one request at a time.

Templates and forms may compute endlessly or use too much memory. Each request therefore has a limit of CPU time, and
the process has a limit of memory. When the CPU limit is reached, a signal ends the process, even inside a long
computation in C. CPU time, unlike wall-clock time, does not depend on the load of the machine.

Requests and answers are frames (`wire`) on stdin and stdout. The process ends when its stdin is closed. This module
does not depend on tenants.
"""

import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slora_adapters.process.wire import encode, receive

# Limit of the process's private memory. Shared libraries do not count.
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SandboxAnswer:
    """The answer to one request.

    text: the result; None if `error` gives a reason.
    cpu_s: CPU seconds that the process has used since it started.
    resident_bytes: resident memory of the process after the request.
    """

    text: str | None
    error: str | None
    cpu_s: float
    resident_bytes: int


def serve_requests(answer: Callable[[Any], tuple[str | None, str | None]], cpu_limit_s: float) -> None:
    """Answers requests until stdin is closed.

    answer: called with a request. Returns the text and None, or None and the reason why there is no text.
    cpu_limit_s: limit of the CPU seconds of one request.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (request := receive(requests.read)) is not None:
        # SIGPROF has no handler, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        text, error = answer(request)
        packed = encode(SandboxAnswer(text, error, time.process_time(), _resident_bytes()))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(packed)
        answers.flush()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
