"""Writes tiny models as GGUF files, with the names, orders and fields that llama.cpp's converter gives them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from tests.support.tiny_models import make_model
from tests.support.tiny_tokenizers import TEXT

_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
# Where the blocks of a type have their float16 factors. Random bytes elsewhere are valid numbers.
_FACTORS = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
Array = npt.NDArray[Any]


def write_gguf(
    path: Path,
    name: str,
    choose_type: Callable[[str], Type] = lambda _: Type.F32,
    fields: Mapping[str, Any] = {},
    vocabulary: Mapping[str, Any] | None = None,
    **changes: object,
) -> PreTrainedModel:
    """Writes a model of `tiny_models` and returns it in float32.

    choose_type: the type of a matrix, by its GGUF name. fields: further fields of the file; None removes one.
    vocabulary: fields of the tokenizer. changes: fields of the model's config.
    """
    model = make_model(name, **changes)
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    values = {
        **_describe(config, architecture),
        **(vocabulary or byte_vocabulary(config.vocab_size)),
        **fields,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    for tensor_name, array in _tensors(model, architecture):
        kind = choose_type(tensor_name) if array.ndim > 1 and "ffn_gate_inp" not in tensor_name else Type.F32
        writer.add_tensor(tensor_name, _encode(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def byte_vocabulary(vocab_size: int) -> dict[str, Any]:
    """A vocabulary in the way of GPT-2, of single characters and one merge."""
    texts = [*map(chr, range(0x21, 0x21 + min(94, vocab_size - 4))), "ab", "<s>", "</s>"]
    texts += [f"[PAD{number}]" for number in range(len(texts), vocab_size)]
    return _vocabulary("gpt2", texts, merges=["a b"], pre="gpt-2")


def trained_vocabulary(pre: str, vocab_size: int = 600) -> dict[str, Any]:
    """A vocabulary of BPE over bytes, trained on text that is divided at spaces only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    texts = sorted(trained["vocab"], key=trained["vocab"].get)
    merges = [" ".join(pair) for pair in trained["merges"]]
    return _vocabulary("gpt2", [*texts, "<s>", "</s>", "<|user|>"], merges=merges, pre=pre)


def sentencepiece_vocabulary(vocab_size: int = 600, *, spaces: str = "") -> dict[str, Any]:
    """A vocabulary of SentencePiece's kind of BPE: the later a merge was learned, the lower its score.

    spaces: a token of spaces, as the converter writes those of Gemma.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    trained = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in trained["merges"]]
    single = sorted(trained["vocab"].keys() - set(merged))
    first = ["<unk>", "<s>", "</s>", "<|user|>"]
    texts = list(dict.fromkeys([*first, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]))
    if spaces:
        texts = [text for text in texts if text.strip("\N{LOWER ONE EIGHTH BLOCK}")]
        texts += ["\N{LOWER ONE EIGHTH BLOCK}", spaces]
    scores = [-float(number) for number in range(len(texts))]
    return _vocabulary("llama", texts, scores=scores, add_space_prefix=not spaces)


def _vocabulary(model: str, texts: list[str], **fields: Any) -> dict[str, Any]:
    control = ("<s>", "</s>", "<|user|>")
    kinds = [
        3 if text in control else 2 if text == "<unk>" else 6 if text.startswith("<0x") else
        5 if text.startswith("[PAD") else 4 if text.isspace() else 1
        for text in texts
    ]  # fmt: skip
    fields |= {"model": model, "tokens": texts, "token_type": kinds}
    fields |= {f"{name}_token_id": texts.index(text) for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, int) and value < 0:
        writer.add_int32(key, value)
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _describe(config: Any, architecture: str) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "general.name": "tiny", "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
    if architecture == "phi3":
        values["attention.sliding_window"] = config.sliding_window or 0
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    elif architecture.startswith("gemma"):
        values["attention.sliding_window"] = config.sliding_window
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        if architecture == "gemma3":
            values["attention.sliding_window_pattern"] = slides
        else:
            values["attn_logit_softcapping"] = config.attn_logit_softcapping
            values["final_logit_softcapping"] = config.final_logit_softcapping
    if config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        values["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {
        key if key.startswith("general.") else f"{architecture}.{key}": value for key, value in values.items()
    }


def _tensors(model: PreTrainedModel, architecture: str) -> list[tuple[str, Array]]:
    config: Any = model.config
    parts = {**_PARTS, **(_GEMMA_PARTS if architecture.startswith("gemma") else {})}
    found: list[tuple[str, Array]] = []
    for name, parameter in model.state_dict().items():
        array = parameter.detach().float().numpy()
        stem, _, kind = name.rpartition(".")
        if architecture.startswith("gemma") and stem.endswith("norm"):
            array = array + 1
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                found.append(("output.weight", array))
        elif stem in ("model.embed_tokens", "model.norm"):
            found.append((f"{'token_embd' if 'embed' in stem else 'output_norm'}.weight", array))
        else:
            _, _, layer, part = stem.split(".", 3)
            if part == "mlp.experts":
                part, kind = f"{part}.{kind}", "weight"
            if part == "mlp.experts.gate_up_proj":
                gate, up = np.split(array, 2, axis=1)
                found += [
                    (f"blk.{layer}.ffn_gate_exps.weight", gate),
                    (f"blk.{layer}.ffn_up_exps.weight", up),
                ]
                continue
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                is_query = part == "self_attn.q_proj"
                array = _pair(array, config.num_attention_heads if is_query else config.num_key_value_heads)
            array = array.squeeze(0) if part == "mlp.shared_expert_gate" else array
            found.append((f"blk.{layer}.{parts[part]}.{kind}", array))
    return found + _rope_factors(model)


def _pair(array: Array, num_heads: int) -> Array:
    """Interleaves the halves of each head's rows."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _rope_factors(model: PreTrainedModel) -> list[tuple[str, Array]]:
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        pairs = (("long", rope["long_factor"]), ("short", rope["short_factor"]))
        return [(f"rope_factors_{name}.weight", np.array(values, np.float32)) for name, values in pairs]
    if rope.get("rope_type") != "llama3":
        return []
    inverse = model.model.rotary_emb.inv_freq
    plain = rope["rope_theta"] ** -(torch.arange(len(inverse)) / len(inverse))
    return [("rope_freqs.weight", (plain / inverse).numpy().astype(np.float32))]


def _encode(array: Array, kind: Type) -> Array:
    if kind not in _FACTORS:
        return gguf.quants.quantize(np.ascontiguousarray(array), kind)
    # The package can't write these types. The numbers need not be those of the model.
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 256, (array.size // numbers, num_bytes), np.uint8)
    for start in _FACTORS[kind]:
        blocks[:, start : start + 2] = rng.normal(0, 2e-4, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(*array.shape[:-1], array.shape[-1] // numbers * num_bytes)
