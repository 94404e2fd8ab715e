"""Adapters on the embedding and the output head give peft's answers, and cost other requests in the batch nothing."""

from collections.abc import Callable
from functools import cache

import pytest

from slora import LLM, SamplingParams
from slora.core.request import EngineRequest, single_adapter
from slora.models.step_batch import StepBatch
from slora_kernels.batch import TileLimits
from tests.slora.engine.test_parity import Work, answer, judge, judge_with_triton, mix
from tests.slora.sampling.test_prompt_logprobs import check_scores
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import EMBEDDING_KINDS, KINDS
from tests.support.tiny_models import VOCAB_SIZE

Kits = Callable[[str], ModelKit]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    kinds = {**EMBEDDING_KINDS, "r8_on_q_and_v": KINDS["r8_on_q_and_v"]}
    return cache(lambda model: make_kit(tmp_path_factory.mktemp(model), model, kinds))


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    "model",
    [
        "qwen2_tied",
        "gemma3_text",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gemma2")),
    ],
)
def test_parity_holds_with_chunks_and_preemption(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=20 if soak else 2, seed=5)
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(40), **settings)
    verdict = judge(kit.oracle, work, answer(llm, kit, work))
    report(f"parity of {model} with adapted embeddings and heads, {kernels} kernels: {verdict}")
    assert llm.stats().preemptions > 0
    assert verdict.equal, verdict


@pytest.mark.soak
def test_triton_kernels_answer_as_peft_does(kits: Kits) -> None:
    kit = kits("llama")
    work = Work([[3, 1, 4, 1], [5, 9], [2, 6, 5]], ["both_and_linears", "embedding", "head"])
    verdict = judge_with_triton(kit, work, max_tokens=3)
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_prompts_are_scored_with_the_head_of_their_adapter(kits: Kits, kernels: str) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 400, kernels=kernels, max_num_seqs=20, max_num_batched_tokens=90)
    # The prompt has more rows than one block. Both choices sample from the same row of logits.
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=2, n=2)
    prompts = {kind: [(7 * n + len(kind)) % VOCAB_SIZE for n in range(70)] for kind in versions}
    asked = [
        EngineRequest(kind, "t", prompts[kind], single_adapter(versions[kind]), params) for kind in versions
    ]
    answers = drive(engine, [asked])
    for kind, prompt in prompts.items():
        check_scores(kit, prompt, kind, 2, answers[kind])
        assert kit.oracle.judge(prompt, answers[kind].token_ids, kind).equal
        assert answers[f"{kind}/1"].token_ids == answers[kind].token_ids


def test_the_oracle_distinguishes_each_of_these_adapters_from_the_base(kits: Kits) -> None:
    kit = kits("llama")
    work = mix(kit, prompts_each=1, seed=6)
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400)), kit, work)
    for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
        assert kind is None or kit.oracle.judge(prompt, given.token_ids, None).wrong > 10


@pytest.mark.parametrize(
    ("kinds", "adapts_embedding", "head_rows"),
    [
        ((None, "r8_on_q_and_v"), False, 0),
        ((None, "embedding", "r8_on_q_and_v"), True, 0),
        (("r8_on_q_and_v", "head", None, "both_and_linears", "head"), True, 3),
    ],
)
def test_a_step_adapts_embedding_and_head_only_for_the_rows_that_need_it(
    kits: Kits, kinds: tuple[str | None, ...], *, adapts_embedding: bool, head_rows: int
) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 500)
    for name, kind in enumerate(kinds):
        version = versions[kind] if kind is not None else None
        engine.add(
            EngineRequest(
                str(name), "tenant", [1, 2, 3], single_adapter(version), SamplingParams(max_tokens=2)
            )
        )
    plan = engine._scheduler.schedule()
    for load in plan.loads:
        engine._runner.memory.load(load)
    batch = StepBatch.build(plan, engine._runner.memory, TileLimits(16))
    assert batch.adapts_embedding == adapts_embedding
    rows = [count for layer in batch.head_lora for count in layer.tiles[:, 2].tolist()]
    assert sum(rows) == head_rows
    if batch.head_lora:
        (layer,) = batch.head_lora
        slots = [
            chunk.slots[0].slot if chunk.slots else None
            for chunk in plan.chunks
            for _ in chunk.sampled_sequences
        ]
        for slot, first, count in layer.tiles.tolist():
            assert slots[first : first + count] == [slot] * count
        # A sampled row is a row of its own, although a prefill chunk produced it.
        apart = StepBatch.build(plan, engine._runner.memory, TileLimits(16, 16))
        assert [layer.num_decodes for layer in (*apart.lora, *apart.head_lora)] == [0, len(rows)]
