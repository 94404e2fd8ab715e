"""The tensors of a GGUF file under the names that transformers' classes give them, for the native families.

llama.cpp's converter changes some of them, and the reader changes them back:

- For the architecture llama, the rows of q and k are in the order of the pairs that rotate together.
- For Gemma, norms are stored with one added.
- The experts of a layer are stacked in one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from slora.models.weights.gguf_file import PLAIN_TYPES, GgufFile, GgufTensor
from slora.models.weights.tensor_place import TensorPlace

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The tensors of experts: of all in one stack, or of one expert in old files.
_EXPERTS = re.compile(r"(ffn_(?:gate|up|down))(?:_exps|\.(\d+))")
_MIXTRAL_EXPERT = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_QWEN_EXPERT = {"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"}
# Tensors that describe rope. They become fields of config.json.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def locate_gguf_tensors(file: GgufFile) -> Iterator[TensorPlace]:
    """Yields the weights of the file. Raises ConfigError for a tensor that no native family has."""
    for tensor in file.tensors.values():
        if tensor.name not in ROPE_FACTORS:
            yield from _locate(file, tensor)


def _locate(file: GgufFile, tensor: GgufTensor) -> Iterator[TensorPlace]:
    place = TensorPlace(
        tensor.name,
        file.path,
        tensor.type_name,
        tensor.shape,
        tensor.offset,
        None if tensor.type_name in PLAIN_TYPES else tensor.block,
    )
    stem, _, kind = tensor.name.rpartition(".")
    is_gemma = file.architecture.startswith("gemma")
    if is_gemma and stem.endswith("_norm"):
        place = replace(place, added=1.0)
    if stem in _NAMES:
        yield replace(place, name=f"{_NAMES[stem]}.{kind}")
        return
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    layer, part = (f"model.layers.{match[1]}", match[2]) if match else ("", "")
    names = _GEMMA_LAYER if is_gemma else _LAYER
    if part in names:
        yield _in_halves(
            file, replace(place, name=f"{layer}.{_rename(file, names[part], part)}.{kind}"), part
        )
    elif experts := _EXPERTS.fullmatch(part):
        names = _MIXTRAL_EXPERT if file.architecture == "llama" else _QWEN_EXPERT
        block = "block_sparse_moe" if file.architecture == "llama" else "mlp"
        stack = [int(experts[2])] if experts[2] else range(tensor.shape[0])
        for expert in stack:
            one = place if experts[2] else place.item(expert)
            yield replace(one, name=f"{layer}.{block}.experts.{expert}.{names[experts[1]]}.{kind}")
    else:
        raise file.refusal(
            f"slora does not know the tensor {tensor.name!r} of the architecture {file.architecture}; without it, it "
            "would serve a different model"
        )


def _rename(file: GgufFile, name: str, part: str) -> str:
    if part == "ffn_gate_inp" and file.architecture == "llama":
        return "block_sparse_moe.gate"
    if part == "ffn_up" and file.architecture == "phi3":
        return "mlp.gate_up_proj"
    return name


def _in_halves(file: GgufFile, place: TensorPlace, part: str) -> TensorPlace:
    """Sets the shape of a matrix with one row, and the rows of the heads whose order the converter changed."""
    if part == "ffn_gate_inp_shexp" and len(place.shape) == 1:
        return replace(place, shape=(1, *place.shape))
    if file.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return place
    heads = file.fields.get("llama.attention.head_count")
    if part == "attn_k":
        heads = file.fields.get("llama.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or place.shape[0] % (2 * heads):
        raise file.refusal(f"{place.name} has {place.shape[0]} rows for {heads!r} heads")
    return replace(place, paired_rows=place.shape[0] // heads)
