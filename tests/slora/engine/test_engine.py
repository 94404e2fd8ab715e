"""The engine's interface: which requests it refuses, what ends an answer, and which statistics it reports."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slora.core.engine_config import EngineConfig
from slora.core.engine_state import Pin
from slora.core.errors import AdapterFetchFailed, ConfigError, ContextTooLong, RequestRefused
from slora.core.request import EngineRequest, FinishReason, TenantShare, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.runner.runner import Runner
from tests.support.driving import COSTS, Answer, drive, make_engine, make_source, start_engine, step
from tests.support.model_kit import ModelKit, make_kit
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(kit: ModelKit) -> Engine:
    source, _ = make_source(kit)
    return make_engine(kit, source, 200)


def ask(prompt: list[int], params: SamplingParams = GREEDY, name: str = "r") -> EngineRequest:
    return EngineRequest(name, "tenant", prompt, (), params)


def test_a_request_that_can_never_be_served_is_refused_and_not_counted(engine: Engine) -> None:
    for prompt, params in (([], GREEDY), ([1], replace(GREEDY, logit_bias={VOCAB_SIZE: 1.0}))):
        with pytest.raises(RequestRefused):
            engine.add(ask(prompt, params))
    assert engine.num_unfinished == 0
    assert engine.stats().prompt_tokens == 0


def test_a_stop_token_does_not_come_before_min_tokens(engine: Engine) -> None:
    free = drive(engine, [[ask([1, 2])]])["r"].token_ids
    stop, before = free[2], free[: free.index(free[2])]
    params = replace(GREEDY, min_tokens=6, stop_token_ids=(stop, 100_000))
    answer = drive(engine, [[ask([1, 2], params)]])["r"]
    assert answer.token_ids[: len(before)] == before and stop not in answer.token_ids[:6]
    assert len(answer.token_ids) >= 6


def test_a_request_that_can_never_fit_the_pool_is_refused_at_once(kit: ModelKit) -> None:
    engine, versions = start_engine(kit, num_pages=12)
    assert engine.info.max_model_len == 12 * 16
    engine.add(ask([1] * 100, replace(GREEDY, max_tokens=92)))
    with pytest.raises(ContextTooLong, match="max_model_len"):
        engine.add(ask([1] * 100, replace(GREEDY, max_tokens=93), name="too long"))
    large = EngineRequest(
        "large", "t", [1] * 100, single_adapter(versions["r16_on_all_seven"]), replace(GREEDY, max_tokens=92)
    )
    answer = drive(engine, [[large]])["large"]
    assert isinstance(answer.error, ContextTooLong) and answer.error.code == "context_length_exceeded"


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add(ask([1]))
    with pytest.raises(RequestRefused, match="'r' is already running"):
        engine.add(ask([2]))
    assert len(drive(engine, [])["r"].token_ids) == 10
    engine.add(ask([2]))


@pytest.mark.parametrize(("length", "max_tokens"), [(500, None), (MAX_POSITIONS - 1, 1)])
def test_the_whole_context_may_be_used(engine: Engine, length: int, max_tokens: int | None) -> None:
    answer = drive(engine, [[ask([1] * length, replace(GREEDY, max_tokens=max_tokens))]])["r"]
    assert len(answer.token_ids) == MAX_POSITIONS - length
    assert answer.reason is FinishReason.LENGTH


def test_the_end_token_of_the_model_ends_the_answer_unless_ignored(engine: Engine) -> None:
    free = drive(engine, [[ask([1, 2])]])["r"].token_ids
    engine.info = replace(engine.info, eos_token_ids=(VOCAB_SIZE - 1, free[3]))
    obeyed = drive(engine, [[ask([1, 2], replace(GREEDY, ignore_eos=False))]])["r"]
    assert obeyed.token_ids == free[: free.index(free[3]) + 1]
    assert obeyed.reason is FinishReason.STOP
    ignored = drive(engine, [[ask([1, 2])]])["r"]
    assert ignored.token_ids == free and ignored.reason is FinishReason.LENGTH


def test_an_aborted_request_frees_its_pages_at_once_and_others_go_on(kit: ModelKit) -> None:
    engine, versions = start_engine(kit, 200)
    alone = drive(engine, [[ask([5, 6])]])["r"].token_ids
    engine.add(EngineRequest("gone", "t", [1] * 40, single_adapter(versions["odd_rank"]), GREEDY))
    engine.add(ask([5, 6]))
    answers = {"gone": Answer(), "r": Answer()}
    for _ in range(3):
        step(engine, answers)
    assert answers["gone"].token_ids
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never there")
    engine.check_invariants()
    stats = engine.stats()
    assert stats.running == 1 and stats.waiting_adapters == ()
    assert stats.loaded_adapters == ((versions["odd_rank"].tenant, versions["odd_rank"].digest),)
    # Idle cached pages: the adapter's, and the two blocks that the request computed completely.
    assert stats.pages_held == 1 and stats.pages_cached == stats.adapter_pages + 2 > 2
    assert answers["r"].token_ids + drive(engine, [])["r"].token_ids == alone


def test_a_deleted_adapter_is_freed_from_the_pool(kit: ModelKit) -> None:
    engine, versions = start_engine(kit, 200)
    version = versions["odd_rank"]
    drive(engine, [[EngineRequest("a", "t", [1], single_adapter(version), GREEDY)]])
    assert engine.stats().resident_adapters == 1
    engine.remove_adapter(version)
    stats = engine.stats()
    assert stats.resident_adapters == stats.pages_cached == 0 and stats.pages_free == 200
    error = drive(engine, [[EngineRequest("b", "t", [1], single_adapter(version), GREEDY)]])["b"].error
    assert isinstance(error, AdapterFetchFailed)


def test_a_pinned_adapter_answers_like_a_requested_one_and_sets_its_tenants_share(kit: ModelKit) -> None:
    source, versions = make_source(kit)
    request = EngineRequest("r", "local", [1, 2], single_adapter(versions["odd_rank"]), GREEDY)
    asked_for = drive(make_engine(kit, source, 200), [[request]])["r"].token_ids
    engine = make_engine(kit, source, 200)
    engine.set_pins([Pin(versions["odd_rank"], TenantShare(max_share=0.01))])
    for _ in range(3):
        engine.step()
    assert (engine.stats().pinned_adapters, engine.stats().pinned_loaded) == (1, 0), "2 pages are its ceiling"
    engine.set_pins([Pin(versions["odd_rank"])])
    for _ in range(3):
        engine.step()
    assert (engine.stats().pinned_loaded, engine.stats().prompt_tokens) == (1, 0)
    assert drive(engine, [[request]])["r"].token_ids == asked_for
    assert engine.stats().adapter_loads == 1


def test_the_statistics_add_up(kit: ModelKit) -> None:
    engine, versions = start_engine(kit, 200)
    requests = [
        EngineRequest(str(n), "t", [1] * 7, single_adapter(version), GREEDY)
        for n, version in enumerate(versions.values())
    ]
    drive(engine, [requests])
    stats = engine.stats()
    assert stats.prompt_tokens == 7 * len(requests)
    assert stats.generated_tokens == 10 * len(requests)
    assert stats.steps >= 10  # more if adapters are loaded in slices
    assert stats.adapter_loads == stats.resident_adapters == len(versions)
    assert stats.running == stats.waiting == stats.awaiting_adapter == stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total == 200
    # Each request computed 7 + 9 tokens, which is one whole block.
    assert stats.pages_cached == stats.adapter_pages + len(requests)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool_bytes": 0}, "pool_bytes is 0; it must be auto, or a size in bytes of at least 1"),
        ({"pool_bytes": 100}, "pool_bytes is 100, but one page of this model takes"),
        ({"block_tokens": 12}, "block_tokens is 12; it must be a power of two"),
        ({"block_tokens": 1}, "a page of 1 tokens takes .*choose a larger block size"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_num_batched_tokens": 5}, "max_num_batched_tokens is 5, below max_num_seqs"),
        ({"max_model_len": 1000}, "max_model_len is 1000, but this model's positions end at 512"),
        ({"max_model_len": 512, "pool_bytes": 200_000}, r"max_model_len is 512, but the pool holds \d{3} tokens"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu or cuda"),
        ({"kernels": "magic"}, "kernels is 'magic'; it must be auto, triton, cpu or torch"),
        ({"prefix_cache": "shared"}, "prefix_cache is 'shared'; it must be off, tenant or public"),
        ({"preemption": "wait"}, "preemption is 'wait'; it must be auto, swap or recompute"),
        ({"scheduling": "lifo"}, "scheduling is 'lifo'; it must be fair or fcfs"),
        ({"swap_bytes": -1}, "swap_bytes is -1; it must be auto, or a size in bytes"),
        ({"swap_bytes": 100}, "swap_bytes is 100, but one page of this model takes .*or 0 to disable swapping"),
        ({"swap_bytes": 0, "preemption": "swap"}, "preemption is swap, but swap_bytes is 0.*raise swap_bytes"),
        ({"load_bytes_per_step": 0}, "load_bytes_per_step is 0; it must be auto, or a size in bytes of at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_with_the_remedy(
    kit: ModelKit, settings: dict[str, int | str], message: str
) -> None:
    source, _ = make_source(kit)
    with pytest.raises(ConfigError, match=message):
        make_engine(kit, source, 200, **settings)


def test_the_default_pool_is_a_quarter_of_the_free_memory(
    kit: ModelKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "slora_kernels.machine_limits.MachineLimits.free_memory_bytes", lambda _: 4 * kit.pool_bytes(100)
    )
    source, _ = make_source(kit)
    assert make_engine(kit, source, 0, pool_bytes=None).info.num_pages == 100


def test_a_model_is_served_under_its_directory_s_name_or_the_one_given(kit: ModelKit) -> None:
    assert EngineConfig(kit.directory).served_name == kit.directory.name
    assert EngineConfig(kit.directory, model_name="given").served_name == "given"


def test_costs_are_learned_from_steps_and_reported(kit: ModelKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Born from a fault: costs measured at start beside a busy program were used until a restart."""
    spoilt = replace(COSTS, step_s=5.0, decode_s=1e-9)
    monkeypatch.setattr(Runner, "measure_costs", lambda runner: spoilt)
    engine, versions = start_engine(kit, 100, costs=None, kernels="torch")
    assert engine.stats().costs.step_s == 5.0 and engine.stats().costs.decode_s > 1e-6, "it is bounded"
    monkeypatch.setattr("slora.runner.learned_costs._FIT_EVERY_S", 0.0)
    drive(
        engine,
        [[EngineRequest(kind, "t", [1], single_adapter(one), GREEDY) for kind, one in versions.items()]],
    )
    costs = engine.stats().costs
    assert 0 < costs.step_s < 2.0
    assert costs.load_byte_s == engine.stats().load_paces.pool != spoilt.load_byte_s


