"""Embeddings equal the pooled `last_hidden_state` of transformers + peft, however their prompts are batched, chunked,
preempted or found in the prefix cache."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slora.core.errors import ContextTooLong, DeadlineMissed, RequestFailed
from slora.core.request import (
    NOT_SAMPLED,
    EngineRequest,
    FinishReason,
    Pooling,
    PoolingKind,
    RequestUsage,
    TenantShare,
    single_adapter,
)
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.runner.runner import PageTransferFailed, RunningStep
from slora.scheduler.step_plan import StepPlan
from slora_adapters.version import AdapterVersion
from tests.support.covering import soaked
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import (
    Answer,
    add_overflowing_adapter,
    drive,
    make_engine,
    make_source,
    start_engine,
    step,
)
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.peft_adapters import EMBEDDING_KINDS
from tests.support.tiny_models import MODELS, OTHER_MODELS, VOCAB_SIZE

LAST, MEAN = Pooling(), Pooling(PoolingKind.MEAN)
# Float32 programs that add in different orders differ by less, relative to vectors of length 1.
TOLERANCE = 2e-5


def ask(
    name: str,
    prompt: Sequence[int],
    adapter: AdapterVersion | None = None,
    pooling: Pooling | None = LAST,
    tenant: str = "t",
) -> EngineRequest:
    """With pooling None, a request for 30 tokens."""
    sampling = NOT_SAMPLED if pooling else SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tenant, list(prompt), single_adapter(adapter), sampling, pooling=pooling)


def draw(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def vector(answer: Answer) -> torch.Tensor:
    assert answer.error is None and answer.reason is FinishReason.STOP and not answer.token_ids
    assert answer.embedding is not None
    return torch.frombuffer(bytearray(answer.embedding), dtype=torch.float32)


def measure_error(kit: ModelKit, request: EngineRequest, kind: str | None, answer: Answer) -> float:
    """The largest difference of a component."""
    assert request.pooling is not None
    mean = request.pooling.kind is PoolingKind.MEAN
    expected = kit.oracle.embedding(request.prompt_token_ids, kind, mean=mean)
    return float((vector(answer) - expected).abs().max())


def mix(
    versions: dict[str, AdapterVersion], lengths: Sequence[int] = (1, 16, 50)
) -> list[tuple[EngineRequest, str | None]]:
    """Requests of both poolings for the base and each adapter, and one to continue a prompt after each."""
    made: list[tuple[EngineRequest, str | None]] = []
    for kind in [None, *versions]:
        version = None if kind is None else versions[kind]
        for pooling in (LAST, MEAN, None):
            length = lengths[len(made) % len(lengths)]
            made.append((ask(str(len(made)), draw(length, len(made)), version, pooling), kind))
    random.Random(0).shuffle(made)
    return made


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("num_pages", "settings"),
    [
        pytest.param(1000, {}, id="whole", marks=pytest.mark.soak),
        pytest.param(1000, {"max_num_seqs": 7, "max_num_batched_tokens": 7}, id="in chunks"),
        pytest.param(52, {"preemption": "recompute"}, id="recomputed", marks=pytest.mark.soak),
        pytest.param(
            52,
            {"preemption": "swap", "max_num_batched_tokens": 40, "max_num_seqs": 40},
            id="swapped",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_embeddings_beside_answers_equal_those_of_transformers_and_peft(
    kits: Kits,
    report: Callable[[str], None],
    model: str,
    kernels: str,
    num_pages: int,
    settings: dict[str, int | str],
) -> None:
    kit = kits(model)
    source, versions = make_source(kit)
    asked = mix(versions, (1, 16, 50) if num_pages > 100 else (90, 33, 120))
    engine = make_engine(kit, source, num_pages, kernels=kernels, **settings)
    answers = drive(engine, [[request] for request, _ in asked])
    stats = engine.stats()
    assert (stats.preemptions > 0) == (num_pages < 100)
    assert (stats.swapped_in_pages > 0) == (settings.get("preemption") == "swap")
    errors = [
        measure_error(kit, request, kind, answers[request.request_id])
        for request, kind in asked
        if request.pooling is not None
    ]
    report(f"{len(errors)} embeddings of {model}, {stats.preemptions} preemptions: off by {max(errors):.1e}")
    assert max(errors) < TOLERANCE
    for request, kind in asked:
        if request.pooling is None:
            answer = answers[request.request_id]
            assert kit.oracle.judge(request.prompt_token_ids, answer.token_ids, kind).equal


@pytest.mark.parametrize("model", soaked(MODELS, "phi3_longrope"))
def test_every_family_embeds_as_transformers_does(kits: Kits, model: str) -> None:
    """The prompts are longer than windows, and on both sides of the switch of a longrope model."""
    kit = kits(model)
    source, versions = make_source(kit)
    kind = next(iter(versions))
    engine = make_engine(kit, source, 400, max_num_seqs=9, max_num_batched_tokens=11)
    asked = [
        (ask(f"{length}{pooling}{one}", draw(length), one and versions[kind], pooling), one)
        for length in (40, 60)
        for pooling in (LAST, MEAN)
        for one in (None, kind)
    ]
    answers = drive(engine, [[request for request, _ in asked]])
    assert max(measure_error(kit, r, one, answers[r.request_id]) for r, one in asked) < TOLERANCE


@pytest.mark.parametrize("model", soaked(OTHER_MODELS, "opt"))
def test_a_model_of_transformers_embeds_with_its_own_last_hidden_state(tmp_path: Path, model: str) -> None:
    kit = make_kit(tmp_path, model, num_hidden_layers=2)
    engine, versions = start_engine(kit, 400, max_num_seqs=9, max_num_batched_tokens=11)
    assert engine.info.can_embed
    kind = next(iter(versions))
    asked = [
        (ask("base", draw(25), None, MEAN), None),
        (ask("last", draw(19), versions[kind], LAST), kind),
        (ask("mean", draw(19), versions[kind], MEAN), kind),
        (ask("answer", draw(5), versions[kind], None), kind),
    ]
    answers = drive(engine, [[request for request, _ in asked]])
    assert max(measure_error(kit, r, one, answers[r.request_id]) for r, one in asked[:3]) < TOLERANCE
    assert kit.oracle.judge(draw(5), answers["answer"].token_ids, kind).equal


def test_an_adapted_embedding_layer_counts_and_an_adapted_head_does_not(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, "llama", EMBEDDING_KINDS)
    source, versions = make_source(kit)
    asked = [
        (ask(f"{kind}{pooling}", draw(20), version, pooling), kind)
        for kind, version in versions.items()
        for pooling in (LAST, MEAN)
    ]
    answers = drive(make_engine(kit, source, 400), [[request for request, _ in asked]])
    assert max(measure_error(kit, r, kind, answers[r.request_id]) for r, kind in asked) < TOLERANCE
    base = kit.oracle.embedding(draw(20), None, mean=False)
    assert torch.allclose(vector(answers[f"head{LAST}"]), base, atol=TOLERANCE)
    assert not torch.allclose(vector(answers[f"embedding{LAST}"]), base, atol=0.01)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_the_last_hidden_state_uses_the_prefix_cache_and_the_mean_does_not(kits: Kits, kernels: str) -> None:
    kit = kits("llama")
    kind, prompt = "odd_rank", draw(40)
    engine, versions = start_engine(kit, 400, kernels=kernels)
    for name, pooling, num_cached in (("first", MEAN, 0), ("last", LAST, 32), ("mean", MEAN, 0)):
        request = ask(name, prompt, versions[kind], pooling)
        answer = drive(engine, [[request]])[name]
        assert answer.num_cached == num_cached
        assert measure_error(kit, request, kind, answer) < TOLERANCE
    continued = drive(engine, [[ask("continued", prompt, versions[kind], None)]])["continued"]
    assert continued.num_cached == 32
    assert kit.oracle.judge(prompt, continued.token_ids, kind).equal


def test_a_mean_that_resumes_after_a_preemption_skips_what_it_has_pooled(kits: Kits) -> None:
    """Its own blocks may still be in the prefix cache, and they hold only pooled tokens.

    Another tenant takes its place.
    """
    kit = kits("llama")
    engine, _ = start_engine(kit, 100, max_num_seqs=1, max_num_batched_tokens=20)
    request = ask("mean", draw(90), pooling=MEAN)
    engine.add(request)
    for _ in range(2):
        engine.step()
    (sequence,) = engine.scheduler.unfinished
    assert sequence.pooled is not None and sequence.pooled.next_token == 40
    engine.add(replace(ask("first", draw(5), tenant="u"), share=TenantShare(priority=-1)))
    answer = drive(engine, [])["mean"]
    assert sequence.num_preemptions == 1
    assert measure_error(kit, request, None, answer) < TOLERANCE


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_mean_that_is_preempted_in_the_middle_of_its_prompt_is_exact(kits: Kits, way: str) -> None:
    """It needs 12 of the 20 pages. An older answer takes 7, and a further one after each 16 steps."""
    kit = kits("llama")
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 5, "swap_bytes": kit.pool_bytes(20)}
    engine, _ = start_engine(kit, 20, preemption=way, **settings)
    older, mean = ask("older", draw(100), pooling=None), ask("mean", draw(190), pooling=MEAN)
    older = replace(older, sampling=replace(older.sampling, max_tokens=90))
    engine.add(older)
    engine.add(mean)
    answers: dict[str, Answer] = {"older": Answer(), "mean": Answer()}
    (sequence,) = engine.scheduler.find("mean")
    pooled = []
    while engine.num_unfinished:
        before = engine.stats().preemptions
        step(engine, answers)
        if engine.stats().preemptions > before:
            assert sequence.pooled is not None
            pooled.append(sequence.pooled.next_token)
    assert len(pooled) == 1 and 100 < pooled[0] < 190, "it was not preempted in the middle"
    assert (engine.stats().swapped_in_pages > 0) == (way == "swap")
    assert measure_error(kit, mean, None, answers["mean"]) < TOLERANCE


def test_an_embedding_is_shortened_and_then_normalized(kits: Kits) -> None:
    kit = kits("llama")
    poolings = {
        "whole": Pooling(PoolingKind.MEAN),
        "raw": Pooling(PoolingKind.MEAN, normalize=False),
        "short": Pooling(PoolingKind.MEAN, 5),
        "short raw": Pooling(PoolingKind.MEAN, 5, normalize=False),
        "one": Pooling(PoolingKind.MEAN, 1),
        "all": Pooling(PoolingKind.MEAN, 48),
    }
    engine, _ = start_engine(kit, 100)
    answers = drive(engine, [[ask(name, draw(9), pooling=one) for name, one in poolings.items()]])
    found = {name: vector(answer) for name, answer in answers.items()}
    expected = kit.oracle.embedding(draw(9), None, mean=True, normalize=False)
    normalize = torch.nn.functional.normalize
    assert torch.allclose(found["raw"], expected, atol=1e-4)
    assert torch.allclose(found["whole"], normalize(expected, dim=0), atol=TOLERANCE)
    assert torch.equal(found["short raw"], found["raw"][:5])
    assert torch.allclose(found["short"], normalize(expected[:5], dim=0), atol=TOLERANCE)
    assert found["one"].abs().tolist() == [1.0]
    assert torch.equal(found["all"], found["whole"])


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_other_requests_do_not_change_an_embedding(kits: Kits, kernels: str) -> None:
    """They are equal to the last bit, if no chunk is divided."""
    kit = kits("qwen2")
    source, versions = make_source(kit, "bfloat16")
    mine = [
        ask("last", draw(30), versions["patterns"], LAST),
        ask("mean", draw(45), versions["patterns"], MEAN),
    ]
    others = [request for request, _ in mix(versions)]
    pool_bytes = kit.pool_bytes(600, dtype="bfloat16")

    def run(requests: list[EngineRequest]) -> list[torch.Tensor]:
        settings = {"dtype": "bfloat16", "pool_bytes": pool_bytes, "max_num_batched_tokens": 4000}
        engine = make_engine(kit, source, 0, kernels=kernels, **settings)
        answers = drive(engine, [requests])
        return [vector(answers[one.request_id]) for one in mine]

    for alone, beside in zip(run(mine), run([*others, *mine]), strict=True):
        assert torch.equal(alone, beside)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_hidden_states_that_are_not_finite_fail_their_own_request_alone(
    kits: Kits, tmp_path: Path, kernels: str
) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    bursting = add_overflowing_adapter(source, kit, tmp_path)
    bad = [ask(f"bad {one.kind}", draw(20), bursting, one) for one in (LAST, MEAN, Pooling(dimensions=1))]
    good = ask("good", draw(20), versions["odd_rank"], MEAN)
    answers = drive(
        make_engine(kit, source, 500, kernels=kernels), [[*bad[:2], good, replace(bad[2], request_id="one")]]
    )
    for name in ("bad last", "bad mean", "one"):
        error = answers[name].error
        assert isinstance(error, RequestFailed) and "the hidden states of adapter" in str(error)
        assert bursting.digest in str(error) and answers[name].embedding is None
    assert measure_error(kit, good, "odd_rank", answers["good"]) < TOLERANCE


def test_a_step_that_is_computed_again_in_parts_pools_no_token_twice(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    engine, _ = start_engine(kit, 200, max_num_seqs=40, max_num_batched_tokens=40)
    requests = [ask(f"{n}", draw(70, n), pooling=pooling) for n, pooling in enumerate((MEAN, LAST, MEAN))]
    culprit = ask("culprit", draw(30), pooling=None)
    fail_after_pooling(engine, monkeypatch)
    answers = drive(engine, [[*requests, culprit]])
    assert isinstance(answers["culprit"].error, RequestFailed)
    for request in requests:
        assert measure_error(kit, request, None, answers[request.request_id]) < TOLERANCE


def fail_after_pooling(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that samples a token fails after it has pooled its prompts."""

    def fail(*_: object) -> None:
        raise ValueError("sampling fails")

    monkeypatch.setattr("slora.runner.runner.sample", fail)


