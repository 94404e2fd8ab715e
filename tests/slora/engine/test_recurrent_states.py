"""Models with recurrent layers: the states of their sequences are in pages of the pool, and answers equal peft's."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from slora import LLM, LoraAdapter, SamplingParams
from slora.core.cost_model import CostModel
from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.core.engine_state import ANSWER_TOKENS
from slora.core.errors import ConfigError, RequestFailed, StepFailed
from slora.core.request import EngineRequest, Pooling, PoolingKind, single_adapter
from slora.core.request_check import NOT_SAMPLED
from slora.models.model_spec import ModelSpec, read_model_spec
from slora.models.recurrent_layers import check_recurrent_layers
from slora.models.transformers_decoder import TransformersDecoder
from slora.runner.runner import PageTransferFailed, RunningStep
from slora.sampling.sampler import sample
from slora.scheduler.charges import estimate_backlog
from slora.scheduler.step_plan import StepPlan
from slora_adapters.loader.source import DirectorySource
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_kernels.cpu.kernels import CpuKernels
from slora_kernels.cpu.machine_code import find_worker, has_workers
from tests.slora.engine.test_forks import ask, compare_choices
from tests.slora.engine.test_overlapped_steps import SAMPLING
from tests.slora.engine.test_parity import answer, judge, judge_engine, mix
from tests.support.covering import soaked
from tests.support.driving import Answer, drive, make_engine, make_source, read_once, start_engine, step
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.poison import poison
from tests.support.tiny_models import RECURRENT, RECURRENT_MODELS, write_model

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)

_CHOSEN = {("lfm2", "recompute"), ("bamba", "swap"), ("qwen3_5_text", "swap")}


def count_few_pages(kit: ModelKit) -> int:
    """The pages of all adapters and of two of the longest sequences."""
    spec = kit.spec
    shape = spec.shape("float32")
    page_bytes = shape.num_kv_layers * shape.layer_page_bytes(16)
    adapters = (read_once(path, shape, AdapterLimits()) for path in kit.adapters.values())
    num_bytes = [pack(adapter, shape, "float32").layout.num_bytes for adapter in adapters]
    sequence_pages = spec.footprint(16, "float32", page_bytes).pages(60)
    return sum(-(-count // page_bytes) for count in num_bytes) + sequence_pages * 2


# In transformers, the log-probabilities of qwen3_next differ by up to 9.9e-5 between a forward pass of the whole text
# and one of each token after the prompt. The oracle takes the first, and ours differ by up to 3.1e-5 from the second.
_TOLERANCE = 2e-4
# In the quick run, the next test has qwen3_5_text, whose recurrence is that of qwen3_next and of qwen4_exp_text, and
# bamba, whose recurrence is that of granitemoehybrid and of falcon_h1.
_QUICK = ("lfm2", "jamba", "minimax", "mamba2", "nemotron_h")


@pytest.mark.parametrize("model", soaked(RECURRENT_MODELS, *_QUICK))
def test_parity_holds_alone_mixed_in_chunks_and_preempted(
    kits: Kits, report: Callable[[str], None], model: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=8 if soak else 1, seed=6)
    small = {"max_model_len": 96, "max_num_seqs": 9, "max_num_batched_tokens": 11}
    ways: dict[str, dict[str, Any]] = {
        "alone": {"max_num_seqs": 1},
        "mixed": {"max_num_batched_tokens": 23, "max_num_seqs": 16},
        "swapped": {**small, "preemption": "swap"},
        "recomputed": {**small, "preemption": "recompute"},
    }
    for way in ways if soak else ("swapped",):
        is_short = "preemption" in ways[way]
        num_pages = count_few_pages(kit) if is_short else 2000
        verdict, stats = judge_engine(kit, work, PARAMS, num_pages, **ways[way])
        report(f"{model} {way}, {stats.preemptions} preemptions: {verdict}")
        # A sequence without KV takes no more pages than at its beginning, so it may not be preempted.
        assert model == "mamba2" or (stats.preemptions > 0) == is_short, stats.preemptions
        assert verdict.is_within(_TOLERANCE), (way, verdict)


@pytest.mark.parametrize(
    ("model", "preemption"),
    soaked([(model, way) for model in RECURRENT_MODELS for way in ("swap", "recompute")], *_CHOSEN),
)
def test_choices_have_states_of_their_own_and_no_free_page_is_read(
    kits: Kits, model: str, preemption: str
) -> None:
    kit = kits(model)
    source, versions = make_source(kit)
    adapters = [None, *versions.values()] * 2
    requests = [
        ask(str(number), adapter, n=number % 3 + 1, max_tokens=20) for number, adapter in enumerate(adapters)
    ]
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 11, "preemption": preemption}
    engine = make_engine(kit, source, count_few_pages(kit), **settings)
    stats = compare_choices(requests, make_engine(kit, source, 2000), engine)
    assert stats.preemptions > 0 and stats.pages_held == 0


# The experts of these models have the names of an MLP's linears, and peft refuses DoRA on experts.
_DORA_REFUSED = ("qwen3_next", "minimax")


@pytest.mark.parametrize(
    "model",
    # peft refuses to adapt the output of their recurrent layers.
    soaked((name for name in RECURRENT_MODELS if name not in ("falcon_h1", "nemotron_h", "mamba2")), "bamba"),
)
def test_dora_biases_and_sums_reach_the_linears_of_recurrent_layers(
    tmp_path: Path, report: Callable[[str], None], model: str
) -> None:
    mlp = "" if model in _DORA_REFUSED else "|gate_proj|up_proj|w1|w3|input_linear"
    linears = {"target_modules": rf".*\.(in_proj\w*|out_proj|q_proj{mlp})"}
    kinds = {
        "dora": {"r": 4, "lora_alpha": 6, "use_dora": True, **linears},
        "biased": {"r": 3, "lora_alpha": 6, "lora_bias": True, **linears},
        "plain": {"r": 2, "lora_alpha": 3, **linears},
        "other": {"r": 5, "lora_alpha": 3, **linears},
    }
    kit = make_kit(tmp_path, model, kinds)
    work = mix(kit, prompts_each=1, seed=6)
    llm = LLM(kit.directory, pool_bytes=kit.pool_bytes(2000), max_num_seqs=9, max_num_batched_tokens=13)
    verdict = judge(kit.oracle, work, answer(llm, kit, work, PARAMS))
    report(f"{model} with DoRA and biases: {verdict}")
    assert verdict.equal, verdict
    weights = {"plain": 0.7, "other": -1.2}
    kit.oracle.add_sum("sum", weights)
    adapters = [LoraAdapter(kit.adapters[kind], weight=weight) for kind, weight in weights.items()]
    (output,) = llm.generate([[3] * 30], PARAMS, [adapters])
    assert kit.oracle.judge([3] * 30, output.token_ids, "sum").equal


def ask_all(versions: dict) -> list[EngineRequest]:
    rng = random.Random(1)
    names = [None, *versions]
    requests = []
    for number, (kind, sampling) in enumerate(SAMPLING.items()):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randint(1, 30))]
        name = names[number % len(names)]
        version = single_adapter(versions[name] if name else None)
        requests.append(EngineRequest(kind, "t", prompt, version, sampling))
    pooled = Pooling(PoolingKind.MEAN)
    requests.append(EngineRequest("pooled", "t", [5] * 30, (), NOT_SAMPLED, pooling=pooled))
    return requests


def answer_apart(kit: ModelKit, source: DirectorySource, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Answers the requests one after the other, with enough pages."""
    engine = make_engine(kit, source, 2000)
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= drive(engine, [[request]])
    return answers


