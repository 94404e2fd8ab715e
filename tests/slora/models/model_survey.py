"""Judges every class of the installed transformers that decodes text, also beside images, and writes docs/models.md.

    python -m tests.slora.models.model_survey [--types llama opt] [--write docs/models.md]

Each class gets a small config, and its logits in slora are compared with those of transformers (`config_judge`). A
family with a config in `tiny_models` uses that one. The default config of any other class is shrunk.
"""

import argparse
import re
import signal
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from tests.support.config_judge import Verdict, judge_config
from tests.support.tiny_models import (
    MODELS,
    OTHER_MODELS,
    RECURRENT,
    RECURRENT_MODELS,
    count_layers,
    make_config,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
_NATIVE, _OTHER = "slora's decoder", "transformers' classes"
_MOST_SECONDS = 120
_NUM_RANKS = 2
_MOST_REASON_CHARS = 220
# A pattern of field names, and the largest value that a small model has there.
_SIZES = (
    (r"(hidden_size|n_embd|d_model|dim|word_embed_proj_dim|embedding_size|lru_width)", 64),
    (r"(.*intermediate_size.*|.*ffn_dim|n_inner|d_ff|ffn_hidden_size)", 48),
    (r"(num_hidden_layers|n_layers?|num_layers|layers|encoder_layers|decoder_layers)", 2),
    (r"(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads)", 4),
    (r"(head_dim|kv_channels|d_kv|attention_head_dim)", 16),
    (r"(vocab_size.*)", 128),
    (r"(num.*_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|top_k|moe_k|moe_topk|topk_group|n_group)", 1),
    (r"(.*lora_rank)", 16),
    (r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|rotary_dim)", 8),
    (r"(max_position_embeddings|n_positions|max_sequence_length|n_ctx|max_seq_len)", 512),
    (r"(sliding_window)", 21),
    (r"(first_k_dense_replace|n_shared_experts)", 1),
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_KDA = {"linear_head_dim": 8, "linear_num_heads": 4}
_FEWER_HEADS = {"2": {"num_attention_heads": 2, "num_key_value_heads": 2}}
# Fields without which a shrunk default config has no sense. A name with dots is that of a field within a part.
_FIELDS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "hunyuan_v1_moe": {"rope_parameters": _ROPE, "head_dim": 16},
    "ministral": {"rope_parameters": _ROPE, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "intermediate_size": [48] * 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "kosmos-2.5": {
        "text_config": {
            "vocab_size": 128,
            "embed_dim": 64,
            "layers": 2,
            "ffn_dim": 48,
            "attention_heads": 4,
            "max_position_embeddings": 512,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "head_dim": 16,
        },
    },
    "gemma3n": {
        "text_config.intermediate_size": [48] * 4,
        "text_config.num_kv_shared_layers": 2,
        "text_config.hidden_size_per_layer_input": 8,
        "text_config.laurel_rank": 8,
    },
    "qwen2_vl": {"vision_config.depth": 1, "vision_config.embed_dim": 64, "vision_config.hidden_size": 64},
    "perception_lm": {"vision_config.model_args": {"embed_dim": 64}},
    "mistral4": {"head_dim": 16},
    "longcat_flash": {"moe_topk": 2},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "granite_docling": {"vision_config.out_hidden_size": 64},
    "muse_spark": {"audio_config.out_hidden_size": 64},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "inkling2": {"vision_config.text_hidden_size": 64},
    "inkling2_loop": {"vision_config.text_hidden_size": 64},
    "hy_v4_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    # As in the released model, layers with windows have fewer heads than those with an indexer.
    "dots3_note_text": {"head_dim": 16, "per_layer_config": _FEWER_HEADS},
    "dots3_note": {
        "text_config.head_dim": 16,
        "text_config.per_layer_config": _FEWER_HEADS,
        "vision_config.adapter_in_dim": 64,
        "vision_config.adapter_out_dim": 64,
        "audio_config.adapter_input_size": 64,
        "audio_config.adapter_out_dim": 64,
    },
    "minimax_m3_vl": {
        "text_config.layer_types": ["full_attention", "minimax_m3_sparse"],
        "text_config.index_n_heads": 2,
        "text_config.index_head_dim": 16,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 2,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 96,
        "text_config.indexer_compress_ratio": 4,
    },
    "chameleon": {"vocabulary_map": {"<image>": 127, "IMGIMGAZ": 126}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE}},
    "step3p7": {
        "text_config.sliding_window": 21,
        "text_config.layer_types": ["full_attention", "sliding_attention"],
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "hunyuan_vl": {
        "text_config.head_dim": 16,
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]},
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "4/8",
    },
    "nemotron_h_omni": {
        "text_config.time_step_min": 1e-30,
        "text_config.mamba_num_heads": 6,
        "text_config.mamba_head_dim": 16,
        "text_config.ssm_state_size": 8,
        "text_config.n_groups": 2,
        "text_config.chunk_size": 8,
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 127},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 127},
    "kimi_linear": {**_KDA, "num_experts_per_token": 2},
    "bailing_hybrid": {**_KDA, "num_experts_per_token": 1, "num_expert_group": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "time_step_min": 1e-30,
    },
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
}
_THETA, _HEAD_DIM = 1e4, 16
# Text parts whose classes assume the parts of a rope if the config has none.
_ROPE_OF_PARTS = (
    *(
        "qwen2_vl_text",
        "glm4v_text",
        "glm4v_moe_text",
        "glm_ocr_text",
        "paddleocr_vl_text",
        "qwen2_5_omni_text",
    ),
)
# Ids of special tokens, and those of placeholders for images and sound, which no prompt contains.
_TOKEN, _PLACEHOLDER = 1, 127
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEADS = ("num_attention_heads", "n_head", "num_heads")


