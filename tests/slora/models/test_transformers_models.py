"""Models that run through transformers' own classes on our pages: they give peft's answers, or are refused with a
reason."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig

from slora import LLM, SamplingParams
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.models.divided_modules import divide_modules
from slora.models.model_spec import ModelSpec, read_model_spec
from slora.models.model_structure import find_auto_class
from slora.models.transformers_decoder import TransformersDecoder
from slora.planning.model_size import measure_model
from tests.slora.engine.test_parity import Work, answer, judge, judge_engine, judge_with_triton, mix
from tests.support.coded_checkpoints import write_mxfp4
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import start_engine
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import kinds_for, make_kit
from tests.support.peft_adapters import LATENT_DORA_KINDS, LATENT_KINDS, expert_lora_kinds
from tests.support.tiny_models import (
    LATENT_MODELS,
    OTHER_MODELS,
    RECURRENT_MODELS,
    count_layers,
    make_config,
    write_model,
)

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)
# Each pool is small enough to run short. Page and adapter sizes differ by model.
NUM_PAGES = {
    "gpt_bigcode": 60,
    "phimoe": 9,
    "bloom": 22,
    "mpt": 22,
    "qwen2_5_vl": 27,
    "smolvlm": 27,
    "gpt_oss": 14,
    **dict.fromkeys(LATENT_MODELS, 26),
    "hy_v4": 14,
    "mistral_large4": 14,
    "minimax_m3_vl_text": 24,
    "gemma4_text": 11,
    "llama4_text": 15,
}
TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip


# The others differ from these in names or in the order of rotated elements, or these have all that they have. In the
# quick run, other tests compare some of them with peft: `test_adapter_features.py` has gpt_oss, gpt2 and deepseek_v3,
# `test_tensor_parallel.py` starcoder2, `test_verification.py` gpt_neox, `test_quantization.py` qwen3_vl. Tests below
# have the models with indexers, and those whose embedding and head are adapted.
QUICK = (
    *("gpt_bigcode", "cohere", "hunyuan_v1_dense", "gemma4_text", "mistral3", "bloom", "falcon", "gpt_neo"),
    "phimoe",
)


@pytest.mark.parametrize("model", soaked(OTHER_MODELS, *QUICK))
def test_parity_holds_in_chunks_and_when_pages_are_short(
    tmp_path: Path, report: Callable[[str], None], model: str, *, soak: bool
) -> None:
    kit = make_kit(tmp_path, model, num_hidden_layers=count_layers(model))
    work = mix(kit, prompts_each=8 if soak else 2, seed=6)
    settings = {"max_model_len": 96, "max_num_seqs": 9, "max_num_batched_tokens": 11}
    verdict, stats = judge_engine(kit, work, PARAMS, NUM_PAGES.get(model, 31), **settings)
    short = f"{stats.preemptions} preemptions, {stats.adapter_evictions} evictions"
    report(f"{model} by transformers' classes, {short}: {verdict}")
    assert stats.preemptions + stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", soaked(LATENT_MODELS, "deepseek_v2"))
def test_latents_are_shared_swapped_and_read_again(
    tmp_path: Path, report: Callable[[str], None], model: str, kernels: str
) -> None:
    """Beside plain adapters on all linears of attention, there are some with DoRA and biases on `kv_b_proj`."""
    kit = make_kit(tmp_path, model, LATENT_KINDS | LATENT_DORA_KINDS, num_hidden_layers=2)
    assert kit.spec.shape("float32").layer_page_bytes(16) == 16 * (20 + 8) * 4
    prefix = [5, 9, 2, 7] * 9
    tails = mix(kit, prompts_each=3, seed=5)
    work = Work([prefix + prompt[:20] for prompt in tails.prompts], tails.kinds)
    settings = {"max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 23, "preemption": "swap"}
    verdict, stats = judge_engine(kit, work, PARAMS, 44, kernels=kernels, **settings)
    moved = f"{stats.swapped_in_pages} pages swapped, {stats.prefix_hits} cached tokens"
    report(f"latents of {model} with {kernels} kernels, {moved}: {verdict}")
    assert stats.swapped_in_pages > 0 and stats.prefix_hits > 0
    assert verdict.equal, verdict


# Model -> the longest sequence, and the fields that the message names.
SELECTING = {
    "deepseek_v32": (96, "index_topk"),
    "minimax_m3_vl_text": (96, "index_topk_blocks and index_block_size"),
    "qwen4_exp_text": (99, "indexer_budget and indexer_compress_ratio"),
    "glm5_next": (103, "index_topk and index_kpool"),
}


@pytest.mark.parametrize("model", soaked(SELECTING, "deepseek_v32", "minimax_m3_vl_text"))
def test_sequences_end_where_an_indexer_no_longer_selects_all_tokens(tmp_path: Path, model: str) -> None:
    longest, fields = SELECTING[model]
    linears = r".*self_attn\.(\w+_proj|kv_a_proj_with_mqa|indexer\.(wk|wq_b|\w+_proj))"
    layers = {} if model in RECURRENT_MODELS else {"num_hidden_layers": 2}
    kit = make_kit(
        tmp_path, model, {"indexers": {"r": 4, "lora_alpha": 9, "target_modules": linears}}, **layers
    )
    assert kit.spec == ModelSpec.from_plain(json.loads(json.dumps(asdict(kit.spec))))
    assert kit.spec.max_positions == longest
    work = Work([[7, 3, 5, 1] * 23] * 2, [None, "indexers"])
    verdict, _ = judge_engine(kit, work, replace(PARAMS, max_tokens=longest - 92), 400)
    assert verdict.equal, verdict
    with pytest.raises(
        ConfigError,
        match=rf"max_model_len is {longest + 1}, .* up to {longest} tokens \({fields}\): .*; give at most that",
    ):
        start_engine(kit, 400, max_model_len=longest + 1)


# In the quick run, `test_the_rows_of_latents_are_keys_and_values` runs them.
@pytest.mark.interpreted_slowly
def test_triton_kernels_read_latents(tmp_path: Path) -> None:
    """The first prompt has more tokens than a page."""
    kit = make_kit(tmp_path, "deepseek_v2", LATENT_DORA_KINDS, num_hidden_layers=1)
    verdict = judge_with_triton(kit, Work([[3, 7, 4, 9] * 5, [2, 6, 5]], ["dora_on_latent", None]))
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", soaked(["olmo2", "granite", "opt", "phi"], "opt", "phi"))
def test_adapters_reach_the_embedding_and_the_head(tmp_path: Path, model: str) -> None:
    """Covers an untied head, scaled logits, a tied head, and a head with a bias that PEFT saves beside the adapter."""
    names = ["embed_tokens"] if model == "opt" else ["embed_tokens", "lm_head"]
    kinds = {
        "embedding": {"r": 6, "lora_alpha": 12, "target_modules": names[:1]},
        "all": {"r": 5, "lora_alpha": 7, "target_modules": names},
    }
    kit = make_kit(tmp_path, model, kinds, num_hidden_layers=2)
    work = mix(kit, prompts_each=2, seed=9)
    verdict, _ = judge_engine(kit, work, PARAMS, 400, max_num_batched_tokens=30, max_num_seqs=9)
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", soaked(["llama_biased_linear_rope", "gemma2", "qwen3_moe"], "gemma2"))
def test_a_family_of_our_own_is_the_same_through_transformers(tmp_path: Path, model: str) -> None:
    kinds = {kind: kinds_for(model)[kind] for kind in ("r8_on_q_and_v", "some_layers")}
    kit = make_kit(tmp_path, model, kinds)
    work = mix(kit, prompts_each=2, seed=7)
    llm = LLM(kit.directory, pool_bytes=kit.pool_bytes(400), model_impl="transformers")
    verdict = judge(kit.oracle, work, answer(llm, kit, work, PARAMS))
    assert verdict.equal, verdict


def test_experts_in_mxfp4_are_the_numbers_that_they_code(tmp_path: Path) -> None:
    kinds = {kind: expert_lora_kinds("gpt_oss")[kind] for kind in ("patterns", "some_layers")}
    kit = make_kit(tmp_path, "gpt_oss", kinds, hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    coded = tmp_path / "coded"
    write_mxfp4(coded, kit.directory)
    work = mix(kit, prompts_each=2, seed=8)
    llm = LLM(coded, pool_bytes=kit.pool_bytes(400), dtype="float32")
    verdict = judge(kit.oracle, work, answer(llm, kit, work, PARAMS))
    assert verdict.equal, verdict
    question = EngineConfig(coded, dtype="float32")
    assert measure_model(read_model_spec(coded), question).weight_bytes == measure_plain(kit.directory)


def measure_plain(directory: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())


@pytest.mark.parametrize("model", ["gpt_oss", "mistral3", "mistral3_in_text_config"])
@pytest.mark.parametrize(
    ("dtype", "method", "reason"),
    [
        ("float16", "mxfp4", "float16 can't hold weights of mxfp4; set dtype to bfloat16"),
        ("float32", "gptq", "quantization_config has quant_method 'gptq'"),
        ("float32", "fp8", "fmt is 'e5m2'; only e4m3 is served"),
    ],
)
def test_a_quantization_that_is_not_exact_is_refused(
    tmp_path: Path, model: str, dtype: str, method: str, reason: str
) -> None:
    """Born from wrong logits: transformers obeys the field in text_config, too."""
    name, within, _ = model.partition("_in_text_config")
    write_model(tmp_path, name, num_hidden_layers=2)
    path = tmp_path / "config.json"
    config = read_json(path)
    part = config["text_config"] if within else config
    part["quantization_config"] = {"quant_method": method, "fmt": "e5m2"}
    write_json(path, config)
    with pytest.raises(ConfigError, match=reason):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22, dtype=dtype)


def test_keys_with_a_bias_are_refused_in_fp8(tmp_path: Path) -> None:
    write_model(tmp_path, "bloom", num_hidden_layers=2)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is fp8, but .* \(ALiBi\), .* set kv_cache_dtype to auto"
    ):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        (
            "glm5_next",
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail is false .* at any length",
        ),
        (
            "deepseek_v32",
            {"index_topk": 0, "num_hidden_layers": 2},
            "index_topk .*: indexers select 0 tokens; give at least 1",
        ),
    ],
)
def test_an_indexer_that_never_selects_all_tokens_is_refused(
    tmp_path: Path, model: str, fields: dict[str, Any], reason: str
) -> None:
    make_config(model, **fields).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        read_model_spec(tmp_path)


def test_chunks_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama4_text", num_hidden_layers=2, attention_chunk_size=40)
    with pytest.raises(
        ConfigError, match=r"attention_chunk_size is 40, .* not a multiple of the block size 16"
    ):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22)


@pytest.mark.parametrize("positions", soaked([512, 32768], 32768))
def test_long_chunks_and_scales_are_checked_with_short_ones(tmp_path: Path, positions: int) -> None:
    """As Llama 4 has them, of 8192 tokens."""
    lengths = {"attention_chunk_size": 8192, "floor_scale": 8192, "max_position_embeddings": positions}
    kit = make_kit(tmp_path, "llama4_text", num_hidden_layers=2, **lengths)
    spec = kit.spec
    assert spec.chunked_layers == (0,)
    assert spec.counting_paths == ("model.layers.1.self_attn",)
    work = mix(kit, prompts_each=1, seed=8)
    verdict, _ = judge_engine(kit, work, PARAMS, 400)
    assert verdict.equal, verdict


def save(directory: Path, model_type: str, **fields: Any) -> Path:
    CONFIG_MAPPING[model_type](**(TINY | fields)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("git", {}, "can't be built with paged attention .* has attention functions of its own"),
        ("falcon", {"alibi": True}, "with alibi: transformers adds the bias twice"),
        (
            "mpt",
            {"max_position_embeddings": 65536},
            "the linear bias of scores reaches 1.64e.04 at 65536 positions; at most 8192",
        ),
        # Born from wrong answers outside the window, and for all sequences of a batch except the first.
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1, "num_key_value_heads": 2},
            r"layers\.0\.self_attn: .* has no window, but the model's own mask hides token 0 from token 50",
        ),
        (
            "phimoe",
            {"sliding_window": 40, "num_key_value_heads": 2},
            "has no window, but the model's own mask hides token 0 from token 40",
        ),
        ("granite", {"is_causal": False}, "mask shows token 1 to token 0"),
        ("bart", {}, r"layers\.0\.encoder_attn attends to the output of an encoder"),
        ("recurrent_gemma", {}, "never calls an attention function"),
        (
            "diffllama",
            {"num_key_value_heads": 2},
            r"calls attention several times in model\.layers\.0\.self_attn",
        ),
        ("bert", {"is_decoder": False}, "it is not causal"),
        (
            "granite",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type of rope_parameters is 'dynamic'",
        ),
        # No class but Hunyuan's reads alpha.
        (
            "granite",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "alpha": 9.0}},
            r"model\.rotary_emb has rope_type 'dynamic'",
        ),
    ],
)  # fmt: skip
def test_models_that_pages_cannot_serve_exactly_are_refused_by_name(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    directory = save(tmp_path, model_type, **fields)
    with pytest.raises(ConfigError, match=reason):
        read_model_spec(directory, "transformers")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "modernbert-decoder", "pad_token_id": None}, "for field 'pad_token_id'"),
        ({"model_type": "granite", "layer_types": ["full_attention"]}, "number of `layer_types`"),
        ({"model_type": "modernbert-decoder", "pad_token_id": 64}, "Padding_idx must be within num_embeddings"),
        ({"model_type": "glm4_moe_lite", "num_key_value_heads": 3}, "num_key_value_heads is 3; num_attention"),
        ({"model_type": "glm4_moe_lite", "num_key_value_heads": 0}, "num_key_value_heads is 0; give a positive"),
        ({"model_type": "granite", "num_attention_heads": 0}, "num_attention_heads is 0; give a positive number"),
        ({"model_type": "granite", "hidden_size": "32"}, "for field 'hidden_size'"),
        ({"model_type": "granite", "dtype": "foo"}, "has no attribute 'foo'"),
        ({"model_type": "granite", "vocab_size": 0}, "vocab_size is 0"),
        ({"model_type": "granite", "per_layer_config": {"0": {"intermediate_size": 16}}}, "'intermediate_size'"),
        (
            {"model_type": "granite", "per_layer_config": {"0": {"num_attention_heads": 2}}},
            "num_key_value_heads is 4; num_attention_heads 2 must be a multiple of it",
        ),
        ({"model_type": "musicgen"}, "Multiple valid text configs"),
        ({"model_type": "nonesuch"}, "nonesuch"),
    ],
)  # fmt: skip
def test_a_config_that_transformers_refuses_is_refused_with_its_reason_on_one_line(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    """Born from tracebacks of many exception types."""
    write_json(tmp_path / "config.json", {**TINY, **fields})
    with pytest.raises(ConfigError, match=reason) as refusal:
        read_model_spec(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", ["mistral3", "gemma3_text_seeing"])
@pytest.mark.parametrize(("whole", "expected"), [(None, (5,)), (3, (3,))])
def test_the_text_part_may_name_the_token_that_ends_an_answer(
    tmp_path: Path, model: str, whole: int | None, expected: tuple[int, ...]
) -> None:
    """Born from answers without an end: only the field of the whole model was read."""
    fields = make_config(model).to_dict()
    fields["text_config"] |= {"eos_token_id": 5}
    write_json(tmp_path / "config.json", fields | {"eos_token_id": whole})
    assert read_model_spec(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_text_part_may_name_the_dtype(tmp_path: Path, field: str) -> None:
    """Born from weights of twice the size: without the field of the whole model, float32 was assumed."""
    fields = make_config("mistral3").to_dict()
    for part in (fields, fields["text_config"]):
        part.pop("dtype", None)
    fields["text_config"][field] = "bfloat16"
    write_json(tmp_path / "config.json", fields)
    assert read_model_spec(tmp_path).dtype == "bfloat16"


def test_a_config_class_that_needs_a_padding_token_is_served(tmp_path: Path) -> None:
    """Born from a traceback: such a class refuses null, which means no padding token."""
    fields = {**TINY, "model_type": "cwm", "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1}
    write_json(tmp_path / "config.json", {**fields, "pad_token_id": 3, "eos_token_id": 2})
    assert read_model_spec(tmp_path).sizes.num_kv_heads == 2


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    """Born from an answer of random weights: transformers initialises missing weights randomly and only warns."""
    write_model(tmp_path, "olmo2", num_hidden_layers=2)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {key: value for key, value in weights.items() if key != name}
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 weights that the model needs, such as {name};"):
        LLM(tmp_path, kernels=KERNELS, pool_bytes=1 << 22)


def add_tensors(directory: Path, *names: str) -> None:
    path = directory / "model.safetensors"
    save_file(
        {**load_file(path), **{name: torch.ones(32) for name in names}}, path, metadata={"format": "pt"}
    )


def load(directory: Path) -> None:
    TransformersDecoder(read_model_spec(directory), directory, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "name", "stored_name"),
    [
        ("olmo2", "model.layers.0.self_attn.q_proj.bias", None),
        ("olmo2", "model.layers.1.mlp.up_proj.weight_scale_inv", None),
        ("olmo2", "model.embed_tokens.bias", None),
        ("olmo2", "lm_head.bias", None),
        ("olmo2", "model.norm.bias", None),
        ("gpt_oss", "model.layers.1.self_attn.q_norm.weight", None),
        ("gpt2", "h.1.attn.q_norm.weight", None),
        (
            "mistral3",
            "model.language_model.layers.0.self_attn.q_proj.bias",
            "language_model.model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_a_tensor_of_the_decoder_that_would_be_ignored_is_refused_by_its_name(
    tmp_path: Path, model: str, name: str, stored_name: str | None
) -> None:
    """Born from wrong logits: transformers' class has no bias if its config names none, and only warns."""
    write_model(tmp_path, model, num_hidden_layers=2)
    add_tensors(tmp_path, stored_name or name)
    with pytest.raises(ConfigError, match=rf"has 1 tensors of the decoder .* would ignore, such as {name};"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("olmo2", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.eh_proj.weight"]),
        ("gpt_bigcode", ["transformer.h.0.attn.bias", "h.1.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"]),
        ("mistral3", ["vision_tower.extra.weight", "mtp.layers.0.self_attn.q_proj.weight"]),
    ],
)
def test_tensors_that_are_no_parameters_of_the_decoder_are_no_obstacle(
    tmp_path: Path, model: str, names: list[str]
) -> None:
    write_model(tmp_path, model, num_hidden_layers=2)
    add_tensors(tmp_path, *names)
    load(tmp_path)


