"""Allowed tokens and bad words in the engine: every answer is the best one that they leave."""

from dataclasses import replace

import pytest
import torch

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import MARGIN, Oracle
from tests.support.peft_adapters import KINDS
from tests.support.poison import poison

KIND = "r8_on_q_and_v"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ALLOWED = tuple(range(3, 90, 7))


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    sizes = {"vocab_size": 101, "num_hidden_layers": 1}
    return make_kit(tmp_path_factory.mktemp("filtered"), "llama", {KIND: KINDS[KIND]}, **sizes)


@pytest.fixture(scope="module")
def oracle(kit: ModelKit) -> Oracle:
    return Oracle(kit.directory, kit.adapters)


def ask(kit: ModelKit, name: str, sampling: SamplingParams) -> EngineRequest:
    adapter = make_source(kit)[1][KIND] if len(name) % 2 else None
    return EngineRequest(name, "t", [*range(5, 5 + len(name))], single_adapter(adapter), sampling)


def start(kit: ModelKit, num_pages: int = 200, **settings: int | str) -> Engine:
    return make_engine(kit, make_source(kit)[0], num_pages, **settings)


def has_word(answer: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(answer[at : at + len(word)]) == word for at in range(len(answer)))


def forbid_what_is_said(kit: ModelKit, request: EngineRequest) -> SamplingParams:
    """Bad words that the answer has without them: a pair of tokens, three tokens, and a single token."""
    said = drive(start(kit), [[request]])[request.request_id].token_ids
    words = (tuple(said[1:3]), tuple(said[4:7]), (said[8],))
    return replace(request.sampling, bad_words=words)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_each_token_is_the_most_probable_one_that_is_left(
    kit: ModelKit, oracle: Oracle, kernels: str
) -> None:
    requests = []
    for number in range(6):
        request = ask(kit, "r" * (number + 3), GREEDY)
        sampling = forbid_what_is_said(kit, request) if number % 3 else GREEDY
        if number % 2:
            sampling = replace(sampling, allowed_token_ids=ALLOWED)
        requests.append(replace(request, sampling=sampling))
    answers = drive(start(kit, kernels=kernels), [requests])
    num_forced = 0
    for request in requests:
        answer = answers[request.request_id].token_ids
        adapter = KIND if request.adapters else None
        logits = oracle.answer_logits(request.prompt_token_ids, answer, adapter)
        for position, (row, token) in enumerate(zip(logits, answer, strict=True)):
            left = row.clone()
            if request.sampling.allowed_token_ids is not None:
                left[[one for one in range(101) if one not in ALLOWED]] = -torch.inf
            for *before, last in request.sampling.bad_words:
                if answer[max(0, position - len(before)) : position] == before:
                    left[last] = -torch.inf
            assert left[token] > -torch.inf and left[token] >= left.max() - MARGIN
            num_forced += int(row.argmax() != left.argmax())
    assert num_forced > 12


def test_sampled_answers_keep_the_filter_alone_in_a_batch_and_after_a_preemption(kit: ModelKit) -> None:
    sampling = SamplingParams(
        max_tokens=40, seed=3, ignore_eos=True, n=2, allowed_token_ids=ALLOWED[:4], bad_words=((3, 10), (17,))
    )
    requests = [ask(kit, "r" * (number + 9), replace(sampling, seed=number)) for number in range(5)]
    small = start(kit, 18, prefix_cache="off", preemption="recompute")
    poison(small)
    answers = drive(small, [requests])
    assert small.stats().preemptions > 0
    for request in requests[:2]:
        alone = drive(start(kit), [[request]])
        assert {name: one.token_ids for name, one in alone.items()} == {
            name: answers[name].token_ids for name in alone
        }
    for answer in answers.values():
        assert {3, 10} < set(answer.token_ids) <= {3, 10, 24} and not has_word(answer.token_ids, (3, 10))


@pytest.mark.parametrize("width", [2, 4])
def test_a_beam_search_is_that_of_transformers_with_the_other_tokens_suppressed(
    kit: ModelKit, oracle: Oracle, width: int
) -> None:
    search = replace(
        GREEDY, use_beam_search=True, n=2, best_of=width, allowed_token_ids=ALLOWED, max_tokens=6
    )
    request = ask(kit, "beams", search)
    answers = drive(start(kit, max_num_seqs=width), [[request]])
    others = [token for token in range(101) if token not in ALLOWED]
    expected, _ = oracle.beam_search(
        request.prompt_token_ids,
        KIND,
        (),
        num_beams=width,
        num_return_sequences=2,
        max_new_tokens=6,
        suppress_tokens=others,
    )
    assert [answers[name].token_ids for name in ("beams", "beams/1")] == expected


def test_no_beam_has_a_bad_word(kit: ModelKit) -> None:
    search = replace(GREEDY, use_beam_search=True, n=3, allowed_token_ids=ALLOWED[:6])
    found = drive(start(kit, max_num_seqs=3), [[ask(kit, "b", search)]])
    said = found["b"].token_ids
    words = (tuple(said[2:4]), tuple(said[:3]))
    answers = drive(start(kit, max_num_seqs=3), [[ask(kit, "b", replace(search, bad_words=words))]])
    assert len(answers) == 3
    assert not any(has_word(answer.token_ids, word) for answer in answers.values() for word in words)
