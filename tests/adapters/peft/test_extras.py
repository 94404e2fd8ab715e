import json

import pytest

from slora_adapters.errors import AdapterInvalid
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.peft.peft_directory import parse_adapter
from tests.adapters.hand_made import SHAPE, make_members, reason_codes


def _extras(**files: str) -> AdapterExtras:
    members = {name: memoryview(raw) for name, raw in make_members(**files).items()}
    return parse_adapter(members, SHAPE, AdapterLimits()).extras


def test_texts_beside_the_weights_are_kept_as_they_are() -> None:
    extras = _extras(chat_template_dot_jinja="{{ messages }}é", generation_config_dot_json='{"top_p": 0.5}')
    assert extras == AdapterExtras("{{ messages }}é", '{"top_p": 0.5}')
    assert _extras() == AdapterExtras()


@pytest.mark.parametrize(
    "template",
    [
        "{{ m }}",
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ m }}"}],
        [{"name": ["unhashable"], "template": "x"}, {"name": "default", "template": "{{ m }}"}],
    ],
)
def test_the_template_of_a_tokenizer_config_is_found(template: object) -> None:
    assert (
        _extras(tokenizer_config_dot_json=json.dumps({"chat_template": template})).chat_template == "{{ m }}"
    )


def test_a_template_file_wins_over_the_tokenizer_config() -> None:
    extras = _extras(chat_template_dot_jinja="file", tokenizer_config_dot_json='{"chat_template": "config"}')
    assert extras.chat_template == "file"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"chat_template_dot_jinja": "x" * 101}, "extra_too_long"),
        ({"tokenizer_config_dot_json": json.dumps({"chat_template": "x" * 101})}, "extra_too_long"),
        ({"generation_config_dot_json": json.dumps({"a": "x" * 101})}, "extra_malformed"),
        ({"generation_config_dot_json": "nonsense"}, "extra_malformed"),
        ({"tokenizer_config_dot_json": "[]"}, "extra_malformed"),
        (
            {"tokenizer_config_dot_json": '{"added_tokens_decoder": {"64": {"content": "<new>"}}}'},
            "added_tokens",
        ),
        ({"added_tokens_dot_json": '{"<new>": 64}'}, "added_tokens"),
        ({"tokenizer_config_dot_json": '{"chat_template": "{{ m }}\\ud800"}'}, "extra_malformed"),
        ({"tokenizer_config_dot_json": '{"a": [{"b": ["\\uDFFF"]}]}'}, "extra_malformed"),
        ({"generation_config_dot_json": '{"stop_strings": ["\\ud800"]}'}, "extra_malformed"),
    ],
)
def test_texts_that_are_too_long_broken_or_add_tokens_are_refused(files: dict[str, str], code: str) -> None:
    assert code in reason_codes(make_members(**files), AdapterLimits(max_text_bytes=100, vocab_size=64))


def test_special_tokens_of_the_base_are_accepted() -> None:
    files = {
        "tokenizer_config_dot_json": '{"added_tokens_decoder": {"63": {"content": "<s>"}}}',
        "added_tokens_dot_json": '{"<s>": 63}',
    }
    assert reason_codes(make_members(**files), AdapterLimits(vocab_size=64)) == []


def test_a_template_that_is_not_text_is_refused() -> None:
    members = make_members() | {"chat_template.jinja": b"\xff\xfe"}
    assert reason_codes(members) == ["extra_malformed"]


def test_a_lone_surrogate_is_refused_with_its_file_and_a_pair_of_them_is_accepted() -> None:
    """Born from an upload whose chat template answered every request with a 500."""
    lone = make_members(tokenizer_config_dot_json='{"chat_template": "a\\ud83d"}')
    with pytest.raises(AdapterInvalid, match=r"tokenizer_config.json .*lone surrogate U\+D83D"):
        parse_adapter({name: memoryview(raw) for name, raw in lone.items()}, SHAPE, AdapterLimits())
    paired = '{"chat_template": "a\\ud83d\\ude00"}'
    assert _extras(tokenizer_config_dot_json=paired).chat_template == "a\U0001f600"
