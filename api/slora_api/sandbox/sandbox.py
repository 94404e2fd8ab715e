"""The child's side of a sandbox: a process that runs templates and forms of tenants, and answers one request at a time.

Templates and forms may compute endlessly or use too much memory. Each request therefore has a limit of CPU time, and
the process has a limit of memory. When the CPU limit is reached, a signal ends the process, even inside a long
computation in C. CPU time, unlike wall-clock time, does not depend on the load of the machine.

Requests and answers are frames on stdin and stdout: four bytes of length, then msgpack. The process ends when its stdin
is closed. This module does not depend on tenants.
"""

import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

# Limit of the process's private memory. Shared libraries do not count.
MEMORY_BYTES = 256 << 20
# The niceness of a sandbox, so that processes that serve requests have a higher priority.
_NICE = 10
_LENGTH = struct.Struct(">I")


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

    def pack(self) -> bytes:
        return pack_frame(asdict(self))

    @staticmethod
    def unpack(content: bytes) -> "SandboxAnswer":
        return SandboxAnswer(**msgpack.unpackb(content))


def pack_frame(value: object) -> bytes:
    content: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(content)) + content


def read_length(header: bytes) -> int:
    """Returns the number of bytes that follow the four-byte header."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def serve_requests(answer: Callable[[Any], tuple[str | None, str | None]], cpu_limit_s: float) -> None:
    """Answers requests until stdin is closed.

    answer: called with a request. Returns the text and None, or None and the reason why there is no text.
    cpu_limit_s: limit of the CPU seconds of one request.
    """
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(_LENGTH.size):
        request = msgpack.unpackb(requests.read(read_length(header)), unicode_errors="surrogatepass")
        # SIGPROF has no handler, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        text, error = answer(request)
        packed = SandboxAnswer(text, error, time.process_time(), _resident_bytes()).pack()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(packed)
        answers.flush()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
