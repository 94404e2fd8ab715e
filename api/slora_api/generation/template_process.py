"""Renders chat templates of adapters in a process of its own: `slora_api.generation.template_process JSON`.

A template is a program that a tenant uploaded. The sandbox keeps it from the server's objects, but not from looping
for ever (`{{ 10 ** (10 ** 8) }}` needs no loop even) or from filling the memory. So it runs here, where a limit on
memory holds, and where whoever waits can kill it; an alarm ends it should nobody be left to. Requests come as lines
of JSON on stdin, answers leave as lines on stdout; the process ends with its stdin.

Knows no tokenizer, no adapter and no tenant.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jinja2

from slora.text.chat_template import compile_chat_template

__all__ = ["MAX_RENDERED_CHARS", "main"]

_MEMORY_BYTES = 512 << 20
# Well above what the parent waits for (chat_templates.RENDER_TIMEOUT_S): this is for when the parent is dead.
_ALARM_S = 30
# Far beyond any context; keeps one answer from filling the pipe with gigabytes.
MAX_RENDERED_CHARS = 8 << 20


def _render(request: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, str]:
    """request: `template`, and `messages` unless the template is only to be checked."""
    try:
        template = compile_chat_template(request["template"])
        if "messages" not in request:
            return {"text": ""}
        text = template.render(
            messages=request["messages"],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except (MemoryError, RecursionError):
        return {"error": "it takes too much memory"}
    except Exception as error:  # the top of the loop: a template may raise anything
        return {"error": str(error) or type(error).__name__}
    if len(text) > MAX_RENDERED_CHARS:
        return {"error": f"it writes {len(text)} characters; at most {MAX_RENDERED_CHARS} are accepted"}
    return {"text": text}


def main() -> None:
    """Serves until stdin ends."""
    special_tokens = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin.buffer:
        # Unhandled, the signal ends the process even inside a long computation in C.
        signal.alarm(_ALARM_S)
        answer = _render(json.loads(line), special_tokens)
        signal.alarm(0)
        # Lone surrogates in a message survive as escapes.
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
