"""Adapters of models whose modules have other names than Llama's. Only the base's shape defines the names."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from slora.models.model_spec import read_model_spec
from slora.models.model_structure import read_transformers_spec
from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.adapter import AdapterLimits, bundle
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import parse_adapter, read_adapter
from slora_kernels.layout import ModelShape
from tests.adapters.unpacking import unpack
from tests.support.covering import soaked
from tests.support.peft_adapters import make_adapter, quiet_peft
from tests.support.tiny_models import write_model

ADAPTER = "adapter_model.safetensors"
SIZES: dict[str, int] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "opt": OPTConfig(**SIZES, word_embed_proj_dim=32, ffn_dim=48),
    "opt_projected": OPTConfig(**SIZES, word_embed_proj_dim=16, ffn_dim=48, do_layer_norm_before=False),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=48),
    "gpt_bigcode": GPTBigCodeConfig(
        vocab_size=50,
        n_embd=32,
        n_inner=48,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    ),
}
CASES: dict[str, dict[str, object]] = {
    "opt all linear": {"r": 3},
    "opt one layer": {"target_modules": ["k_proj", "fc2"], "layers_to_transform": 1},
    "opt by pattern": {"target_modules": r".*\.layers\.0\..*(out_proj|fc1)", "r": 2},
    "opt embedding": {"target_modules": ["embed_tokens", "fc1"], "rank_pattern": {"decoder.embed_tokens": 5}},
    # PEFT lists the names that are excluded, too, and ignores names that no module has.
    "opt_projected excluded": {"exclude_modules": ["project_in", "project_out"], "r": 2},
    "opt surplus names": {"target_modules": ["q_proj", "c_attn", "model.decoder.layers.9.fc1"], "r": 2},
    "gpt_neox all linear": {"r": 2},
    "gpt_neox one layer": {"target_modules": ["query_key_value"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "gpt_neox embedding and head": {"target_modules": ["embed_in", "lm_head", "dense"], "r": 4},
    "gpt_bigcode one layer": {"target_modules": ["c_fc", "c_attn"], "layers_to_transform": 1, "layers_pattern": "h"},
    "gpt_bigcode head in full": {"target_modules": ["lm_head", "mlp.c_proj"], "layers_to_transform": [0]},
    "gpt_bigcode embedding": {"target_modules": ["transformer.wte", "c_attn"], "alpha_pattern": {"wte": 3}},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    directory: Path
    shape: ModelShape

    def load(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.directory)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    def write(name: str) -> Base:
        directory = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(directory)
        return Base(directory, read_transformers_spec(directory).sizes)

    return cache(write)


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_reproduce_the_deltas_of_peft(
    tmp_path: Path, bases: Callable[[str], Base], case: str
) -> None:
    base = bases(case.split()[0])
    make_adapter(tmp_path, base.load(), seed=len(case), **CASES[case])
    adapter = read_adapter(tmp_path, base.shape, AdapterLimits(base_directory=base.directory))
    packed = pack(adapter, base.shape, "float32")
    deltas = deltas_by_peft(tmp_path, base)
    assert {pair.path for pair in adapter.pairs.values()} == set(deltas)
    for module_id, pair in adapter.pairs.items():
        a, b = (torch.tensor(factor) for factor in unpack(packed, base.shape, "float32", module_id))
        assert torch.equal(b.contiguous() @ a * packed.scales[module_id].item(), deltas[pair.path]), pair.path


def deltas_by_peft(directory: Path, base: Base) -> dict[str, torch.Tensor]:
    with quiet_peft():
        model = PeftModel.from_pretrained(base.load(), directory)
    found = {}
    for name, layer in model.named_modules():
        path = name.removeprefix("base_model.model.")
        if hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default")
            found[path] = delta.T if path == base.shape.embedding_path else delta
    return found


_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 16, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_ROOTS = r"^(base_model\.model\.)?(model\.language_model|language_model\.model|model)\."
# Name of the adapter -> the base that it was trained on, and its fields of LoraConfig.
GEMMA3: dict[str, tuple[str, dict[str, object]]] = {
    "text": (
        "text",
        {"target_modules": ["q_proj", "down_proj"], "alpha_pattern": {r"^model\.layers\.1\..*": 3}},
    ),
    "text by pattern": ("text", {"target_modules": r"model\.layers\.0\..*_proj"}),
    "both embedding": ("both", {"target_modules": r".*language_model.*(embed_tokens|v_proj)"}),
    "both with images": ("both", {"target_modules": ["q_proj", "fc1", "out_proj", "embed_tokens"], "r": 3}),
    "both excluded": ("both", {"exclude_modules": r".*(vision_tower|multi_modal_projector).*", "r": 3}),
    "both with a projector": (
        "both",
        {"use_dora": True, "bias": "all", "modules_to_save": ["multi_modal_projector", "input_layernorm"]},
    ),
}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    """Gemma 3 with and without vision, with the same text part. A model is loaded from its directory `name_or_path`."""
    root = tmp_path_factory.mktemp("gemma3")
    vision = {"mm_tokens_per_image": 4, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7}
    both = Gemma3ForConditionalGeneration(Gemma3Config(text_config=_TEXT, vision_config=_VISION, **vision))
    text = Gemma3ForCausalLM(Gemma3TextConfig(**_TEXT))
    text.model.load_state_dict(both.model.language_model.state_dict())
    both.save_pretrained(root / "both")
    both.save_pretrained(root / "both, new names", save_original_format=False)
    text.save_pretrained(root / "text")

    def load(name: str) -> PreTrainedModel:
        kind = Gemma3ForCausalLM if name == "text" else Gemma3ForConditionalGeneration
        return kind.from_pretrained(root / name)

    return load


@pytest.mark.covering(1)
@pytest.mark.parametrize("served", ["text", "both", "both, new names"])
@pytest.mark.parametrize("name", GEMMA3)
def test_an_adapter_of_the_same_text_model_is_served_whatever_its_modules_are_called(
    tmp_path: Path, gemma3: Callable[[str], PreTrainedModel], name: str, served: str
) -> None:
    trained, fields = GEMMA3[name]
    make_adapter(tmp_path, gemma3(trained), **fields)
    with quiet_peft():
        model = PeftModel.from_pretrained(gemma3(trained), tmp_path)
    expected = {
        re.sub(_ROOTS, "", path): layer.get_delta_weight("default")
        for path, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight") and "vision_tower" not in path
    }
    directory = Path(gemma3(served).config.name_or_path)
    shape = read_model_spec(directory).shape("float32")
    adapter = read_adapter(tmp_path, shape, AdapterLimits(base_directory=directory, served_dtype="float32"))
    packed = pack(adapter, shape, "float32")
    assert {re.sub(_ROOTS, "", pair.path) for pair in adapter.pairs.values()} == set(expected)
    use = describe_other_parts(tmp_path, {"vision_tower", "multi_modal_projector"})
    if name == "both excluded":  # The config also lists the names of the linears that are excluded.
        assert use == () and adapter.extras.uses[0].startswith(
            "not ['fc1', 'fc2', 'out_proj'] in target_modules"
        )
    else:
        assert adapter.extras.uses[:1] == use
    for module_id, pair in adapter.pairs.items():
        a, b = (torch.tensor(factor) for factor in unpack(packed, shape, "float32", module_id))
        delta = expected[re.sub(_ROOTS, "", pair.path)]
        delta = delta.T if module_id == shape.embedding_module else delta
        assert torch.equal(b.contiguous() @ a * packed.scales[module_id].item(), delta), pair.path
    # What a store keeps is the same adapter, under the names of the served model.
    (tmp_path / "scratch").mkdir()
    members = bundle(adapter, tmp_path, tmp_path / "scratch")
    stored = {
        file: memoryview(raw.read_bytes() if isinstance(raw, Path) else raw) for file, raw in members.items()
    }
    again = parse_adapter(stored, shape, AdapterLimits(served_dtype="float32"))
    assert (
        again.digest == adapter.digest
        and pack(again, shape, "float32").scales.tolist() == packed.scales.tolist()
    )


@pytest.mark.parametrize("model", ["deepseek_v32", "minimax_m3_vl_text"])
def test_the_indexers_of_an_adapter_are_named_and_left_out(tmp_path: Path, model: str) -> None:
    """PEFT's "all-linear" adapts them, and `q_proj` those of MiniMax M3, which never changes an answer."""
    base = write_model(tmp_path / "base", model, num_hidden_layers=2)
    fields: dict[str, object] = (
        {"r": 3, "bias": "all"} if model == "deepseek_v32" else {"target_modules": ["q_proj"]}
    )
    make_adapter(tmp_path / "adapter", base, **fields)
    count = sum(".indexer." in name for name in load_file(tmp_path / "adapter" / ADAPTER))
    assert count
    shape = read_model_spec(tmp_path / "base").shape("float32")
    adapter = read_adapter(tmp_path / "adapter", shape, AdapterLimits(base_directory=tmp_path / "base"))
    (use,) = (use for use in adapter.extras.uses if "indexers" in use)
    assert use == (
        f"not {count} tensors of indexers, which select the tokens that attention reads: this server serves lengths at "
        "which they select all"
    )
    assert adapter.pairs and not any(".indexer." in pair.path for pair in adapter.pairs.values())