@dataclass(frozen=True, slots=True)
class Judgement:
    """way: who computes the model. detail: the reason of a refusal, or why there is no judgement.

    division: the reason why it is not divided among ranks, if transformers' classes compute the model.
    """

    model_type: str
    verdict: Verdict
    way: str
    detail: str
    division: str = ""


def list_model_types() -> list[str]:
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def survey(model_types: Iterable[str]) -> list[Judgement]:
    return [_judge(model_type) for model_type in model_types]


def _judge(model_type: str) -> Judgement:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(folder)
        try:
            with _limit_time():
                raw = make_small_config(model_type)
                verdict, detail = judge_config(directory, raw, "auto")
        except Exception as error:
            return Judgement(model_type, Verdict.UNJUDGED, "", _shorten(f"{type(error).__name__}: {error}"))
        way = _find_way(directory) if verdict is Verdict.EQUAL else ""
        division = ""
        if way == _OTHER:
            with _limit_time():
                verdict, detail = judge_config(directory, raw, "auto", _NUM_RANKS)
            if verdict is Verdict.REFUSED:
                verdict, division = Verdict.EQUAL, _shorten(detail)
        return Judgement(model_type, verdict, way, "" if way else _shorten(detail), division)


def _find_way(directory: Path) -> str:
    try:
        return _OTHER if read_model_spec(directory).decoder is None else _NATIVE
    except ConfigError:
        return ""


@contextmanager
def _limit_time() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"the comparison takes more than {_MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_small_config(model_type: str) -> dict[str, Any]:
    recurrent = f"{model_type}{RECURRENT}"
    for name in (model_type, recurrent):
        if name in MODELS or name in OTHER_MODELS or name in RECURRENT_MODELS:
            changes = {"num_hidden_layers": count_layers(name)} if name in OTHER_MODELS else {}
            return dict(make_config(name, **changes).to_dict())
    raw = dict(CONFIG_MAPPING[model_type]().to_dict())
    _shrink(raw)
    for name, value in _FIELDS.get(model_type, {}).items():
        *parts, last = name.split(".")
        owner = raw
        for part in parts:
            owner = owner[part]
        owner[last] = value
    return raw


def _shrink(raw: dict[str, Any]) -> None:
    layers = _choose_layers(raw)
    _shrink_parts_of_rope(raw)
    shares_heads = any(raw.get(kv) != raw.get(heads) for kv in _KV_HEADS for heads in _HEADS if kv in raw)
    if raw.get("kv_lora_rank") is not None:
        # Latent attention: a head has a part with rope and a part without.
        raw |= {name: size for name, size in _LATENT.items() if name in raw}
    if raw.get("rope_parameters", ()) is None:
        raw["rope_parameters"] = {"rope_type": "default"}
    rope = raw.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and rope.get("rope_theta") is None:
        rope["rope_theta"] = _THETA
    for name, value in raw.items():
        if isinstance(value, dict) and ("hidden_size" in value or "d_model" in value):
            _shrink(value)
        elif isinstance(value, list) and len(value) == layers.total:
            raw[name] = [value[index] for index in layers.chosen]
        elif name in _LATENT and raw.get("kv_lora_rank") is not None:
            pass
        elif name in _KV_HEADS and value is not None:
            raw[name] = 2 if shares_heads else 4
        elif name == "per_layer_config":
            raw[name] = None
        elif re.fullmatch(r".*_token_(id|index)", name) and value is not None:
            raw[name] = _TOKEN if re.match(r"(bos|eos|pad|decoder_start)", name) else _PLACEHOLDER
        elif type(value) is int:
            most = next((most for pattern, most in _SIZES if re.fullmatch(pattern, name)), value)
            raw[name] = min(
                value, max(most, len(layers.chosen)) if "layers" in name or name == "n_layer" else most
            )


