"""A process that renders chat templates: `python -m slora_api.sandbox.template_process JSON`.

A tenant's template is an untrusted program. Jinja's sandbox keeps it away from the server's objects, and `sandbox`
limits its CPU time and memory. This module does not depend on tokenizers, adapters or tenants.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jinja2
from pydantic_core import to_json

from slora.text.chat_template import compile_chat_template, render_chat
from slora_adapters.process.wire import encode
from slora_api.sandbox.sandbox import MEMORY_BYTES, serve_requests

# The maximum size of a rendered text. It is far longer than any context. The server decodes this many bytes in a few
# milliseconds.
MAX_RENDERED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RendererSettings:
    """Settings of a rendering process.

    special_tokens: variables that every template may use.
    cpu_limit_s: limit of the CPU seconds of one request.
    """

    special_tokens: Mapping[str, str]
    cpu_limit_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RendererSettings":
        return RendererSettings(**json.loads(text))


def pack_request(template: str, messages: Any = None, variables: Mapping[str, Any] | None = None) -> bytes:
    """Encodes a request. Without `messages`, the process only checks that the template can be compiled.

    variables: the variables of the template. They are sent as JSON, because msgpack has no integers of more than 64
        bits.
    """
    text = to_json(variables or {}).decode()
    return encode({"template": template, "messages": messages, "variables": text})


def _render(special_tokens: Mapping[str, str], request: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns the text and None, or None and the reason why there is no text."""
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
        return None, f"it takes more than {MEMORY_BYTES} bytes of memory, or is nested too deeply"
    except Exception as error:  # A template may raise any exception.
        return None, (str(error) or type(error).__name__).encode(errors="backslashreplace").decode()[:1000]
    if num_bytes > MAX_RENDERED_BYTES:
        return None, f"it outputs {num_bytes} bytes; at most {MAX_RENDERED_BYTES} are accepted"
    return text, None


def main() -> None:
    """Answers requests until stdin is closed."""
    settings = RendererSettings.from_json(sys.argv[1])
    serve_requests(partial(_render, settings.special_tokens), settings.cpu_limit_s)


if __name__ == "__main__":
    main()
