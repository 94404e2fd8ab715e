import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from slora.errors import RequestRefused
from slora_api.generation import chat_templates
from slora_api.generation.chat_templates import ChatTemplates
from tests.api.scripted_engine import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi ünï"}]
T = TypeVar("T")


def with_templates(use: Callable[[ChatTemplates], Awaitable[T]]) -> T:
    async def run() -> T:
        templates = ChatTemplates(byte_tokenizer())
        try:
            return await use(templates)
        finally:
            await templates.close()

    return asyncio.run(run())


def render(template: str | None) -> str:
    return with_templates(lambda templates: templates.render(MESSAGES, template))


def test_the_base_models_template_is_used_when_an_adapter_brings_none() -> None:
    assert render(None) == "[user]hi ünï"


def test_an_adapters_own_template_is_used_with_the_models_special_tokens() -> None:
    assert (
        render("{{ messages[0].content }}!{{ eos_token }}{{ add_generation_prompt }}") == "hi ünï!<eos>True"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content.upper() }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_refuses_the_messages(template: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        render(template)
    assert caught.value.param == "messages"


def test_a_template_that_cannot_be_read_is_found_without_messages() -> None:
    reasons = with_templates(lambda templates: templates.check("{% if %}"))
    assert [reason.code for reason in reasons] == ["chat_template_malformed"]
    assert with_templates(lambda templates: templates.check("{{ messages[99].x.y.z }}")) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped_and_harms_nobody_else(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "RENDER_TIMEOUT_S", 0.3)

    async def use(templates: ChatTemplates) -> str:
        for _ in range(3):
            with pytest.raises(RequestRefused, match="longer than"):
                await templates.render(MESSAGES, template)
        return await templates.render(MESSAGES, "fine")

    assert with_templates(use) == "fine"


def test_a_template_that_fills_the_memory_is_refused() -> None:
    with pytest.raises(RequestRefused):
        render("{{ ('x' * 2000000000) | length }}")


def test_conversations_rendered_at_once_do_not_mix() -> None:
    async def use(templates: ChatTemplates) -> list[str]:
        renders = [
            templates.render([{"role": "user", "content": str(n)}], "{{ messages[0].content }}")
            for n in range(20)
        ]
        return list(await asyncio.gather(*renders))

    assert with_templates(use) == [str(n) for n in range(20)]


def test_a_rendering_that_was_cancelled_does_not_answer_the_next_one() -> None:
    async def use(templates: ChatTemplates) -> list[str]:
        for _ in range(4):
            slow = "{% for i in range(3000) %}{% for j in range(100) %}{% endfor %}{% endfor %}slow"
            task = asyncio.create_task(templates.render(MESSAGES, slow))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return [await templates.render(MESSAGES, "next") for _ in range(2)]

    assert with_templates(use) == ["next", "next"]