def _shrink_parts_of_rope(raw: dict[str, Any]) -> None:
    """Divides the pairs of a small head among time, height and width, in models that also read images."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if isinstance(rope, dict) and (rope.get("mrope_section") or raw.get("model_type") in _ROPE_OF_PARTS):
            pairs = int(_HEAD_DIM * rope.get("partial_rotary_factor", 1)) // 2
            rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


@dataclass(frozen=True, slots=True)
class _Layers:
    """total: number of layers of the config. chosen: those that the small model keeps."""

    total: int
    chosen: Sequence[int]


def _choose_layers(raw: dict[str, Any]) -> _Layers:
    """Keeps one layer for each combination of what the lists of the config say of a layer, and at least two layers."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    total = next((raw[name] for name in names if isinstance(raw.get(name), int)), 0)
    lists = [value for value in raw.values() if isinstance(value, list) and len(value) == total]
    found: dict[str, int] = {}
    for index in range(total):
        found.setdefault(repr([value[index] for value in lists]), index)
    chosen = sorted(found.values())[:4]
    return _Layers(total, chosen if len(chosen) > 1 else list(range(min(2, total))))


def _shorten(text: str) -> str:
    text = re.sub(r"(/\S*/)?tmp\w+: |/\S*/", "", " ".join(text.split())).replace("|", "/")
    text = re.sub(r"\btmp\w+", "the checkpoint", text)
    text = text.replace(f"transformers {transformers.__version__}", "transformers")
    return text if len(text) <= _MOST_REASON_CHARS else f"{text[:_MOST_REASON_CHARS].rstrip()} ..."


_INTRODUCTION = f"""# Which base models are served?

`python -m tests.slora.models.model_survey --write docs/models.md` writes this page. It makes a small model with random
weights of every class of transformers {transformers.__version__} that decodes text, also beside images, and compares
slora's logits with those of transformers in float32: prompts of several lengths, whole and in chunks, from paged
memory. Of a model that also reads images, the text part is served. Names are those of `model_type` in config.json. A
real checkpoint can differ from the small one in fields that slora does not serve. Then it is refused when the server
starts, and the message names the field; see
[Why is my model refused?](serving.md#why-is-my-model-refused).
"""


def write_document(found: Sequence[Judgement]) -> str:
    parts = [_INTRODUCTION]
    for way, text in (
        (_NATIVE, "They are the fastest, and can be divided among GPUs and rounded to 8 or 4 bits."),
        (
            _OTHER,
            "Attention, memory, experts and adapters are slora's. On a CPU, so are norms, gated MLPs and single "
            "tokens of recurrent\nlayers, where they compute the same. The rest is computed as transformers "
            "computes it. Models that [select\ntokens](serving.md#how-long-are-the-sequences-of-a-model-that-"
            "selects-tokens) are served up to the length at which they\nselect all. All were compared on "
            f"{_NUM_RANKS} tensor-parallel ranks, too.",
        ),
    ):
        names = [f"`{one.model_type}`" for one in found if one.way == way]
        parts.append(f"## Computed by {way} ({len(names)})\n\n{text}\n\n{_wrap(names)}\n")
        rows = [
            f"| `{one.model_type}` | {one.division} |" for one in found if one.way == way and one.division
        ]
        if rows:
            table = "\n".join(["| not divided | reason |", "|---|---|", *rows])
            parts.append(f"{table}\n")
    for verdict, title in (
        (Verdict.WRONG, "Wrong"),
        (Verdict.REFUSED, "Refused"),
        (Verdict.UNJUDGED, "Not judged, because no small model could be built"),
    ):
        rows = [f"| `{one.model_type}` | {one.detail} |" for one in found if one.verdict is verdict]
        if rows:
            table = "\n".join(["| model_type | reason |", "|---|---|", *rows])
            parts.append(f"## {title} ({len(rows)})\n\n{table}\n")
    return "\n".join(parts)


def read_document() -> dict[str, str]:
    """The heading under which the page has each model."""
    found, heading = {}, ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").rpartition(" (")[0]
        elif heading:
            is_row = line.startswith("|")
            names = re.findall(r"`([^`]+)`", line.split("|")[1] if is_row else line)
            found |= dict.fromkeys(names, heading)
    return found


def _wrap(names: Sequence[str]) -> str:
    lines, line = [], ""
    for name in names:
        item = f"{name}, " if name != names[-1] else f"{name}."
        if len(line) + len(item) > 120:
            lines.append(line.rstrip())
            line = ""
        line += item
    return "\n".join([*lines, line])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", help="values of model_type; by default all")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    found = []
    for model_type in options.types or list_model_types():
        found += survey([model_type])
        print(model_type, found[-1].verdict.value, found[-1].way, found[-1].detail, flush=True)
    if options.write:
        options.write.write_text(write_document(found), encoding="utf-8")


if __name__ == "__main__":
    main()