@pytest.mark.parametrize("model", ["starcoder2", "gpt2", "deepseek_v2", "qwen3_next"])
def test_a_rank_has_the_planned_numbers_of_a_class_of_transformers(tmp_path: Path, model: str) -> None:
    write_model(tmp_path, model, **({"vocab_size": 127} if model == "gpt2" else {}))
    spec = read_model_spec(tmp_path)
    divided = find_auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path)
    divide_modules(divided, spec.partition("float32", 2), 1)
    sizes = [
        measure_model(spec, EngineConfig(tmp_path, dtype="float32", tensor_parallel_size=size))
        for size in (1, 2)
    ]
    assert sizes[1].weight_bytes == 4 * sum(parameter.numel() for parameter in divided.parameters())
    assert sizes[1].weight_bytes < 0.75 * sizes[0].weight_bytes
    assert (sizes[0].num_exchanges, sizes[1].num_exchanges > 0) == (0, True)


def test_a_parameter_that_another_module_uses_is_not_divided(tmp_path: Path) -> None:
    write_model(tmp_path, "starcoder2", num_hidden_layers=1)
    spec = read_model_spec(tmp_path)
    model = find_auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path)
    model.other = torch.nn.Linear(64, 64)
    model.other.weight = model.model.layers[0].self_attn.o_proj.weight
    with pytest.raises(
        ConfigError, match=r"other of .* shares its weight with model.layers.0.self_attn.o_proj"
    ):
        divide_modules(model, spec.partition("float32", 2), 0)
