"""Grammars and their masks, walked through at random without a model."""

import json
import random
import re
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter

from slora.core.errors import ConfigError, RequestRefused
from slora.core.sampling_params import MAX_FORM_CHARS, OutputKind, StructuredOutput
from slora.grammar.lark_grammar import GrammarLibrary, LarkMatcher
from slora.grammar.matcher import TokenSpelling
from slora.text.tokenizer import Tokenizer
from tests.slora.grammar.random_schemas import RECURSIVE, SCHEMAS
from tests.support.tiny_tokenizers import TOKENIZERS

EOS = 1  # a special token of all tiny tokenizers
MAX_STEPS = 400
VOCAB_SIZE = 400  # a model may have more ids than its tokenizer


def make_library(name: str) -> tuple[GrammarLibrary, Tokenizer]:
    tokenizer = Tokenizer(TOKENIZERS[name](), {}, None)
    assert tokenizer.decode([EOS]) == ""
    return GrammarLibrary(tokenizer.spell_vocabulary(VOCAB_SIZE), [EOS]), tokenizer


# A schema with 5 ** 10 combinations of properties.
COMBINED = {
    "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"const": 1}}} for j in range(5)]} for i in range(10)]
}
# Each further character has more ways to continue what came before.
BRANCHY = r"(?i)(hello|world|foo|bar|[\p{L}]+){1,300}"

LIBRARY, TOKENIZER = make_library("byte_level")


def allowed(matcher: LarkMatcher) -> list[int]:
    words = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    matcher.write_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def write_at_random(
    output: StructuredOutput, seed: int, library: GrammarLibrary = LIBRARY
) -> list[int] | None:
    """Random tokens of an answer that ended. None: it did not end within MAX_STEPS tokens."""
    rng, matcher = random.Random(seed), library.compile(output).start({EOS})
    token_ids: list[int] = []
    for step in range(MAX_STEPS):
        tokens = allowed(matcher)
        assert tokens and matcher.error is None, matcher.error
        if EOS in tokens and rng.random() < 0.5 + step / MAX_STEPS:
            return token_ids
        # Quotation marks and brackets end what is open, so that most answers end.
        ends = [token for token in tokens if TOKENIZER.token_text(token)[:1] in ('"', "}", "]")]
        few = ends if library is LIBRARY and ends and rng.random() < step / MAX_STEPS else tokens
        token_ids.append(rng.choice([token for token in few if token != EOS] or [EOS]))
        if token_ids[-1] == EOS:
            return token_ids[:-1]
        matcher.accept(token_ids[-1])
    return None


