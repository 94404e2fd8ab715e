"""Adapters of each kind give peft's answers, beside other adapters and the base: with norms or rows of the embedding
and the head of their own, DoRA, trained biases, an adapted embedding or head, and of experts and routers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slora import LLM, LoraAdapter, SamplingParams
from slora.core.errors import RequestFailed, RequestRefused
from slora.core.request import EngineRequest, single_adapter
from slora.models.affine import SiteWeight
from slora.models.decoder import Decoder
from slora.models.step_batch import StepBatch
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import read_adapter
from slora_kernels.batch import TileLimits
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from tests.slora.engine.test_parity import (
    GREEDY,
    Work,
    answer_by_engine,
    judge,
    judge_engine,
    judge_with_triton,
    mix,
)
from tests.slora.engine.test_tensor_parallel import judge_divided
from tests.slora.sampling.test_prompt_logprobs import check_scores
from tests.support.covering import soaked
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, start_engine
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import Oracle
from tests.support.peft_adapters import (
    BIAS_KINDS,
    DORA_EMBEDDING_KINDS,
    DORA_KINDS,
    EMBEDDING_KINDS,
    KINDS,
    NORM_KINDS,
    ROW_KINDS,
    TIED_KINDS,
    expert_lora_kinds,
)
from tests.support.tiny_models import VOCAB_SIZE, few_layers

Kinds = dict[str, dict[str, object]]
# Returns the kit of a feature and a model.
Kits = Callable[[str, str], ModelKit]
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
_BIASED = ("qwen2", "llama_biased_linear_rope")


def _find_norm_kinds(model: str) -> Kinds:
    if model in _OTHER_NORMS:
        some, others = _OTHER_NORMS[model]
        return {
            "norms_of_layers": {"r": 4, "modules_to_save": some},
            "last_of_all": {"r": 3, "modules_to_save": others},
            "plain": {"r": 5},
        }
    return NORM_KINDS | {"plain": KINDS["patterns"], "tokens": ROW_KINDS["tokens"]}


def _find_dora_kinds(model: str) -> Kinds:
    dora = DORA_KINDS["dora"]
    if model == "gpt2":
        biases = {"bias": "lora_only", "lora_bias": True}
        return {
            "dora": dora,
            "plain": {"r": 5},
            "biases": {"r": 5, "target_modules": ["c_attn", "c_fc"], **biases},
        }
    if model == "mixtral":
        return {"dora": {**dora, "target_modules": ["q_proj", "o_proj"]}}
    if model == "phi3_window":
        return {"dora": dora, "plain": {"r": 5}}
    biases = BIAS_KINDS if model in _BIASED else {}
    embeddings = {} if model == "qwen2_moe" else DORA_EMBEDDING_KINDS
    plain = {"plain": KINDS["odd_rank"]} if model == "qwen2_moe" else {"plain": KINDS["patterns"]}
    return DORA_KINDS | biases | embeddings | plain


def _find_row_kinds(model: str) -> Kinds:
    if model == "gpt2":
        return {
            "tokens": {"r": 3, "target_modules": ["c_attn"], "trainable_token_indices": {"wte": [4, 90]}},
            "whole_head": {"r": 3, "target_modules": ["c_fc"], "modules_to_save": ["lm_head"]},
            "plain": {"r": 5},
        }
    return ROW_KINDS | {"plain": KINDS["patterns"], "head": EMBEDDING_KINDS["head"]}


def _find_tied_kinds(model: str) -> Kinds:
    """The head of llama is not tied, so that the field has no effect there."""
    return TIED_KINDS if model == "qwen2_tied" else {"tied_pair": TIED_KINDS["tied_pair"]}


FEATURES: dict[str, Callable[[str], Kinds]] = {
    "norms": _find_norm_kinds,
    "dora": _find_dora_kinds,
    "embeddings": lambda _: {**EMBEDDING_KINDS, "r8_on_q_and_v": KINDS["r8_on_q_and_v"]},
    "rows": _find_row_kinds,
    "tied": _find_tied_kinds,
    "experts": expert_lora_kinds,
}
# gemma3 has norms of queries and keys, and post norms, and its norms multiply by 1 + weight. It scales its embeddings.
# gpt2, olmo2 and deepseek_v3 run through transformers' own classes. There, routers are in float32 or linears that
# return a tuple, experts have another activation, no gate or other names, and some layers have a recurrence. Those of
# Llama 4 get tokens that the router's score has multiplied, and PEFT adapts the transposes of their weights. In the
# quick run, `test_parity_holds_with_chunks_preemption_and_evicted_adapters` has qwen3, qwen2, qwen2_tied and
# qwen2_moe, and `test_triton_kernels_answer_as_peft_does` the experts of mixtral.
QUICK = {
    "norms": ("gemma3_text", "olmo2"),
    "dora": ("qwen2_tied", "gpt2"),
    "rows": ("gemma3_text",),
    "tied": ("qwen2_tied",),
    "experts": ("deepseek_v3", "llama4_text"),
}
MODELS = {
    "norms": ("gemma3_text", *_OTHER_NORMS, "qwen3", "llama", "qwen2_moe"),
    "dora": (
        *("qwen2_tied", "phi3_window", "gpt2", "qwen2", "llama", "qwen2_moe", "gemma2", "gemma3_text"),
        *("llama_biased_linear_rope", "mixtral"),
    ),
    "rows": ("llama", "gemma3_text", "gpt2", "qwen2_tied"),
    "tied": ("qwen2_tied", "llama"),
    "experts": (
        *("qwen3_moe_mixed", "deepseek_v3", "llama4_text", "mixtral", "qwen2_moe", "gpt_oss", "phimoe"),
        *("granitemoehybrid_recurrent", "jamba", "nemotron_h"),
    ),
}
SLOW = pytest.mark.interpreted_slowly
ALL_AT_ONCE = soaked(
    [(feature, model) for feature, models in MODELS.items() for model in models],
    *((feature, model) for feature, models in QUICK.items() for model in models),
)


@pytest.fixture(scope="module")
def kits(
    tmp_path_factory: pytest.TempPathFactory, expert_kits: Callable[[str], ModelKit], soak: bool
) -> Kits:
    def make(feature: str, model: str) -> ModelKit:
        if feature == "experts":
            return expert_kits(model)
        changes = few_layers(model, soak=soak)
        return make_kit(tmp_path_factory.mktemp(model), model, FEATURES[feature](model), **changes)

    return cache(make)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(("feature", "model"), ALL_AT_ONCE)
def test_every_kind_in_one_batch_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], feature: str, model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(feature, model)
    work = mix(kit, prompts_each=20 if soak else 1, seed=4)
    if feature == "rows":
        # All tokens of these prompts have rows of their own in one of the adapters.
        own = [[90, 3, 17, 7, 8, 9, 11, 4] * 2] * len(kit.adapters)
        work = Work(work.prompts + own, [*work.kinds, *kit.adapters])
    # Each answer crosses a page's end.
    params = GREEDY if soak else replace(GREEDY, max_tokens=20)
    answers, _ = answer_by_engine(kit, work, params, 900, kernels=kernels)
    # PEFT need not read its own files in the quick run.
    oracle = Oracle(kit.directory, kit.adapters) if soak else kit.oracle
    verdict = judge(oracle, work, answers)
    report(f"parity of {model} with its {feature}, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict
    for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
        of_base = oracle.judge(prompt, given.token_ids, None, given.logprobs)
        assert kind is None or not of_base.equal, f"the oracle takes {kind} for the base"


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    ("feature", "model", "num_pages", "prompts_each"),
    [
        ("norms", "qwen3", 26, 2),
        ("dora", "qwen2", 40, 1),
        ("embeddings", "qwen2_tied", 40, 2),
        ("rows", "qwen2_tied", 44, 2),
        ("experts", "qwen2_moe", 44, 2),
        pytest.param("embeddings", "gemma3_text", 28, 2, marks=pytest.mark.soak),
        pytest.param("experts", "gpt_oss", 40, 2, marks=pytest.mark.soak),
        pytest.param("embeddings", "llama", 32, 2, marks=pytest.mark.soak),
        pytest.param("embeddings", "gemma2", 28, 2, marks=pytest.mark.soak),
    ],
)
def test_parity_holds_with_chunks_preemption_and_evicted_adapters(
    kits: Kits,
    report: Callable[[str], None],
    feature: str,
    model: str,
    num_pages: int,
    prompts_each: int,
    kernels: str,
    *,
    soak: bool,
) -> None:
    kit = kits(feature, model)
    work = mix(kit, prompts_each=(20 if feature == "embeddings" else 8) if soak else prompts_each, seed=5)
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    verdict, stats = judge_engine(kit, work, GREEDY, num_pages, kernels=kernels, **settings)
    report(f"parity of {model} with its {feature} in few pages, {kernels} kernels: {verdict}")
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize(
    ("feature", "model"),
    [
        ("norms", "qwen3"),
        ("dora", "qwen2"),
        ("experts", "qwen2_moe"),
        *(
            pytest.param(feature, model, marks=pytest.mark.soak)
            for feature, model in (
                # In the quick run, test_added_tokens.py has rows and whole matrices of this model.
                ("rows", "qwen2_tied"),
                ("dora", "llama"),
                ("dora", "gpt2"),
                # In the quick run, test_tensor_parallel.py has an adapter of starcoder2 with DoRA and biases.
                ("dora", "starcoder2"),
                ("norms", "olmo2"),
                ("rows", "olmo2"),
                ("rows", "gpt2"),
                ("embeddings", "granite"),
                ("experts", "deepseek_v3"),
                ("experts", "gpt_oss"),
                ("experts", "llama4_text"),
                ("experts", "nemotron_h"),
                ("experts", "granitemoehybrid_recurrent"),
            )
        ),
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_divided_model_answers_as_peft_does(kits: Kits, feature: str, model: str, size: int) -> None:
    verdict = judge_divided(kits(feature, model), size)
    assert verdict.equal, verdict


@pytest.mark.parametrize(
    ("feature", "model", "kinds"),
    [
        # The last kind adapts all linears, with several ranks.
        ("rows", "llama", ["tokens_of_both", "whole_head", "plain"]),
        pytest.param("rows", "llama", ["whole_embedding", "tokens", None], marks=SLOW),
        ("experts", "mixtral", ["all_experts", "down_only", None]),
        # In the quick run, tests of kernels have these.
        pytest.param("norms", "qwen3", ["every_norm_with_dora", "norms_of_layers", None], marks=SLOW),
        pytest.param("dora", "qwen2", ["dora_with_patterns", "two_biases", "dora_on_head"], marks=SLOW),
        pytest.param("embeddings", "llama", ["both_and_linears", "embedding", "head"], marks=SLOW),
    ],
)  # fmt: skip
def test_triton_kernels_answer_as_peft_does(
    tmp_path: Path, feature: str, model: str, kinds: list[str | None]
) -> None:
    found = {kind: lora for kind, lora in FEATURES[feature](model).items() if kind in kinds}
    kit = make_kit(tmp_path, model, found, num_hidden_layers=1)
    verdict = judge_with_triton(kit, Work([[3, 7, 4, 9], [5, 9], [2, 6, 5]], kinds))
    assert verdict.equal, verdict


def test_a_norm_may_lie_in_two_pages(tmp_path: Path) -> None:
    """Weights of 832 bytes, which do not divide a page."""
    kinds = ("every_norm_with_dora", "norms_of_layers")
    kit = make_kit(tmp_path, "qwen3", {kind: NORM_KINDS[kind] for kind in kinds}, hidden_size=208)
    work = mix(kit, prompts_each=1, seed=5)
    verdict, _ = judge_engine(kit, work, replace(GREEDY, max_tokens=8), 900)
    assert verdict.equal, verdict


@pytest.mark.parametrize(
    ("feature", "model", "kind"),
    [
        ("norms", "qwen3", "norms_of_layers"),
        ("rows", "qwen2_tied", "tokens"),
        ("rows", "qwen2_tied", "whole_head"),
    ],
)
def test_an_adapter_with_norms_or_rows_of_its_own_is_refused_in_a_sum(
    kits: Kits, feature: str, model: str, kind: str
) -> None:
    kit = kits(feature, model)
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    asked = [LoraAdapter(kit.adapters[kind]), LoraAdapter(kit.adapters["plain"])]
    with pytest.raises(RequestRefused, match="norms or rows of the embedding or the head of its own"):
        llm.generate([[1, 2, 3]], GREEDY, [asked])


def test_an_adapter_with_dora_is_refused_in_a_sum_and_with_another_weight(kits: Kits) -> None:
    kit = kits("dora", "qwen2")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    dora, plain = kit.adapters["dora"], kit.adapters["plain"]
    for adapters in (
        [LoraAdapter(dora, weight=0.5)],
        [LoraAdapter(dora), LoraAdapter(plain)],
        [LoraAdapter(plain), LoraAdapter(dora, weight=-1.0)],
    ):
        with pytest.raises(RequestRefused, match="served alone and with the weight 1"):
            llm.generate([[1, 2, 3]], GREEDY, [adapters])
    (output,) = llm.generate([[1, 2, 3]], GREEDY, [[LoraAdapter(dora, weight=1.0)]])
    assert kit.oracle.judge([1, 2, 3], output.token_ids, "dora").equal


def test_a_weight_of_trained_biases_is_a_weight_of_their_change(kits: Kits, tmp_path: Path) -> None:
    """With the weight 0.5, B counts half, and a bias is half-way between the base model's and the trained one."""
    kit = kits("dora", "qwen2")
    tensors = load_file(kit.adapters["all_biases"] / "adapter_model.safetensors")
    base = load_file(kit.directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            tensors[name] = tensor / 2
        elif name.endswith(".bias"):
            own = base[name.removeprefix("base_model.model.").replace(".base_layer", "")]
            tensors[name] = (tensor + own) / 2
    shutil.copytree(kit.adapters["all_biases"], tmp_path / "half")
    save_file(tensors, tmp_path / "half" / "adapter_model.safetensors")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    asked = [[LoraAdapter(kit.adapters["all_biases"], weight=0.5)], [LoraAdapter(tmp_path / "half")]]
    weighted, half = llm.generate([[1, 2, 3]] * 2, GREEDY, asked)
    assert weighted.token_ids == half.token_ids
    for ours, theirs in zip(weighted.logprobs or (), half.logprobs or (), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_failure_while_scales_are_computed_leaves_no_half_finished_adapter(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("dora", "qwen2")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    find_weight, calls = Decoder.find_weight, 0

    def fail_once(self: Decoder, site: LoraSite, kernels: Kernels) -> SiteWeight:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("no memory")
        return find_weight(self, site, kernels)

    monkeypatch.setattr(Decoder, "find_weight", fail_once)
    # The engine computes the failed step again.
    (output,) = llm.generate([[1, 2, 3]], GREEDY, kit.adapters["dora"])
    assert calls > 5 and kit.oracle.judge([1, 2, 3], output.token_ids, "dora").equal


def test_an_adapter_names_what_is_used_of_it(kits: Kits) -> None:
    kit = kits("dora", "qwen2")
    shape, num_layers = kit.spec.shape("float32"), kit.spec.sizes.num_layers
    uses = {
        kind: read_adapter(path, shape, AdapterLimits()).extras.uses
        for kind, path in kit.adapters.items()
        if kind in ("plain", "dora_and_biases", "bias_of_b")
    }
    assert uses == {
        "plain": (),
        "dora_and_biases": (
            f"the DoRA magnitudes of {7 * num_layers} modules",
            f"the trained biases of {3 * num_layers} modules, which replace those of the base model",
        ),
        "bias_of_b": (f"the biases of lora_B of {2 * num_layers} modules",),
    }


@pytest.mark.parametrize(("dtype", "is_served"), [("float32", True), ("bfloat16", False)])
def test_a_delta_that_cancels_most_of_a_row_is_not_served_with_a_wrong_norm(
    kits: Kits, tmp_path: Path, dtype: str, *, is_served: bool
) -> None:
    """In bfloat16, the rounded products leave nothing of the norm of the row that remains."""
    kit = kits("dora", "qwen2")
    shutil.copytree(kit.adapters["dora"], tmp_path / "cancelling")
    path = tmp_path / "cancelling" / "adapter_model.safetensors"
    tensors, base = load_file(path), load_file(kit.directory / "model.safetensors")
    module = "model.layers.0.self_attn.k_proj"
    # B A is minus 97% of the first 8 columns of W, which are all that the changed base has.
    weight = base[f"{module}.weight"]
    weight[:, 8:] = 0
    save_file(base, tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        if (kit.directory / name).is_file():
            shutil.copy(kit.directory / name, tmp_path / name)
    scale = 16 / 8
    prefix = f"base_model.model.{module}"
    tensors[f"{prefix}.lora_A.weight"] = torch.eye(8, weight.shape[1])
    tensors[f"{prefix}.lora_B.weight"] = (-0.97 / scale * weight[:, :8]).contiguous()
    save_file(tensors, path)
    llm = LLM(tmp_path, dtype=dtype, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    if not is_served:
        with pytest.raises(RequestFailed):
            llm.generate([[1, 2, 3]], GREEDY, tmp_path / "cancelling")
        return
    (output,) = llm.generate([[1, 2, 3]], GREEDY, tmp_path / "cancelling")
    oracle = Oracle(tmp_path, {"cancelling": tmp_path / "cancelling"})
    assert oracle.judge([1, 2, 3], output.token_ids, "cancelling").equal


@pytest.mark.covering(1)
@pytest.mark.parametrize("feature", ["embeddings", "rows"])
@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_prompts_are_scored_with_the_head_of_their_adapter(kits: Kits, feature: str, kernels: str) -> None:
    kit = kits(feature, "qwen2_tied")
    engine, versions = start_engine(kit, 900, kernels=kernels, max_num_seqs=20, max_num_batched_tokens=90)
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
    kit = kits("embeddings", "qwen2_tied")
    engine, versions = start_engine(kit, 500)
    for name, kind in enumerate(kinds):
        version = versions[kind] if kind is not None else None
        engine.add(
            EngineRequest(
                str(name), "tenant", [1, 2, 3], single_adapter(version), SamplingParams(max_tokens=2)
            )
        )
    plan = engine.scheduler.schedule()
    for load in plan.loads:
        engine.runner.memory.load(load)
    batch = StepBatch.build(plan, engine.runner.memory, TileLimits(16))
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
        apart = StepBatch.build(plan, engine.runner.memory, TileLimits(16, 16))
        assert [layer.num_decodes for layer in (*apart.lora, *apart.head_lora)] == [0, len(rows)]
