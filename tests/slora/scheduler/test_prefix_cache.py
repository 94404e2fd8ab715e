"""Prefix caching changes no answer. The cached prefix is found to the exact token, and only by sequences that may
share it.

All tests use tiny real models. Before each step, every free page of the pool and of the host is filled with NaN.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from slora.core.errors import RequestFailed
from slora.core.request import EngineRequest, WeightedAdapter, compose_adapters, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.runner.runner import RunningStep
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import DirectorySource
from slora_adapters.version import AdapterVersion
from tests.support.covering import soaked
from tests.support.driving import (
    Answer,
    add_overflowing_adapter,
    drive,
    make_engine,
    make_source,
    start_engine,
)
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.peft_adapters import make_adapter
from tests.support.poison import poison
from tests.support.tiny_models import RECURRENT_MODELS, VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
NUM_TURNS = 3
BLOCK = 16


def random_tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


# The common beginning of all conversations: more than one block, but no whole number of blocks.
OPENING = random_tokens("opening", 21)
# For models with recurrent layers, whose states are kept only 16 blocks apart.
LONG_OPENING = random_tokens("opening", 70)
SMALL_BLOCKS = 4


def find_opening(model: str) -> list[int]:
    return LONG_OPENING if model in RECURRENT_MODELS else OPENING


def find_limits(model: str) -> dict[str, int | str]:
    if model in RECURRENT_MODELS:
        return {"max_model_len": 200, "block_tokens": SMALL_BLOCKS}
    return {"max_model_len": 160}


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation. Each prompt has all previous turns and a new question. With several choices, the first one is
    continued."""

    name: str
    adapter: AdapterVersion | None = None
    weight: float = 1.0
    num_choices: int = 1
    tenant: str = "local"

    def ask(self, turn: int, said: list[int]) -> EngineRequest:
        question = random_tokens(f"{self.name} {turn}", 5 + 4 * turn)
        prompt = [*said, *question]
        params = replace(
            GREEDY,
            n=self.num_choices,
            temperature=float(self.num_choices > 1),
            seed=7,
            max_tokens=24 + 4 * turn,
        )
        return EngineRequest(
            f"{self.name} {turn}", self.tenant, prompt, single_adapter(self.adapter, self.weight), params
        )


def make_talks(model: str, versions: dict[str, AdapterVersion]) -> list[Talk]:
    first, second, *others = versions.values()
    talks = [
        Talk("base"),
        Talk("base of another tenant", tenant="other"),
        Talk("three of the base", num_choices=3),
        Talk("adapter", first),
        Talk("the same again", first),
        Talk("half of it", first, weight=0.5),
        Talk("against it", first, weight=-1.0),
        Talk("three of an adapter", second, num_choices=3),
        *(Talk(f"adapter {number}", version) for number, version in enumerate(others)),
    ]
    return talks[:4] if model in RECURRENT_MODELS else talks


def converse(engine: Engine, talks: list[Talk], opening: list[int]) -> dict[str, Answer]:
    """Runs all talks concurrently. Two more join in each step. Then all of them continue with their next question."""
    answers: dict[str, Answer] = {}
    said = {talk.name: opening for talk in talks}
    for turn in range(NUM_TURNS):
        requests = [talk.ask(turn, said[talk.name]) for talk in talks]
        answers |= drive(engine, [requests[at : at + 2] for at in range(0, len(requests), 2)])
        for talk, request in zip(talks, requests, strict=True):
            said[talk.name] = [*request.prompt_token_ids, *answers[request.request_id].token_ids]
    return answers


@pytest.fixture(scope="module")
def plain_answers(kits: Kits) -> Callable[[str], dict[str, Answer]]:
    """The answers of each model with a large pool and no prefix cache."""

    def answer(model: str) -> dict[str, Answer]:
        kit = kits(model)
        source, versions = make_source(kit)
        engine = make_engine(kit, source, 1000, prefix_cache="off")
        return converse(engine, make_talks(model, versions), find_opening(model))

    return cache(answer)


