"""Structured output in the engine: each answer has its form, alone and in a batch, in beams and after a preemption."""

import json
import re
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, FinishReason, single_adapter
from slora.core.sampling_params import SamplingParams, StructuredOutput
from slora.engine.engine import Engine
from slora.llm.llm import LLM
from slora.sampling import token_masks
from slora.text.tokenizer import Tokenizer
from tests.api.served import EOS, write_tokenizer
from tests.support.covering import soaked
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import Answer, drive, make_engine, make_source, step
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import KINDS
from tests.support.poison import poison

KIND = "r8_on_q_and_v"
PARAMS = SamplingParams(max_tokens=60, seed=7, logprobs=0)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    """A tiny model with one token for each printable character, and one adapter."""
    root = tmp_path_factory.mktemp("characters")
    sizes = {"vocab_size": EOS + 1, "num_hidden_layers": 1, "eos_token_id": EOS}
    made = make_kit(root, "llama", {KIND: KINDS[KIND]}, **sizes)
    write_tokenizer(made.directory)
    return made


def schema_of(number: int) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            f"key {number}": {"enum": [number, f"text {number}", None]},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": number % 3},
        },
        "required": [f"key {number}", "list"],
        "additionalProperties": False,
    }


def ask(kit: ModelKit, name: str, output: StructuredOutput, **changes: object) -> EngineRequest:
    adapter = make_source(kit)[1][KIND] if len(name) % 2 else None
    params = replace(PARAMS, structured_output=output, **changes)  # type: ignore[arg-type]
    return EngineRequest(name, "t", [*range(5, 5 + len(name))], single_adapter(adapter), params)


def start(kit: ModelKit, num_pages: int = 200, **settings: int | str) -> Engine:
    return make_engine(kit, make_source(kit)[0], num_pages, **settings)


def text_of(kit: ModelKit, answer: Answer) -> str:
    assert answer.error is None, answer.error
    return Tokenizer.from_directory(kit.directory).decode(answer.token_ids)


def check_form(kit: ModelKit, answer: Answer, schema: dict[str, object]) -> bool:
    """Returns whether the answer ended by itself. If so, it must be valid."""
    if answer.reason is FinishReason.LENGTH:
        return False
    Draft202012Validator(schema).validate(json.loads(text_of(kit, answer)))
    return True


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_64_answers_with_different_schemas_in_a_batch_are_those_of_each_alone(
    kit: ModelKit, kernels: str
) -> None:
    """A quarter of the batch has no form, and a quarter samples greedily."""
    requests = []
    for number in range(64):
        output = StructuredOutput.json_schema(schema_of(number))
        request = ask(kit, "r" * (number % 9 + 1) + str(number), output, temperature=float(number % 4 > 0))
        if number % 4 == 3:
            request = replace(request, sampling=replace(request.sampling, structured_output=None))
        requests.append(request)
    together = drive(start(kit, kernels=kernels), [requests])
    num_ended = 0
    for number, request in enumerate(requests):
        if number in (0, 9, 35, 62):
            alone = drive(start(kit, kernels=kernels), [[request]])[request.request_id]
            assert alone.token_ids == together[request.request_id].token_ids
        if number % 4 != 3:
            num_ended += check_form(kit, together[request.request_id], schema_of(number))
    assert num_ended > 30


def test_the_first_mask_of_a_schema_needs_no_step_of_its_own(kit: ModelKit) -> None:
    engine = start(kit)
    engine.add(ask(kit, "a", StructuredOutput.choice(["yes"])))
    (output,) = engine.step()
    assert output.delta is not None and len(output.delta.token_ids) == 1


@pytest.mark.parametrize("preemption", soaked(["recompute", "swap"], "swap"))
def test_a_preempted_answer_keeps_its_form(kit: ModelKit, preemption: str) -> None:
    """The pool is so small that sequences preempt one another."""
    requests = [
        ask(kit, "r" * (number + 9), StructuredOutput.json_schema(schema_of(number)), max_tokens=90)
        for number in range(6)
    ]
    swap = {} if preemption == "recompute" else {"swap_bytes": 4 << 20}
    small = start(kit, 18, preemption=preemption, prefix_cache="off", **swap)
    poison(small)
    answers = drive(small, [requests])
    assert small.stats().preemptions > 0
    expected = drive(start(kit), [requests])
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids


@pytest.mark.parametrize("preemption", soaked(["recompute", "swap"], "recompute"))
def test_answers_whose_masks_are_deferred_are_the_same(
    kit: ModelKit, monkeypatch: pytest.MonkeyPatch, preemption: str
) -> None:
    """Each step has time for one mask after the first tokens, and half of the sequences have no form."""
    requests = [
        ask(
            kit,
            "r" * (number + 9),
            StructuredOutput.json_schema(schema_of(number)),
            n=number % 3 + 1,
            max_tokens=30,
        )
        for number in range(6)
    ]
    requests[1::2] = [
        replace(one, sampling=replace(one.sampling, structured_output=None)) for one in requests[1::2]
    ]
    beams = {"use_beam_search": True, "temperature": 0.0, "seed": None, "n": 2, "best_of": 3}
    requests.append(ask(kit, "beams", StructuredOutput.regex("(yes|no|[a-c]{3}){2}"), **beams))
    expected = drive(start(kit), [requests])
    monkeypatch.setattr(token_masks, "_STEP_S", 0.0)
    small = start(kit, 26, preemption=preemption)
    poison(small)
    answers = drive(small, [requests])
    assert small.stats().preemptions > 0 and small.stats().steps > 2 * 30
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }


