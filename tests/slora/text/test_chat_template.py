"""A compiled chat template needs little memory, whatever its constant expressions evaluate to."""

import gc
import tracemalloc
import weakref

import jinja2
import pytest

from slora.text.chat_template import Messages, compile_chat_template, render_chat

MIB = 1 << 20
# Short sources whose constants would be large if the compiler evaluated them.
LARGE_CONSTANTS = {
    "product": "{{{{ 'a' * 1200000{} }}}}",
    "products": "{{{{ ('a' * 4000 ~ 'b' * 4000 ~ '{}') * 400 }}}}",
    "filter": "{{{{ 'a' | center(1200000{}) }}}}",
    "concatenation": "{{{{ 'a' | center(2000000) ~ '{}' }}}}",
    "condition": "{{% if 'a' * 1200000{} %}}x{{% endif %}}",
}


@pytest.mark.parametrize("kind", LARGE_CONSTANTS)
def test_constant_expressions_are_not_computed_at_compilation(kind: str) -> None:
    """Found with 37 adapters: each kept 12 MB of text in the process that renders templates."""
    tracemalloc.start()
    try:
        for number in range(10):
            compile_chat_template(LARGE_CONSTANTS[kind].format(number))
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * MIB and peak < 4 * MIB


def test_the_number_of_cached_templates_is_bounded() -> None:
    templates = [weakref.ref(compile_chat_template(f"{{{{ a }}}} {number}")) for number in range(600)]
    gc.collect()
    assert sum(template() is not None for template in templates) < 530


def test_a_template_is_compiled_once() -> None:
    assert compile_chat_template("{{ once }}") is compile_chat_template("{{ once }}")


def test_products_are_still_computed_at_rendering() -> None:
    assert compile_chat_template("{{ 'ab' * 3 }}{{ 2 * 3 }}").render() == "ababab6"


def test_a_template_may_append_arguments_to_a_text_as_deepseeks_do() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city":"Köln"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    source = (
        "{% set one = messages[0].tool_calls[0].function %}{{ one.name + ' ' + one.arguments + '.' }}"
        "{{ one.arguments.city }}"
    )
    assert render_chat(source, messages, {}, {}) == 'f {"city": "Köln"}.Köln'


# The loops of LLaVA and SmolVLM, which read only parts; one that reads only strings; and one that reads both.
IN_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text + '' }}{% endfor %}"
IN_STRINGS = "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}{% endfor %}"
IN_BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}!{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
MIXED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content[0]['text'] + '' }}"
    "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "  a question of more than sixteen characters\n"},
]


@pytest.mark.parametrize("template", [IN_PARTS, FIRST_PART, IN_STRINGS, IN_BOTH, MIXED])
def test_each_template_gets_the_form_of_content_that_it_reads(template: str) -> None:
    """Born from a bug: a template that loops over parts rendered empty turns."""
    chat = [message for message in CHAT if message["content"] or template in (IN_PARTS, IN_BOTH)]
    expected = "".join(f"<{message['role']}>{message['content']}" for message in chat)
    for _ in range(2):
        assert render_chat(template, chat, {}, {}) == expected


ONLY_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ONLY_LAST = "{{ messages[-1].content }}"
CALLS = [
    {"role": "user", "content": "what weather is it in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "a warm and sunny day"},
    {"role": "user", "content": "thank you very much indeed"},
]
NO_CALLS = "{# tool_calls #}{% for m in messages %}{{ m.content or '' }}{% endfor %}"
NO_RESULTS = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% elif m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "dropped"),
    [
        (ONLY_USERS, CHAT, r"message 0 \(role 'system'\)"),
        (ONLY_LAST, CHAT, r"message 0 \(role 'system'\)"),
        (ONLY_LAST, CHAT[1:], r"message 0 \(role 'user'\)"),
        ("hello, I show no question of yours", CHAT[3:], r"message 0 \(role 'user'\)"),
        (NO_CALLS, CALLS, r"message 1 \(role 'assistant'\)"),
        (NO_RESULTS, CALLS, r"message 2 \(role 'tool'\)"),
    ],
)
def test_a_template_that_shows_nothing_of_a_message_refuses_the_conversation(
    template: str, messages: Messages, dropped: str
) -> None:
    for _ in range(2):
        with pytest.raises(jinja2.TemplateError, match=f"shows nothing of {dropped}"):
            render_chat(template, messages, {}, {})


def test_a_template_may_declare_that_it_shows_only_the_last_turn() -> None:
    declared = "{%- set shows_last_turn_only = true -%}" + ONLY_LAST
    assert render_chat(declared, CHAT[1:], {}, {}) == CHAT[3]["content"]
    with pytest.raises(jinja2.TemplateError, match="message 0"):
        render_chat(declared, CHAT, {}, {})


def test_a_message_may_be_changed_by_its_template() -> None:
    shout = "{% for m in messages %}{{ m.content.split('</think>')[-1] | upper }}{% endfor %}"
    messages = [{"role": "assistant", "content": "<think>hm, let me think</think>yes, this is it"}]
    assert render_chat(shout, messages, {}, {}) == "YES, THIS IS IT"
    assert render_chat(IN_STRINGS, [{"role": "user", "content": ""}], {}, {}) == "<user>"
