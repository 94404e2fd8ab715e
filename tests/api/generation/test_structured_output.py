"""The fields that set the form of an answer: what reaches the engine, and what is refused."""

import json
from typing import Any

import pytest

from slora.core.sampling_params import MAX_FORM_CHARS, OutputKind, StructuredOutput
from tests.api.platform import Platform, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "base", "prompt": "hello"},
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "hello"}]},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


# Deeper schemas than this can't be sent from here, because Python could not write them as JSON.
DEEP = nest(900)


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": JSON_SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA_TEXT, "disable_fallback": True}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        (
            {"structured_outputs": {"json": SCHEMA_TEXT, "disable_any_whitespace": True}},
            "compact_json",
            SCHEMA_TEXT,
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            "json_schema",
            SCHEMA_TEXT,
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            "compact_json",
            '{"type":"object"}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"guided_json": SCHEMA_TEXT, "response_format": {"type": "text"}}, "json_schema", SCHEMA_TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_each_field_gives_the_engine_its_form(
    platform: Platform, key: str, path: str, fields: dict[str, Any], kind: str | None, text: str
) -> None:
    post(platform, key, path, {**BODIES[path], **fields}).raise_for_status()
    found = platform.engine.requests[-1].sampling.structured_output
    if kind is None:
        assert found is None
    else:
        assert found == StructuredOutput(OutputKind(kind), text, next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have `json_schema`"),
        ({"response_format": {**JSON_SCHEMA, "type": "text"}}, "response_format", "with no other type"),
        ({"response_format": {**JSON_SCHEMA, "strict": True}}, "response_format.strict", "not a parameter"),
        ({"structured_outputs": {}}, "structured_outputs", "has no form"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "only one form"),
        *(
            (
                {"structured_outputs": {"json": {}, "whitespace_pattern": pattern}},
                "structured_outputs.whitespace_pattern",
                "Send `structured_outputs` with `disable_any_whitespace: true`",
            )
            for pattern in (" ", "")
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": "[ ]?"},
            "guided_whitespace_pattern",
            "Send `structured_outputs` with `disable_any_whitespace: true`",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs",
            "which needs `json` or `json_object`",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "only one form"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        # Found in review: a schema of 984 levels was answered 500.
        ({"guided_json": DEEP}, "guided_json", "more than 64 levels deep; flatten it"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json", "more than 64 levels deep; flatten it"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json", "more than 64 levels deep"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": DEEP}}},
            "response_format.json_schema.schema",
            "more than 64 levels deep",
        ),
        ({"guided_json": {"x-guidance": {}}}, "guided_json", "the key 'x-guidance'"),
        ({"guided_regex": "a" * (MAX_FORM_CHARS + 1)}, "guided_regex", f"at most {MAX_FORM_CHARS}"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "omit min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "omit ignore_eos"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "not supported"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    platform: Platform, key: str, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = post(platform, key, CHAT, {**BODIES[CHAT], **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error
