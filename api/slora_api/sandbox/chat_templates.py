"""Renders conversations to text with the chat template of an adapter or of the base model.

The base model's template renders short conversations in this process: the operator trusts it, and the round trip to
another process would take longer. All other conversations, such as those with template variables from a client, are
rendered in sandboxes (`sandbox_pool`). The budget of CPU time is kept per tenant, not per template.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from slora.core.errors import RequestRefused
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import Reason
from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.fair_slots import FairSlots
from slora_api.sandbox.sandbox_pool import SandboxPool, SandboxWork
from slora_api.sandbox.sandbox_process import SandboxProcess
from slora_api.sandbox.template_process import MAX_RENDERED_BYTES, RendererSettings, pack_request

# Limit of the CPU seconds of one request. Common templates take well below a millisecond, and the longest known
# template takes a few milliseconds. Thousands of messages take tens of milliseconds.
RENDER_CPU_S = 2.0
# A tenant whose templates take one millisecond can render 250 conversations per second indefinitely.
_BURST_CPU_S, _REFILL = 10.0, 0.25
# The base model's template renders a conversation of this size in less than a millisecond.
_SHORT_CHARS, _SHORT_MESSAGES = 8_000, 32

Messages = Sequence[Mapping[str, Any]]


class ChatTemplates:
    """Renders conversations. Call `close` at the end.

    slots: see `cpu_slots`. num_processes: number of API processes of the host, which divide the CPU budgets among
    themselves. clock: monotonic seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        slots: FairSlots,
        render_cpu_s: float = RENDER_CPU_S,
        clock: Callable[[], float] = time.monotonic,
        num_processes: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        settings = RendererSettings(tokenizer.special_tokens, render_cpu_s)

        def start(timeout_s: float) -> Awaitable[SandboxProcess]:
            command = "slora_api.sandbox.template_process", settings.to_json()
            return SandboxProcess.start(command, pack_request(""), timeout_s, MAX_RENDERED_BYTES)

        self._pool = SandboxPool(
            SandboxWork(start, render_cpu_s, "rendered", "chat template"),
            slots,
            CpuBudget(
                _BURST_CPU_S / num_processes, _REFILL / num_processes, "rendering chat templates", clock
            ),
            clock,
        )

    def find_template(self, own_template: str | None, *, has_tools: bool) -> str | None:
        """Returns the template that `render` uses, or None if the model has no template. A model may have a second
        template for requests with tools.
        """
        if own_template is not None:
            return own_template
        tool_template = self._tokenizer.tool_template if has_tools else None
        return tool_template or self._tokenizer.chat_template

    async def render(
        self,
        tenant: str,
        messages: Messages,
        own_template: str | None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> str:
        """Returns the text of the prompt.

        own_template: the adapter's chat template; None selects the base model's.
        param: the field of the request that holds the messages. Errors name it.
        variables: further variables of the template, such as `tools`, from the client.

        Raises RequestRefused if the template refuses the messages, TenantBusy, and ServerBusy if no process can be
        started.
        """
        template = self.find_template(own_template, has_tools=bool((variables or {}).get("tools")))
        is_trusted = own_template is None and not variables
        if template is None or (is_trusted and _is_short(messages)):
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, param=param
            )
        every = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        answer = await self._pool.ask(tenant, pack_request(template, messages, every))
        if answer.text is None:
            owner = "model" if own_template is None else "adapter"
            raise RequestRefused(
                f"The {owner}'s chat template refuses these messages: {str(answer.error).rstrip('.')}.", param
            )
        return answer.text

    async def check(self, tenant: str, template: str) -> list[Reason]:
        """Returns a reason to refuse the template if it cannot be compiled. The check renders no messages.

        Raises TenantBusy or ServerBusy.
        """
        answer = await self._pool.ask(tenant, pack_request(template))
        if answer.error is None:
            return []
        return [Reason("chat_template_malformed", f"the chat template is not valid: {answer.error}")]

    async def close(self) -> None:
        """Ends the idle processes. A busy process ends when its request or this process ends."""
        await self._pool.close()


def _is_short(messages: Messages) -> bool:
    """Whether the messages are quick to render. Messages with tool calls are not, because the arguments have to be
    parsed.
    """
    if len(messages) > _SHORT_MESSAGES or any("tool_calls" in message for message in messages):
        return False
    return sum(len(text) for message in messages for text in message.values()) <= _SHORT_CHARS
