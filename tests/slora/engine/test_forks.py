"""The choices of one request equal the answers of separate requests that have the same seeds."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from slora.core.engine_state import EngineStats
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams, choice_seed
from slora.engine.engine import Engine
from slora_adapters.version import AdapterVersion
from tests.support.covering import soaked
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import Answer, drive, make_engine, make_source, step
from tests.support.model_kit import Kits
from tests.support.poison import poison
from tests.support.tiny_models import VOCAB_SIZE

# Lengths on both sides of a page's 16 tokens, and up to more than two pages.
LENGTHS = (1, 15, 16, 17, 40)


def ask(name: str, adapter: AdapterVersion | None, n: int, max_tokens: int = 30) -> EngineRequest:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice(LENGTHS))]
    seed = rng.randrange(-(2**63), 2**63)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, logprobs=0, n=n)
    return EngineRequest(name, "t", prompt, single_adapter(adapter), params)


def apart(request: EngineRequest) -> list[EngineRequest]:
    """One separate request for each choice."""
    params = request.sampling
    return [
        replace(
            request,
            request_id=f"{request.request_id}/{index}" if index else request.request_id,
            sampling=replace(params, n=1, seed=choice_seed(params.seed or 0, index)),
        )
        for index in range(params.n)
    ]


def assert_same(found: dict[str, Answer], expected: dict[str, Answer], tolerance: float = 1e-4) -> None:
    """tolerance: of log-probabilities."""
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].error is None and found[name].reason == answer.reason
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].logprobs == pytest.approx(answer.logprobs, abs=tolerance)


def compare_choices(
    requests: list[EngineRequest], plain: Engine, engine: Engine, tolerance: float = 1e-4
) -> EngineStats:
    """Compares choices, whose requests arrive in turn, with requests of their own that `plain` answers at once.

    Before each step of `engine`, all free pages are filled with NaN.
    """
    expected = drive(plain, [[one for request in requests for one in apart(request)]])
    poison(engine)
    found = drive(engine, [requests[at : at + 3] for at in range(0, len(requests), 3)])
    assert_same(found, expected, tolerance)
    return engine.stats()


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    ("model", "num_pages", "settings"),
    [
        pytest.param("llama", 200, {}, marks=pytest.mark.soak),
        pytest.param("llama", 200, {"max_num_seqs": 9, "max_num_batched_tokens": 11}, marks=pytest.mark.soak),
        ("llama", 40, {}),
        pytest.param("llama", 200, {"max_num_seqs": 4}, marks=pytest.mark.soak),
        ("mistral_window", 40, {"max_num_seqs": 9, "max_num_batched_tokens": 11}),
    ],
    ids=["at ease", "in chunks", "preempted", "few places", "behind windows"],
)
def test_choices_equal_requests_of_their_own(
    kits: Kits, kernels: str, model: str, num_pages: int, settings: dict[str, int]
) -> None:
    kit = kits(model)
    source, versions = make_source(kit)
    adapters = [None, *list(versions.values())[:4]] * 2
    requests = [ask(str(number), adapter, n=number % 4 + 1) for number, adapter in enumerate(adapters)]
    stats = compare_choices(
        requests,
        make_engine(kit, source, 2000, kernels=kernels),
        make_engine(kit, source, num_pages, kernels=kernels, **settings),
    )
    assert (stats.preemptions > 0) == (num_pages < 100)
    assert stats.pages_held == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("survivor", soaked([0, 1, 2], 1))
def test_choices_that_diverge_never_see_each_others_kv(kits: Kits, kernels: str, survivor: int) -> None:
    """Fills every page that the surviving choice does not hold with NaN while all choices run, then aborts the
    others."""
    kit = kits("llama")
    source, _ = make_source(kit)
    request = replace(ask("three", None, n=3), prompt_token_ids=list(range(1, 38)))
    expected = drive(make_engine(kit, source, 100, kernels=kernels), [apart(request)])
    engine = make_engine(kit, source, 100, kernels=kernels)
    engine.add(request)
    answers: dict[str, Answer] = defaultdict(Answer)
    for _ in range(6):
        step(engine, answers)
    tables = {one.index: one.blocks.pages.tolist() for one in engine.scheduler.find("three")}
    assert len({tuple(pages[:2]) for pages in tables.values()}) == 1, (
        "the whole blocks of the prompt are shared"
    )
    assert len({pages[2] for pages in tables.values()}) == 3, "the block that they write to is not"
    others = [page for page in range(100) if page not in tables[survivor]]
    engine.runner.memory.pages[others] = 0xFF
    for index in {0, 1, 2} - {survivor}:
        engine.abort("three", index)
    engine.check_invariants()
    while engine.num_unfinished:
        step(engine, answers)
    name = f"three/{survivor}" if survivor else "three"
    assert answers[name].token_ids == expected[name].token_ids
    assert len({tuple(answer.token_ids) for answer in expected.values()}) == 3
