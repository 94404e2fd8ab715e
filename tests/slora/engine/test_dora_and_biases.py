"""DoRA, biases of B and trained biases of the base model give peft's answers, beside plain adapters and the base."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slora import LLM, LoraAdapter
from slora.core.errors import RequestFailed, RequestRefused
from slora.models.affine import SiteWeight
from slora.models.decoder import Decoder
from slora.models.model_spec import read_model_spec
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import read_adapter
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge, judge_with_triton, mix
from tests.slora.engine.test_tensor_parallel import judge_divided
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import Oracle
from tests.support.peft_adapters import BIAS_KINDS, DORA_EMBEDDING_KINDS, DORA_KINDS, KINDS

Kits = Callable[[str], ModelKit]
BIASED = ("qwen2", "llama_biased_linear_rope")
# Other families, whose kinds are those of `_find_kinds`.
MODELS = ["llama", "qwen2", "qwen2_tied", "phi3_window", "qwen2_moe", "gpt2"]
SOAKED = ["gemma2", "gemma3_text", "llama_biased_linear_rope", "mixtral"]


def _find_kinds(model: str) -> dict[str, dict[str, object]]:
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
    biases = BIAS_KINDS if model in BIASED else {}
    embeddings = {} if model == "qwen2_moe" else DORA_EMBEDDING_KINDS
    plain = {"plain": KINDS["odd_rank"]} if model == "qwen2_moe" else {"plain": KINDS["patterns"]}
    return DORA_KINDS | biases | embeddings | plain


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return cache(lambda model: make_kit(tmp_path_factory.mktemp(model), model, _find_kinds(model)))


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", [*MODELS, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAKED)])
def test_every_kind_in_one_batch_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=20 if soak else 1, seed=4)
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(600))
    verdict = judge(kit.oracle, work, answer(llm, kit, work))
    report(f"parity of {model} with DoRA and biases, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_parity_holds_with_chunks_preemption_and_evicted_adapters(
    kits: Kits, kernels: str, *, soak: bool
) -> None:
    kit = kits("qwen2")
    work = mix(kit, prompts_each=8 if soak else 1, seed=5)
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(40), **settings)
    verdict = judge(kit.oracle, work, answer(llm, kit, work))
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", ["qwen2", pytest.param("llama", marks=pytest.mark.soak)])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_divided_model_answers_as_peft_does(kits: Kits, model: str, size: int) -> None:
    verdict = judge_divided(kits(model), size)
    assert verdict.equal, verdict


def test_triton_kernels_answer_as_peft_does(tmp_path: Path) -> None:
    kinds = ["dora_with_patterns", "two_biases", "dora_on_head"]
    kit = make_kit(
        tmp_path, "qwen2", {kind: _find_kinds("qwen2")[kind] for kind in kinds}, num_hidden_layers=2
    )
    work = Work([[3, 1, 4, 1], [5, 9], [2, 6, 5]], [*kinds])
    verdict = judge_with_triton(kit, work)
    assert verdict.equal, verdict


def test_the_oracle_distinguishes_each_of_these_adapters_from_the_base(kits: Kits) -> None:
    kit = kits("qwen2")
    work = mix(kit, prompts_each=1, seed=6)
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400)), kit, work)
    for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
        assert kind is None or kit.oracle.judge(prompt, given.token_ids, None).wrong > 10


def test_an_adapter_with_dora_is_refused_in_a_sum_and_with_another_weight(kits: Kits) -> None:
    kit = kits("qwen2")
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
    kit = kits("qwen2")
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
    kit = kits("qwen2")
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
    kit = kits("qwen2")
    shape = read_model_spec(kit.directory).shape("float32")
    uses = {
        kind: read_adapter(path, shape, AdapterLimits()).extras.uses
        for kind, path in kit.adapters.items()
        if kind in ("plain", "dora_and_biases", "bias_of_b")
    }
    assert uses == {
        "plain": (),
        "dora_and_biases": (
            "the DoRA magnitudes of 21 modules",
            "the trained biases of 9 modules, which replace those of the base model",
        ),
        "bias_of_b": ("the biases of lora_B of 6 modules",),
    }


@pytest.mark.parametrize(("dtype", "is_served"), [("float32", True), ("bfloat16", False)])
def test_a_delta_that_cancels_most_of_a_row_is_not_served_with_a_wrong_norm(
    kits: Kits, tmp_path: Path, dtype: str, *, is_served: bool
) -> None:
    """In bfloat16, the rounded products leave nothing of the norm of the row that remains."""
    kit = kits("llama")
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