def test_steps_of_new_shapes_teach_no_costs(kit: ModelKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take many times as long as later ones, so prompts of other tenants got few tokens in each step."""
    monkeypatch.setattr(Runner, "measure_costs", lambda runner: COSTS)
    monkeypatch.setattr("slora.runner.learned_costs._FIT_EVERY_S", 0.0)
    delayed = itertools.count()
    monkeypatch.setattr(Runner, "num_delayed", property(lambda runner: next(delayed)))
    engine, _ = start_engine(kit, 100, costs=None, kernels="torch")
    before = engine.stats().costs
    drive(engine, [[ask([1])]])
    assert engine.stats().costs == before
    monkeypatch.setattr(Runner, "num_delayed", 3)
    drive(engine, [[ask([2])]])
    assert engine.stats().costs != before


def test_given_costs_are_not_changed(kit: ModelKit) -> None:
    engine, _ = start_engine(kit, 100, kernels="torch")
    drive(engine, [[ask([1])]])
    assert engine.stats().costs == COSTS


def test_two_engines_that_one_thread_made_answer_on_two_threads_at_once(tmp_path: Path) -> None:
    """Born from a review: both ran jobs that the first thread had kept, on the scratch memory of that thread."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    kit = make_kit(tmp_path, "llama", {}, **sizes)
    source, _ = make_source(kit, "bfloat16")
    settings = {"dtype": "bfloat16", "quantization": "int4"}
    engines = [make_engine(kit, source, 40, **settings) for _ in range(2)]
    params = replace(GREEDY, max_tokens=60, logprobs=1)
    prompts = [1, 2], [3, 4]

    def answer(engine: Engine, prompt: list[int]) -> Answer:
        return drive(engine, [[ask(prompt, params)]])["r"]

    alone = [*map(answer, engines, prompts)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            assert [*threads.map(answer, engines, prompts)] == alone


def test_an_answer_does_not_depend_on_steps_that_the_engine_computed_before(tmp_path: Path) -> None:
    """On a CPU with AMX, later steps run the jobs of earlier ones. Each pair of adapters differs in one thing that jobs
    depend on: scales of the output columns, the linears that they change, their rank.
    """
    every = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}
    kinds = {
        "first": {"r": 12, "target_modules": ["q_proj"]},
        "every": every,
        "scaled": {**every, "use_dora": True},
        "high": {**every, "r": 8},
    }
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
    kit = make_kit(tmp_path, "llama", kinds, **sizes)
    source, versions = make_source(kit, "bfloat16")
    # Contexts of 14 to 34 tokens, which have two bounds.
    params = replace(GREEDY, max_tokens=20, logprobs=1)
    requests = [
        EngineRequest(kind, "t", list(range(14)), single_adapter(version), params)
        for kind, version in versions.items()
    ]
    requests.append(replace(requests[1], request_id="half", adapters=single_adapter(versions["every"], 0.5)))

    def start() -> Engine:
        return make_engine(kit, source, 150, dtype="bfloat16")

    alone = {request.request_id: drive(start(), [[request]])[request.request_id] for request in requests}
    assert len({tuple(answer.token_ids) for answer in alone.values()}) == len(requests)
    engine = start()
    for request in (*requests, *reversed(requests)):
        assert drive(engine, [[request]])[request.request_id].logprobs == alone[request.request_id].logprobs
    assert drive(engine, [requests]) == alone