def test_an_embedding_survives_a_step_that_could_not_move_its_pages(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 200, max_num_seqs=20, max_num_batched_tokens=20)
    launch, num_runs = engine.runner.launch, 0

    def fail_once(plan: StepPlan) -> RunningStep:
        nonlocal num_runs
        num_runs += 1
        step = launch(plan)
        if num_runs in (2, 3):
            raise PageTransferFailed("a copy failed")
        return step

    engine.runner.launch = fail_once  # type: ignore[method-assign]
    request = ask("mean", draw(70), versions["odd_rank"], MEAN)
    answer = drive(engine, [[request]])["mean"]
    assert num_runs > 5
    assert measure_error(kit, request, "odd_rank", answer) < TOLERANCE


def test_an_embedding_is_charged_its_prompt_and_no_generated_token(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 100)
    drive(engine, [[ask("a", draw(40), pooling=MEAN)]])
    drive(engine, [[ask("b", draw(40), pooling=LAST)]])
    usage = {one.request_id: one.usage for one in engine.pop_usage()}
    assert [(u.prompt_tokens, u.cached_tokens, u.generated_tokens) for u in usage.values()] == [
        (40, 0, 0),
        (40, 32, 0),
    ]
    assert all(isinstance(one, RequestUsage) and one.page_seconds >= 0 for one in usage.values())
    assert engine.stats().generated_tokens == 0