def test_answers_of_random_schemas_are_valid(*, soak: bool) -> None:
    num_ended = 0

    @settings(max_examples=1000 if soak else 30, suppress_health_check=list(HealthCheck), deadline=None)
    @given(SCHEMAS, st.integers(0, 2**32))
    def check(schema: dict[str, object], seed: int) -> None:
        nonlocal num_ended
        try:
            token_ids = write_at_random(StructuredOutput.json_schema(schema), seed)
        except RequestRefused as error:
            assert "can't be enforced" in error.message
            return
        if token_ids is not None:
            num_ended += 1
            Draft202012Validator(schema).validate(json.loads(TOKENIZER.decode(token_ids)))

    check()
    assert num_ended >= (600 if soak else 15), "too few answers ended for this test to prove anything"


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_a_recursive_schema_are_valid(seed: int) -> None:
    token_ids = write_at_random(StructuredOutput.json_schema(RECURSIVE), seed)
    assert token_ids is not None
    Draft202012Validator(RECURSIVE).validate(json.loads(TOKENIZER.decode(token_ids)))


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        (StructuredOutput.regex("[a-f]{2,5}/é"), "[a-f]{2,5}/é"),
        (StructuredOutput.choice(["yes", 'n"o\n', "日本"]), 'yes|n"o\n|日本'),
        (StructuredOutput.choice(["", "a", "ab", "😀"]), "|a|ab|😀"),
        (StructuredOutput.choice([f"label {number}" for number in range(4000)]), "label [0-3]?[0-9]{1,3}"),
        (StructuredOutput.grammar('start: NAME ("," NAME)*\nNAME: /[xy]+/'), "[xy]+(,[xy]+)*"),
        (StructuredOutput.grammar('root ::= "a" [0-9]+ end\nend ::= "." | "!"'), r"a[0-9]+[.!]"),
        (StructuredOutput.json_object(), r"(?s:\{.*\})"),
    ],
    ids=["regex", "choice", "prefixes", "many choices", "Lark", "GBNF", "JSON object"],
)
def test_answers_have_the_form(output: StructuredOutput, pattern: str) -> None:
    texts = [TOKENIZER.decode(ids) for seed in range(8) if (ids := write_at_random(output, seed)) is not None]
    assert len(texts) > 3
    for text in texts:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r'[^"]', ["a", "\\", "\n", "é"], ['"']),
        (r'[^"\\\n]', ["a", "\t"], ['"', "\\", "\n"]),
        (r'[^]"-]', ["a", "\\"], ['"', "]", "-"]),
        (r'[^-"]', ["a", "\\"], ['"', "-"]),
        (r'[[^"]&&[^b]]', ["a", "\\"], ['"', "b"]),
        (r'\[[^"]', ["[a"], ['["', "a"]),
    ],
)
def test_a_class_of_a_pattern_excludes_characters_that_json_escapes(
    pattern: str, texts: list[str], others: list[str]
) -> None:
    library = GrammarLibrary(TokenSpelling([*(bytes([byte]) for byte in range(256)), b""]), [256])
    string = {"type": "string", "pattern": f"^{pattern}$"}
    names = {"type": "object", "patternProperties": {f"^{pattern}$": True}, "additionalProperties": False}
    for schema, form in ((string, "{}"), (names, "{{{}: 1}}")):
        grammar = library.compile(StructuredOutput.json_schema(schema))
        for text in (*texts, *others):
            matcher, words = grammar.start({256}), np.zeros(9, np.int32)
            is_allowed = True
            for token in (*form.format(json.dumps(text, ensure_ascii=False)).encode(), 256):
                matcher.write_mask(words)
                is_allowed = is_allowed and bool(words.view(np.uint32)[token // 32] >> token % 32 & 1)
                if token != 256 and is_allowed:
                    matcher.accept(token)
            assert is_allowed == (text in texts), (schema, text)


@pytest.mark.parametrize("name", ["byte_fallback", "gemma_like", "metaspace"])
def test_the_text_of_a_tokenizer_that_strips_a_space_has_the_form(name: str) -> None:
    """The first token of a text loses its space, so no such token may be the first."""
    library, tokenizer = make_library(name)
    num_checked = 0
    for form in ("( ?a| *h?lo| *)*", "a.*"):
        try:
            token_ids = write_at_random(StructuredOutput.regex(form), 3, library)
        except RequestRefused:
            continue
        if token_ids is not None:
            num_checked += 1
            assert re.fullmatch(form, tokenizer.decode(token_ids)), tokenizer.decode(token_ids)
    assert num_checked, "no answer ended"


@pytest.mark.parametrize("name", ["word_suffix", "connectionist"])
def test_a_tokenizer_whose_tokens_cannot_be_decoded_one_by_one_is_refused(name: str) -> None:
    tokenizer = Tokenizer(TOKENIZERS[name](), {}, None)
    with pytest.raises(ConfigError, match="structured output does not support"):
        tokenizer.spell_vocabulary(tokenizer.vocab_size)


def test_each_token_spells_what_it_adds_to_a_text() -> None:
    for name in ("byte_level", "byte_fallback", "gemma_like", "metaspace", "word_piece", "undecoded"):
        tokenizer = Tokenizer(TOKENIZERS[name](), {}, None)
        spelling = tokenizer.spell_vocabulary(tokenizer.vocab_size)
        rng, num_checked = random.Random(name), 0
        for _ in range(200):
            ids = rng.choices(
                [token for token, piece in enumerate(spelling.pieces) if piece], k=rng.randint(2, 5)
            )
            # Such a token spells something else at the beginning, so only the tokens after it are compared.
            num_first = 1 if ids[0] in spelling.not_first else 0
            raw = b"".join(spelling.pieces[token] for token in ids[num_first:])
            text, first = tokenizer.decode(ids), tokenizer.decode(ids[:num_first])
            if "\ufffd" not in text + first:
                num_checked += 1
                assert first + raw.decode() == text, (name, ids)
        assert num_checked >= 20, f"only {num_checked} texts of {name} were compared"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (StructuredOutput.json_schema({"type": "array", "uniqueItems": True}, "response_format"), "uniqueItems"),
        (StructuredOutput.json_schema({"not": {"type": "null"}}), "not"),
        (StructuredOutput.json_schema({"if": {}, "then": {}}), "if"),
        (StructuredOutput.json_schema({"$ref": "#"}), "refers to itself without end"),
        (StructuredOutput.json_schema({"$ref": "https://example.com/schema"}), "not present"),
        (StructuredOutput.json_schema({"$ref": "#/$defs/none"}), "none"),
        (StructuredOutput.json_schema({"type": "text"}), "Invalid type: text"),
        (StructuredOutput.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (StructuredOutput(OutputKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
        (StructuredOutput.json_schema(False), "schema is false"),
        (StructuredOutput.json_schema(COMBINED), "schema too large"),
        (StructuredOutput.regex("(a"), "unclosed group"),
        (StructuredOutput.regex("a(?=b)"), "look-around"),
        (StructuredOutput.choice([]), "empty list"),
        (StructuredOutput.grammar("start: start"), "refers to itself without end"),
        (StructuredOutput.grammar('start: a\na: b "x"\nb: a'), "refers to itself without end"),
        (StructuredOutput.grammar("start: other"), 'unknown name: "other"'),
        (StructuredOutput.grammar('first: "a"'), "no start rule"),
        (StructuredOutput.grammar("root ::= (("), "not a valid grammar"),
        (StructuredOutput.grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_enforced_is_refused_with_its_field(
    output: StructuredOutput, message: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(message)) as refused:
        LIBRARY.compile(output)
    assert refused.value.param == output.param and output.param in refused.value.message


def test_a_form_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestRefused, match=f"at most {MAX_FORM_CHARS}"):
        StructuredOutput.regex("a" * (MAX_FORM_CHARS + 1))


def test_a_form_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestRefused, match="surrogate"):
        StructuredOutput.regex("\ud800")


def test_stop_tokens_are_allowed_only_where_the_answer_may_end() -> None:
    (stop,) = TOKENIZER.encode("q")
    matcher = LIBRARY.compile(StructuredOutput.regex("[pq]{2}")).start({EOS, stop})
    (p,) = TOKENIZER.encode("p")
    assert allowed(matcher) == [p]
    matcher.accept(p)
    assert allowed(matcher) == [p]
    matcher.accept(p)
    assert allowed(matcher) == sorted([EOS, stop])


def test_a_copy_of_a_matcher_is_independent() -> None:
    matcher = LIBRARY.compile(StructuredOutput.choice(["ab", "ac"])).start({EOS})
    (a,), (b,), (c,) = map(TOKENIZER.encode, "abc")
    matcher.accept(a)
    other = matcher.copy()
    matcher.accept(b)
    assert allowed(matcher) == [EOS]
    assert allowed(other) == sorted([b, c]) and allowed(other) == sorted([b, c])


def test_a_grammar_beyond_the_limits_of_a_mask_ends_with_the_reason() -> None:
    matcher, rng = LIBRARY.compile(StructuredOutput.regex(BRANCHY)).start({EOS}), random.Random(0)
    for _ in range(500):
        if not (tokens := [token for token in allowed(matcher) if token != EOS]):
            break
        matcher.accept(rng.choice(tokens))
    assert matcher.error is not None and "too many expressions" in matcher.error
    assert not allowed(matcher) and not allowed(matcher.copy())


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    friends: list["Pet"] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Dog.model_rebuild()


class Red(BaseModel):
    kind: Literal["light"]
    color: Literal["red"]


class Green(BaseModel):
    kind: Literal["light"]
    color: Literal["green"]


class Dark(BaseModel):
    kind: Literal["dark"]


class Owner(BaseModel):
    first: Pet | None
    lamp: Annotated[Annotated[Red | Green, Field(discriminator="color")] | Dark, Field(discriminator="kind")]
    oneOf: bool


NUMBERS = {"oneOf": [{"type": "integer", "minimum": 3}, {"type": ["null", "boolean"]}, {"const": "oneOf"}]}
UNIONS: dict[str, Any] = {
    "tags with defaults, recursive": TypeAdapter(Pet).json_schema(),
    "unions within": Owner.model_json_schema(),
    "types": NUMBERS,
    "data": {"const": {"oneOf": [{"a": 1}, {"a": 2}]}},
}


@pytest.mark.parametrize("name", UNIONS)
def test_answers_of_unions_are_valid(name: str) -> None:
    """Born from a bug: unions of pydantic models were refused."""
    output, num_ended = StructuredOutput.json_schema(UNIONS[name]), 0
    for seed in range(8):
        token_ids = write_at_random(output, seed)
        if token_ids is not None:
            num_ended += 1
            Draft202012Validator(UNIONS[name]).validate(json.loads(TOKENIZER.decode(token_ids)))
    assert num_ended > 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"pet": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}},
            "'oneOf' at $.properties.pet, whose branches may overlap: use anyOf, or give each branch a property",
        ),
        (
            {"properties": {"a": {"items": {"not": {}}}}},
            "'not' at $.properties.a.items, which is not supported; remove",
        ),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' at $, which is not supported; remove it"),
    ],
)
def test_an_unsupported_keyword_is_named_with_its_path_and_the_remedy(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(words)):
        LIBRARY.compile(StructuredOutput.json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        True,
        {
            "$defs": {
                "pair": {
                    "type": "array",
                    "prefixItems": [{"type": "integer"}, {"enum": ["a b", {"c": [1, 2]}]}],
                }
            },
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/pair"}, "b": {"type": "object"}},
            "required": ["a", "b"],
        },
    ],
    ids=["object", "any", "nested"],
)
def test_compact_json_has_no_white_space(schema: dict[str, Any] | bool) -> None:
    """Born from a switch of vLLM's clients that was refused."""
    output, num_ended = StructuredOutput.json_schema(schema, is_compact=True), 0
    for seed in range(12):
        if (token_ids := write_at_random(output, seed)) is not None:
            num_ended += 1
            text = TOKENIZER.decode(token_ids)
            assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)), text
            Draft202012Validator(schema).validate(json.loads(text))
    assert num_ended > 3


@pytest.mark.parametrize(
    "output",
    [
        StructuredOutput.json_object(),
        StructuredOutput.json_schema({}),
        StructuredOutput.json_schema(True),
        StructuredOutput.json_schema(
            {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
        ),
    ],
)
def test_white_space_in_json_is_bounded(output: StructuredOutput) -> None:
    """Born from a bug: 3 of 60 answers were blanks up to `max_tokens`."""
    grammar = LIBRARY.compile(output)

    def count_blanks(text: str, blank: str) -> int:
        matcher = grammar.start({EOS})
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            assert token in allowed(matcher)
            matcher.accept(token)
        (token,) = TOKENIZER.encode(blank, add_special_tokens=False)
        for count in range(100):
            if token not in allowed(matcher):
                return count
            matcher.accept(token)
        return 100

    for text in ('{"a"', '{"a":', '{"a": [1', '{"a": [1]', '{\n    "a": [\n        1,\n        2'):
        assert 1 <= count_blanks(text, " ") < 40 and count_blanks(text, "\n") == 1
