"""Beam search in the engine equals transformers' own, with and without adapters, and with a pool short of pages."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from slora import LLM
from slora.core.errors import ContextTooLong, RequestRefused
from slora.core.request import EngineRequest, FinishReason, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits
from tests.support.oracle import LOGPROB_TOLERANCE, MARGIN, Oracle
from tests.support.poison import poison
from tests.support.tiny_models import VOCAB_SIZE

Asked = tuple[str | None, EngineRequest]
# Lengths on both sides of a page's 16 tokens, and up to more than two pages.
LENGTHS = (1, 15, 16, 17, 40)
SEARCH = SamplingParams(max_tokens=20, temperature=0.0, n=2, best_of=3, use_beam_search=True)


def ask(
    number: int, kind: str | None, version: AdapterVersion | None, max_tokens: tuple[int, ...]
) -> EngineRequest:
    rng = random.Random(number)
    width = rng.randint(2, 5)
    params = replace(
        SEARCH,
        max_tokens=rng.choice(max_tokens),
        best_of=width,
        n=rng.randint(1, width),
        length_penalty=rng.choice((0.0, 1.0, 1.0, 2.0, -0.5)),
        early_stopping=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 1, 6)))),
        logprobs=rng.choice((None, 0, 3)),
    )
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice(LENGTHS))]
    return EngineRequest(f"{number} on {kind}", "t", prompt, single_adapter(version), params)


def ask_many(
    versions: dict[str, AdapterVersion], count: int, max_tokens: tuple[int, ...] = (1, 2, 20, 30)
) -> list[Asked]:
    kinds = [None, None, *list(versions)[:3]]
    rows = [(number, kinds[number % len(kinds)]) for number in range(count)]
    return [(kind, ask(number, kind, versions[kind] if kind else None, max_tokens)) for number, kind in rows]


def told(answers: dict[str, Answer], request: EngineRequest) -> list[Answer]:
    """The answers to one request, the best first."""
    names = [request.request_id, *(f"{request.request_id}/{n}" for n in range(1, request.sampling.n))]
    return [answers[name] for name in names]


@cache
def search_by_transformers(
    oracle: Oracle, prompt: tuple[int, ...], kind: str | None, stop_ids: tuple[int, ...], **settings: object
) -> tuple[list[list[int]], list[float]]:
    """The oracle's answers and scores. Several tests ask the same."""
    return oracle.beam_search(prompt, kind, stop_ids, **settings)


def check_parity(oracle: Oracle, asked: list[Asked], answers: dict[str, Answer]) -> int:
    """The tokens and their order must be the same, or the scores within MARGIN. Returns how many answers passed by
    score only."""
    excused = 0
    for kind, request in asked:
        params, found = request.sampling, told(answers, request)
        assert all(answer.error is None for answer in found)
        expected, scores = search_by_transformers(
            oracle,
            tuple(request.prompt_token_ids),
            kind,
            params.stop_token_ids,
            num_beams=params.width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
        )
        for answer, tokens, score in zip(found, expected, scores, strict=True):
            ended = answer.token_ids[-1] in params.stop_token_ids
            assert answer.reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
            judged = oracle.token_logprobs(request.prompt_token_ids, answer.token_ids, kind)
            if answer.token_ids != tokens:
                own = sum(judged) / len(judged) ** params.length_penalty
                assert abs(own - score) < MARGIN, (request, answer.token_ids, tokens)
                excused += 1
            if params.logprobs is not None:
                assert answer.logprobs == pytest.approx(judged, abs=LOGPROB_TOLERANCE)
    return excused


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    ("model", "num_pages", "settings"),
    [
        pytest.param("llama", 250, {}, marks=pytest.mark.soak),
        ("llama", 250, {"max_num_seqs": 5, "max_num_batched_tokens": 9}),
        pytest.param("llama", 42, {"preemption": "recompute"}, marks=pytest.mark.soak),
        pytest.param("llama", 42, {"preemption": "recompute", "prefix_cache": "off"}, marks=pytest.mark.soak),
        ("llama", 42, {"preemption": "swap", "swap_bytes": 4 << 20}),
        ("mistral_window", 36, {"max_num_seqs": 11, "max_num_batched_tokens": 13}),
    ],
    ids=["at ease", "in chunks", "computed again", "computed again alone", "swapped", "behind windows"],
)
def test_beams_answer_as_those_of_transformers_do(
    kits: Kits,
    report: Callable[[str], None],
    kernels: str,
    model: str,
    num_pages: int,
    settings: dict[str, int | str],
    *,
    soak: bool,
) -> None:
    kit = kits(model)
    source, versions = make_source(kit)
    asked = ask_many(versions, 200 if soak else 15)
    if soak and num_pages == 250:
        num_pages = 500  # More requests need a larger pool to be at ease.
    engine = make_engine(kit, source, num_pages, kernels=kernels, **settings)
    poison(engine)
    requests = [request for _, request in asked]
    answers = drive(engine, [requests[at : at + 5] for at in range(0, len(requests), 5)])
    excused = check_parity(kit.oracle, asked, answers)
    stats = engine.stats()
    report(
        f"beams of {model} with {kernels} kernels, {settings}: {len(answers)} answers, {excused} excused, "
        f"{stats.preemptions} preemptions, {stats.swapped_out_pages} pages swapped"
    )
    assert excused <= len(answers) // 20
    is_scarce = num_pages < 100 or "max_num_seqs" in settings  # Tenants yield places, too.
    assert (stats.preemptions > 0) == is_scarce
    if "preemption" in settings:
        assert (stats.swapped_in_pages > 0) == (settings["preemption"] == "swap")
    assert stats.pages_held == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


