"""Adapters of experts and routers: how they are read, stored, added up and verified.

`test_adapter_features.py` compares their answers with peft's."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from slora import LLM, LoraAdapter
from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from slora.verify.verification import VerificationRequest, verify_adapter
from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.adapter import AdapterLimits, bundle, certify
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.tensor_file import MAX_HEADER_BYTES
from slora_kernels.layout import EXPERT_PATHS, ModelShape
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge_engine
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.oracle import Oracle
from tests.support.peft_adapters import (
    EXPERT_LORA_KINDS,
    expert_lora_kinds,
    make_adapter,
    write_single_experts,
)
from tests.support.tiny_models import OTHER_MODELS, count_layers, make_model, write_model


@pytest.mark.parametrize("model", soaked(["qwen3_moe_mixed", "gpt_oss"], "qwen3_moe_mixed"))
def test_a_row_has_the_same_bits_in_every_batch(expert_kits: Kits, model: str) -> None:
    kit = expert_kits(model)
    work = Work([[3, 1, 4, 1, 5] * 5, [9, 2, 6, 5], [3, 5]], ["all_linear", None, "patterns"])
    settings = {"kernels": KERNELS, "pool_bytes": kit.pool_bytes(400), "max_model_len": 128}
    params = replace(GREEDY, max_tokens=12)
    together = answer(LLM(kit.directory, **settings), kit, work, params)
    chunked = answer(
        LLM(kit.directory, max_num_batched_tokens=12, max_num_seqs=3, **settings), kit, work, params
    )
    alone = LLM(kit.directory, max_num_seqs=1, **settings)
    for index, (prompt, kind) in enumerate(zip(work.prompts, work.kinds, strict=True)):
        (single,) = answer(alone, kit, Work([prompt], [kind]), params)
        assert single == together[index] == chunked[index], kind


@pytest.mark.parametrize("model", soaked(["mixtral", "qwen3_moe"], "mixtral"))
def test_an_adapter_with_linears_of_single_experts_answers_as_peft_does(
    tmp_path: Path, report: Callable[[str], None], model: str
) -> None:
    write_model(tmp_path / "base", model)
    write_single_experts(tmp_path / "single", make_model(model), seed=3, std=0.15)
    kit = ModelKit(tmp_path / "base", {"single": tmp_path / "single"})
    work = Work([[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5]], ["single", None, "single"])
    verdict, _ = judge_engine(kit, work, GREEDY, 400)
    report(f"parity of {model} with linears of single experts: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", soaked(["gpt_oss", "deepseek_v2", "phimoe", "nemotron_h"], "gpt_oss"))
def test_an_adapter_with_linears_of_single_experts_answers_as_the_merged_model_does(
    tmp_path: Path, report: Callable[[str], None], model: str
) -> None:
    changes = {"num_hidden_layers": count_layers(model)} if model in OTHER_MODELS else {}
    base = write_model(tmp_path / "base", model, **changes)
    write_single_experts(tmp_path / "single", base, seed=3, std=0.15)
    kit = ModelKit(tmp_path / "base", {"single": tmp_path / "single"})
    work = Work([[3, 1, 4, 1, 5], [9, 2, 6]], ["single", None])
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400)), kit, work)
    verdict = Oracle(kit.directory, {}).judge(
        work.prompts[1], answers[1].token_ids, None, answers[1].logprobs
    )
    _merge_single_experts(base, tmp_path / "single")
    base.save_pretrained(tmp_path / "merged")
    merged = Oracle(tmp_path / "merged", {})
    verdict += merged.judge(work.prompts[0], answers[0].token_ids, None, answers[0].logprobs)
    report(f"parity of {model} with linears of single experts: {verdict}")
    assert verdict.equal, verdict


@torch.no_grad()
def _merge_single_experts(model: PreTrainedModel, adapter: Path) -> None:
    """Adds the deltas of `write_single_experts` to the weights of transformers 5."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        path, is_a, _ = name.removeprefix("base_model.model.").partition(".lora_A")
        if not is_a:
            continue
        delta = 2.0 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        layer, block, inner = re.fullmatch(r"(model\.layers\.\d+)\.(\w+)\.(.+)", path).groups()
        holder = next((m for m in model.get_submodule(layer).modules() if hasattr(m, "experts")), None)
        if ".experts." in path:
            number, linear = (re.search(pattern, inner)[0] for pattern in (r"\d+", r"[a-z_]+\d?(?=\.\d+$|$)"))
            up = getattr(holder.experts, "gate_up_proj", getattr(holder.experts, "up_proj", None))
            weight = (holder.experts.down_proj if linear in ("w2", "down_proj", "down_projs") else up)[
                int(number)
            ]
            half = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}.get(linear)
            if up.shape[1] == 2 * len(delta) and half is not None:
                weight = weight[half * len(delta) :][: len(delta)]
            weight += delta.T if getattr(holder.experts, "is_transposed", False) else delta
        elif inner in ("gate", "router.linear") and block != "self_attn":
            router = getattr(holder, "router", None) or holder.gate
            router.weight += delta
        else:
            model.get_submodule(path).weight += delta


