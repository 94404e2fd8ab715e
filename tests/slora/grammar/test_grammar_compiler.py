"""Grammars are compiled once, on a thread, and errors of the vocabulary refuse the requests that need it."""

import threading

import pytest

from slora.core.errors import ConfigError
from slora.core.sampling_params import StructuredOutput
from slora.grammar.grammar_compiler import Compiled, GrammarCompiler, Refused
from slora.grammar.matcher import TokenSpelling

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
    compiler.request("acme", FINE)
    compiler.request("acme", FINE)  # joins the first request
    assert arrived.wait(300)
    (first,) = compiler.poll()
    compiler.request("acme", StructuredOutput(FINE.kind, FINE.text, "another field"))
    (second,) = compiler.poll()  # needs no thread
    compiler.close()
    assert isinstance(first, Compiled) and isinstance(second, Compiled)
    assert second.grammar is first.grammar and second.output.param == "another field"


def test_a_grammar_is_cached_for_its_tenant_alone() -> None:
    compiler = GrammarCompiler(spell, [EOS])
    for tenant in ("acme", "globex", "acme"):
        compiler.request(tenant, FINE)
    grammars = {}
    for result in compiler.poll():  # the third request has joined the first
        assert isinstance(result, Compiled)
        grammars[result.tenant] = result.grammar
    assert len(grammars) == 2 and grammars["acme"] is not grammars["globex"]
    compiler.request("globex", FINE)
    (again,) = compiler.poll()
    assert isinstance(again, Compiled) and again.grammar is grammars["globex"]


def test_many_forms_of_a_tenant_do_not_delay_a_form_of_another() -> None:
    """The forms wait while the thread reads the vocabulary."""
    may_spell, is_done = threading.Event(), threading.Semaphore(0)

    def spell_late() -> TokenSpelling:
        assert may_spell.wait(300)
        return SPELLING

    compiler = GrammarCompiler(spell_late, [EOS], notify=is_done.release)
    for number in range(20):
        compiler.request("greedy", StructuredOutput.regex(f"a{number}"))
    for number in range(2):
        compiler.request("other", StructuredOutput.regex(f"b{number}"))
    may_spell.set()
    for _ in range(22):
        assert is_done.acquire(timeout=300)
    order = [result.tenant for result in compiler.poll()]
    compiler.close()
    assert order[:4] == ["greedy", "other", "greedy", "other"] and len(order) == 22


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
        compiler.request("acme", FINE)
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
        compiler.request("acme", StructuredOutput.regex(text))
        assert [type(result) for result in compiler.poll()] == [Refused]
    assert num_reads == 1
