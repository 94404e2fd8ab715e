"""The format of tool calls is recognized by the chat template."""

import pytest

from slora_api.chat.call_format import CALL_FORMATS
from slora_api.chat.template_traits import read_traits
from slora_api.settings import TOOL_CALL_PARSERS
from tests.support.tool_templates import HERMES, R1, TOOL_TEMPLATES


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_the_template_of_each_family_shows_its_format(family: str) -> None:
    traits = read_traits(TOOL_TEMPLATES[family])
    assert traits.reads_tools and traits.max_calls == (1 if family == "llama3" else None)
    assert traits.call_format is CALL_FORMATS["hermes" if family == "qwen3" else family]
    assert traits.thinks == (family in ("qwen3", "deepseek"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ message['tool_calls'][0] }}{% if message.tool_calls | length == 1 %}",
        "{% set call = message.tool_calls[0].function %}",
    ],
)
def test_a_template_that_reads_only_the_first_call_is_recognized(template: str) -> None:
    assert read_traits(template).max_calls == 1


@pytest.mark.parametrize(
    "template",
    [
        "{% if message.tool_calls[0].id %}{% for call in message.tool_calls %}",
        "{{ message['tool_calls'][0].id }}{% for call in message['tool_calls'] %}",
        "{{ message.tool_calls[0].id }}{{ message.tool_calls | tojson }}",
        "{% set calls = message.tool_calls %}",
    ],
)
def test_a_template_that_may_read_all_calls_is_not_held_to_one(template: str) -> None:
    assert read_traits(template).max_calls is None


def test_each_format_can_be_chosen_by_a_setting() -> None:
    assert TOOL_CALL_PARSERS[1:] == tuple(CALL_FORMATS)


def test_a_template_for_reasoning_is_recognized_without_tools() -> None:
    traits = read_traits(R1)
    assert traits.thinks and not traits.reads_tools and traits.max_calls == 0


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }}",
        "{# tools, tool_calls, </think> #}{{ messages }}",
        "{# tools #}{{ messages }}{# tools\n #}{#}tools#}",
        "{{ toolset }}{# tools",
        "{{ my_tools }}",
    ],
)
def test_a_template_without_tools_and_reasoning_has_neither(template: str) -> None:
    traits = read_traits(template)
    assert not traits.reads_tools and not traits.thinks and traits.max_calls == 0


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }}",
        HERMES.replace("<tool_call>", "<tool_call><function="),
        "{{ tools }}<tool_call><arg_key>",
        "<start_of_turn>{{ tools }}<start_function_call>",
    ],
)
def test_a_format_that_this_server_cannot_read_is_unknown(template: str) -> None:
    traits = read_traits(template)
    assert traits.reads_tools and traits.call_format is None