def test_a_search_of_one_beam_is_greedy(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 100)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    one_beam = replace(greedy, use_beam_search=True)
    requests = [EngineRequest(str(params), "t", [5, 6, 7], (), params) for params in (greedy, one_beam)]
    first, second = drive(engine, [requests]).values()
    assert first.token_ids == second.token_ids and first.reason == second.reason


def test_biases_and_barred_stop_tokens_count_in_a_search_as_in_transformers(kits: Kits) -> None:
    """The reference uses min_new_tokens and sequence_bias. Both are added to log-probabilities, which are not
    normalised again."""
    kit = kits("llama")
    source, versions = make_source(kit)
    kind = "r16_on_all_seven"
    prompt = list(range(1, 20))
    stops = (3, 44, 90)
    params = replace(
        SEARCH,
        n=4,
        best_of=4,
        max_tokens=12,
        min_tokens=7,
        stop_token_ids=stops,
        logit_bias={3: 4.0, 20: 2.0},
    )
    request = EngineRequest("r", "t", prompt, single_adapter(versions[kind]), params)
    answers = drive(make_engine(kit, source, 200), [[request]])
    shared = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12}
    expected, _ = kit.oracle.beam_search(
        prompt, kind, stops, min_new_tokens=7, sequence_bias={(3,): 4.0, (20,): 2.0}, **shared
    )
    assert [answer.token_ids for answer in told(answers, request)] == expected
    assert all(len(tokens) >= 8 for tokens in expected)
    plain, _ = kit.oracle.beam_search(prompt, kind, stops, **shared)
    assert plain != expected


def run_until_forked(engine: Engine, request: EngineRequest) -> list[list[int]]:
    """The block tables of the beams after a few tokens."""
    engine.add(request)
    for _ in range(6):
        assert engine.step() == []
    return [beam.blocks.pages.tolist() for beam in engine.scheduler.find(request.request_id)]


def test_beams_share_the_pages_of_their_common_tokens(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 100)
    request = EngineRequest("r", "t", list(range(1, 38)), (), replace(SEARCH, best_of=4))
    tables = run_until_forked(engine, request)
    assert len(tables) == 4 and len({tuple(pages[:2]) for pages in tables}) == 1
    assert engine.stats().pages_held == len({page for pages in tables for page in pages}) < 4 * 3
    engine.abort("r", 0)  # the client has not seen any of the beams
    assert len(engine.scheduler.find("r")) == 4
    engine.abort("r")
    engine.check_invariants()
    assert engine.stats().pages_held == 0


def test_a_search_is_refused_if_its_beams_do_not_fit_with_nothing_shared(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 8)
    wide = EngineRequest("r", "t", [1] * 30, (), replace(SEARCH, best_of=3, max_tokens=3))
    drive(engine, [[replace(wide, sampling=replace(wide.sampling, best_of=4))]])
    with pytest.raises(
        ContextTooLong, match=r"9 pages for 33 tokens for each of 3 beams .* the pool has only 8"
    ):
        engine.add(replace(wide, sampling=replace(wide.sampling, max_tokens=4)))
    engine.check_invariants()


def test_a_search_needs_as_many_tokens_as_beams_that_do_not_end_it(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 100)
    params = replace(SEARCH, stop_token_ids=tuple(range(126)))
    with pytest.raises(
        RequestRefused, match="best_of is 3, but only 2 of the 128 tokens are not stop tokens"
    ):
        engine.add(EngineRequest("r", "t", [1], (), params))
    fits = replace(params, best_of=2, max_tokens=3)
    answers = drive(engine, [[EngineRequest("r", "t", [1], (), fits)]])
    assert all(answer.token_ids for answer in answers.values()) and len(answers) == 2


def test_an_answer_of_a_search_is_streamed_whole(kits: Kits) -> None:
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(200))
    params = replace(SEARCH, n=2, best_of=4, logprobs=2)
    (whole,) = llm.generate([[1, 2, 3]], params, [kit.path("rslora")])
    deltas = list(llm.stream([[1, 2, 3]], params, [kit.path("rslora")]))
    assert [delta.choice for delta in deltas] == [0, 1]
    for delta, choice in zip(deltas, whole.choices, strict=True):
        assert list(delta.token_ids) == choice.token_ids and delta.finish_reason == choice.finish_reason
        assert choice.logprobs is not None and all(len(entry.top) == 2 for entry in choice.logprobs)
        assert list(delta.logprobs or ()) == choice.logprobs and len(choice.logprobs) == params.max_tokens
    totals = [sum(entry.logprob for entry in choice.logprobs or ()) for choice in whole.choices]
    assert totals[0] > totals[1]
    llm.check()


def test_an_open_ended_search_ends_where_the_pool_does(kits: Kits) -> None:
    """8 pages for 2 beams are 64 tokens for each beam. The KV of the last token is never computed."""
    engine, _ = start_engine(kits("llama"), 8)
    params = replace(SEARCH, max_tokens=None, best_of=2, ignore_eos=True)
    answers = drive(engine, [[EngineRequest("r", "t", [1] * 20, (), params)]])
    assert [len(answer.token_ids) for answer in answers.values()] == [64 - 20 + 1] * 2