def _change(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Changes the tensors with this text in their names, or removes them."""
    path = directory / "adapter_model.safetensors"
    changed = {key: change(tensor) if name in key else tensor for key, tensor in load_file(path).items()}
    save_file({key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("tensors", "change", "lora", "message"),
    [
        ("experts.2.w1", lambda tensor: None, {}, r"experts\.2\.w1, but there are no tensors for it"),
        ("experts.1.w2.lora_B", lambda tensor: tensor[:-1], {}, r"lora_B of .*experts\.1\.w2 has shape"),
        ("experts.0.w3", lambda tensor: tensor.half(), {}, "differ in rank, scale or dtype"),
        ("experts.9.w3", lambda tensor: tensor, {"rank_pattern": {"experts.1.w2": 8}}, "experts.1.w2 has shape"),
        ("gate", lambda tensor: tensor, {"alpha_pattern": {"w3": 3}}, "differ in rank, scale or dtype"),
        ("gate", lambda tensor: tensor, {"use_dora": True}, "use_dora is set, and the adapter has tensors for single"),
        ("gate", lambda tensor: tensor, {"use_rslora": True}, "use_rslora is set, and the adapter has tensors"),
        ("gate", lambda tensor: tensor, {"exclude_modules": ["w2"]}, "which the config does not adapt"),
        ("gate", lambda tensor: tensor, {"exclude_modules": ["experts.1.w2"]}, "which the config does not adapt"),
    ],
)  # fmt: skip
def test_linears_of_single_experts_that_can_not_be_joined_are_refused(
    tmp_path: Path,
    tensors: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    lora: dict[str, object],
    message: str,
) -> None:
    write_single_experts(tmp_path / "single", make_model("mixtral", num_hidden_layers=1), **lora)
    _change(tmp_path / "single", tensors, change)
    with pytest.raises(AdapterInvalid, match=message):
        read_adapter(tmp_path / "single", _shape_of(tmp_path, "mixtral"), AdapterLimits())


def test_linears_of_single_experts_that_grow_too_large_are_refused(tmp_path: Path) -> None:
    write_single_experts(tmp_path / "single", make_model("mixtral", num_hidden_layers=1), r=24)
    shape = _shape_of(tmp_path, "mixtral")
    joined = read_adapter(tmp_path / "single", shape, AdapterLimits()).tensor_bytes
    size = (tmp_path / "single" / "adapter_model.safetensors").stat().st_size
    assert size < joined
    with pytest.raises(AdapterInvalid, match="the joined tensors of the experts take more than"):
        read_adapter(tmp_path / "single", shape, AdapterLimits(max_tensor_bytes=size))


@pytest.mark.parametrize(
    ("tensors", "change", "lora", "message"),
    [
        ("experts.lora_A", lambda tensor: tensor[:-1], {}, r"lora_A of .*experts\.down_proj has shape"),
        ("experts.base_layer", lambda tensor: None, {}, r"experts\.gate_up_proj, but there are no tensors"),
        ("experts.lora", lambda tensor: None, {}, r"experts\.down_proj, but there are no tensors"),
        ("-", None, {"use_dora": True}, "use_dora is set together with target_parameters"),
        ("-", None, {"lora_bias": True}, "lora_bias is set together with target_parameters"),
        ("-", None, {"alora_invocation_tokens": [3]}, "target_parameters and alora_invocation_tokens are both"),
        ("-", None, {"target_parameters": "experts.down_proj"}, "target_parameters is a text"),
        ("-", None, {"target_parameters": ["mlp.experts.w1"]}, r"names 'mlp.experts.w1', which is not the weight"),
        ("-", None, {"target_parameters": ["lm_head.weight"]}, "names 'lm_head.weight', which is not the weight"),
        ("-", None, {"target_parameters": ["q_proj.weight"], "target_modules": ["q_proj"]}, "both name .*q_proj"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_refused(
    tmp_path: Path,
    tensors: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    lora: dict[str, object],
    message: str,
) -> None:
    base = make_model("qwen3_moe", num_hidden_layers=1)
    make_adapter(tmp_path / "adapter", base, **EXPERT_LORA_KINDS["all_experts"])
    if change is not None:
        _change(tmp_path / "adapter", tensors, change)
    path = tmp_path / "adapter" / "adapter_config.json"
    write_json(path, read_json(path) | lora)
    with pytest.raises(AdapterInvalid, match=message):
        read_adapter(tmp_path / "adapter", _shape_of(tmp_path, "qwen3_moe"), AdapterLimits())


def _shape_of(directory: Path, model: str) -> ModelShape:
    write_model(directory / "base", model, num_hidden_layers=1)
    return read_model_spec(directory / "base").shape("float32")


def test_a_certificate_names_experts_apart(expert_kits: Kits) -> None:
    kit = expert_kits("qwen2_moe")
    shape = read_model_spec(kit.directory).shape("float32")
    adapter = read_adapter(kit.adapters["patterns"], shape, AdapterLimits())
    assert adapter.target_modules == ("q_proj", "o_proj", "gate", "experts.gate_up_proj", "experts.down_proj")
    summary = certify(adapter, shape, None).modules["experts.down_proj"]
    assert (summary.adapted, summary.total, summary.max_rank) == (2, 2, 7)
    tensors = load_file(kit.adapters["patterns"] / "adapter_model.safetensors")
    norms = []
    for layer in (1, 2):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        a, b = (tensors[f"{prefix}.lora_{factor}.weight"].double() for factor in "AB")
        count = shape.linears[-1].num_experts
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), 7, count), a.view(count, 7, -1))
        norms.append(float(delta.norm()) * (3 if layer == 2 else 9) / 7)
    assert summary.max_norm == pytest.approx(max(norms), rel=1e-3)


def test_a_file_with_a_header_that_no_store_keeps_is_rewritten(tmp_path: Path) -> None:
    """128 experts in 48 layers have 37,000 tensors, whose names take 4 MB."""
    write_single_experts(tmp_path / "single", make_model("mixtral", num_hidden_layers=1))
    path = tmp_path / "single" / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"padding": "x" * (MAX_HEADER_BYTES + 1)})
    adapter = read_adapter(tmp_path / "single", _shape_of(tmp_path, "mixtral"), AdapterLimits())
    stored = bundle(adapter, tmp_path / "single", tmp_path)[path.name]
    with safe_open(stored, "pt") as file:
        assert sorted(file.keys()) == sorted(tensor.name for tensor in adapter.tensors.list_all())
    assert stored != path


def test_a_plain_adapter_with_a_long_header_is_rewritten(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", num_hidden_layers=1)
    make_adapter(tmp_path / "adapter", make_model("llama", num_hidden_layers=1), r=2)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    shape = read_model_spec(tmp_path / "base").shape("float32")
    digest = read_adapter(tmp_path / "adapter", shape, AdapterLimits()).digest
    save_file(load_file(path), path, metadata={"padding": "x" * (MAX_HEADER_BYTES + 1)})
    adapter = read_adapter(tmp_path / "adapter", shape, AdapterLimits())
    assert adapter.has_unused and adapter.digest == digest


@pytest.mark.parametrize(
    ("model", "kind"),
    # `all_linear` has a router and both linears of the experts.
    soaked(
        [
            *(("mixtral", kind) for kind in ("all_linear", "gate_up_only", "router")),
            *(("gpt_oss", "patterns"), ("llama4_text", "patterns")),
        ],
        *(("mixtral", "all_linear"), ("llama4_text", "patterns")),
    ),
)
def test_a_verification_compares_the_factors_of_all_experts(expert_kits: Kits, model: str, kind: str) -> None:
    kit = expert_kits(model)
    found = verify_adapter(VerificationRequest(kit.directory, kit.adapters[kind], max_tokens=2))
    assert found.equal, found.problems
    paths = {check.path.removeprefix("model.layers.1.") for check in found.modules}
    assert set(expert_lora_kinds(model)[kind].get("target_parameters", EXPERT_PATHS)) <= {
        path for full in paths for path in (full, full.removeprefix("mlp."), f"{full}.weight")
    }


def test_a_verification_finds_one_wrong_factor_of_one_expert(expert_kits: Kits, tmp_path: Path) -> None:
    kit = expert_kits("mixtral")
    wrong = tmp_path / "wrong"
    shutil.copytree(kit.adapters["all_linear"], wrong)
    # A column of B belongs to one expert.
    _change(wrong, "layers.2.mlp.experts.lora_B", lambda b: b * (torch.arange(b.shape[1]) != 5))
    request = VerificationRequest(kit.directory, kit.adapters["all_linear"], max_tokens=1)
    found = verify_adapter(request, LoraAdapter(wrong))
    (problem, *_) = found.problems
    assert problem.startswith("model.layers.2.mlp.experts.down_proj: the LoRA delta deviates by")


def test_a_transposed_weight_is_adapted_as_peft_adapts_it(tmp_path: Path) -> None:
    """Born from a bug: PEFT adapts the transpose of such a weight, and a square one was served wrongly."""
    write_model(tmp_path / "base", "gpt2", num_hidden_layers=2)
    names = ["attn.c_proj.weight", "mlp.c_fc.weight"]
    base = make_model("gpt2", num_hidden_layers=2)
    make_adapter(tmp_path / "adapter", base, r=4, std=0.15, target_modules=[], target_parameters=names)
    kit = ModelKit(tmp_path / "base", {"transposed": tmp_path / "adapter"})
    work = Work([[3, 1, 4, 1, 5], [9, 2, 6]], ["transposed", None])
    verdict, _ = judge_engine(kit, work, GREEDY, 400)
    assert verdict.equal, verdict
    found = verify_adapter(VerificationRequest(kit.directory, kit.adapters["transposed"], max_tokens=2))
    assert found.equal, found.problems


def test_a_block_that_passes_its_tokens_in_another_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "llama4_text", num_hidden_layers=2)
    own = Llama4TextMoe.forward
    monkeypatch.setattr(Llama4TextMoe, "forward", lambda block, x: own(block, x.flip(-2)))
    with pytest.raises(
        ConfigError, match=r"feed_forward\.experts .* Llama4TextMoe of transformers does not pass"
    ):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22)


def test_a_class_that_computes_its_experts_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "gpt_oss", num_hidden_layers=2)
    own = GptOssExperts.forward.__wrapped__
    monkeypatch.setattr(GptOssExperts.forward, "__wrapped__", lambda *args: own(*args) * 1.01)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts .* GptOssExperts of transformers"):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22)


@pytest.mark.parametrize("model", soaked(["mixtral", "gpt_oss"], "mixtral"))
def test_a_sum_of_adapters_of_experts_answers_as_one_adapter_of_both_does(tmp_path: Path, model: str) -> None:
    kinds = {kind: expert_lora_kinds(model)["all_experts"] for kind in ("first", "second")}
    kit = make_kit(tmp_path, model, kinds, num_hidden_layers=2)
    count, rank = 4, 3
    first, second = (load_file(kit.adapters[kind] / "adapter_model.safetensors") for kind in kinds)
    joined = {}
    for name in first:
        sides = [first[name], second[name] * (-0.5 if "lora_B" in name else 1)]
        shape = (-1, rank, count) if "lora_B" in name else (count, rank, -1)
        joined[name] = torch.cat([side.view(shape) for side in sides], 1)
        joined[name] = joined[name].flatten(*((1, 2) if "lora_B" in name else (0, 1))).contiguous()
    shutil.copytree(kit.adapters["first"], tmp_path / "both")
    save_file(joined, tmp_path / "both" / "adapter_model.safetensors")
    path = tmp_path / "both" / "adapter_config.json"
    twice = {"r": 2 * rank, "lora_alpha": 4 * rank}
    write_json(path, read_json(path) | twice)
    oracle = Oracle(kit.directory, {"both": tmp_path / "both"})
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    adapters = [LoraAdapter(kit.adapters["first"]), LoraAdapter(kit.adapters["second"], weight=-0.5)]
    prompts, params = [[3, 1, 4, 1, 5], [9, 2]], replace(GREEDY, max_tokens=12)
    for prompt, output in zip(prompts, llm.generate(prompts, params, [adapters, adapters]), strict=True):
        logprobs = [entry.logprob for entry in output.logprobs or ()]
        verdict = oracle.judge(prompt, output.token_ids, "both", logprobs)
        assert verdict.equal, verdict
