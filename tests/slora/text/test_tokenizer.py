import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors
from transformers import AutoTokenizer

from slora.core.errors import ConfigError, RequestRefused
from slora.text.chat_template import cut_at_mark, mark_end, render_chat
from slora.text.tokenizer import Tokenizer
from tests.support.json_files import read_json, write_json
from tests.support.tiny_tokenizers import (
    CHAT_TEMPLATE,
    TEXT,
    TOKENIZERS,
    byte_fallback,
    byte_level,
    write_tokenizer,
)
from tests.support.tool_templates import TOOL_TEMPLATES

DEMO = Path(__file__).parents[3] / "demo" / "model"
KINDS: dict[str, Callable[[], FastTokenizer]] = {"byte_level": byte_level, "byte_fallback": byte_fallback}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Größe? "},
    {"role": "assistant", "content": "日本 <|user|> </s>"},
    {"role": "user", "content": "quotes \"' & <tags>\n"},
]

Pair = tuple[Tokenizer, "AutoTokenizer"]


@pytest.fixture(scope="module", params=[*KINDS, "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Our tokenizer and transformers' tokenizer, loaded from one directory."""
    directory = DEMO
    if request.param != "demo":
        directory = tmp_path_factory.mktemp(request.param)
        write_tokenizer(directory, KINDS[request.param]())
    elif not (DEMO / "tokenizer.json").exists():
        pytest.skip("the demo model has not been trained")
    return Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)


@given(text=st.one_of(st.text(), st.sampled_from([TEXT, "</s><s>", " a  b ", "<|user|>x</s>"])))
def test_text_becomes_the_tokens_that_transformers_makes_of_it(pair: Pair, text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@given(data=st.data())
def test_tokens_become_the_text_that_transformers_makes_of_them(pair: Pair, data: st.DataObject) -> None:
    ours, theirs = pair
    tokens = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    assert [ours.token_text(token) for token in tokens] == [theirs.decode([token]) for token in tokens]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_is_rendered_as_transformers_renders_it(pair: Pair, add_generation_prompt: bool) -> None:
    ours, theirs = pair
    rendered = ours.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt}
    assert rendered == theirs.apply_chat_template(CHAT, tokenize=False, **options)
    tokens = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    assert ours.encode(rendered, add_special_tokens=False) == tokens


KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"


@pytest.mark.parametrize("content", ["The answer is", "ends with spaces  ", "", "  ", "a</s>b\n"])
@pytest.mark.parametrize("template", [KEEPS, TRIMS])
def test_a_conversation_ends_inside_its_last_message_as_in_transformers(
    pair: Pair, template: str, content: str
) -> None:
    ours, theirs = pair
    messages = [*CHAT, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert cut_at_mark(ours.apply_chat_template(mark_end(messages), template)) == expected
    assert messages[-1]["content"] == content


def test_a_template_that_leaves_out_the_last_message_cannot_be_continued(pair: Pair) -> None:
    assert (
        cut_at_mark(pair[0].apply_chat_template(mark_end(CHAT[:1]), "{{ messages[0].content[:-3] }}")) is None
    )


def test_the_vocabulary_counts_added_tokens(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)


# Features of published templates beyond plain Jinja.
TEMPLATES = {
    "tojson": "{{ messages[1]['content'] | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "tojson_sorted": "{{ {'b': 1, 'a': 'ß<'} | tojson(sort_keys=True, separators=(',', ':')) }}",
    "loop_controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "trimmed_blocks": "  {% if true %}\n  x\n  {% endif %}\ny",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "absent_tools": "{% if tools is none and not documents %}none{% endif %}{{ absent is defined }}",
    "slices": "{{ messages[1:][0]['content'].strip().split('r')[0] }}",
    "macro": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{{ say(messages[0]) }}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_features_behave_as_in_transformers(pair: Pair, template: str) -> None:
    ours, theirs = pair
    source = TEMPLATES[template] + "{% for m in messages %}{{ m.content }}{% endfor %}"
    expected = theirs.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    assert ours.apply_chat_template(CHAT, source) == expected


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Größe <&>", "parameters": {"type": "object", "properties": {}}},
    },
    {"type": "function", "function": {"name": "g"}},
]  # fmt: skip


def conversation_with_calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Größe? "},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"x": 1}'},
    ]


