"""A request whose engine was lost continues in another engine, with the same tokens as without the loss."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slora.core.errors import RequestRefused
from slora.core.request import EmittedTokens, EngineRequest, FinishReason, RequestUsage, single_adapter
from slora.core.sampling_params import OutputKind, SamplingParams, StructuredOutput
from slora.engine.engine import Engine
from tests.api.served import EOS, write_tokenizer
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits, make_kit
from tests.support.peft_adapters import KINDS

KIND = "r8_on_q_and_v"
SAMPLED = SamplingParams(max_tokens=30, seed=7, ignore_eos=True, logprobs=2)
CASES = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    "min_tokens": replace(SAMPLED, min_tokens=20, stop_token_ids=tuple(range(40)), max_tokens=None),
    "bad_words": replace(SAMPLED, bad_words=tuple((one, two) for one in range(4) for two in range(8))),
    "choices": replace(SAMPLED, n=3, stop_token_ids=tuple(range(4))),
}
PROMPT = [5, 6, 7, 8, 9] * 9


def cut(answer: Answer, at: int) -> tuple[int, ...] | None:
    """The first `at` tokens of an answer; None if the answer has ended by then."""
    return None if at >= len(answer.token_ids) else tuple(answer.token_ids[:at])


def check_cuts(start: Callable[[], Engine], request: EngineRequest, num_cuts: int = 3) -> list[Answer]:
    """Cuts the answer at random points. Returns the undisturbed choices."""
    whole = start()
    found = drive(whole, [[request]])
    ids = [request.request_id, *(f"{request.request_id}/{n}" for n in range(1, request.sampling.width))]
    expected = [found[one] for one in ids]
    usage = whole.stats().usage
    rng = random.Random(request.request_id)
    longest = max(len(one.token_ids) for one in expected)
    for _ in range(num_cuts):
        ats = [rng.randrange(longest) for _ in expected]
        ats[rng.randrange(len(ats))] = 1
        choices = tuple(cut(one, at) for one, at in zip(expected, ats, strict=True))
        num_emitted = sum(min(at, len(one.token_ids)) for one, at in zip(expected, ats, strict=True))
        engine = start()
        resumed = drive(engine, [[replace(request, emitted=EmittedTokens(choices, num_emitted, 3))]])
        for one, name, tokens in zip(expected, ids, choices, strict=True):
            if tokens is None:
                assert name not in resumed
                continue
            assert resumed[name].error is None and resumed[name].reason == one.reason
            assert [*tokens, *resumed[name].token_ids] == one.token_ids
            if one.logprobs:
                rest = one.logprobs[len(tokens) :]
                assert resumed[name].logprobs == pytest.approx(rest, abs=1e-4)
        found_usage = engine.stats().usage
        assert replace(found_usage, page_seconds=0, adapter_bytes=0) == RequestUsage(
            len(request.prompt_token_ids), 3, usage.generated_tokens
        )
        engine.check_invariants()
        engine.close()
    whole.close()
    return expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", ["llama", "mistral_window"])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_request_continues_as_if_it_had_not_been_interrupted(
    kits: Kits, model: str, name: str, *, soak: bool
) -> None:
    kit = kits(model)
    source, versions = make_source(kit)
    adapters = single_adapter(versions[KIND])
    check_cuts(
        lambda: make_engine(kit, source, 200, max_num_seqs=9, max_num_batched_tokens=20),
        EngineRequest(name, "t", PROMPT, adapters, CASES[name]),
        3 if soak else 2,
    )


def test_a_resumed_request_keeps_the_state_of_its_grammar(tmp_path: Path) -> None:
    sizes = {"vocab_size": EOS + 1, "num_hidden_layers": 1, "eos_token_id": EOS}
    kit = make_kit(tmp_path, "llama", {KIND: KINDS[KIND]}, **sizes)
    write_tokenizer(kit.directory)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, "two"]}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    output = StructuredOutput(OutputKind.JSON_SCHEMA, json.dumps(schema), "response_format")
    params = SamplingParams(max_tokens=80, seed=3, logprobs=0, n=2, structured_output=output)
    source = make_source(kit)[0]
    answers = check_cuts(
        lambda: make_engine(kit, source, 200), EngineRequest("form", "t", [5, 6, 7], (), params), 4
    )
    assert any(one.reason is FinishReason.STOP for one in answers)


def test_a_request_that_cannot_be_resumed_is_refused(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 50)
    request = EngineRequest("r", "t", [1, 2], (), SamplingParams(n=2))
    for emitted in (
        EmittedTokens(((1,),), 1),
        EmittedTokens((None, None), 4),
        EmittedTokens(((1,), (10**6,)), 2),
    ):
        with pytest.raises(RequestRefused, match="emitted"):
            engine.add(replace(request, emitted=emitted))
    assert engine.num_unfinished == 0
