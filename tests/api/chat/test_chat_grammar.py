"""An answer that must call a tool parses in every format, whatever the model would say."""

import json
import re
from random import Random
from typing import Any

import numpy as np
import pytest

from slora.core.sampling_params import StructuredOutput
from slora.grammar.lark_grammar import GrammarLibrary
from slora.grammar.matcher import TokenSpelling
from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.call_format import CALL_FORMATS
from slora_api.chat.chat_grammar import ChatGrammar
from slora_api.chat.text_reader import Piece, PieceKind

# One token for each byte, the end of text, and markers that are special tokens.
EOS = 256
SPECIAL = {"[TOOL_CALLS]": 257, "<|tool_call|>": 258, "<|/tool_call|>": 259, "</think>": 260, "[ARGS]": 261}
TEXTS = {token_id: text.encode() for text, token_id in SPECIAL.items()}
PIECES = [*(bytes([byte]) for byte in range(256)), *[b""] * 6]
LIBRARY = GrammarLibrary(TokenSpelling(PIECES), [EOS])
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "}"]}},
    "required": ["city"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "x-guidance": {}}
TOOLS = [("get_weather", WEATHER), ("f", None), ("count", COUNT)]
NAMES = frozenset(name for name, _ in TOOLS)
# The test prefers these tokens where the mask allows them, so that answers end.
ENDING = [EOS, *b'"}]<', 258, 259]