# The template of Gemma shows only arguments that are objects.
@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        *itertools.product(TOOL_TEMPLATES, ['{"city": "Köln", "n": [1.5, null]}', "{}", ""]),
        *((family, "not JSON") for family in TOOL_TEMPLATES if family != "gemma"),
    ],
)
def test_tools_and_calls_are_rendered_as_in_transformers(pair: Pair, family: str, arguments: str) -> None:
    """transformers wants the arguments of calls as an object, where they are one."""
    ours, theirs = pair
    template = TOOL_TEMPLATES[family]
    parsed = arguments if arguments == "not JSON" else json.loads(arguments or "{}")
    expected = theirs.apply_chat_template(
        conversation_with_calls(parsed),
        tools=TOOLS,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    for sent in (arguments, parsed):
        messages = conversation_with_calls(sent)
        assert render_chat(template, messages, ours.special_tokens, {"tools": TOOLS}) == expected


def test_a_model_with_a_template_for_tools_has_both(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(), None)
    config = tmp_path / "tokenizer_config.json"
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write_json(config, read_json(config) | {"chat_template": both})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    assert ours.chat_template == theirs.get_chat_template() == "plain"
    assert ours.tool_template == theirs.get_chat_template(tools=TOOLS) == "with tools"
    theirs.save_pretrained(tmp_path)
    assert Tokenizer.from_directory(tmp_path).tool_template == "with tools"


# Each template would reach Python itself, or run for ever.
ATTACKS = {
    "class": "{{ messages.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "attribute_filter": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "mutation": "{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "endless_range": "{% for x in range(10 ** 12) %}{% endfor %}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_cannot_leave_its_sandbox(pair: Pair, attack: str) -> None:
    ours, _ = pair
    messages = [{"role": "user", "content": "x"}]
    try:
        rendered = ours.apply_chat_template(messages, ATTACKS[attack])
    except RequestRefused as error:
        assert error.param == "messages"
    else:
        assert rendered == "", "only what Jinja makes of an undefined value may come out"
    assert messages == [{"role": "user", "content": "x"}]


# One template for each kind of exception that Python code under a template may raise.
FAILURES = {
    "its own": "{{ raise_exception('roles must alternate') }}",
    "syntax": "{% for %}",
    "type": "{{ 1 + 'a' }}",
    "value": "{{ 'é'.encode('ascii') }}",
    "key": "{{ '{a}'.format() }}",
    "index": "{{ '{0}'.format() }}",
    "lookup": "{{ 'a'.encode('no such encoding') }}",
    "arithmetic": "{{ 1 / 0 }}",
    "overflow": "{{ 2.0 ** 10000 }}",
    "undefined": "{{ messages.nothing.at_all }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "assertion": "{% filter nothing %}{% endfilter %}",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_every_template_error_is_reported_as_an_invalid_request(pair: Pair, failure: str) -> None:
    """Born from a bug: an IndexError, a LookupError or endless recursion inside a template was not caught."""
    ours, _ = pair
    with pytest.raises(RequestRefused, match="the chat template refuses these messages") as caught:
        ours.apply_chat_template(CHAT, FAILURES[failure])
    assert caught.value.param == "messages"


def test_a_template_of_an_adapter_replaces_the_model_s(pair: Pair) -> None:
    ours, _ = pair
    assert (
        ours.apply_chat_template(CHAT[:1], "{{ messages | length }}{{ messages[0].content }}") == "1Be brief."
    )


@pytest.mark.parametrize("place", ["jinja file", "text", "named"])
def test_a_template_is_found_wherever_versions_of_transformers_put_it(tmp_path: Path, place: str) -> None:
    write_tokenizer(tmp_path, byte_level(), chat_template=None)
    config_path = tmp_path / "tokenizer_config.json"
    config = read_json(config_path)
    if place == "jinja file":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        config["chat_template"] = "not this one"
    elif place == "text":
        config["chat_template"] = CHAT_TEMPLATE
    else:
        config["chat_template"] = [
            {"name": "tool_use", "template": "not this one"},
            {"name": "default", "template": CHAT_TEMPLATE},
        ]
    write_json(config_path, config)
    assert Tokenizer.from_directory(tmp_path).chat_template == CHAT_TEMPLATE


def test_special_tokens_are_found_as_text_and_as_objects(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    config_path = tmp_path / "tokenizer_config.json"
    config = read_json(config_path)
    config["bos_token"] = {"content": "<s>", "lstrip": False, "special": True}
    config["eos_token"] = "</s>"
    config["pad_token"] = None
    write_json(config_path, config)
    assert dict(Tokenizer.from_directory(tmp_path).special_tokens) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_obeyed(tmp_path: Path) -> None:
    fast = byte_level()
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    write_tokenizer(tmp_path, fast)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("a") == byte_level().encode("a").ids
    assert ours.encode(TEXT) == byte_level().encode(TEXT).ids


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(), chat_template=None)
    with pytest.raises(RequestRefused, match="no chat template; send a text prompt to /v1/completions"):
        Tokenizer.from_directory(tmp_path).apply_chat_template(CHAT)


def test_a_directory_without_a_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; save the model's tokenizer there"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"text"'])
def test_a_damaged_tokenizer_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_long_text_can_be_counted_and_decoded_without_the_interpreter_lock(pair: Pair) -> None:
    ours, _ = pair
    token_ids = ours.encode(TEXT * 50, add_special_tokens=False)
    assert ours.count_tokens(TEXT * 50) == len(token_ids)
    assert ours.decode_long(token_ids) == ours.decode(token_ids)
    assert max(len(ours.token_text(token_id)) for token_id in token_ids) <= ours.longest_token_chars


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_characters_of_the_tokens_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(TOKENIZERS[kind](), {}, None)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    widths = tokenizer.measure(token_ids)
    assert sum(widths) == len(tokenizer.decode(token_ids))
    assert len(widths) == len(token_ids) and min(widths, default=0) >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_belongs_to_the_last_of_its_tokens(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), {}, None)
    token_ids = tokenizer.encode("🎉h")
    end_id = KINDS[kind]().token_to_id("</s>")
    assert len(token_ids) > 3
    expected = [*[0] * (len(token_ids) - 2), 1, 1]
    assert tokenizer.measure(token_ids) == expected
    assert tokenizer.measure([*token_ids[:-1], end_id, token_ids[-1]]) == [*expected[:-1], 0, 1]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(kind: str) -> None:
    """Born from a bug: each half of a character had the bytes of U+FFFD."""
    fast = TOKENIZERS[kind]()
    tokenizer = Tokenizer(fast, {}, None)
    token_ids = tokenizer.encode(" 日本</s> a é", add_special_tokens=False)
    parts = [tokenizer.token_bytes(token_id, is_first=not at) for at, token_id in enumerate(token_ids)]
    assert b"".join(parts).decode() == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert b"</s>" in parts


_PAIRS = [
    None,
    processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]),
    processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:1 </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    ),
]


@pytest.mark.parametrize("processor", _PAIRS)
def test_a_pair_of_texts_is_encoded_as_transformers_does(tmp_path: Path, processor: Any) -> None:
    fast = byte_fallback()
    if processor is not None:
        fast.post_processor = processor
    write_tokenizer(tmp_path, fast)
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for first, second in (("Größe?", " a  b "), (TEXT, "x"), ("", "y"), ("</s>", "<s>")):
        parts = (ours.encode(text, add_special_tokens=False) for text in (first, second))
        assert ours.join_pair(*parts) == theirs(first, second)["input_ids"]
