"""A process that renders chat templates: `python -m slora_api.generation.template_process JSON`.

A tenant's template is an untrusted program. The sandbox keeps it away from the server's objects. It does not prevent
endless computations, such as `{{ 10 ** (10 ** 8) }}`, or the use of too much memory. Each request therefore has a limit
of CPU time, and the process has a limit of memory. The signal of the CPU limit ends the process even inside a long
computation in C. CPU time, unlike wall-clock time, does not depend on the load of the machine.

Requests and answers are frames on stdin and stdout: four bytes of length, then msgpack. The process ends when its stdin
is closed. It does not depend on tokenizers, adapters or tenants.
"""

import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import msgpack

from slora.text.chat_template import compile_chat_template, render_chat

__all__ = ["MAX_RENDERED_BYTES", "RenderedText", "RendererSettings", "main", "pack_request", "read_length"]

# Far longer than any context. Decoding this many bytes takes the reader some milliseconds.
MAX_RENDERED_BYTES = 8 << 20
# Limit of private memory. It does not count shared libraries.
_MEMORY_BYTES = 256 << 20
# Niceness: the processes that serve requests go first.
_NICE = 10
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class RendererSettings:
    """Settings of a rendering process.

    special_tokens: variables that every template may use.
    cpu_limit_s: CPU seconds of one request.
    """

    special_tokens: Mapping[str, str]
    cpu_limit_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RendererSettings":
        return RendererSettings(**json.loads(text))


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The answer to one request.

    text: the rendered text; None if `error` gives a reason.
    cpu_s: CPU seconds that the process has used since it started.
    resident_bytes: resident memory of the process after the request.
    """

    text: str | None
    error: str | None
    cpu_s: float
    resident_bytes: int

    def pack(self) -> bytes:
        return _frame(asdict(self))

    @staticmethod
    def unpack(content: bytes) -> "RenderedText":
        return RenderedText(**msgpack.unpackb(content))


def pack_request(template: str, messages: Any = None, variables: Mapping[str, Any] | None = None) -> bytes:
    """Encodes a request. Without `messages`, the process only checks that the template can be compiled.

    variables: of the template. They travel as JSON, because msgpack has no integers of more than 64 bits.
    """
    return _frame({"template": template, "messages": messages, "variables": json.dumps(variables or {})})


def read_length(header: bytes) -> int:
    """Returns the number of bytes that follow the four-byte header."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def _frame(value: object) -> bytes:
    content: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(content)) + content


def _render(request: Mapping[str, Any], special_tokens: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Returns the text, or None and the reason why there is no text."""
    try:
        if request["messages"] is None:
            compile_chat_template(request["template"])
            return "", None
        variables = json.loads(request["variables"])
        text = render_chat(request["template"], request["messages"], special_tokens, variables)
        num_bytes = len(text.encode())
    except jinja2.TemplateSyntaxError as error:
        return None, f"line {error.lineno}: {error.message}"
    except UnicodeEncodeError as error:
        return (
            None,
            f"it outputs the lone surrogate U+{ord(error.object[error.start]):04X} at character "
            f"{error.start}",
        )
    except (MemoryError, RecursionError):
        return None, f"it takes more than {_MEMORY_BYTES} bytes of memory, or is nested too deeply"
    except Exception as error:  # a template may raise any exception
        return None, (str(error) or type(error).__name__).encode(errors="backslashreplace").decode()[:1000]
    if num_bytes > MAX_RENDERED_BYTES:
        return None, f"it outputs {num_bytes} bytes; at most {MAX_RENDERED_BYTES} are accepted"
    return text, None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _answer(content: bytes, special_tokens: Mapping[str, str]) -> bytes:
    text, error = _render(msgpack.unpackb(content, unicode_errors="surrogatepass"), special_tokens)
    return RenderedText(text, error, time.process_time(), _resident_bytes()).pack()


def _serve(requests: BinaryIO, answers: BinaryIO, settings: RendererSettings) -> None:
    while header := requests.read(_LENGTH.size):
        content = requests.read(read_length(header))
        # SIGPROF has no handler, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, settings.cpu_limit_s)
        answer = _answer(content, settings.special_tokens)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer)
        answers.flush()


def main() -> None:
    """Answers requests until stdin is closed."""
    settings = RendererSettings.from_json(sys.argv[1])
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    _serve(sys.stdin.buffer, sys.stdout.buffer, settings)


if __name__ == "__main__":
    main()
