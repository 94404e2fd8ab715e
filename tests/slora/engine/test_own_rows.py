"""Adapters with rows of the embedding or the head of their own give peft's answers, beside other adapters and the base.

The rows are those of some tokens (`trainable_token_indices`) or all of them (`modules_to_save`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from slora import LLM, LoraAdapter
from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, single_adapter
from slora_adapters.errors import AdapterInvalid
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge_engine, judge_with_triton, mix
from tests.slora.engine.test_tensor_parallel import judge_divided
from tests.slora.sampling.test_prompt_logprobs import check_scores
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import EMBEDDING_KINDS, KINDS, ROW_KINDS, TIED_KINDS, make_adapter
from tests.support.tiny_models import VOCAB_SIZE

Kits = Callable[[str], ModelKit]
# gemma scales its embeddings.
MODELS = ["llama", "qwen2_tied", "gemma3_text", "gpt2"]


def _find_kinds(model: str) -> dict[str, dict[str, object]]:
    if model == "gpt2":
        return {
            "tokens": {"r": 3, "target_modules": ["c_attn"], "trainable_token_indices": {"wte": [4, 90]}},
            "whole_head": {"r": 3, "target_modules": ["c_fc"], "modules_to_save": ["lm_head"]},
            "plain": {"r": 5},
        }
    return ROW_KINDS | {"plain": KINDS["patterns"], "head": EMBEDDING_KINDS["head"]}


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return cache(lambda model: make_kit(tmp_path_factory.mktemp(model), model, _find_kinds(model)))


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_in_one_batch_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=20 if soak else 2, seed=4)
    # All tokens of these prompts have rows of their own in one of the adapters.
    own = Work([[90, 3, 17, 7, 8, 9, 11, 4] * 2] * len(kit.adapters), [*kit.adapters])
    work = Work(work.prompts + own.prompts, work.kinds + own.kinds)
    verdict, _ = judge_engine(kit, work, GREEDY, 900, kernels=kernels)
    report(f"parity of {model} with rows of its own, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", ["qwen2_tied", "llama"])
def test_tied_embeddings_and_heads_answer_as_peft_does(
    report: Callable[[str], None], tmp_path: Path, model: str, *, soak: bool
) -> None:
    """The head of llama is not tied, so that the field has no effect there."""
    kinds = TIED_KINDS if model == "qwen2_tied" else {"tied_pair": TIED_KINDS["tied_pair"]}
    kit = make_kit(tmp_path, model, kinds)
    work = mix(kit, prompts_each=20 if soak else 2, seed=7)
    verdict, _ = judge_engine(kit, work, GREEDY, 900)
    report(f"parity of {model} with what training tied: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_parity_holds_with_chunks_preemption_and_evicted_adapters(
    kits: Kits, kernels: str, *, soak: bool
) -> None:
    kit = kits("qwen2_tied")
    work = mix(kit, prompts_each=8 if soak else 2, seed=5)
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    verdict, stats = judge_engine(kit, work, GREEDY, 44, kernels=kernels, **settings)
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_divided_model_answers_as_peft_does(kits: Kits, size: int) -> None:
    verdict = judge_divided(kits("qwen2_tied"), size)
    assert verdict.equal, verdict


def test_triton_kernels_answer_as_peft_does(tmp_path: Path) -> None:
    kinds = ["tokens_of_both", "whole_head", "whole_embedding"]
    kit = make_kit(tmp_path, "llama", {kind: ROW_KINDS[kind] for kind in kinds}, num_hidden_layers=1)
    work = Work([[3, 7, 4, 9], [5, 9], [2, 6, 5]], [*kinds])
    verdict = judge_with_triton(kit, work)
    assert verdict.equal, verdict


def test_prompts_are_scored_with_the_head_of_their_adapter(kits: Kits) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 900, kernels=KERNELS, max_num_seqs=20, max_num_batched_tokens=90)
    params = replace(GREEDY, max_tokens=4, prompt_logprobs=2, n=2)
    prompts = {kind: [(7 * n + len(kind)) % 128 for n in range(70)] for kind in versions}
    asked = [
        EngineRequest(kind, "t", prompts[kind], single_adapter(versions[kind]), params) for kind in versions
    ]
    answers = drive(engine, [asked])
    for kind, prompt in prompts.items():
        check_scores(kit, prompt, kind, 2, answers[kind])


def test_a_resized_base_serves_adapters_of_added_tokens(
    report: Callable[[str], None], tmp_path: Path
) -> None:
    """The remedy in the refusal of such adapters on the base model with the vocabulary that it had before."""
    old = make_kit(tmp_path / "old", "llama", {})
    base, size = AutoModelForCausalLM.from_pretrained(old.directory), VOCAB_SIZE + 3
    base.resize_token_embeddings(size, mean_resizing=False)
    base.save_pretrained(tmp_path / "resized")
    kinds: dict[str, dict[str, object]] = {
        "added": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        "trained": {"r": 3, "target_modules": ["o_proj"], "trainable_token_indices": [VOCAB_SIZE, size - 1]},
        "adapted": {"r": 3, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    }
    kit = ModelKit(tmp_path / "resized", {})
    for seed, (kind, fields) in enumerate(kinds.items()):
        kit.adapters[kind] = tmp_path / kind
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "resized")
        make_adapter(tmp_path / kind, trained, seed=seed, std=0.15, **fields)
    prompts = [[3, VOCAB_SIZE, 7, size - 1, 5, VOCAB_SIZE + 1] * 3, [size - 1], [1, 2, 3]]
    work = Work(prompts * 4, [kind for kind in (None, *kinds) for _ in prompts])
    verdict, _ = judge_engine(kit, work, GREEDY, 900)
    report(f"parity of llama with 3 added tokens: {verdict}")
    assert verdict.equal, verdict

    llm = LLM(old.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    remedy = rf"3 tokens were added to the vocabulary .* serve the base model after resize_token_embeddings\({size}\)"
    for kind in ("added", "adapted"):
        with pytest.raises(AdapterInvalid, match=remedy):
            llm.generate([[1, 2, 3]], GREEDY, kit.adapters[kind])
    with pytest.raises(AdapterInvalid, match=f"names token {size - 1}, but the base model has {VOCAB_SIZE}"):
        llm.generate([[1, 2, 3]], GREEDY, kit.adapters["trained"])


def test_an_adapter_with_rows_of_its_own_is_refused_in_a_sum(kits: Kits) -> None:
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    for kind in ("tokens", "whole_head"):
        asked = [LoraAdapter(kit.adapters[kind]), LoraAdapter(kit.adapters["plain"])]
        with pytest.raises(RequestRefused, match="rows of the embedding or the head of its own"):
            llm.generate([[1, 2, 3]], GREEDY, [asked])


def test_the_oracle_distinguishes_each_of_these_adapters_from_the_base(kits: Kits) -> None:
    kit = kits("qwen2_tied")
    work = mix(kit, prompts_each=1, seed=6)
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900)), kit, work)
    for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
        verdict = kit.oracle.judge(prompt, given.token_ids, None, given.logprobs)
        assert verdict.equal == (kind is None), kind