def test_each_choice_of_a_request_has_the_form(kit: ModelKit) -> None:
    output = StructuredOutput.regex("[a-c]{2,4}=[0-9]")
    answers = drive(start(kit), [[ask(kit, "n", output, n=5)]])
    texts = [text_of(kit, answer) for answer in answers.values()]
    assert len(texts) == 5 and len(set(texts)) > 1
    assert all(re.fullmatch("[a-c]{2,4}=[0-9]", text) for text in texts)


@pytest.mark.parametrize("width", [2, 5])
def test_each_hypothesis_of_a_beam_search_has_the_form(kit: ModelKit, width: int) -> None:
    """At first the form allows one continuation, so there are fewer beams than the search has places."""
    output = StructuredOutput.regex("key: (yes|no|[a-c]{3})[.!]?")
    search = {"n": 2, "best_of": width, "use_beam_search": True, "temperature": 0.0, "seed": None}
    engine = start(kit, max_num_seqs=width, max_num_batched_tokens=width + 3)
    answers = drive(engine, [[ask(kit, "beams", output, **search), ask(kit, "alone", output)]])
    texts = [text_of(kit, answer) for name, answer in answers.items() if name != "alone"]
    assert len(set(texts)) == 2 and all(re.fullmatch(output.text, text) for text in texts)


def test_a_beam_search_with_fewer_answers_than_asked_is_refused(kit: ModelKit) -> None:
    search = {"n": 3, "use_beam_search": True, "temperature": 0.0}
    answers = drive(start(kit), [[ask(kit, "few", StructuredOutput.choice(["yes", "no"]), **search)]])
    error = answers["few"].error
    assert isinstance(error, RequestRefused) and error.param == "n" and "found only 2" in error.message


def test_an_answer_that_is_cut_off_says_so(kit: ModelKit) -> None:
    cut = drive(start(kit), [[ask(kit, "cut", StructuredOutput.choice(["yes"]), max_tokens=2)]])["cut"]
    assert text_of(kit, cut) == "ye" and cut.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (StructuredOutput.regex("(a", "guided_regex"), "unclosed group"),
        (StructuredOutput.regex("é"), "no token of this model's vocabulary"),
        (StructuredOutput.regex("aé"), "after 1 tokens of the answer"),
    ],
    ids=["malformed", "no token spells it", "no token spells the rest"],
)
def test_a_form_that_the_model_cannot_write_is_refused_alone(
    kit: ModelKit, output: StructuredOutput, message: str
) -> None:
    engine = start(kit)
    answers = drive(engine, [[ask(kit, "bad", output), ask(kit, "good", StructuredOutput.choice(["yes"]))]])
    error = answers["bad"].error
    assert isinstance(error, RequestRefused) and error.param == output.param and message in error.message
    assert text_of(kit, answers["good"]) == "yes"
    assert {one.request_id: one.usage for one in engine.pop_usage()}["bad"].generated_tokens == message.count(
        "1"
    )


def test_a_penalty_or_bias_does_not_lift_a_mask(kit: ModelKit) -> None:
    output = StructuredOutput.regex("[ab]{20}")
    bias = {"logit_bias": {3: 100.0}, "repetition_penalty": 0.05, "presence_penalty": -2.0}
    assert re.fullmatch(output.text, text_of(kit, drive(start(kit), [[ask(kit, "b", output, **bias)]])["b"]))


def test_log_probabilities_are_those_of_the_model(kit: ModelKit) -> None:
    """A mask does not change them, as penalties do not."""
    answer = drive(start(kit), [[ask(kit, "p", StructuredOutput.choice(["yes"]), logprobs=5)]])["p"]
    assert text_of(kit, answer) == "yes" and all(logprob < -0.01 for logprob in answer.logprobs)


def test_aborting_a_request_while_its_grammar_compiles_frees_everything(kit: ModelKit) -> None:
    """The grammar is compiled on a thread, which notifies the engine."""
    engine = start(kit)
    requests = [ask(kit, name, StructuredOutput.choice(["yes"])) for name in ("a", "bb", "ccc")]
    for request in requests:
        engine.add(request)
    engine.abort("a")
    engine.check_invariants()
    engine.purge_tenant("t")
    assert engine.num_unfinished == 0 and len(engine.pop_usage()) == 3
    answers: dict[str, Answer] = {}
    step(engine, answers)
    assert not answers
    assert text_of(kit, drive(engine, [[requests[0]]])["a"]) == "yes"


def test_the_library_answers_in_a_form(kit: ModelKit) -> None:
    llm = LLM(kit.directory, device="cpu", kernels="torch", pool_bytes=kit.pool_bytes(50))
    params = SamplingParams(max_tokens=9, structured_output=StructuredOutput.choice(["maybe", "never"]))
    assert {answer.text for answer in llm.generate(["a", "b", "c"], params)} <= {"maybe", "never"}
