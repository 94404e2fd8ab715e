"""Prompt lookup changes how many tokens a step yields, and nothing else: tokens, log-probabilities and usage are those
of decoding one by one."""

import random
from dataclasses import replace

import pytest

from slora.core.request import EngineRequest, RequestUsage, single_adapter
from slora.core.sampling_params import OutputKind, SamplingParams, StructuredOutput
from slora.engine.engine import Engine
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence
from slora_adapters.version import AdapterVersion
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits
from tests.support.tiny_models import VOCAB_SIZE

ON = {"prompt_lookup_tokens": 15}


def make_prompt(rng: random.Random) -> list[int]:
    """A prompt that repeats itself."""
    phrase = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))]
    return [*(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 9))), *phrase * rng.randint(1, 5)]


def make_params(rng: random.Random) -> SamplingParams:
    """Greedy answers of a tiny model soon repeat themselves. A bias makes sampled answers do so, too."""
    favourites = rng.sample(range(VOCAB_SIZE), 3)
    return SamplingParams(
        max_tokens=rng.randint(1, 40),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        top_p=rng.choice((1.0, 0.8)),
        top_k=rng.choice((0, 0, 5)),
        min_p=rng.choice((0.0, 0.1)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
        logit_bias=rng.choice(({}, dict.fromkeys(favourites, 30.0))),
        min_tokens=0,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 2)))),
        seed=rng.randrange(2**40),
        logprobs=rng.choice((None, 0, 2)),
        n=rng.choice((1, 1, 1, 2)),
    )


def make_requests(versions: dict[str, AdapterVersion], count: int) -> list[EngineRequest]:
    rng, adapters = random.Random(3), [None, *versions.values()]
    requests = []
    for number in range(count):
        params = make_params(rng)
        params = replace(params, min_tokens=rng.choice((0, 0, params.max_tokens // 2)))  # type: ignore[operator]
        adapter = adapters[number % len(adapters)]
        requests.append(EngineRequest(str(number), "t", make_prompt(rng), single_adapter(adapter), params))
    return requests


def take_turns(requests: list[EngineRequest]) -> list[list[EngineRequest]]:
    return [requests[at : at + 3] for at in range(0, len(requests), 3)]


def generated(engine: Engine) -> int:
    usage: dict[str, RequestUsage] = {one.request_id: one.usage for one in engine.pop_usage()}
    return sum(one.generated_tokens for one in usage.values())


def check_same(drafted: dict[str, Answer], plain: dict[str, Answer]) -> None:
    assert drafted.keys() == plain.keys()
    for name, answer in drafted.items():
        assert answer.error is None and answer.token_ids == plain[name].token_ids, name
        assert answer.reason == plain[name].reason and answer.logprobs == plain[name].logprobs, name


@pytest.mark.parametrize(
    ("model", "num_pages", "settings"),
    [
        ("llama", 500, {}),
        ("llama", 40, {"max_model_len": 128, "max_num_batched_tokens": 19, "max_num_seqs": 9}),
        pytest.param("mistral_window", 40, {"max_model_len": 128, "prefix_cache": "off"}, marks=pytest.mark.soak),
        pytest.param("phi3_longrope", 40, {"max_model_len": 128, "preemption": "swap"}, marks=pytest.mark.soak),
        pytest.param("qwen2", 40, {"max_model_len": 128, "kv_cache_dtype": "fp8"}, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_answers_have_the_same_tokens_and_logprobs_bit_for_bit(
    kits: Kits, model: str, num_pages: int, settings: dict[str, int | str], soak: bool
) -> None:
    """In bfloat16, a row has the same bits in a batch of any size, so answers can be compared exactly."""
    kit = kits(model)
    source, versions = make_source(kit, "bfloat16")
    requests = make_requests(versions, 200 if soak else 40)
    plain_engine = make_engine(kit, source, num_pages, dtype="bfloat16", **settings)
    engine = make_engine(kit, source, num_pages, dtype="bfloat16", **settings, **ON)
    plain = drive(plain_engine, take_turns(requests))
    check_same(drive(engine, take_turns(requests)), plain)
    stats = engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens and stats.drafts > 0
    assert plain_engine.stats().draft_tokens == 0
    num_tokens = sum(len(answer.token_ids) for answer in plain.values())
    assert stats.generated_tokens == num_tokens == generated(engine) == generated(plain_engine)


def ask(prompt: list[int], **params: object) -> EngineRequest:
    return EngineRequest("r", "t", prompt, (), SamplingParams(**{"temperature": 0.0, **params}))  # type: ignore[arg-type]


def copying(**params: object) -> EngineRequest:
    """Its answer repeats one token: nearly all of its drafts are accepted."""
    return ask([5, 6, 7, 7, 7, 7], logit_bias={7: 100.0}, ignore_eos=True, **params)


def count_steps(kits: Kits, request: EngineRequest, **settings: int | str) -> tuple[int, Answer]:
    engine, _ = start_engine(kits("llama"), 100, **settings)
    answer = drive(engine, [[request]])["r"]
    return engine.stats().steps, answer


def test_an_answer_that_copies_takes_few_steps_and_ends_at_max_tokens(kits: Kits) -> None:
    steps, answer = count_steps(kits, copying(max_tokens=64), **ON)
    assert answer.token_ids == [7] * 64 and steps < 20
    assert count_steps(kits, copying(max_tokens=64))[0] == 64
    assert count_steps(kits, copying(max_tokens=64, prompt_lookup=False), **ON)[0] == 64


def test_a_stop_token_within_a_draft_ends_the_answer(kits: Kits) -> None:
    prompt = [*[7, 8] * 6, 9, *[7, 8] * 6]
    request = ask(
        prompt, logit_bias={7: 100.0}, stop_token_ids=(7,), ignore_eos=True, min_tokens=20, max_tokens=40
    )
    _, answer = count_steps(kits, request, **ON)
    _, plain = count_steps(kits, request)
    assert (
        answer.token_ids == plain.token_ids and answer.reason == plain.reason and len(answer.token_ids) == 21
    )


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.1},
        {"n": 2, "best_of": 2, "use_beam_search": True},
        {"structured_output": StructuredOutput(OutputKind.REGEX, "a*", "guided_regex")},
        {"prompt_lookup": False},
    ],
    ids=lambda params: next(iter(params)),
)
def test_a_request_whose_tokens_depend_on_the_tokens_before_is_not_drafted(params: dict[str, object]) -> None:
    sequences = [
        Sequence(ask([1], **fields), TenantAccount("t"), 9, frozenset(), 0, BlockTable(16))
        for fields in ({}, params)
    ]
    assert [one.can_draft for one in sequences] == [True, False]
