"""Adapters created and saved by PEFT itself, like the adapters that users upload."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

# One adapter of each kind that must be served, as fields of LoraConfig.
KINDS: dict[str, dict[str, object]] = {
    "r8_on_q_and_v": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "r16_on_all_seven": {"r": 16, "lora_alpha": 16},
    "odd_rank": {"r": 5, "lora_alpha": 7},
    "patterns": {
        "r": 4,
        "lora_alpha": 9,
        "rank_pattern": {"q_proj": 9, r"layers\.1\..*(v|up)_proj": 2},
        "alpha_pattern": {"mlp.down_proj": 5, r"layers\.(0|2)\.self_attn\.\w+": 13},
    },
    "rslora": {"r": 7, "lora_alpha": 4, "use_rslora": True},
    "some_layers": {
        "r": 12,
        "lora_alpha": 24,
        "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
}
# The same kinds for models that fuse q, k and v into one linear, and gate and up into another.
FUSED_KINDS: dict[str, dict[str, object]] = {
    **KINDS,
    "r8_on_q_and_v": {**KINDS["r8_on_q_and_v"], "target_modules": ["qkv_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 9,
        "rank_pattern": {"qkv_proj": 9, r"layers\.1\..*up_proj": 2},
        "alpha_pattern": {"mlp.down_proj": 5, r"layers\.(0|2)\.self_attn\.\w+": 13},
    },
    "some_layers": {**KINDS["some_layers"], "target_modules": ["qkv_proj", "gate_up_proj"]},
}
# Kinds for Mixtral and Qwen3-MoE. There, PEFT 0.21 takes "all-linear" and the names of an MLP's linears for parameters
# of experts, which this server does not adapt. PEFT does not do this for Qwen2-MoE.
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERT_KINDS: dict[str, dict[str, object]] = {
    "r8_on_q_and_v": KINDS["r8_on_q_and_v"],
    "r16_on_attention": {"r": 16, "lora_alpha": 16, "target_modules": _ATTENTION},
    "patterns": {
        "r": 4,
        "lora_alpha": 9,
        "target_modules": _ATTENTION,
        "rank_pattern": {"q_proj": 9, r"layers\.1\..*v_proj": 2},
        "alpha_pattern": {"self_attn.o_proj": 5, r"layers\.(0|2)\.self_attn\.\w+": 13},
    },
    "rslora": {"r": 7, "lora_alpha": 4, "use_rslora": True, "target_modules": _ATTENTION},
    "some_layers": {**KINDS["some_layers"], "target_modules": ["k_proj", "o_proj"]},
}
# Kinds for models whose linears have other names: adapters on all linears, or on all linears of one layer.
# Of low ranks, because a page of a model with few layers of attention is small.
RECURRENT_KINDS: dict[str, dict[str, object]] = {
    "r4_on_all": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": r".*\.(in_proj\w*|[qkvo]_proj|w[123]|input_linear|feed_forward\.down_proj|mixer\.up_proj)",
    },
    "r3_on_recurrent_layers": {"r": 3, "lora_alpha": 7, "target_modules": r".*\.(in_proj\w*|out_proj)"},
}
WHOLE_KINDS: dict[str, dict[str, object]] = {
    "r16_on_all": {"r": 16, "lora_alpha": 16},
    "odd_rank": {"r": 5, "lora_alpha": 7},
    "rslora_in_one_layer": {
        "r": 7,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": r".*\.1\..*att(n|ention)\.(q_proj|c_attn|query_key_value|Wqkv)",
    },
}
# Kinds for the linears of latent attention.
LATENT_KINDS: dict[str, dict[str, object]] = {
    "r8_on_attention": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    },
    "odd_rank_on_latent": {"r": 5, "lora_alpha": 7, "target_modules": ["kv_b_proj"]},
}
_EXPANDING = ["kv_a_proj_with_mqa", "kv_b_proj"]
# Kinds that also scale or shift the outputs of the linear that expands latents.
LATENT_DORA_KINDS: dict[str, dict[str, object]] = {
    "dora_on_latent": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": _EXPANDING},
    "bias_on_latent": {"r": 3, "lora_alpha": 5, "lora_bias": True, "target_modules": _EXPANDING},
}

# Kinds that adapt experts and routers, some of them beside other linears. PEFT 0.21 takes "all-linear" for all of them
# in Mixtral and Qwen3-MoE, and adapts the two parts of gate_up_proj with twice the rank.
_GATE_UP, _DOWN, _ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
EXPERT_LORA_KINDS: dict[str, dict[str, object]] = {
    "all_linear": {"r": 4, "lora_alpha": 8},
    "all_experts": {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": [_GATE_UP, _DOWN]},
    "gate_up_only": {
        "r": 5,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj"],
    },
    "down_only": {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    "router": {"r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "target_parameters": [_ROUTER]},
    "patterns": {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": [_GATE_UP, _DOWN, _ROUTER],
        "rank_pattern": {"experts.down_proj": 7, r"layers\.1\..*gate_up_proj": 2, "o_proj": 5},
        "alpha_pattern": {"mlp.gate.weight": 5, r"layers\.2\..*down_proj": 3},
    },
}  # fmt: skip

# What a model calls otherwise than these kinds.
_OWN_NAMES = {
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "deepseek_v3": {"q_proj": "q_b_proj", "v_proj": "kv_b_proj"},
    "phimoe": {"mlp.gate": "mlp.router"},
    "granitemoehybrid_recurrent": {
        "mlp.experts": "block_sparse_moe.experts",
        "mlp.gate": "block_sparse_moe.router",
    },
    "jamba": {"mlp.experts": "feed_forward.experts", "mlp.gate": "feed_forward.router"},
    "llama4_text": {"mlp.experts": "feed_forward.experts", "mlp.gate": "feed_forward.router"},
    "nemotron_h": {"mlp.": "mixer.", "gate_up_proj": "up_proj"},
}
# "all-linear" names the routers of PhiMoE and Llama 4, and linears of recurrent layers that PEFT or slora refuses.
_WITHOUT_ALL_LINEAR = ("phimoe", "jamba", "nemotron_h", "llama4_text")


def expert_lora_kinds(model: str) -> dict[str, dict[str, object]]:
    """`EXPERT_LORA_KINDS` with the names of the model's own modules, and a plain kind."""

    def rename(value: object) -> object:
        if isinstance(value, str):
            for name, own in _OWN_NAMES.get(model, {}).items():
                value = value.replace(name, own)
            return value
        if isinstance(value, dict):
            return {rename(key): rename(entry) for key, entry in value.items()}
        return [rename(entry) for entry in value] if isinstance(value, list) else value

    if model not in _OWN_NAMES:
        return EXPERT_LORA_KINDS | {"plain": KINDS["r8_on_q_and_v"]}
    # As OpenAI's recipe for gpt-oss: all linears of attention, and the experts of some layers.
    some = [f"1.{_GATE_UP}", f"1.{_DOWN}"]
    recipe = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "target_parameters": some}
    kinds = EXPERT_LORA_KINDS | {"some_layers": recipe, "plain": KINDS["r8_on_q_and_v"]}
    if model == "gpt_oss":  # PEFT trains the biases of its router, but not those of its experts.
        kinds["biases"] = {"r": 4, "target_modules": ["q_proj"], "target_parameters": [_DOWN], "bias": "all"}
    if model in _WITHOUT_ALL_LINEAR:
        attention = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
        kinds |= {kind: kinds[kind] | attention for kind in ("all_linear", "some_layers")}
    return {kind: {name: rename(value) for name, value in fields.items()} for kind, fields in kinds.items()}