CHUNKS = {"max_num_seqs": 7, "max_num_batched_tokens": 7}
ODD_CHUNKS = {"max_num_seqs": 3, "max_num_batched_tokens": 13}
SWAP: dict[str, int | str] = {"preemption": "swap", "swap_pages": 60}
RECOMPUTE: dict[str, int | str] = {"preemption": "recompute"}
PUBLIC: dict[str, int | str] = {"prefix_cache": "public"}
SLICES: dict[str, int | str] = {"load_bytes_per_step": 1}  # one page of an adapter in each step


QUICK_CASES = [
    ("llama", 27, SWAP | SLICES),
    ("mistral_window", 24, RECOMPUTE | PUBLIC | SLICES | ODD_CHUNKS | {"scheduling": "fcfs"}),
    ("lfm2", 40, SWAP | ODD_CHUNKS),
]  # fmt: skip
OTHER_CASES = [
    ("phi3_longrope", 24, SWAP | ODD_CHUNKS | {"scheduling": "fcfs"}),
    ("llama", 80, {"preemption": "auto", "swap_pages": 60}),
    ("llama", 200, PUBLIC | CHUNKS),
    ("phi3_longrope", 200, CHUNKS),
    ("llama", 200, {}),
    ("llama", 36, SWAP),
    ("llama", 36, RECOMPUTE | PUBLIC | SLICES),
    ("llama", 36, {"preemption": "auto", "swap_pages": 5, **CHUNKS}),
    ("mistral_window", 200, ODD_CHUNKS),
    ("mistral_window", 25, SWAP | PUBLIC),
    ("mistral_window", 24, RECOMPUTE | ODD_CHUNKS | {"scheduling": "fcfs"}),
    ("mistral_window", 25, SWAP | SLICES | CHUNKS | {"prefix_cache": "off"}),
    ("phi3_longrope", 32, SWAP | SLICES),
    ("phi3_longrope", 32, RECOMPUTE | PUBLIC | CHUNKS),
    ("lfm2", 400, PUBLIC | CHUNKS),
    ("bamba", 400, SLICES | ODD_CHUNKS),
    ("qwen3_5_text", 400, PUBLIC),
    ("falcon_h1", 400, CHUNKS),
]


@pytest.mark.parametrize(
    ("model", "num_pages", "settings"),
    [*QUICK_CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in OTHER_CASES)],
)
def test_answers_do_not_change_with_cache_hits_eviction_swap_and_recomputation(
    kits: Kits,
    plain_answers: Callable[[str], dict[str, Answer]],
    report: Callable[[str], None],
    model: str,
    num_pages: int,
    settings: dict[str, int | str],
) -> None:
    kit = kits(model)
    engine, versions = start_engine(kit, num_pages, **find_limits(model), **in_bytes(kit, settings))
    poison(engine)
    answers = converse(engine, make_talks(model, versions), find_opening(model))

    expected = plain_answers(model)
    assert answers.keys() == expected.keys()
    for name, answer in expected.items():
        assert answers[name].error is None and answers[name].token_ids == answer.token_ids, name
        assert answers[name].logprobs == pytest.approx(answer.logprobs, abs=1e-4), name
    stats = engine.stats()
    report(
        f"{model}, {num_pages} pages, {settings}: {stats.prefix_hits} of {stats.prefix_queries} tokens found, "
        f"{stats.prefix_evictions} blocks and {stats.adapter_evictions} adapters evicted, {stats.preemptions} gave "
        f"way, {stats.swapped_out_pages} pages swapped out"
    )
    assert (stats.prefix_hits > 0) == (settings.get("prefix_cache") != "off")
    assert stats.swap_pages_used == stats.pages_held == 0
    if num_pages < 50:
        assert stats.preemptions > 0 and stats.adapter_evictions > 0
        assert (stats.swapped_out_pages > 0) == (settings["preemption"] != "recompute")
        assert stats.swapped_in_pages <= stats.swapped_out_pages