def test_a_prompt_to_embed_may_fill_the_context_and_not_exceed_it(kits: Kits) -> None:
    kit = kits("llama")
    engine, _ = start_engine(kit, 100, max_model_len=64)
    request = ask("full", draw(64))
    assert measure_error(kit, request, None, drive(engine, [[request]])["full"]) < TOLERANCE
    with pytest.raises(ContextTooLong, match=r"context length is 64 tokens .* input has 65 tokens"):
        engine.add(ask("long", draw(65)))


def test_an_embedding_that_does_not_fit_into_the_pool_names_its_input(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 20, max_model_len=300)
    answer = drive(engine, [[ask("r", draw(300), versions["r16_on_all_seven"])]])["r"]
    assert isinstance(answer.error, ContextTooLong) and answer.error.param == "input"
    assert "but the pool has only 20 (pool_bytes); shorten the input" in str(answer.error)


def test_an_embedding_that_misses_its_deadline_says_so(kits: Kits) -> None:
    engine, _ = start_engine(kits("llama"), 100, max_num_seqs=1)
    late = replace(ask("late", draw(400)), deadline_s=1e-6)
    answer = drive(engine, [[late]])["late"]
    assert isinstance(answer.error, DeadlineMissed) and "the embedding was to come within" in str(
        answer.error
    )


def test_tenants_share_the_engine_fairly_between_embeddings_and_answers(kits: Kits) -> None:
    """One tenant embeds 20 long prompts; the other one's short embedding does not wait for them."""
    engine, _ = start_engine(kits("llama"), 400, max_num_seqs=16, max_num_batched_tokens=64)
    order: list[str] = []
    for number in range(20):
        engine.add(ask(f"hog {number}", draw(100, number), pooling=MEAN, tenant="hog"))
    engine.step()
    engine.add(ask("honest", draw(20), tenant="honest"))
    while engine.num_unfinished:
        order.extend(output.request_id for output in engine.step())
    assert order.index("honest") <= 4
    assert len(order) == 21