# Kinds that also adapt the embedding and the output head.
EMBEDDING_KINDS: dict[str, dict[str, object]] = {
    "embedding": {"r": 6, "lora_alpha": 12, "target_modules": ["embed_tokens"]},
    "head": {"r": 3, "lora_alpha": 4, "target_modules": ["lm_head"], "use_rslora": True},
    "both_and_linears": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*(embed_tokens|lm_head|q_proj|down_proj)",
        "rank_pattern": {"embed_tokens": 9, "lm_head": 17},
        "alpha_pattern": {"model.embed_tokens": 5},
    },
    # PEFT accepts a full module name regardless of `layers_to_transform`. It skips a suffix that matches a module
    # outside the layers.
    "full_names_pass_the_layer_filter": {
        "target_modules": ["lm_head", "embed_tokens", "v_proj"],
        "layers_to_transform": [1],
    },
}


# Kinds that also scale the outputs of linears (DoRA) or add trained biases to them.
DORA_KINDS: dict[str, dict[str, object]] = {
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
    "dora_with_patterns": {
        "r": 4,
        "lora_alpha": 9,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": r".*\.(0|2)\..*(q_proj|v_proj|o_proj|down_proj|up_proj)",
        "rank_pattern": {"q_proj": 9, r"layers\.2\..*(v|up)_proj": 2},
    },
}
# These need a base model with biases of q, k and v.
BIAS_KINDS: dict[str, dict[str, object]] = {
    "bias_of_b": {"r": 5, "lora_alpha": 7, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "all_biases": {"r": 6, "lora_alpha": 9, "bias": "all", "target_modules": ["o_proj", "q_proj"]},
    "own_biases": {"r": 3, "lora_alpha": 6, "bias": "lora_only", "target_modules": ["k_proj", "down_proj"]},
    "dora_and_biases": {"r": 4, "lora_alpha": 4, "bias": "all", "use_dora": True},
    "two_biases": {
        "r": 4,
        "lora_alpha": 8,
        "bias": "lora_only",
        "lora_bias": True,
        "target_modules": ["k_proj", "v_proj"],
    },
}
# Adapters that a prompt activates with some tokens.
ACTIVATED_KINDS: dict[str, dict[str, object]] = {
    "activated": {"r": 8, "lora_alpha": 16, "alora_invocation_tokens": [5, 6]},
    "activated_elsewhere": {"r": 4, "target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [3, 4, 3]},
    "activated_with_bias": {
        "r": 3,
        "target_modules": ["k_proj", "down_proj"],
        "lora_bias": True,
        "alora_invocation_tokens": [5, 6, 9],
    },
}  # fmt: skip
# Kinds with rows of the embedding or of the head: those of some tokens, or all.
ROW_KINDS: dict[str, dict[str, object]] = {
    "tokens": {"r": 4, "target_modules": ["q_proj", "down_proj"], "trainable_token_indices": [90, 3, 17]},
    "tokens_of_head": {"r": 4, "target_modules": ["v_proj"], "trainable_token_indices": {"lm_head": [5, 1]}},
    "tokens_of_both": {
        "r": 3,
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 8, 9], "lm_head": [2, 100]},
    },
    "same_tokens_of_both": {
        "r": 3,
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [11, 4], "lm_head": [11, 4]},
    },
    "whole_head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole_embedding": {"r": 4, "target_modules": ["up_proj"], "modules_to_save": ["embed_tokens"]},
    "whole_both_with_dora": {
        "r": 4,
        "use_dora": True,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
}
# Kinds for bases whose head is tied to the embedding. PEFT ties what is trained of both, too.
TIED_KINDS: dict[str, dict[str, object]] = {
    "tied_pair": {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied_pair_by_pattern": {
        "r": 3,
        "target_modules": r".*(lm_head|down_proj)",
        "alpha_pattern": {"lm_head": 5},
        "ensure_weight_tying": True,
    },
    "tied_pair_with_dora": {
        "r": 4,
        "use_dora": True,
        "target_modules": ["v_proj", "lm_head"],
        "ensure_weight_tying": True,
    },
    "tied_whole": {
        "r": 4,
        "target_modules": ["o_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tied_whole_of_head_and_norm": {
        "r": 4,
        "target_modules": ["o_proj"],
        "modules_to_save": ["lm_head", "model.norm"],
        "ensure_weight_tying": True,
    },
}
# Kinds with norms of their own. PEFT takes the names for the ends of paths, so that "norm" names all norms.
NORM_KINDS: dict[str, dict[str, object]] = {
    "norms_of_layers": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["input_layernorm", "post_attention_layernorm"],
    },
    "final_norm_and_head": {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["model.norm", "lm_head"]},
    "every_norm_with_dora": {
        "r": 3,
        "use_dora": True,
        "target_modules": ["o_proj", "up_proj"],
        "modules_to_save": ["norm"],
    },
    "norms_of_one_layer": {
        "r": 3,
        "target_modules": ["k_proj"],
        "modules_to_save": ["layers.1.input_layernorm"],
        "trainable_token_indices": [90, 3, 17],
    },
}  # fmt: skip
DORA_EMBEDDING_KINDS: dict[str, dict[str, object]] = {
    "dora_on_embedding_and_head": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": r".*(embed_tokens|lm_head|q_proj|down_proj)",
        "rank_pattern": {"embed_tokens": 9, "lm_head": 17},
    },
    "dora_on_head": {"r": 3, "lora_alpha": 4, "use_dora": True, "target_modules": ["lm_head"]},
}


