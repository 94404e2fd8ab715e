"""A request with a seed gives the same tokens alone and in a batch with 63 others that use every sampling method."""

import random

import pytest

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from tests.support.covering import soaked
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS, MOSTLY_FASTEST
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits
from tests.support.tiny_models import VOCAB_SIZE

NUM_REQUESTS = 64


def any_params(rng: random.Random) -> SamplingParams:
    """Half of the fields have their defaults. The others have random values of their range."""

    def maybe(value: float, rest: float) -> float:
        return value if rng.random() < 0.5 else rest

    biased = rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 1, 5, 40)))
    max_tokens = rng.randint(4, 24)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 0.3, 0.8, 1.0, 1.7)),
        top_p=maybe(rng.uniform(0.3, 1), 1),
        top_k=int(maybe(rng.randint(1, 60), 0)),
        min_p=maybe(rng.uniform(0, 0.3), 0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.6), 1),
        logit_bias={token: rng.uniform(-20, 3) for token in biased},
        min_tokens=rng.choice((0, 0, 3)),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 2)))),
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=rng.choice((None, 0, 5)),
        prompt_logprobs=rng.choice((None, None, 2)),
        n=rng.choice((1, 1, 1, 2)),
    )


def any_requests(versions: dict[str, AdapterVersion], seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        EngineRequest(
            str(number),
            "t",
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))],
            single_adapter(rng.choice([None, *versions.values()])),
            any_params(rng),
        )
        for number in range(NUM_REQUESTS)
    ]


def in_any_order(requests: list[EngineRequest], rng: random.Random) -> list[list[EngineRequest]]:
    """Splits the requests into lists of 0 to 9, one list before each step."""
    rest, arrivals = rng.sample(requests, len(requests)), []
    while rest:
        count = rng.randint(0, 9)
        arrivals.append(rest[:count])
        del rest[:count]
    return arrivals


def check_same(answers: dict[str, Answer], alone: dict[str, Answer]) -> None:
    assert answers.keys() == alone.keys()
    for name, answer in answers.items():
        assert answer.error is None and alone[name].error is None
        assert answer.token_ids == alone[name].token_ids, name
        assert answer.reason == alone[name].reason


CASES = soaked(
    [(kernels, dtype) for dtype in ("bfloat16", "float32") for kernels in CPU_KERNELS],
    *((KERNELS, dtype) for dtype in ("bfloat16", "float32")),
)


@pytest.mark.invariance
@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    "model", soaked(["llama", "mistral_window", "qwen2_moe", "gpt2", "stablelm"], "llama")
)
def test_a_repeated_request_gets_the_same_numbers_alone_and_among_63_others(
    kits: Kits, kernels: str, model: str, soak: bool
) -> None:
    """In bfloat16, with log-probabilities, which show a difference long before a token does.

    The prompt is cut into chunks, in other places whenever other requests are beside it. From the second time on, most
    of it is in the prefix cache.
    """
    kit = kits(model)
    source, versions = make_source(kit, "bfloat16")
    engine = make_engine(
        kit,
        source,
        num_pages=900,
        kernels=kernels,
        dtype="bfloat16",
        max_num_batched_tokens=64,
        max_num_seqs=64,
    )
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(75)]
    adapter = single_adapter(next(iter(versions.values())))
    answers = []
    num_turns = 20 if soak else 6
    for turn in range(num_turns):
        sampling = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5)
        request = EngineRequest(f"same {turn}", "t", prompt, adapter, sampling)
        others = any_requests(versions, turn)[1:] if turn % 2 else []
        waiting = [*others, request]
        rng.shuffle(waiting)
        answer = drive(engine, in_any_order(waiting, rng))[request.request_id]
        assert answer.error is None
        answers.append((answer.token_ids, answer.logprobs))
    assert answers == [answers[0]] * num_turns


@pytest.mark.invariance
@pytest.mark.parametrize(("kernels", "dtype"), CASES)
def test_a_seeded_request_gets_the_same_answer_in_any_batch(
    kits: Kits, kernels: str, dtype: str, soak: bool
) -> None:
    kit = kits("llama")
    source, versions = make_source(kit, dtype)
    engine = make_engine(kit, source, num_pages=800, kernels=kernels, dtype=dtype)
    rng = random.Random(1)
    for seed in range(12 if soak else 1):
        requests = any_requests(versions, seed)[: NUM_REQUESTS if soak else 20]
        alone: dict[str, Answer] = {}
        for request in requests:
            alone |= drive(engine, [[request]])
        assert len({tuple(answer.token_ids) for answer in alone.values()}) > 0.75 * len(alone)
        for arrivals in ([requests], in_any_order(requests, rng)):
            check_same(drive(engine, arrivals), alone)
    assert engine.stats().preemptions == 0
    if dtype == "float32":
        tight = make_engine(
            kit, source, num_pages=70 if soak else 34, kernels=kernels, max_num_batched_tokens=256
        )
        check_same(drive(tight, in_any_order(requests, rng)), alone)
        assert tight.stats().preemptions > 0


def test_without_a_seed_two_answers_differ(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), num_pages=500)
    requests = [EngineRequest(str(n), "t", [1, 2, 3], (), SamplingParams(max_tokens=40)) for n in range(2)]
    answers = drive(engine, [requests])
    assert answers["0"].token_ids != answers["1"].token_ids
