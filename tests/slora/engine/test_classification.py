"""Adapters with a head that classifies texts give the logits of transformers' sequence classification + peft."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from slora import LLM
from slora.core.errors import RequestRefused
from slora.core.request import Pooling, PoolingKind, WeightedAdapter, compose_adapters
from tests.slora.engine.test_embeddings import ask, draw, vector
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge
from tests.slora.engine.test_tensor_parallel import divided_engine
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, start_engine
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.peft_adapters import make_adapter, quiet_peft
from tests.support.tiny_models import few_layers

CLASSIFY = Pooling(PoolingKind.CLASSIFY, normalize=False)
MODELS = ["llama", "qwen3", "gemma3_text", "qwen2_moe", "gpt2", "gpt_neox", "phi", "stablelm"]
NUM_LABELS = {"three_labels": 3, "one_label": 1, "with_norms_and_dora": 5}
TOLERANCE = 2e-5


def _find_base(directory: Path, kind: str) -> PreTrainedModel:
    base = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=NUM_LABELS[kind])
    base.config.pad_token_id = None
    return base.eval()


def _make_kit(root: Path, model: str, changes: dict[str, int]) -> ModelKit:
    plain = {"plain": {"r": 3, "target_modules": ["c_attn"] if model == "gpt2" else "all-linear"}}
    if model == "qwen2_moe":
        plain["plain"]["target_modules"] = ["q_proj", "o_proj"]
    kit = make_kit(root, model, plain, **changes)
    targets = {} if model != "qwen2_moe" else {"target_modules": ["q_proj", "o_proj"]}
    norms = {"gpt2": "ln_1"}.get(model, "input_layernorm")
    kinds: dict[str, dict[str, object]] = {
        "three_labels": {"r": 4, **targets},
        "one_label": {"r": 3, **targets},
        "with_norms_and_dora": {"r": 4, "use_dora": True, "modules_to_save": [norms], **targets},
    }
    for seed, (kind, fields) in enumerate(kinds.items(), 10):
        kit.adapters[kind] = root / kind
        transposed = {"fan_in_fan_out": True} if model == "gpt2" else {}
        base = _find_base(kit.directory, kind)
        make_adapter(
            root / kind,
            base,
            seed=seed,
            std=0.15,
            task_type="SEQ_CLS",
            dtype=torch.float32,
            **transposed,
            **fields,
        )
    return kit


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Kits:
    return cache(lambda model: _make_kit(tmp_path_factory.mktemp(model), model, few_layers(model, soak=soak)))


@torch.inference_mode()
def _expect(kit: ModelKit, kind: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    with quiet_peft():
        model = PeftModel.from_pretrained(_find_base(kit.directory, kind), kit.adapters[kind]).eval()
    return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", soaked(MODELS, "gemma3_text", "gpt2"))
def test_logits_equal_those_of_transformers_and_peft_beside_answers(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str
) -> None:
    kit = kits(model)
    engine, versions = start_engine(kit, 400, kernels=kernels, max_num_seqs=7, max_num_batched_tokens=21)
    prompts = [draw(length, length) for length in (1, 5, 16, 33, 50)]
    asked = [
        ask(f"{kind}{number}", prompt, versions[kind], CLASSIFY)
        for number, prompt in enumerate(prompts)
        for kind in NUM_LABELS
    ]
    texts = [ask(f"text {kind}", prompts[3], versions.get(kind), None) for kind in ("plain", "base")]
    answers = drive(engine, [[*asked[:7], *texts, *asked[7:]]])
    errors = []
    for kind, count in NUM_LABELS.items():
        for number, expected in enumerate(_expect(kit, kind, prompts)):
            logits = vector(answers[f"{kind}{number}"])
            assert logits.shape == (count,)
            errors.append(float((logits - expected).abs().max()))
    report(f"{len(errors)} texts classified by {model}, {kernels} kernels: logits off by {max(errors):.1e}")
    assert max(errors) < TOLERANCE
    for kind, request in zip(("plain", None), texts, strict=True):
        given = answers[request.request_id]
        assert kit.oracle.judge(prompts[3], given.token_ids, kind, None).equal


def test_two_ranks_classify_as_one_does(kits: Kits) -> None:
    kit, prompt = kits("llama"), draw(30)
    with divided_engine(kit, 2) as (engine, _, versions):
        answers = drive(engine, [[ask(kind, prompt, versions[kind], CLASSIFY) for kind in NUM_LABELS]])
    for kind in NUM_LABELS:
        (expected,) = _expect(kit, kind, [prompt])
        assert torch.allclose(vector(answers[kind]), expected, atol=TOLERANCE)


def test_logits_survive_eviction_and_preemption(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 18, kernels=KERNELS, max_num_seqs=12, max_num_batched_tokens=21)
    prompts = [draw(length, length) for length in (60, 70, 80, 90)]
    asked = [
        ask(f"{kind}{number}", prompt, versions[kind], CLASSIFY)
        for number, prompt in enumerate(prompts)
        for kind in NUM_LABELS
    ]
    answers = drive(engine, [asked])
    stats = engine.stats()
    assert stats.adapter_evictions > 0 or stats.preemptions > 0
    for kind in NUM_LABELS:
        for number, expected in enumerate(_expect(kit, kind, prompts)):
            assert torch.allclose(vector(answers[f"{kind}{number}"]), expected, atol=TOLERANCE)


@pytest.mark.parametrize("weights", [{"one_label": 0.5}, {"one_label": 1, "three_labels": 1}, {"plain": 2}])
def test_one_adapter_of_weight_one_classifies(kits: Kits, weights: dict[str, float]) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 400, kernels=KERNELS)
    adapters = compose_adapters(WeightedAdapter(versions[kind], weight) for kind, weight in weights.items())
    request = replace(ask("sum", [1, 2, 3], versions["plain"], CLASSIFY), adapters=adapters)
    error = drive(engine, [[request]])["sum"].error
    assert isinstance(error, RequestRefused) and error.param == "adapters"
    assert "the head of one adapter classifies texts, with the weight 1" in error.message


def test_a_head_is_needed_to_classify_and_a_model_of_texts_to_write_one(kits: Kits) -> None:
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    with pytest.raises(RequestRefused, match="has no head that classifies texts"):
        llm.embed([[1, 2]], CLASSIFY, kit.adapters["plain"])
    with pytest.raises(RequestRefused, match="the base model has no head that classifies texts"):
        llm.embed([[1, 2]], CLASSIFY)
    with pytest.raises(RequestRefused, match="classifies texts and writes none"):
        llm.generate([[1, 2]], GREEDY, kit.adapters["one_label"])
    work = Work([[1, 2, 3]], ["plain"])
    assert judge(kit.oracle, work, answer(llm, kit, work)).equal
    assert llm.embed([[1, 2]], CLASSIFY, kit.adapters["three_labels"])[0].shape == (3,)