@contextmanager
def quiet_peft() -> Iterator[None]:
    with warnings.catch_warnings():  # PEFT 0.21 reads an attribute that transformers 5.2x renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # How PEFT handles the embeddings is part of what is tested.
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`", UserWarning)
        warnings.filterwarnings(
            "ignore", "Model has `tie_word_embeddings=True` and a tied layer", UserWarning
        )
        # PEFT 0.21 takes the bias of B for a B without columns.
        warnings.filterwarnings("ignore", r"Adapter 'default': \d+ LoRA tensor", UserWarning)
        # PEFT 0.21 does not count parameters that a pattern matches.
        warnings.filterwarnings("ignore", "The following .*_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings(
            "ignore", "You have requested `ensure_weight_tying`, but no tied", UserWarning
        )
        # The linears without a bias of their own.
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed but", UserWarning)
        yield


def make_adapter(
    directory: Path,
    base: PreTrainedModel,
    *,
    seed: int = 0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **lora: object,
) -> PeftModel:
    """Adds an adapter with random tensors to `base`, which PEFT modifies, and saves it. lora: fields of LoraConfig."""
    random = torch.Generator().manual_seed(seed)
    fields = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
    with quiet_peft():
        model = get_peft_model(base, LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name and not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=random)
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.copy_(noise * std)
                parameter.data = parameter.data.to(dtype)
            else:  # Biases, and rows of embeddings and heads.
                parameter.add_(noise * std)
    # The README takes more time than all other files.
    model.create_or_update_model_card = lambda *_: None
    with quiet_peft():
        model.save_pretrained(directory)
    return model


# For each model, where its experts were in transformers 4, their linears, and the router. Unsloth cuts gpt-oss so.
_SINGLE_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("{}.w1", "{}.w3", "{}.w2"), "gate"),
    "phimoe": ("block_sparse_moe", ("{}.w1", "{}.w3", "{}.w2"), "gate"),
    "nemotron_h": ("mixer", ("{}.up_proj", "{}.down_proj"), "gate"),
    "gpt_oss": ("mlp", ("gate_up_projs.{}", "down_projs.{}"), "router.linear"),
}


def write_single_experts(
    directory: Path, base: PreTrainedModel, *, seed: int = 0, std: float = 1.0, **lora: object
) -> None:
    """Writes an adapter as PEFT saved it with transformers 4, where each expert had linears of its own.

    It adapts all linears, router included. lora: fields of adapter_config.json.
    """
    random = torch.Generator().manual_seed(seed)
    block, linears, router = _SINGLE_EXPERTS.get(
        base.config.model_type, ("mlp", ("{}.gate_proj", "{}.up_proj", "{}.down_proj"), "gate")
    )
    rank, tensors = int(str(lora.get("r", 4))), {}

    def add(name: str, in_width: int, out_width: int) -> None:
        for factor, shape in (("A", (rank, in_width)), ("B", (out_width, rank))):
            noise = torch.randn(shape, generator=random) * std
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = noise

    for name, module in base.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            add(name, module.in_features, module.out_features)
        elif name.endswith(".experts"):
            layer, (count, *sizes) = name.rpartition(".")[0].rpartition(".")[0], module.down_proj.shape
            hidden, width = reversed(sizes) if getattr(module, "is_transposed", False) else sizes
            add(f"{layer}.{block}.{router}", hidden, count)
            # gate_up_projs of Unsloth are not halved.
            first = 2 * width if "gate_up" in linears[0] else width
            for expert in range(count):
                for linear in linears:
                    ends = (width, hidden) if linear == linears[-1] else (hidden, first)
                    add(f"{layer}.{block}.experts.{linear.format(expert)}", *ends)
    paths = [name.partition(".lora_")[0].split(".") for name in tensors]
    targets = sorted({".".join(path[-2:] if path[-1].isdigit() else path[-1:]) for path in paths})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": targets,
    }
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    text = json.dumps({"bias": "none", **config, **lora})
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")