def in_bytes(kit: ModelKit, settings: dict[str, int | str]) -> dict[str, int | str]:
    """Converts swap_pages, a number of host pages, to bytes, as the engine expects."""
    settings = dict(settings)
    if "swap_pages" in settings:
        settings["swap_bytes"] = kit.pool_bytes(int(settings.pop("swap_pages")))
    return settings


def start(
    kits: Kits, model: str = "llama", **settings: int | str
) -> tuple[Engine, dict[str, AdapterVersion]]:
    kit = kits(model)
    engine, versions = start_engine(kit, 80, **settings)
    poison(engine)
    return engine, versions


def ask_one(engine: Engine, request: EngineRequest) -> Answer:
    return drive(engine, [[request]])[request.request_id]


def make_request(
    prompt: list[int],
    tenant: str = "local",
    adapter: AdapterVersion | None = None,
    weight: float = 1.0,
    **params: int,
) -> EngineRequest:
    return EngineRequest("r", tenant, prompt, single_adapter(adapter, weight), replace(GREEDY, **params))  # type: ignore[arg-type]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("model", "adapted"), [("llama", False), ("llama", True), ("mistral_window", True)])
@pytest.mark.parametrize(("num_prompt", "num_answer"), [(20, 13), (20, 12), (37, 40), (1, 16), (1, 17)])
def test_a_second_turn_finds_all_whole_blocks_of_the_first_and_its_answer_to_the_token(
    kits: Kits, model: str, adapted: bool, num_prompt: int, num_answer: int
) -> None:
    """The last token of an answer is never computed. Lengths 20 and 13 have the KV of 32 tokens; 20 and 12 have that
    of 31."""
    engine, versions = start(kits, model)
    adapter = versions["odd_rank"] if adapted else None
    prompt = random_tokens("first", num_prompt)
    first = ask_one(engine, make_request(prompt, adapter=adapter, max_tokens=num_answer))
    assert first.num_cached == engine.stats().prefix_hits == 0
    follow_up = [*prompt, *first.token_ids, *random_tokens("second", 9)]
    second = ask_one(engine, make_request(follow_up, adapter=adapter))
    stats = engine.stats()
    assert second.num_cached == stats.prefix_hits == (num_prompt + num_answer - 1) // BLOCK * BLOCK
    assert stats.prefix_queries == num_prompt + len(follow_up)


