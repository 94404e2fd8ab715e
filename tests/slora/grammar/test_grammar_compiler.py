"""Grammars are compiled once, on a thread, and errors of the vocabulary refuse the requests that need it."""

import threading

import pytest

from slora.errors import ConfigError
from slora.grammar import grammar_compiler
from slora.grammar.grammar_compiler import GrammarCompiler
from slora.grammar.grammar_source import Compiled, Refused
from slora.grammar.token_spelling import TokenSpelling
from slora.structured_output import StructuredOutput

EOS = 256
SPELLING = TokenSpelling([*(bytes([byte]) for byte in range(EOS)), b""])
FINE = StructuredOutput.choice(["yes", "no"], "guided_choice")


def spell() -> TokenSpelling:
    return SPELLING


def fail_to_spell() -> TokenSpelling:
    raise ConfigError("the model has no tokenizer")


def test_a_grammar_is_compiled_on_a_thread_and_then_cached() -> None:
    arrived = threading.Event()
    compiler = GrammarCompiler(spell, [EOS], notify=arrived.set)
    compiler.request(FINE)
    compiler.request(FINE)  # joins the first request
    assert arrived.wait(60)
    (first,) = compiler.poll()
    compiler.request(StructuredOutput(FINE.kind, FINE.text, "another field"))
    (second,) = compiler.poll()  # needs no thread
    compiler.close()
    assert isinstance(first, Compiled) and isinstance(second, Compiled)
    assert second.grammar is first.grammar and second.output.param == "another field"


def test_the_grammar_that_was_used_least_recently_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_FORMS", 2)
    compiler = GrammarCompiler(spell, [EOS])

    def compile_one(pattern: str) -> object:
        compiler.request(StructuredOutput.regex(pattern))
        (result,) = compiler.poll()
        assert isinstance(result, Compiled)
        return result.grammar

    a, b = compile_one("a"), compile_one("b")
    assert compile_one("a") is a
    compile_one("c")
    assert compile_one("a") is a and compile_one("b") is not b


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (GrammarCompiler(fail_to_spell, [EOS]), "the model has no tokenizer"),
        (GrammarCompiler(spell, []), "no end-of-sequence token"),
    ],
)
def test_a_model_without_the_vocabulary_for_grammars_refuses_each_form(
    compiler: GrammarCompiler, message: str
) -> None:
    for _ in range(2):
        compiler.request(FINE)
        (result,) = compiler.poll()
        assert isinstance(result, Refused) and result.error.param == "guided_choice"
        assert message in result.error.message


def test_a_vocabulary_that_spells_no_bytes_is_read_once() -> None:
    num_reads = 0

    def count_and_fail() -> TokenSpelling:
        nonlocal num_reads
        num_reads += 1
        raise ConfigError("the model has no tokenizer")

    compiler = GrammarCompiler(count_and_fail, [EOS])
    for text in ("a", "b", "c"):
        compiler.request(StructuredOutput.regex(text))
        assert [type(result) for result in compiler.poll()] == [Refused]
    assert num_reads == 1