@pytest.fixture(scope="module")
def expected(kits: Kits) -> dict[str, Answer]:
    """The answers to `ask_all`."""
    source, versions = make_source(kits("lfm2"))
    return answer_apart(kits("lfm2"), source, ask_all(versions))


def assert_close(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        other = found[name]
        assert (other.token_ids, other.reason, other.error) == (one.token_ids, one.reason, None), name
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4), name
        theirs, ours = ([entry.logprob for entry in a.prompt_logprobs if entry] for a in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4), name
        assert (other.embedding is None) == (one.embedding is None)


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
def test_requests_of_all_kinds_get_the_answers_of_an_idle_engine(
    kits: Kits, expected: dict[str, Answer], *, overlap: bool
) -> None:
    """Beams, seeds, filters, prompt log-probabilities and embeddings, in few pages and in chunks."""
    kit = kits("lfm2")
    source, versions = make_source(kit)
    requests = ask_all(versions)
    engine = make_engine(
        kit, source, count_few_pages(kit), max_num_seqs=6, max_num_batched_tokens=13, overlap=overlap
    )
    poison(engine)
    found = drive(engine, [requests[at : at + 2] for at in range(0, len(requests), 2)])
    assert_close(found, expected)
    assert engine.stats().preemptions > 0


def test_a_failed_computation_restarts_the_other_sequences_of_its_step(
    kits: Kits, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails has advanced some states. Its runs in smaller groups advance them again."""
    kit = kits("lfm2")
    source, versions = make_source(kit)
    requests = ask_all(versions)
    engine = make_engine(kit, source, 2000, max_num_seqs=12, max_num_batched_tokens=40)
    sampled = 0

    def fail_sometimes(*args: Any) -> Any:
        nonlocal sampled
        sampled += 1
        if sampled in (3, 4, 9):
            raise RuntimeError("out of memory")
        return sample(*args)

    monkeypatch.setattr("slora.runner.runner.sample", fail_sometimes)
    found = drive(engine, [requests[at : at + 3] for at in range(0, len(requests), 3)])
    assert sampled > 9
    assert_close(found, expected)


def test_a_step_that_could_not_move_pages_restarts_its_sequences(
    kits: Kits, expected: dict[str, Answer]
) -> None:
    kit = kits("lfm2")
    source, versions = make_source(kit)
    requests = ask_all(versions)
    engine = make_engine(kit, source, 2000, max_num_seqs=9, max_num_batched_tokens=40)
    launch, steps = engine.runner.launch, 0

    def fail_afterwards(plan: StepPlan) -> RunningStep:
        nonlocal steps
        running, steps = launch(plan), steps + 1
        if steps in (4, 9):
            raise PageTransferFailed("pages could not be copied")
        return running

    engine.runner.launch = fail_afterwards  # type: ignore[method-assign]
    found = drive(engine, [requests[at : at + 3] for at in range(0, len(requests), 3)])
    assert steps > 9
    assert_close(found, expected)


def test_failures_of_other_requests_end_no_request(kits: Kits) -> None:
    """However many steps other requests break, their neighbours restart and end with the same answers."""
    kit = kits("lfm2")
    source, _ = make_source(kit)
    engine = make_engine(kit, source, 200)
    forward = engine.runner.decoder.forward

    def fail_at_17(batch: Any, *rest: Any) -> Any:
        if int(batch.attention.max_query_len) == 17:
            raise RuntimeError("this length cannot be computed")
        return forward(batch, *rest)

    engine.runner.decoder.forward = fail_at_17  # type: ignore[method-assign]
    requests = [EngineRequest(f"fine{number}", "t", [5, 6, 7 + number], (), PARAMS) for number in range(3)]
    expected = answer_apart(kit, source, requests)
    found: defaultdict[str, Answer] = defaultdict(Answer)
    for request in requests:
        engine.add(request)
    for number in range(4):
        engine.add(EngineRequest(f"broken{number}", "u", [9] * 17, (), PARAMS))
        step(engine, found)
        step(engine, found)
    while engine.num_unfinished:
        step(engine, found)
    assert all(isinstance(found.pop(f"broken{number}").error, RequestFailed) for number in range(4))
    assert_close(found, expected)


def test_failed_copies_of_other_requests_end_no_request(kits: Kits) -> None:
    """Steps that fail to load an adapter count only for the sequences that need it."""
    kit = kits("lfm2")
    source, versions = make_source(kit)
    version = single_adapter(next(iter(versions.values())))
    requests = [EngineRequest("fine", "t", [5, 6, 7], (), PARAMS)]
    expected = answer_apart(kit, source, requests)
    engine = make_engine(kit, source, 200)
    launch, found = engine.runner.launch, defaultdict(Answer)
    engine.add(requests[0])
    for _ in range(3):
        step(engine, found)

    def fail_loads(plan: StepPlan) -> RunningStep:
        if plan.loads:
            raise PageTransferFailed("pages could not be copied")
        return launch(plan)

    engine.runner.launch = fail_loads  # type: ignore[method-assign]
    engine.add(EngineRequest("other", "u", [9] * 17, version, PARAMS))
    while engine.num_unfinished:
        step(engine, found)
    assert isinstance(found.pop("other").error, StepFailed)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt_lookup_tokens": 4}, "prompt_lookup_tokens is 4, but this model .lfm2. has recurrent layers"),
        ({"pool_bytes": 6144}, "the recurrent state of one sequence takes 2; raise pool_bytes to at least"),
    ],
)  # fmt: skip
def test_what_states_cannot_do_is_refused_by_name(
    tmp_path: Path, settings: dict[str, int], reason: str
) -> None:
    kit = make_kit(tmp_path, "lfm2", {}, conv_L_cache=9)
    with pytest.raises(ConfigError, match=reason):
        LLM(kit.directory, **{"pool_bytes": kit.pool_bytes(40), **settings})


def test_the_prefix_cache_is_off_for_a_class_that_computes_no_chunk_from_a_state(
    kits: Kits, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = start_engine(kits("jamba"), 100, block_tokens=4)
    assert engine.info.prefix_cache == "off"
    assert "computes prompts of this model (jamba) only from their beginning" in caplog.text
    request = EngineRequest("a", "t", [7] * 80, (), PARAMS)
    assert [drive(engine, [[request]])["a"].num_cached for _ in range(2)] == [0, 0]


def test_the_backlog_counts_the_pages_of_states() -> None:
    """A pool of 90 pages has room for 10 answers of 8 blocks, if each has a state of a page."""
    costs = CostModel(0.02, 0.001, 0.0005, 0.0, 0.0, 0.0)
    footprint = KVFootprint(ANSWER_TOKENS // 8, state_pages=1)
    config = SchedulerConfig(90, 1, 1024, footprint, max_num_seqs=64, max_num_batched_tokens=64)
    assert estimate_backlog([], 0, 0, costs, config).answer_token_s == pytest.approx(0.0005 + 0.02 / 10)


def test_the_invariants_find_the_state_of_a_waiting_sequence(kits: Kits) -> None:
    engine, _ = start_engine(kits("lfm2"), 40)
    engine.add(EngineRequest("a", "t", [7] * 4, (), PARAMS))
    engine.check_invariants()
    (sequence,) = engine.scheduler.unfinished
    sequence.blocks.state_pages = [0]
    with pytest.raises(AssertionError, match="a waiting request holds pages"):
        engine.check_invariants()


def test_a_spec_keeps_its_states_in_json(kits: Kits) -> None:
    spec = read_model_spec(kits("lfm2").directory)
    assert spec.states and spec == ModelSpec.from_plain(json.loads(json.dumps(asdict(spec))))


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("bamba", {"time_step_limit": [0.0, 100.0]}, r"\(0.0, 100.0\), .* remove time_step_limit from config"),
        ("falcon_h1", {"time_step_limit": [0.001, math.inf]}, r"\(0.001, inf\), .* remove time_step_limit"),
        (f"granitemoehybrid{RECURRENT}", {"time_step_limit": [0.1, 2.0]}, r"\(0.1, 2.0\)"),
        # Its class takes the limit from another field.
        ("nemotron_h", {"time_step_min": 0.001}, r"\(0.001, inf\), .* set time_step_min to 1e-30 in config"),
    ],
)  # fmt: skip
def test_limits_of_time_steps_are_refused(
    tmp_path: Path, model: str, fields: dict[str, object], reason: str
) -> None:
    """transformers limits the time steps of a prompt, but not those of single tokens after it."""
    write_model(tmp_path, model, **fields)
    with pytest.raises(ConfigError, match=rf"has time_step_limit {reason}"):
        read_model_spec(tmp_path)


@pytest.mark.skipif(not has_workers(), reason="needs machine code for this CPU, or numba")
@pytest.mark.parametrize(("model", "num_workers"), [("qwen3_5_text", 4), ("opt", 0)])
def test_the_machine_code_of_recurrent_layers_is_compiled_before_the_check(
    tmp_path: Path, model: str, num_workers: int
) -> None:
    """For the model's dtype, and for float32, which the check uses. Other models compile nothing."""
    write_model(tmp_path, model)
    decoder = TransformersDecoder(read_model_spec(tmp_path), tmp_path, torch.bfloat16, torch.device("cpu"))
    find_worker.cache_clear()
    decoder.warm_up(CpuKernels())
    assert find_worker.cache_info().misses == num_workers
    check_recurrent_layers(decoder.module, decoder.spec)
    assert find_worker.cache_info().misses == num_workers