@pytest.mark.parametrize(("length", "found"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_at_least_the_last_token_of_a_cached_prompt_is_computed(kits: Kits, length: int, found: int) -> None:
    engine, _ = start(kits)
    prompt = random_tokens("again", length)
    first = ask_one(engine, make_request(prompt))
    again = ask_one(engine, make_request(prompt))
    assert (first.num_cached, again.num_cached) == (0, found)
    assert again.token_ids == first.token_ids


def test_concurrent_requests_reuse_blocks_that_one_of_them_computed(kits: Kits) -> None:
    engine, _ = start(kits)
    prompt = random_tokens("at once", 40)
    requests = [replace(make_request(prompt, max_tokens=30), request_id=name) for name in "ab"]
    answers = drive(engine, [[request] for request in requests])
    assert [answers[name].num_cached for name in "ab"] == [0, 32]
    assert answers["a"].token_ids == answers["b"].token_ids


def test_the_cached_tokens_of_all_choices_are_reported_once(kits: Kits) -> None:
    engine, _ = start(kits)
    prompt = random_tokens("choices", 40)
    drive(engine, [[make_request(prompt)]])
    answers = drive(engine, [[make_request(prompt, n=3)]])
    assert {name: answer.num_cached for name, answer in answers.items()} == {"r": 32, "r/1": 0, "r/2": 0}
    assert engine.stats().prefix_hits == 32


def test_a_longer_prompt_reuses_the_blocks_of_a_choices_answer(kits: Kits) -> None:
    engine, _ = start(kits)
    prompt = random_tokens("choices", 20)
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, n=3)
    answers = drive(engine, [[EngineRequest("r", "t", prompt, (), params)]])
    for name in ("r", "r/1", "r/2"):
        follow_up = EngineRequest("r", "t", [*prompt, *answers[name].token_ids], (), GREEDY)
        assert ask_one(engine, follow_up).num_cached == (20 + 40 - 1) // BLOCK * BLOCK


def test_states_are_kept_where_later_prompts_are_likely_to_continue(tmp_path: Path) -> None:
    """States lie at least 16 blocks apart: at the ends of prompts, of common beginnings, and after each 64 blocks."""
    kit = make_kit(tmp_path, "lfm2", {}, max_position_embeddings=1024)
    engine, _ = start_engine(kit, 400, block_tokens=SMALL_BLOCKS)
    poison(engine)
    short, long = random_tokens("short", 65), random_tokens("long", 330)
    expected = {
        "a short prompt": (short[:64], 0),
        "again": (short[:64], 0),
        "one token longer": (short, 0),
        "again, after 16 blocks": (short, 64),
        "a long prompt": (long, 0),
        "again, after its end": (long, 328),
        "its first tokens": (long[:300], 256),
        "again, because a state 10 blocks later would save little": (long[:300], 256),
        "its very first tokens": ([*long[:200], *random_tokens("a", 60)], 0),
        "its very first tokens again": ([*long[:200], *random_tokens("b", 20)], 200),
    }
    found = {name: ask_one(engine, make_request(prompt)).num_cached for name, (prompt, _) in expected.items()}
    assert found == {name: num_cached for name, (_, num_cached) in expected.items()}


def test_a_prompt_takes_the_kept_state_if_the_pool_has_no_room_for_a_copy(kits: Kits) -> None:
    """A sequence of 100 tokens has 25 blocks and 3 pages of state, and the pool has 32 pages."""
    engine, _ = start_engine(kits("lfm2"), 8, block_tokens=SMALL_BLOCKS)
    poison(engine)
    long = make_request(random_tokens("long", 100), max_tokens=1)
    first = ask_one(engine, long)
    other = replace(make_request([3, 4, 5], max_tokens=30), request_id="other")
    assert ask_one(engine, long).num_cached == 96
    answers = drive(engine, [[other], [long]])
    assert (answers["r"].num_cached, answers["r"].token_ids) == (96, first.token_ids)
    assert engine.stats().preemptions == 0
    # The longest answer needs all pages of the pool.
    assert ask_one(engine, replace(long, sampling=replace(GREEDY, max_tokens=16))).error is None


@pytest.mark.parametrize(("prefix_cache", "found"), [("off", 0), ("tenant", 0), ("public", 32)])
def test_another_tenant_finds_the_base_s_blocks_only_if_the_operator_made_them_public(
    kits: Kits, prefix_cache: str, found: int
) -> None:
    engine, _ = start(kits, prefix_cache=prefix_cache)
    prompt = random_tokens("common", 40)
    first = ask_one(engine, make_request(prompt, "mine"))
    second = ask_one(engine, make_request(prompt, "yours"))
    assert second.num_cached == engine.stats().prefix_hits == found
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("prefix_cache", ["tenant", "public"])
def test_two_tenants_never_share_blocks_of_adapters_with_equal_weights(kits: Kits, prefix_cache: str) -> None:
    kit = kits("llama")
    source, _ = make_source(kit)
    mine, yours = (source.add(kit.adapters["odd_rank"], tenant) for tenant in ("mine", "yours"))
    assert mine.digest == yours.digest
    engine = make_engine(kit, source, 200, prefix_cache=prefix_cache)
    prompt = random_tokens("common", 40)
    first = ask_one(engine, make_request(prompt, "mine", mine))
    second = ask_one(engine, make_request(prompt, "yours", yours))
    assert second.num_cached == 0 and second.token_ids == first.token_ids
    assert ask_one(engine, make_request(prompt, "yours", yours)).num_cached == 32


@pytest.mark.parametrize("prefix_cache", ["tenant", "public"])
def test_blocks_are_found_for_their_own_adapter_and_weight_alone(kits: Kits, prefix_cache: str) -> None:
    engine, versions = start(kits, prefix_cache=prefix_cache)
    prompt = random_tokens("who", 40)
    one, other = versions["odd_rank"], versions["rslora"]
    ways = [(None, 1.0), (one, 1.0), (one, 0.5), (one, -1.0), (other, 1.0), (other, 0.5)]
    answers = [ask_one(engine, make_request(prompt, adapter=a, weight=w)) for a, w in ways]
    assert [answer.num_cached for answer in answers] == [0] * len(ways)
    again = [ask_one(engine, make_request(prompt, adapter=a, weight=w)) for a, w in ways]
    assert [answer.num_cached for answer in again] == [32] * len(ways)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(ways)


# Modules of the last of three layers, or before it -> whether K and V stay those of the base model.
LAST_MODULES = {
    "tail": (r".*(layers\.2\.(self_attn\.[qo]_proj|mlp\.\w+_proj)|lm_head)", True),
    "query": (r".*layers\.2\.self_attn\.q_proj", True),
    "key": (r".*layers\.2\.self_attn\.k_proj", False),
    "value": (r".*layers\.2\.(self_attn\.v_proj|mlp\.\w+_proj)", False),
    "earlier": (r".*(layers\.1\.mlp\.down_proj|layers\.2\.mlp\.\w+_proj)", False),
    "embedding": (r".*(embed_tokens|layers\.2\.mlp\.\w+_proj)", False),
}


@pytest.fixture(scope="module")
def last_kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    kinds: dict[str, dict[str, object]] = {
        kind: {"r": 4, "target_modules": modules} for kind, (modules, _) in LAST_MODULES.items()
    }
    return make_kit(tmp_path_factory.mktemp("last"), "llama", kinds)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", LAST_MODULES)
@pytest.mark.parametrize("comes_first", [False, True])
def test_an_adapter_shares_the_base_s_blocks_only_if_it_changes_no_k_and_no_v(
    last_kit: ModelKit, kind: str, comes_first: bool
) -> None:
    source, versions = make_source(last_kit)
    prompt = random_tokens("tail", 40)
    ways = [None, versions[kind]][:: -1 if comes_first else 1]
    alone = [
        ask_one(make_engine(last_kit, source, 80, prefix_cache="off"), make_request(prompt, adapter=way))
        for way in ways
    ]
    engine = make_engine(last_kit, source, 80)
    poison(engine)
    answers = [ask_one(engine, make_request(prompt, adapter=way)) for way in ways]
    assert [answer.num_cached for answer in answers] == [0, 32 * LAST_MODULES[kind][1]]
    for answer, expected, way in zip(answers, alone, ways, strict=True):
        assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
        assert last_kit.oracle.judge(prompt, answer.token_ids, kind if way else None, answer.logprobs).equal
    assert answers[0].logprobs != answers[1].logprobs


def test_a_sum_is_known_by_those_of_its_adapters_that_change_k_or_v(last_kit: ModelKit) -> None:
    source, versions = make_source(last_kit)
    engine = make_engine(last_kit, source, 80)
    prompt = random_tokens("sum", 40)
    parts = [WeightedAdapter(versions["tail"], 0.5), WeightedAdapter(versions["key"], 2.0)]
    both = EngineRequest("r", "local", prompt, compose_adapters(parts), GREEDY)
    assert ask_one(engine, make_request(prompt, adapter=versions["key"], weight=2.0)).num_cached == 0
    found = ask_one(engine, both)
    assert found.num_cached == 32
    plain = ask_one(make_engine(last_kit, source, 80, prefix_cache="off"), both)
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_public_cache_shares_no_block_of_a_request_with_an_adapter(last_kit: ModelKit) -> None:
    engine, versions = start_engine(last_kit, 80, prefix_cache="public")
    prompt = random_tokens("public", 40)
    for adapter in (versions["tail"], None, versions["query"]):
        assert ask_one(engine, make_request(prompt, adapter=adapter)).num_cached == 0


def test_blocks_of_an_adapter_that_changes_no_k_and_no_v_outlive_it(last_kit: ModelKit) -> None:
    engine, versions = start_engine(last_kit, 80)
    prompt = random_tokens("outlive", 40)
    ask_one(engine, make_request(prompt, adapter=versions["tail"]))
    engine.remove_adapter(versions["tail"])
    assert ask_one(engine, make_request(prompt)).num_cached == 32


def upload(source: DirectorySource, kit: ModelKit, directory: Path, seed: int) -> AdapterVersion:
    make_adapter(directory, kit.read_model(), seed=seed, std=0.15, r=4)
    return source.add(directory, "local")


def test_blocks_of_a_deleted_adapter_are_never_found_again(kits: Kits, tmp_path: Path) -> None:
    kit = kits("llama")
    source, _ = make_source(kit)
    engine = make_engine(kit, source, 200)
    prompt = random_tokens("uploaded", 40)
    first_upload = upload(source, kit, tmp_path, seed=1)
    first = ask_one(engine, make_request(prompt, adapter=first_upload))
    engine.remove_adapter(first_upload)
    assert engine.stats().pages_cached == 0, "its blocks outlive it"
    second_upload = upload(source, kit, tmp_path, seed=2)
    assert second_upload != first_upload
    second = ask_one(engine, make_request(prompt, adapter=second_upload))
    assert second.num_cached == 0 and second.token_ids != first.token_ids
    back = ask_one(engine, make_request(prompt, adapter=upload(source, kit, tmp_path, seed=1)))
    assert back.num_cached == 0 and back.token_ids == first.token_ids


def test_an_adapter_deleted_during_a_request_leaves_no_cached_block(kits: Kits) -> None:
    engine, versions = start(kits)
    version = versions["odd_rank"]
    engine.add(make_request(random_tokens("under way", 40), adapter=version))
    outputs = engine.step()
    engine.remove_adapter(version)
    while engine.num_unfinished:
        outputs += engine.step()
    assert all(output.error is None for output in outputs) and len(outputs) == GREEDY.max_tokens
    assert engine.stats().pages_free == engine.stats().pages_total


def test_a_request_for_prompt_logprobs_bypasses_the_cache_and_fills_it(kits: Kits) -> None:
    engine, _ = start(kits)
    prompt = random_tokens("scored", 40)
    scored = [ask_one(engine, make_request(prompt, prompt_logprobs=1)) for _ in range(2)]
    assert [answer.num_cached for answer in scored] == [0, 0]
    assert all(len(answer.prompt_logprobs) == 40 for answer in scored)
    plain = ask_one(engine, make_request(prompt))
    assert plain.num_cached == 32 and plain.token_ids == scored[0].token_ids
    assert (
        ask_one(engine, make_request(prompt, prompt_logprobs=1)).prompt_logprobs == scored[0].prompt_logprobs
    )


def test_cached_blocks_are_found_until_other_tenants_need_the_pages(kits: Kits) -> None:
    kit = kits("llama")
    engine = make_engine(kit, make_source(kit)[0], 8)
    poison(engine)
    prompt, long = random_tokens("kept", 40), random_tokens("long", 100)
    first = ask_one(engine, make_request(prompt))
    assert ask_one(engine, make_request(prompt)).num_cached == 32
    ask_one(engine, make_request(long, max_tokens=20))
    assert engine.stats().prefix_evictions > 0
    again = ask_one(engine, make_request(prompt))
    assert again.num_cached == 0 and again.token_ids == first.token_ids


def break_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[StepPlan], bool]
) -> None:
    """The chosen steps write garbage to all their target pages, then fail."""
    launch, memory = engine.runner.launch, engine.runner.memory

    def launch_or_break(plan: StepPlan) -> RunningStep:
        if not is_broken(plan):
            return launch(plan)
        pages = {
            int(page) for chunk in plan.chunks for page in chunk.sequence.blocks.pages[chunk.start // BLOCK :]
        }
        pages |= {target for _, target in [*plan.copies, *plan.swaps_in]}
        pages |= {page for load in plan.loads for page in load.resident.pages}
        memory.pages[sorted(pages)] = 0xFF
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "launch", launch_or_break)


