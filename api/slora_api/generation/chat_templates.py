"""Renders conversations to text with the chat template of an adapter or of the base model.

The base model's template renders short conversations in this process: the operator trusts it, and the round trip to
another process would take longer. All other rendering, such as that with variables of a client, happens in processes
that tenants share in fair order:

- One request may use `RENDER_CPU_S` of CPU time. A generous limit of wall-clock time ends a stalled process.
- Each tenant has a budget of CPU time. A tenant that has used it up is answered 429. The budget is kept per tenant, not
per template.
- Cancelling a request removes it from the queue or kills the process that renders it.
- A process that dies or stalls is replaced. If starts fail, the pause before the next one grows.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slora.errors import RequestRefused
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import Reason
from slora_api.cpu_budget import CpuBudget
from slora_api.errors import ServerBusy
from slora_api.fair_slots import FairSlots, slots_of_process
from slora_api.generation.template_process import RenderedText, RendererSettings, pack_request
from slora_api.generation.template_renderer import RendererDied, RendererStalled, TemplateRenderer

__all__ = ["RENDER_CPU_S", "ChatTemplates"]

_log = logging.getLogger(__name__)

# CPU seconds of one request. Common templates take well below a millisecond, and the longest known one takes a few.
# Thousands of messages take some tens of milliseconds.
RENDER_CPU_S = 2.0
# A tenant whose templates take one millisecond can render 250 conversations per second indefinitely.
_BURST_CPU_S, _REFILL = 10.0, 0.25
# Charged for each request that ends its process, because another one must be started.
_START_CPU_S = 0.2
# Two are reserved for tenants that hold none, so that two tenants never hold all renderers.
_NUM_RENDERERS, _NUM_RESERVED = 4, 2
# On a machine with many busy programs, two seconds of CPU time can take a minute.
_RENDER_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 60.0
# A process may die for another reason than a limit, for example by the OOM killer. Its request is retried once.
_NUM_ATTEMPTS = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# A fresh process uses 25 MiB. A process that has grown beyond this limit is replaced.
_MAX_RESIDENT_BYTES = 96 << 20
# The base model's template renders a conversation of this size in less than a millisecond.
_SHORT_CHARS, _SHORT_MESSAGES = 8_000, 32

Messages = Sequence[Mapping[str, str]]


class ChatTemplates:
    """Renders conversations. Call `close` at the end.

    max_waiting: requests of one tenant that may wait for a process. num_processes: API processes of the host, which
    divide slots and CPU budgets. clock: monotonic seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_waiting: int = 256,
        render_cpu_s: float = RENDER_CPU_S,
        clock: Callable[[], float] = time.monotonic,
        num_processes: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = RendererSettings(tokenizer.special_tokens, render_cpu_s)
        self._clock = clock
        num_renderers = slots_of_process(_NUM_RENDERERS, _NUM_RESERVED, num_processes)
        self._slots = FairSlots(
            num_renderers, max_waiting, "chat templates to render", clock, num_reserved=_NUM_RESERVED
        )
        self._budget = CpuBudget(
            _BURST_CPU_S / num_processes, _REFILL / num_processes, "rendering chat templates", clock
        )
        self._idle: list[TemplateRenderer] = []
        self._num_failed_starts = 0
        self._next_start_at = 0.0

    async def render(
        self,
        tenant: str,
        messages: Messages,
        own_template: str | None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of the prompt.

        own_template: the adapter's chat template; None selects the base model's.
        variables: further variables of the template, from the client.

        Raises RequestRefused if the template refuses the messages, TenantBusy, and ServerBusy if no process can be
        started.
        """
        template = self._tokenizer.chat_template if own_template is None else own_template
        is_trusted = own_template is None and not variables
        if template is None or (is_trusted and _is_short(messages)):
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        every = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        answer = await self._ask(tenant, pack_request(template, messages, every))
        if answer.text is None:
            owner = "model" if own_template is None else "adapter"
            raise RequestRefused(
                f"The {owner}'s chat template refuses these messages: {answer.error}.", "messages"
            )
        return answer.text

    async def check(self, tenant: str, template: str) -> list[Reason]:
        """Returns a reason if the template cannot be compiled. The template is not tried on messages.

        Raises TenantBusy or ServerBusy.
        """
        answer = await self._ask(tenant, pack_request(template))
        if answer.error is None:
            return []
        return [Reason("chat_template_malformed", f"the chat template is not valid: {answer.error}")]

    async def close(self) -> None:
        """Ends the idle processes. A busy one ends with its request or with this process."""
        while self._idle:
            await self._idle.pop().close()

    async def _ask(self, tenant: str, request: bytes) -> RenderedText:
        self._budget.check(tenant)
        async with self._slots.hold(tenant):
            # Requests of the same tenant that were waiting before this one may have spent the budget.
            self._budget.check(tenant)
            for _ in range(_NUM_ATTEMPTS):
                renderer = await self._take_renderer()
                try:
                    return await self._render_in(renderer, tenant, request)
                except RendererStalled:
                    _log.warning(
                        "a rendering process did not answer within %g s and was killed", _RENDER_TIMEOUT_S
                    )
                    refusal: Exception = ServerBusy(
                        f"The chat template was not rendered within {_RENDER_TIMEOUT_S:g} s, because "
                        "the server is too busy. Try again."
                    )
                except RendererDied as death:
                    if death.hit_cpu_limit:
                        limit_s = self._settings.cpu_limit_s
                        return _failure(f"it takes more than {limit_s:g} s of CPU time")
                    _log.warning("%s", death)
                    refusal = RequestRefused(
                        f"The chat template ended its process with exit code {death.exit_code}; simplify it.",
                        "messages",
                    )
            raise refusal

    async def _render_in(self, renderer: TemplateRenderer, tenant: str, request: bytes) -> RenderedText:
        """Always charges the tenant. Keeps the process for the next request unless it failed or grew too large."""
        started_at = self._clock()
        used_s: float | None = None
        try:
            answer, used_s = await renderer.ask(request, _RENDER_TIMEOUT_S)
        finally:
            if used_s is None:
                # The CPU time of a killed process is unknown, but it is at most the limit and at most the elapsed time.
                used_s = min(self._settings.cpu_limit_s, self._clock() - started_at) + _START_CPU_S
            self._budget.charge(tenant, used_s)
        if answer.resident_bytes > _MAX_RESIDENT_BYTES:
            self._budget.charge(tenant, _START_CPU_S)
            await renderer.close()
        else:
            self._idle.append(renderer)
        return answer

    async def _take_renderer(self) -> TemplateRenderer:
        """Returns an idle process or starts one. Raises ServerBusy if none can be started."""
        while self._idle:
            renderer = self._idle.pop()
            if renderer.is_alive:
                return renderer
        for _ in range(_NUM_ATTEMPTS):
            pause_s = self._next_start_at - self._clock()
            if pause_s > 0:
                break
            try:
                renderer = await TemplateRenderer.start(self._settings, _START_TIMEOUT_S)
            except (RendererDied, RendererStalled, OSError) as error:
                self._num_failed_starts += 1
                _log.error("a rendering process could not be started: %s", error or type(error).__name__)
            else:
                self._num_failed_starts = 0
                return renderer
        else:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._num_failed_starts, 10))
            self._next_start_at = self._clock() + pause_s
        wait_s = max(1, math.ceil(pause_s))
        raise ServerBusy(
            "No process that renders chat templates could be started; the server's log has the "
            f"reason. Try again in {wait_s} s.",
            wait_s,
        )


def _is_short(messages: Messages) -> bool:
    if len(messages) > _SHORT_MESSAGES:
        return False
    return sum(len(text) for message in messages for text in message.values()) <= _SHORT_CHARS


def _failure(error: str) -> RenderedText:
    return RenderedText(None, error, 0.0, 0)
