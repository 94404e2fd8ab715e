"""The format of tool calls is recognized by the chat template."""

from typing import Any

import pytest

from slora_api.chat.call_format import CALL_FORMATS
from slora_api.chat.template_traits import read_traits
from slora_api.core.settings import TOOL_CALL_PARSERS
from tests.support.tool_templates import HERMES, QWEN3, R1, TOOL_TEMPLATES

# Switches in the manner of Qwen 3, SmolLM 3, DeepSeek V3.1, Granite, Gemma 4, Hunyuan and gpt-oss.
SMOLLM3 = "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
DEEPSEEK31 = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
GRANITE = "{%- if thinking %}Write down your thinking.{% endif %}"
GEMMA4 = "{% set enable_thinking = enable_thinking | default(false) %}"
HUNYUAN = (
    "{{ '}}' ~ tools }}{% if enable_thinking is defined and enable_thinking is false %}a{% endif %}{{ 'b' }}"
)
GPT_OSS = '{{ "Reasoning: " + reasoning_effort }}'


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


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (QWEN3, "none", {"enable_thinking": False}),
        (QWEN3, "minimal", {"enable_thinking": False}),
        (QWEN3, "low", {"enable_thinking": True}),
        (SMOLLM3, "high", {"enable_thinking": True}),
        (DEEPSEEK31, "medium", {"thinking": True}),
        (GRANITE, "none", {"thinking": False}),
        (GEMMA4, "high", {"enable_thinking": True}),
        (HUNYUAN, "none", {"enable_thinking": False}),
        (GPT_OSS, "none", {"reasoning_effort": "none"}),
        (QWEN3 + GPT_OSS, "low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (QWEN3 + GPT_OSS, "none", {"enable_thinking": False}),
    ],
)
def test_an_effort_sets_the_variables_that_the_template_reads(
    template: str, effort: str, variables: dict[str, Any]
) -> None:
    switch = read_traits(template).switch
    assert switch.choose_variables(effort) == variables and switch.list_accepted(thinks=True) is None


@pytest.mark.parametrize(
    "template",
    [
        R1,
        "thinking enable_thinking reasoning_effort {{ messages }}",
        "{{ 'thinking' }}{{ message.thinking }}{{ message['reasoning_effort'] }}{{ my_thinking }}",
        "{% set thinking = message.thinking %}{% if thinking %}a{% endif %}",
        "{# {{ reasoning_effort }} #}{{ messages }}",
        "{{ " * 50_000,
    ],
)
def test_an_effort_that_the_template_would_ignore_is_accepted_only_if_it_asks_for_nothing(
    template: str,
) -> None:
    switch = read_traits(template).switch
    assert switch.list_accepted(thinks=True) == ("medium",)
    assert switch.list_accepted(thinks=False) == ("none", "minimal", "medium")