def outlive(
    engine: Engine, requests: list[EngineRequest]
) -> tuple[dict[tuple[str, int], list[int]], set[str]]:
    """Tokens of the complete answers by request and choice, and the ids of the failed requests."""
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    failed = set()
    for request in requests:
        engine.add(request)
    while engine.num_unfinished:
        for output in engine.step():
            if output.delta is None:
                failed.add(output.request_id)
            else:
                answers[output.request_id, output.delta.index] += output.delta.token_ids
        engine.check_invariants()
    return {key: tokens for key, tokens in answers.items() if key[0] not in failed}, failed


@pytest.mark.parametrize("model", soaked(["llama", "mistral_window", "lfm2", "phi3_longrope"], "llama"))
def test_failed_steps_leave_no_wrong_blocks_in_the_cache(
    kits: Kits, plain_answers: Callable[[str], dict[str, Answer]], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """One step of fifty fails, at random: a request may take more than fifty. Failed requests are sent again until all
    have their answers.
    """
    kit = kits(model)
    settings = in_bytes(kit, SWAP | SLICES | {"max_num_seqs": 12, "max_num_batched_tokens": 24})
    engine, versions = start_engine(kit, 60, **find_limits(model), **settings)
    poison(engine)
    chance = random.Random(model)
    break_steps(engine, monkeypatch, lambda plan: chance.random() < 0.02)
    talks, expected, num_failed = make_talks(model, versions), plain_answers(model), 0
    said = {talk.name: find_opening(model) for talk in talks}
    for turn in range(NUM_TURNS):
        left = [talk.ask(turn, said[talk.name]) for talk in talks]
        while left:
            answers, failed = outlive(engine, left)
            for name, index in answers:
                assert answers[name, index] == expected[f"{name}/{index}" if index else name].token_ids, name
            left = [request for request in left if request.request_id in failed]
            num_failed += len(left)
        for talk in talks:
            request = talk.ask(turn, said[talk.name])
            said[talk.name] = [*request.prompt_token_ids, *expected[request.request_id].token_ids]
    assert num_failed > 3 and engine.stats().prefix_hits > 0


@pytest.mark.parametrize("model", soaked(["llama", "mistral_window", "lfm2"], "mistral_window", "lfm2"))
def test_a_request_with_non_finite_logits_caches_no_blocks(kits: Kits, tmp_path: Path, model: str) -> None:
    """The KV computed before the NaN may be wrong as well, including blocks behind the windows. None of it is
    cached."""
    kit = kits(model)
    source, _ = make_source(kit)
    bursting = add_overflowing_adapter(source, kit, tmp_path)
    engine = make_engine(kit, source, 200, **CHUNKS, **find_limits(model))
    prompt = random_tokens("bursting", 100)
    for _ in range(2):
        answer = ask_one(engine, make_request(prompt, adapter=bursting))
        assert isinstance(answer.error, RequestFailed)
        stats = engine.stats()
        assert stats.prefix_hits == 0 and stats.pages_cached == stats.adapter_pages > 0
