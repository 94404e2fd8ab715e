"""A compiled chat template needs little memory, whatever its constant expressions evaluate to."""

import gc
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from slora.text.chat_template import compile_chat_template, render_chat

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


def measure_cached_templates() -> list[int]:
    """Returns the bytes in use after 600, 1,200 and 1,800 templates."""
    compile_chat_template("warm")
    measured = []
    tracemalloc.start()
    try:
        for number in range(1_800):
            compile_chat_template(f"{{{{ a }}}} {number}")
            if (number + 1) % 600 == 0:
                gc.collect()
                measured.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return measured


def test_the_number_of_cached_templates_is_bounded() -> None:
    """In a process of its own, because threads of other tests allocate memory, too.

    Python's table of interned strings may double once, by 1 MB, so only growth in both intervals counts.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        first, second, third = pool.submit(measure_cached_templates).result()
    assert min(second - first, third - second) < 0.2 * first


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
