"""Turns conversations into text: the base model's template here, an adapter's own in a process that can be killed.

The base model's template is the operator's and is trusted; an adapter's is its tenant's and is not. A template that
once ran into the time limit is not tried again, so that nobody can keep the renderers busy.
"""

import asyncio
import hashlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from slora.errors import RequestRefused
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import Reason
from slora_api.generation.template_process import MAX_RENDERED_CHARS

__all__ = ["ChatTemplates"]

# A common template takes well below a millisecond, the longest known one a few.
RENDER_TIMEOUT_S = 2.0
# A fresh process imports Jinja first; on a busy machine that takes seconds.
START_TIMEOUT_S = 30.0
_NUM_RENDERERS = 2
_MAX_REMEMBERED = 10_000

# Tenants' programs run in the renderers: they get no secret, only what Python needs to start.
_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")

Messages = Sequence[Mapping[str, str]]


class _TookTooLong(Exception):
    """The template hit the time limit or brought its process down."""


class _Renderer:
    """One rendering process, started when first needed, killed when a template misbehaves. One request at a time."""

    def __init__(self, special_tokens: str) -> None:
        self._special_tokens = special_tokens
        self._process: Process | None = None

    async def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Raises _TookTooLong."""
        if self._process is None:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._process = await self._start()
        process, self._process = self._process, None
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                answer = await _exchange(process, request)
        except (TimeoutError, OSError, ValueError):
            raise _TookTooLong from None
        else:
            self._process = process
            return answer
        finally:
            # Also when the asker was cancelled half way: this answer must not become the next one's.
            if self._process is None:
                await _kill(process)

    async def close(self) -> None:
        if self._process is not None:
            await _kill(self._process)

    async def _start(self) -> Process:
        arguments = ("-P", "-m", "slora_api.generation.template_process", self._special_tokens)
        # JSON escapes a character to at most 12 bytes (a surrogate pair).
        limit = 12 * MAX_RENDERED_CHARS
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=PIPE, stdout=PIPE, limit=limit, env=environment
        )
        await _exchange(process, {"template": ""})
        return process


async def _exchange(process: Process, request: Mapping[str, object]) -> dict[str, str]:
    """One line there, one line back. Raises OSError or ValueError when the process has gone."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    answer: dict[str, str] = json.loads(await process.stdout.readline())
    return answer


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


class ChatTemplates:
    """Renders conversations; `close` when done."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special_tokens = json.dumps(dict(tokenizer.special_tokens))
        self._renderers: asyncio.LifoQueue[_Renderer] = asyncio.LifoQueue()
        for _ in range(_NUM_RENDERERS):
            self._renderers.put_nowait(_Renderer(special_tokens))
        self._too_slow: OrderedDict[bytes, None] = OrderedDict()

    async def render(self, messages: Messages, own_template: str | None) -> str:
        """The prompt's text. Raises RequestRefused when a template refuses these messages, or is none."""
        if own_template is None:
            return self._tokenizer.apply_chat_template(messages)
        answer = await self._ask({"template": own_template, "messages": messages})
        if "error" in answer:
            raise RequestRefused(
                f"The adapter's chat template refuses these messages: {answer['error']}.", "messages"
            )
        return answer["text"]

    async def check(self, template: str) -> list[Reason]:
        """A reason if the text is no template at all; what it does with messages is not tried."""
        answer = await self._ask({"template": template})
        if "error" not in answer:
            return []
        return [Reason("chat_template_malformed", f"the chat template cannot be read: {answer['error']}")]

    async def close(self) -> None:
        """Ends the rendering processes that are idle; one that is busy ends with this process."""
        while not self._renderers.empty():
            await self._renderers.get_nowait().close()

    async def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        template = hashlib.sha256(str(request["template"]).encode("utf-8", "surrogatepass")).digest()
        if template in self._too_slow:
            return _TOO_SLOW
        renderer = await self._renderers.get()
        try:
            return await renderer.ask(request)
        except _TookTooLong:
            self._too_slow[template] = None
            if len(self._too_slow) > _MAX_REMEMBERED:
                self._too_slow.popitem(last=False)
            return _TOO_SLOW
        finally:
            self._renderers.put_nowait(renderer)


_TOO_SLOW = {"error": f"it takes longer than {RENDER_TIMEOUT_S:g} s"}