def test_the_indexers_of_an_adapter_are_refused_by_a_base_without_any(tmp_path: Path) -> None:
    """They were left out, as if the adapter had been trained in this base."""
    base = write_model(tmp_path / "base", "llama")
    make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    tensors = load_file(tmp_path / "adapter" / ADAPTER)
    path = "base_model.model.model.layers.0.self_attn."
    for factor in ("lora_A", "lora_B"):
        tensors[f"{path}indexer.wk.{factor}.weight"] = tensors[f"{path}q_proj.{factor}.weight"].clone()
    save_file(tensors, tmp_path / "adapter" / ADAPTER)
    shape = read_model_spec(tmp_path / "base").shape("float32")
    with pytest.raises(
        AdapterInvalid, match=r"self_attn\.indexer\.wk\.lora_A\.weight' does not belong to any module"
    ):
        read_adapter(tmp_path / "adapter", shape, AdapterLimits())


def describe_other_parts(directory: Path, parts: Collection[str]) -> tuple[str, ...]:
    """What the certificate says of the tensors outside the decoder in an adapter."""
    names = [part for path in load_file(directory / ADAPTER) for part in path.split(".") if part in parts]
    found = f"{len(names)} tensors of {' and '.join(sorted({*names}))}"
    return (f"not {found}, which text does not reach, because this server reads text only",) if names else ()


