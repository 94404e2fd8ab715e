"""Adapters with norms of their own (`modules_to_save`) give peft's answers, beside other adapters and the base."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from slora import LLM, LoraAdapter
from slora.core.errors import RequestRefused
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge, judge_with_triton, mix
from tests.slora.engine.test_tensor_parallel import judge_divided
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import KINDS, NORM_KINDS, ROW_KINDS

Kits = Callable[[str], ModelKit]
# qwen3 has norms of queries and keys, gemma3 also post norms, and its norms multiply by 1 + weight.
MODELS = ["llama", "qwen3", "gemma3_text", "qwen2_moe"]
# transformers' classes compute these. Most of them have norms with biases, and olmo2 has norms of queries and keys.
_OTHER_NORMS = {
    "gpt2": (["ln_1", "ln_2"], ["ln_f"]),
    "olmo2": (["post_attention_layernorm", "q_norm"], ["norm"]),
    "gpt_neox": (["input_layernorm"], ["layer_norm", "layernorm"]),
    "phi": (["input_layernorm"], ["final_layernorm"]),
    "starcoder2": (["input_layernorm"], ["norm"]),
    "granite": (["input_layernorm"], ["norm"]),
    "cohere": (["input_layernorm"], ["norm"]),
    "stablelm": (["input_layernorm"], ["norm"]),
}
_QUICK = ("gpt2", "olmo2")
OTHERS = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.soak) for name in _OTHER_NORMS]


def _find_kinds(model: str) -> dict[str, dict[str, object]]:
    if model in _OTHER_NORMS:
        some, others = _OTHER_NORMS[model]
        own = {
            "norms_of_layers": {"r": 4, "modules_to_save": some},
            "last_of_all": {"r": 3, "modules_to_save": others},
        }
        return own | {"plain": {"r": 5}}
    return NORM_KINDS | {"plain": KINDS["patterns"], "tokens": ROW_KINDS["tokens"]}


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return cache(lambda model: make_kit(tmp_path_factory.mktemp(model), model, _find_kinds(model)))


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_every_kind_in_one_batch_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=20 if soak else 2, seed=4)
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(900))
    verdict = judge(kit.oracle, work, answer(llm, kit, work))
    report(f"parity of {model} with norms of its own, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_parity_holds_with_chunks_preemption_and_evicted_adapters(
    kits: Kits, kernels: str, *, soak: bool
) -> None:
    kit = kits("qwen3")
    work = mix(kit, prompts_each=8 if soak else 2, seed=5)
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(26), **settings)
    verdict = judge(kit.oracle, work, answer(llm, kit, work))
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_divided_model_answers_as_peft_does(kits: Kits, size: int) -> None:
    verdict = judge_divided(kits("qwen3"), size)
    assert verdict.equal, verdict


def test_triton_kernels_answer_as_peft_does(tmp_path: Path) -> None:
    kinds = ["every_norm_with_dora", "norms_of_layers"]
    kit = make_kit(tmp_path, "qwen3", {kind: NORM_KINDS[kind] for kind in kinds}, num_hidden_layers=2)
    work = Work([[3, 7, 4, 9], [5, 9], [2, 6]], [*kinds, None])
    verdict = judge_with_triton(kit, work)
    assert verdict.equal, verdict


def test_a_norm_may_lie_in_two_pages(tmp_path: Path) -> None:
    """Weights of 832 bytes, which do not divide a page."""
    kinds = ("every_norm_with_dora", "norms_of_layers")
    kit = make_kit(tmp_path, "qwen3", {kind: NORM_KINDS[kind] for kind in kinds}, hidden_size=208)
    work = mix(kit, prompts_each=1, seed=5)
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    verdict = judge(kit.oracle, work, answer(llm, kit, work, replace(GREEDY, max_tokens=8)))
    assert verdict.equal, verdict


def test_an_adapter_with_norms_of_its_own_is_refused_in_a_sum(kits: Kits) -> None:
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    asked = [LoraAdapter(kit.adapters["norms_of_layers"]), LoraAdapter(kit.adapters["plain"])]
    with pytest.raises(RequestRefused, match="norms or rows of the embedding or the head of its own"):
        llm.generate([[1, 2, 3]], GREEDY, [asked])


def test_the_oracle_distinguishes_each_of_these_adapters_from_the_base(kits: Kits) -> None:
    kit = kits("qwen3")
    work = mix(kit, prompts_each=1, seed=6)
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900)), kit, work)
    for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
        verdict = kit.oracle.judge(prompt, given.token_ids, None, given.logprobs)
        assert verdict.equal == (kind is None), kind
