"""Whatever plausible content a config.json has, the model computes what transformers computes, or is refused."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slora.models.families import FAMILIES, read_model_config
from tests.support.config_judge import Verdict, judge_config
from tests.support.config_mutations import draw_changes, each_value
from tests.support.covering import soaked
from tests.support.json_files import write_json

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
# Other config classes have other names for their sizes.
SIZES: dict[str, Any] = {
    **TINY, "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64,
    "d_model": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "n_routed_experts": 4, **EXPERTS,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
# The names under which transformers looks for parts of a model, in every config.
PARTS = {
    "text_config", "text_encoder", "decoder", "generator", "vision_aspect_ratio", "vision_feature_layer",
    "vision_feature_select_strategy",
}  # fmt: skip
# A soft-cap that Gemma 3's config class has and its model code ignores.
REFUSED_UNLESS_NULL = {"attn_logit_softcapping"}
# Their parts have sizes of their own and take a minute to initialise, or 22 GB.
HUGE = frozenset({"phi4_multimodal", "emu3"})
OTHERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING) - FAMILIES.keys() - HUGE)


def native_config(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {**TINY, "head_dim": 8, "sliding_window": 17} if family.startswith("gemma") else dict(TINY)
    if family in ("qwen3", "qwen3_moe"):
        fields["head_dim"] = 8
    if "moe" in family or family == "mixtral":
        fields |= EXPERTS
    fields = {name: value for name, value in fields.items() if name in config_names(family)} | changes
    parts = {"text_config": fields, "vision_config": VISION, "mm_tokens_per_image": 4}
    return {"model_type": family, **(parts if family == "gemma3" else fields)}


def config_names(family: str) -> set[str]:
    kind = config_class(family)
    return {*(field.name for field in dataclasses.fields(kind)), "head_dim"}


def config_class(family: str) -> type[PreTrainedConfig]:
    """The config class of the model's decoder."""
    return CONFIG_MAPPING["gemma3_text" if family == "gemma3" else family]


def other_config(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    kind = CONFIG_MAPPING[model_type]
    known = {*kind.attribute_map, *(field.name for field in dataclasses.fields(kind))}
    sizes = {name: value for name, value in SIZES.items() if name in known and value is not None}
    return {"model_type": model_type, **sizes, **changes}


def judge_all(
    directory: Path, configs: list[dict[str, Any]], model_impl: str, title: str, report: Callable[[str], None]
) -> Counter[Verdict]:
    counts: Counter[Verdict] = Counter()
    wrong = []
    for number, raw in enumerate(configs):
        (directory / str(number)).mkdir()
        verdict, reason = judge_config(directory / str(number), raw, model_impl)
        counts[verdict] += 1
        if verdict is Verdict.WRONG:
            wrong.append((raw, reason))
    figures = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    report(f"{title}: {len(configs)} configs, {figures}")
    assert not wrong
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_native_family_is_equal_to_transformers_or_refused(
    tmp_path: Path, report: Callable[[str], None], family: str, *, soak: bool
) -> None:
    """A soak run tries every value of every field, then changes several fields at once."""
    kind, rng = config_class(family), random.Random(7)
    changes = [{name: value} for name, value in each_value(kind)] if soak else []
    changes += [draw_changes(kind, rng) for _ in range(200 if soak else 3)]
    configs = [native_config(family, change) for change in changes]
    counts = judge_all(tmp_path, configs, "slora", family, report)
    assert counts[Verdict.EQUAL] >= len(configs) // 5


@pytest.mark.parametrize("model_type", soaked(OTHERS, "starcoder2"))
def test_a_class_of_transformers_is_equal_to_itself_or_refused(
    tmp_path: Path, report: Callable[[str], None], model_type: str, *, soak: bool
) -> None:
    rng = random.Random(5)
    drawn = [draw_changes(CONFIG_MAPPING[model_type], rng) for _ in range(10 if soak else 2)]
    configs = [other_config(model_type, change) for change in ({}, *drawn)]
    judge_all(tmp_path, configs, "transformers", model_type, report)


@contextmanager
def reads_of(kind: type[PreTrainedConfig], monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yields the names of the fields that are read from configs of this class."""
    names: set[str] = set()
    plain = kind.__getattribute__

    def get(config: PreTrainedConfig, name: str) -> Any:
        names.add(name)
        return plain(config, name)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", get)
        yield names


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_a_config_with_every_field_that_transformers_reads_of_a_native_family_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    kind = config_class(family)
    config = AutoConfig.for_model(**native_config(family, {}))
    with reads_of(kind, monkeypatch) as names:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model(torch.arange(9)[None], use_cache=False)
    fields = {field.name for field in dataclasses.fields(kind)}
    machinery = {name for name in dir(kind) if name not in fields} | PARTS | REFUSED_UNLESS_NULL
    assert len(names & fields) > 10
    read = {name for name in names - machinery if not name.startswith("_")}
    values = {name: value for name, value in config.to_dict().items() if name in read}
    write_json(tmp_path / "config.json", {**native_config(family, {}), **values})
    assert read_model_config(tmp_path).family == family