# Model -> its parts beside the decoder, and the names that its modules had in earlier releases of transformers.
SEEING_MODELS: dict[str, tuple[set[str], dict[str, str]]] = {
    "qwen2_5_vl": ({"visual"}, {"model.language_model.": "model.", "model.visual.": "visual."}),
    "qwen3_vl": ({"visual"}, {}),
    "smolvlm": ({"vision_model", "connector"}, {}),
    "mistral3": (
        {"vision_tower", "multi_modal_projector"},
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
}


@pytest.mark.parametrize("model", soaked(SEEING_MODELS, "qwen2_5_vl", "mistral3"))
def test_of_an_adapter_on_all_linears_the_part_that_reads_images_is_named_and_left_out(
    tmp_path: Path, model: str
) -> None:
    """Born from a refusal: only two names of such parts were known."""
    parts, early_names = SEEING_MODELS[model]
    base = write_model(tmp_path / "base", model, num_hidden_layers=2)
    make_adapter(tmp_path / "adapter", base, r=3, target_modules=r".*(lm_head|proj|qkv|fc1|out_proj)")
    use = describe_other_parts(tmp_path / "adapter", parts)
    assert use
    shape = read_model_spec(tmp_path / "base").shape("float32")
    limits = AdapterLimits(base_directory=tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", shape, limits)
    assert adapter.extras.uses == use
    assert len(adapter.pairs) == 2 * 7 + 1
    tensors = load_file(tmp_path / "adapter" / ADAPTER)
    for new, early in early_names.items():
        tensors = {
            re.sub(rf"^base_model\.model\.{re.escape(new)}", f"base_model.model.{early}", name): tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, tmp_path / "adapter" / ADAPTER)
    again = read_adapter(tmp_path / "adapter", shape, limits)
    assert again.extras.uses == use
    assert [pair.path for pair in again.pairs.values()] == [pair.path for pair in adapter.pairs.values()]


def test_a_tensor_that_may_be_a_misspelt_part_of_the_decoder_is_not_left_out(tmp_path: Path) -> None:
    """Born from wrong answers: every name beside the decoder was taken for a part that reads images."""
    base = write_model(tmp_path / "base", "qwen3_vl", num_hidden_layers=1)
    make_adapter(tmp_path / "adapter", base, r=3, target_modules=r".*language_model.*q_proj")
    shape = read_model_spec(tmp_path / "base").shape("float32")
    limits = AdapterLimits(base_directory=tmp_path / "base")
    file = tmp_path / "adapter" / ADAPTER
    config_file = file.with_name("adapter_config.json")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    tensors = load_file(file)
    factor = next(iter(tensors.values()))
    for path in (
        *("embed_tokens", "model.norm", "model.lm_head", "mtp.fc", "v_head.summary", "classifier"),
        *(
            f"{root}.0.mlp.up_proj.lora_A"
            for root in ("layers", "model.layers", "model.languagemodel.layers")
        ),
    ):
        name = f"base_model.model.{path}.weight"
        saved = {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}
        fields = saved if path == "classifier" else {}
        config_file.write_text(json.dumps({**config, **fields}), encoding="utf-8")
        save_file({**tensors, name: factor.clone()}, file)
        with pytest.raises(AdapterInvalid, match=f"'{re.escape(name)}' does not belong to any module"):
            read_adapter(file.parent, shape, limits)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_the_names_of_a_wrapper_are_refused_with_the_remedy(
    tmp_path: Path, bases: Callable[[str], Base], wrapper: str
) -> None:
    base = bases("opt")
    make_adapter(tmp_path, base.load(), target_modules=["q_proj"])
    file = tmp_path / ADAPTER
    tensors = load_file(file)
    save_file(
        {name.replace("base_model.model.", f"base_model.model.{wrapper}"): t for name, t in tensors.items()},
        file,
    )
    with pytest.raises(
        AdapterInvalid, match=f"'{wrapper}' is left from a wrapper .* remove '{wrapper}' from all"
    ):
        read_adapter(tmp_path, base.shape, AdapterLimits())
