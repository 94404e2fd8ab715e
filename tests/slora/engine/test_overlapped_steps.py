"""An engine with overlapped steps answers as one without.

On a CPU, a step is computed when it is launched, and its results are read after the launch of the next step.
"""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from slora.core.engine_config import EngineConfig
from slora.core.errors import DeviceFailed, RequestFailed
from slora.core.request import EngineRequest, FinishReason, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.runner.runner import PageTransferFailed, RunningStep
from slora.scheduler.step_plan import SampledToken, StepPlan
from tests.support.cpu_kernels import FASTEST
from tests.support.driving import COSTS, Answer, drive, make_source, step
from tests.support.model_kit import Kits, ModelKit

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLING = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=15, seed=3, temperature=1.2, top_p=0.9),
    "stopping": SamplingParams(max_tokens=40, temperature=1.5, seed=8, stop_token_ids=tuple(range(20))),
    "logprobs": replace(GREEDY, logprobs=3),
    "penalties": SamplingParams(max_tokens=20, seed=5, presence_penalty=1.0, repetition_penalty=1.3),
    "banned": SamplingParams(max_tokens=9, seed=5, min_tokens=6, logit_bias={7: 5.0}, stop_token_ids=(7,)),
    "choices": SamplingParams(max_tokens=11, seed=6, n=3, logprobs=0),
    "beams": SamplingParams(max_tokens=8, temperature=0.0, n=2, use_beam_search=True),
    "filtered": SamplingParams(max_tokens=9, seed=7, bad_words=((5, 6), (9,))),
    "scored": replace(GREEDY, prompt_logprobs=1),
    "short": replace(GREEDY, max_tokens=1),
}


def make_engine(kit: ModelKit, *, overlap: bool, num_pages: int, **settings: int) -> tuple[Engine, dict]:
    source, versions = make_source(kit)
    sizes = {"dtype": "float32", "pool_bytes": kit.pool_bytes(num_pages)}
    config = EngineConfig(kit.directory, **FASTEST, **sizes, **settings)  # type: ignore[arg-type]
    engine = Engine(config, kit.spec, source, COSTS, overlap=overlap)
    return engine, versions


def make_requests(versions: dict, seed: int) -> list[list[EngineRequest]]:
    """Requests of all kinds, with and without adapters, in random order. One list for each step."""
    rng = random.Random(seed)
    arrivals: list[list[EngineRequest]] = [[]]
    for kind, sampling in SAMPLING.items():
        for name in (None, *rng.sample(sorted(versions), 2)):
            prompt = [rng.randrange(3, 60) for _ in range(rng.randint(1, 30))]
            version = single_adapter(versions[name] if name else None)
            arrivals[-1].append(EngineRequest(f"{kind}/{name}", "t", prompt, version, sampling))
            if rng.random() < 0.5:
                arrivals.append([])
    return arrivals


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 5, "max_num_batched_tokens": 9}], ids=["wide", "narrow"]
)
@pytest.mark.parametrize("model", ["llama", "mistral_window", "phi3_longrope"])
def test_requests_of_all_kinds_get_the_same_answers(
    kits: Kits, model: str, settings: dict[str, int], soak: bool
) -> None:
    kit = kits(model)
    for seed in range(20 if soak else 1):
        found = []
        for overlap in (False, True):
            engine, versions = make_engine(kit, overlap=overlap, num_pages=40, **settings)
            answers = drive(engine, make_requests(versions, seed))
            usage = {one.request_id: one.usage for one in engine.pop_usage()}
            found.append((answers, usage))
        (plain, plain_usage), (overlapped, overlapped_usage) = found
        assert plain.keys() == overlapped.keys()
        for key, answer in plain.items():
            other = overlapped[key]
            assert (answer.token_ids, answer.reason, answer.error) == (
                other.token_ids,
                other.reason,
                other.error,
            ), key
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4), key
        for name, one in plain_usage.items():
            other_usage = overlapped_usage[name]
            assert one.generated_tokens == other_usage.generated_tokens, name
            assert one.prompt_tokens == other_usage.prompt_tokens, name


def start(kit: ModelKit, requests: dict[str, int], **fields: int) -> Engine:
    """requests: the token that each prompt repeats. fields: of `SamplingParams`."""
    engine, _ = make_engine(kit, overlap=True, num_pages=60)
    for name, token in requests.items():
        engine.add(EngineRequest(name, "t", [token] * 4, (), replace(GREEDY, **fields)))
    return engine


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = defaultdict(Answer) if answers is None else answers
    while engine.has_work:
        step(engine, answers)
    engine.check_invariants()
    return answers


def answer_alone(kit: ModelKit, token: int) -> list[int]:
    return finish(start(kit, {"alone": token}))["alone"].token_ids