def generate(grammar: str, seed: int, begin: str = "") -> str:
    """An answer of random allowed tokens after `begin`."""
    random = Random(seed)
    matcher = LIBRARY.compile(StructuredOutput.grammar(grammar)).start({EOS})
    words = np.zeros(-(-len(PIECES) // 32), np.int32)
    text = begin.encode()
    for byte in text:
        matcher.accept(byte)
    for _ in range(3000):
        matcher.write_mask(words)
        assert matcher.error is None, (matcher.error, text)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        ending = [token for token in ENDING if token in allowed]
        token = random.choice(ending if ending and random.random() < 0.6 else allowed)
        if token == EOS:
            return text.decode()
        matcher.accept(token)
        text += TEXTS.get(token) or PIECES[token]
    pytest.fail(f"the answer does not end: {text[:200]!r}")


def parts(text: str, syntax: AnswerSyntax) -> list[Piece]:
    return AnswerReader(syntax).push(text, is_last=True)


def chat_grammar(syntax: AnswerSyntax, **fields: Any) -> str:
    special = {text: token_id for text, token_id in SPECIAL.items() if text != "</think>"}
    given = {"tools": TOOLS, "is_single": False, "schema": None, "special_ids": special} | fields
    return ChatGrammar(syntax, **given).write()


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", CALL_FORMATS)
@pytest.mark.parametrize("begin", [None, "<think>Hm.</think>", "Hm.</think>\n\n"])
def test_a_required_call_always_parses(family: str, begin: str | None) -> None:
    """begin: the reasoning before the call; without `<think>`, the prompt begins it. None: the family has none."""
    prompt_thinks = begin is not None and not begin.startswith("<think>")
    syntax = AnswerSyntax(begin is not None, prompt_thinks, CALL_FORMATS[family], NAMES)
    for seed in range(3):
        text = generate(chat_grammar(syntax, is_single=seed == 0), seed, begin or "")
        pieces = [piece for piece in parts(text, syntax) if piece.kind is not PieceKind.REASONING]
        calls = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
        arguments = [json.loads(piece.text) for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
        assert len(calls) == len(arguments) == len(pieces) / 2 >= 1, text
        assert set(calls) <= NAMES and (seed or len(calls) == 1)
        for name, values in zip(calls, arguments, strict=True):
            assert name != "get_weather" or values["city"] in ("Köln", "}")
            assert name != "f" or values == {}


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]f[ARGS]{}",
    "phi4": '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>',
    "llama3": '{"name": "f", "parameters": {}}',
    "gemma": '{"name": "f", "parameters": {}}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def is_allowed(grammar: str, text: str) -> bool:
    """Whether the text is an answer, with its markers as special tokens."""
    matcher = LIBRARY.compile(StructuredOutput.grammar(grammar)).start({EOS})
    words = np.zeros(-(-len(PIECES) // 32), np.int32)
    markers = "|".join(map(re.escape, SPECIAL.keys() - {"</think>"}))
    parts = re.split(f"({markers})", text)
    tokens = [
        token
        for part in parts
        for token in ([SPECIAL[part]] if part in SPECIAL and part != "</think>" else part.encode())
    ]
    for token in (*tokens, EOS):
        matcher.write_mask(words)
        if not words.view(np.uint32)[token // 32] >> token % 32 & 1:
            return False
        if token != EOS:
            matcher.accept(token)
    return True


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", CALL_FORMATS)
@pytest.mark.parametrize("begin", [None, "<think>Hm.</think>\n\n", "Hm.</think>\n\n"])
def test_strict_calls_are_held_to_their_schemas_beside_any_text(family: str, begin: str | None) -> None:
    prompt_thinks = begin is not None and not begin.startswith("<think>")
    syntax = AnswerSyntax(begin is not None, prompt_thinks, CALL_FORMATS[family], NAMES)
    grammar, begin = chat_grammar(syntax, allows_text=True), begin or ""
    call = CALLS[family]
    for text in ("", "Just text <tool_call", "I {x}", call):
        assert is_allowed(grammar, begin + text), text
    if family not in ("llama3", "gemma"):
        assert is_allowed(grammar, f"{begin}See: {call} Done.\n{call}")
    for bad in (
        call.replace("{}", '{"y": 1}'),
        call.replace('"f"', '"g"').replace("]f[", "]g[").replace("｜>f", "｜>g"),
        call[:-2],
    ):
        assert not is_allowed(grammar, begin + bad), bad


def test_an_answer_in_a_form_may_have_calls_instead() -> None:
    syntax = AnswerSyntax(calls=CALL_FORMATS["hermes"], tool_names=NAMES)
    grammar = chat_grammar(syntax, schema=json.dumps(WEATHER))
    kinds = set()
    for seed in range(12):
        pieces = parts(generate(grammar, seed), syntax)
        kinds.add(pieces[0].kind)
        assert pieces[0].kind is PieceKind.CALL or json.loads(pieces[0].text)["city"] in ("Köln", "}")
    assert kinds == {PieceKind.CALL, PieceKind.CONTENT}


def test_a_schema_may_contain_the_name_of_a_directive() -> None:
    word = "%llguidance {}"
    syntax = AnswerSyntax(calls=CALL_FORMATS["hermes"], tool_names=NAMES)
    schema = {
        "type": "object",
        "description": word,
        "properties": {word: {"enum": [word]}},
        "required": [word],
    }
    call = CALLS["hermes"].replace("{}", json.dumps({word: word}))
    assert is_allowed(chat_grammar(syntax, tools=[("f", schema)]), call)
    assert not is_allowed(chat_grammar(syntax, tools=[("f", schema)]), call.replace(f'"{word}"}}', '"x"}'))
    assert is_allowed(chat_grammar(syntax, tools=[], schema=json.dumps({"const": word})), json.dumps(word))


def test_the_end_of_reasoning_may_be_a_special_token() -> None:
    syntax = AnswerSyntax(thinks=True, prompt_thinks=True)
    grammar = chat_grammar(syntax, tools=[], schema='{"const": 1}', special_ids=SPECIAL)
    matcher = LIBRARY.compile(StructuredOutput.grammar(grammar)).start({EOS})
    words = np.zeros(-(-len(PIECES) // 32), np.int32)
    for token in (*b"Hm.", SPECIAL["</think>"], *b"\n1", EOS):
        matcher.write_mask(words)
        assert words.view(np.uint32)[token // 32] >> token % 32 & 1, token
        if token != EOS:
            matcher.accept(token)
