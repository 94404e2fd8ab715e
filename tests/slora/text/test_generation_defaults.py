import json
from typing import Any

import pytest

from slora.core.sampling_params import SamplingParams
from slora.text.generation_defaults import (
    Classifier,
    GenerationDefaults,
    find_unsupported_fields,
    read_classifier,
    read_generation_defaults,
)


def test_generation_configs_saved_by_transformers_are_read() -> None:
    config = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [1, 2], "max_new_tokens": 64,
              "pad_token_id": 1, "transformers_version": "5.0", "stop_strings": "END"}  # fmt: skip
    assert read_generation_defaults(json.dumps(config)) == GenerationDefaults(
        0.7, 0.8, 20, 64, (1, 2), ("END",)
    )
    assert find_unsupported_fields(json.dumps(config)) == []


def test_fields_with_another_name_are_translated() -> None:
    config = {"min_p": 0.05, "repetition_penalty": 1.1, "min_new_tokens": 3}
    defaults = read_generation_defaults(json.dumps(config))
    assert (defaults.min_p, defaults.repetition_penalty, defaults.min_tokens) == (0.05, 1.1, 3)
    assert find_unsupported_fields(json.dumps(config)) == []
    assert defaults.params(2) == SamplingParams(2, min_p=0.05, repetition_penalty=1.1, min_tokens=2)


def test_do_sample_false_means_greedy_decoding() -> None:
    assert read_generation_defaults('{"do_sample": false, "temperature": 0.7}').temperature == 0.0
    assert read_generation_defaults('{"do_sample": true, "temperature": 0.7}').temperature == 0.7


def test_an_adapters_defaults_win_field_by_field() -> None:
    base = GenerationDefaults(temperature=0.5, top_k=10, stop_token_ids=(1,))
    own = GenerationDefaults(temperature=0.0, top_p=0.9)
    assert own.override(base) == GenerationDefaults(0.0, 0.9, 10, None, (1,))


def test_a_missing_file_gives_no_defaults() -> None:
    assert read_generation_defaults(None) == GenerationDefaults()
    assert find_unsupported_fields(None) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("no_repeat_ngram_size", 2),
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("bad_words_ids", [[1]]),
        ("min_length", 3),
    ],
)
def test_a_setting_that_is_not_honoured_is_refused_by_name(field: str, value: Any) -> None:
    reasons = find_unsupported_fields(json.dumps({field: value}))
    assert [reason.code for reason in reasons] == ["generation_config_unsupported"]
    assert field in reasons[0].message


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"temperature": "hot"}', '{"temperature": 9}', '{"top_p": -1}', '{"top_k": -1}', '{"top_k": 1.5}',
     '{"min_p": 2}', '{"repetition_penalty": 0}', '{"min_new_tokens": -1}',
     '{"eos_token_id": "x"}', '{"eos_token_id": [-4]}', '{"max_new_tokens": true}',
     # Values that no engine message, float or UTF-8 text can carry. An adapter with such a value failed every request
     # with a 500.
     '{"eos_token_id": 18446744073709551616}', '{"eos_token_id": [1, 64]}', '{"top_k": 18446744073709551616}',
     '{"max_new_tokens": 18446744073709551616}', '{"min_new_tokens": 18446744073709551616}',
     '{"temperature": 1' + "0" * 400 + "}", '{"temperature": 1e999}', '{"stop_strings": ["a\\ud800"]}'],
)  # fmt: skip
def test_values_that_no_request_could_send_are_refused(text: str) -> None:
    reasons = find_unsupported_fields(text, vocab_size=64)
    assert [reason.code for reason in reasons] == ["generation_config_malformed"]
    assert len(reasons[0].message) < 300, "a message does not repeat a whole file"


def test_a_refusal_names_the_field_the_value_and_the_limit() -> None:
    (reason,) = find_unsupported_fields('{"eos_token_id": [1, 64]}', vocab_size=64)
    assert "eos_token_id" in reason.message and "64" in reason.message and "0 to 63" in reason.message
    (reason,) = find_unsupported_fields('{"stop_strings": "a\\ud800"}')
    assert "stop_strings" in reason.message and "U+D800" in reason.message


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_labels": True},
        {"num_labels": 0},
        {"num_labels": 10**12},
        {"num_labels": 2, "id2label": ["a", "b"]},
        {"num_labels": 2, "id2label": {"0": "a", "1": 2}},
        {"num_labels": 2, "id2label": {"0": "a", "1": "b" * 513}},
    ],
)
def test_fields_that_no_head_has_make_no_classifier(fields: dict[str, Any]) -> None:
    assert read_classifier(json.dumps(fields)) is None
    assert read_classifier('{"num_labels": 2, "id2label": {"1": "b"}}') == Classifier(
        ("LABEL_0", "b"), "softmax"
    )