def test_the_next_step_is_launched_before_the_results_of_a_step_are_read(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events = start(kits("llama"), {"a": 3}), list[str]()
    launch, wait = engine.runner.launch, RunningStep.wait

    def note_launch(plan: StepPlan) -> RunningStep:
        events.append("launch" if plan.chunks else "nothing")
        return launch(plan)

    def note_wait(running: RunningStep) -> list[SampledToken]:
        events.append("wait")
        return wait(running)

    monkeypatch.setattr(engine.runner, "launch", note_launch)
    monkeypatch.setattr(RunningStep, "wait", note_wait)
    finish(engine)
    # No step follows the last token, because it is known that `max_tokens` ends the answer.
    assert events == ["launch", *["launch", "wait"] * (GREEDY.max_tokens - 1), "nothing", "wait", "wait"]


def test_a_sequence_that_stops_computes_one_more_row_that_counts_nowhere(kits: Kits) -> None:
    kit = kits("llama")
    expected = answer_alone(kit, 3)
    stop = expected[4]
    engine = start(kit, {"a": 3}, stop_token_ids=(stop,))
    answer = finish(engine)["a"]
    assert answer.token_ids == expected[: expected.index(stop) + 1] and answer.reason is FinishReason.STOP
    stats = engine.stats()
    assert stats.generated_tokens == engine.pop_usage()[0].usage.generated_tokens == len(answer.token_ids)
    assert stats.steps == len(answer.token_ids) + 1, "the engine did not overlap steps"
    assert stats.pages_held == 0


def test_a_new_request_takes_the_row_of_an_aborted_one_while_its_step_runs(kits: Kits) -> None:
    kit = kits("llama")
    engine, answers = start(kit, {"a": 3, "b": 4}), defaultdict[str, Answer](Answer)
    for _ in range(3):
        step(engine, answers)
    row = engine.scheduler.find("a")[0].row
    engine.abort("a")
    engine.add(EngineRequest("c", "t", [50] * 4, (), GREEDY))
    step(engine, answers)
    assert engine.scheduler.find("c")[0].row == row
    finish(engine, answers)
    assert answers["b"].token_ids == answer_alone(kit, 4)
    assert answers["c"].token_ids == answer_alone(kit, 50)
    assert not answers["a"].ended and engine.stats().pages_held == 0


def test_a_request_that_cannot_be_computed_fails_alone_while_another_step_runs(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    engine, answers = start(kit, {"a": 3, "b": 4}), defaultdict[str, Answer](Answer)
    launch = engine.runner.launch

    def refuse(plan: StepPlan) -> RunningStep:
        if any(chunk.sequence.request.request_id == "bad" for chunk in plan.chunks):
            raise RuntimeError("broken")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", refuse)
    for _ in range(3):
        step(engine, answers)
    assert engine.num_launched
    engine.add(EngineRequest("bad", "t", [50] * 4, (), GREEDY))
    finish(engine, answers)
    assert isinstance(answers["bad"].error, RequestFailed)
    assert [answers[name].token_ids for name in "ab"] == [answer_alone(kit, 3), answer_alone(kit, 4)]


def test_pages_that_cannot_be_moved_are_undone_while_another_step_runs(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    engine, answers = start(kit, {"a": 3, "b": 4}), defaultdict[str, Answer](Answer)
    launch, num_launches = engine.runner.launch, 0

    def fail_twice(plan: StepPlan) -> RunningStep:
        nonlocal num_launches
        num_launches += 1
        if num_launches in (4, 6):
            raise PageTransferFailed("a copy failed")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", fail_twice)
    finish(engine, answers)
    assert [answers[name].token_ids for name in "ab"] == [answer_alone(kit, 3), answer_alone(kit, 4)]


def test_the_device_is_lost_when_the_results_of_a_step_cannot_be_read(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(kits("llama"), {"a": 3})
    engine.step()

    def fail(running: RunningStep) -> list[SampledToken]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(RunningStep, "wait", fail)
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        finish(engine)


def test_a_tenant_is_purged_and_an_adapter_is_deleted_while_a_step_uses_them(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = make_engine(kit, overlap=True, num_pages=200, load_bytes_per_step=1)
    answers = defaultdict[str, Answer](Answer)
    engine.add(EngineRequest("b", "other", [4] * 4, (), GREEDY))
    version = versions["odd_rank"]
    engine.add(EngineRequest("a", version.tenant, [3] * 4, single_adapter(version), GREEDY))
    for _ in range(4):  # Slices of the adapter are being copied.
        step(engine, answers)
    assert engine.num_launched and engine.scheduler.adapters.num_loading
    engine.remove_adapter(version)
    purge, ended = engine.purge_tenant(version.tenant)
    assert purge.num_requests == 1 and [output.request_id for output in ended] == ["a"]
    finish(engine, answers)
    assert answers["b"].token_ids == answer_alone(kit, 4)
    assert engine.stats().resident_adapters == 0
