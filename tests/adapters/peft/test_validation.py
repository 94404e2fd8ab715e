import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from slora_adapters.errors import AdapterInvalid, AdapterNotFound
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter, read_adapter, refuse_pickles
from slora_kernels.layout import LatentShape, ModelShape, NormShape
from tests.adapters.hand_made import (
    SHAPE,
    changed,
    make_config,
    make_members,
    make_tensors,
    reason_codes,
    tensor_name,
    write_directory,
)

Q0_A, Q0_B = tensor_name(0, 0, "A"), tensor_name(0, 0, "B")


def test_a_proper_adapter_is_accepted(tmp_path: Path) -> None:
    adapter = read_adapter(write_directory(tmp_path, make_members()), SHAPE, AdapterLimits())
    assert sorted(adapter.pairs) == [0, 6, 7, 13]
    assert adapter.target_modules == ("q_proj", "down_proj")
    assert (adapter.max_rank, adapter.pairs[0].scale) == (2, 2.0)
    assert adapter.ranks(SHAPE) == [*[2, 0, 0, 0, 0, 0, 2] * 2, 0, 0]


# tests/adapters/inspection has a corpus of many more.
TENSOR_FAULTS = {
    "embedding_adapter_without_a_target": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[Q0_A]}),
        ["untargeted_tensors"],
    ),
    "embedding_adapter_spelt_like_a_linear": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_A.weight": t[Q0_A]}),
        ["unknown_tensor"],
    ),
    "head_adapter_spelt_like_an_embedding": (
        lambda t: t.update({"base_model.model.lm_head.lora_embedding_A": t[Q0_A]}),
        ["embeddings"],
    ),
    "output_head": (lambda t: t.update({"base_model.model.lm_head.weight": t[Q0_A]}), ["embeddings"]),
    "bias_of_the_base": (lambda t: t.update({Q0_B.replace("lora_B.weight", "bias"): t[Q0_A][0]}), ["bias"]),
    "wrong_parent": (lambda t: t.update({Q0_A.replace("self_attn", "mlp"): t[Q0_A]}), ["unknown_tensor"]),
    "foreign_prefix": (lambda t: t.update({"x." + Q0_A: t[Q0_A]}), ["unknown_tensor"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_the_config_are_refused(fault: str) -> None:
    change, codes = TENSOR_FAULTS[fault]
    assert reason_codes(make_members(tensors=changed(make_tensors(), change))) == codes


CONFIG_FAULTS = [
    ({"target_modules": ["proj"]}, "matches_nothing"),
    ({"target_modules": "q_proj"}, "matches_nothing"),
    ({"target_modules": ["q_proj", "down_proj", "lm_head"]}, "missing_tensors"),
    ({"target_modules": ["q_proj", "down_proj", "embed_tokens"]}, "missing_tensors"),
    ({"target_modules": r".*(q_proj|down_proj|lm_head)"}, "missing_tensors"),
    ({"target_modules": ["model.layers.7.self_attn.q_proj"]}, "matches_nothing"),
    ({"layers_to_transform": [0]}, "untargeted_tensors"),
    ({"layers_to_transform": [0], "layers_pattern": "h"}, "matches_nothing"),
    ({"exclude_modules": ["q_proj"]}, "untargeted_tensors"),
    ({"r": 3}, "shape_mismatch"),
    ({"rank_pattern": {"down_proj": 3}}, "shape_mismatch"),
    ({"lora_alpha": 1e6}, "scale_too_high"),
]


@pytest.mark.parametrize(("change", "code"), CONFIG_FAULTS)
def test_configs_that_do_not_fit_base_and_tensors_are_refused(change: dict[str, object], code: str) -> None:
    assert code in reason_codes(make_members(make_config(**change)))


def test_rank_over_the_servers_limit_is_refused_with_value_limit_and_remedy() -> None:
    members = {name: memoryview(raw) for name, raw in make_members().items()}
    from_limit = reason_codes(make_members(), AdapterLimits(max_lora_rank=1))
    assert from_limit == ["rank_too_high"]
    with pytest.raises(AdapterInvalid, match=r"rank 2; this server accepts at most 1 \(max_lora_rank\)"):
        parse_adapter(members, SHAPE, AdapterLimits(max_lora_rank=1))


def test_weights_too_large_for_the_served_dtype_are_refused() -> None:
    tensors = changed(make_tensors(), lambda t: t[Q0_A].__setitem__((0, 0), 1e5))
    assert reason_codes(make_members(tensors=tensors), AdapterLimits(served_dtype="float16")) == ["overflow"]
    assert reason_codes(make_members(tensors=tensors), AdapterLimits(served_dtype="bfloat16")) == []


def test_both_other_spellings_that_peft_and_transformers_load_are_accepted() -> None:
    plain = {name.removeprefix("base_model.model."): value for name, value in make_tensors().items()}
    named = {name.replace(".weight", ".default.weight"): value for name, value in make_tensors().items()}
    assert reason_codes(make_members(tensors=plain)) == reason_codes(make_members(tensors=named)) == []


def uses(members: dict[str, bytes]) -> tuple[str, ...]:
    files = {name: memoryview(raw) for name, raw in members.items()}
    return parse_adapter(files, SHAPE, AdapterLimits()).extras.uses


def count_calls(members: dict[str, bytes]) -> tuple[tuple[str, ...], int]:
    """Also returns the number of calls of Python and C functions, and of their ends."""
    num_calls = count()

    def note(*_: object) -> None:
        next(num_calls)

    sys.setprofile(note)
    try:
        found = uses(members)
    finally:
        sys.setprofile(None)
    return found, next(num_calls)


def test_a_name_in_the_config_that_no_module_has_is_named_in_the_certificate() -> None:
    """Born from a fault: such a name was ignored without a word."""
    names = ["q_proj", "down_proj", "c_attn", "model.layers.9.mlp.up_proj"]
    (text,) = uses(make_members(make_config(target_modules=names)))
    assert text.startswith(
        "not ['c_attn', 'model.layers.9.mlp.up_proj'] in target_modules, which name no linear"
    )
    assert uses(make_members(make_config(target_modules=["self_attn.q_proj", "down_proj"]))) == ()


def test_the_work_for_such_names_does_not_grow_with_the_tensors_that_are_left_out() -> None:
    """Born from a fault: 1 MB with 8,000 names and 9,000 tensors of an image part took 30 s of CPU time."""
    text = {
        name.replace("model.layers", "model.language_model.layers"): t for name, t in make_tensors().items()
    }
    part = {f"base_model.model.model.visual.{i}.lora_A.weight": np.ones((1, 1), "f4") for i in range(300)}
    work = []
    for num_names in (0, 300):
        names = ["q_proj", "down_proj", *(f"n{i}" for i in range(num_names))]
        members = make_members(make_config(target_modules=names), text | part)
        found, num_calls = count_calls(members)
        assert found[0].startswith("not 300 tensors of visual") and len(found) == 1 + bool(num_names)
        work.append(num_calls)
    assert work[1] - work[0] < 100 * 300


def test_the_name_of_a_tensor_that_is_left_out_has_a_bounded_number_of_parts() -> None:
    """Born from a fault: 1 MB with one name of 400,000 parts took gigabytes of memory."""
    text = {
        name.replace("model.layers", "model.language_model.layers"): t for name, t in make_tensors().items()
    }
    for num_parts, codes in ((30, []), (400, ["unknown_tensor"])):
        name = f"base_model.model.model.visual.{'a.' * num_parts}lora_A.weight"
        assert reason_codes(make_members(tensors=text | {name: np.ones((1, 1), "f4")})) == codes


def test_names_of_tensors_that_only_transformers_reads_are_named_in_the_certificate() -> None:
    """Born from a fault: PEFT's own loader ignores them, so it answers otherwise."""
    plain = {name.removeprefix("base_model.model."): value for name, value in make_tensors().items()}
    (text,) = uses(make_members(tensors=plain))
    assert text.startswith(
        "8 tensors named like 'model.layers.0.mlp.down_proj.lora_A.weight': transformers reads"
    )
    assert uses(make_members()) == ()


def test_faults_of_config_tensors_and_texts_are_reported_together() -> None:
    tensors = changed(make_tensors(), lambda t: (t.pop(Q0_B), t[Q0_A].__setitem__((0, 0), np.nan)))
    members = make_members(make_config(use_qalora=True), tensors, generation_config_dot_json="[]")
    assert reason_codes(members) == ["use_qalora", "extra_malformed", "missing_tensors", "non_finite"]


def test_a_missing_file_is_named() -> None:
    members = make_members()
    for name in list(members):
        rest = {other: raw for other, raw in members.items() if other != name}
        assert reason_codes(rest) == ["missing_file"]


def test_a_pickle_in_place_of_the_tensors_is_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, {"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x04."})
    with pytest.raises(AdapterInvalid, match=r"'adapter_model.bin' is a pickle, which is never loaded"):
        read_adapter(tmp_path, SHAPE, AdapterLimits())
    codes = [reason.code for reason in refuse_pickles(["adapter_model.PT", "x.pkl", "model.safetensors"])]
    assert codes == ["pickle", "pickle"]


def test_a_header_length_that_resembles_a_pickle_is_not_reported_as_one() -> None:
    raw = make_members()["adapter_model.safetensors"]
    size = int.from_bytes(raw[:8], "little")
    wanted = 0x0280  # the bytes 80 02 00 ..., which look like pickle protocol 2
    while wanted < size:
        wanted += 0x10000  # the bytes 80 02 01 00 ...
    padded = wanted.to_bytes(8, "little") + raw[8 : 8 + size].ljust(wanted) + raw[8 + size :]
    assert padded.startswith(b"\x80\x02")
    assert reason_codes(make_members() | {"adapter_model.safetensors": padded}) == []
    assert reason_codes(make_members() | {"adapter_model.safetensors": padded[:-1]}) == ["tensors_malformed"]


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        read_adapter(tmp_path / "nowhere", SHAPE, AdapterLimits())


def test_a_file_over_the_byte_limit_is_not_even_parsed() -> None:
    assert reason_codes(make_members(), AdapterLimits(max_tensor_bytes=100)) == ["too_large"]


def with_rows(tied: bool, config: dict[str, object], **rows: np.ndarray) -> list[str]:
    """The reasons for an adapter with rows of its own. rows: tensors by their names, with _dot_ for dots."""
    tensors = {name.replace("_dot_", "."): values for name, values in rows.items()}
    return refuse(replace(SHAPE, ties_head=tied), config, tensors)


def refuse(shape: ModelShape, config: dict[str, object], tensors: dict[str, np.ndarray]) -> list[str]:
    """The codes of the reasons to refuse an adapter that also has these tensors."""
    members = make_members(make_config(**config), make_tensors() | tensors)
    try:
        parse_adapter({name: memoryview(raw) for name, raw in members.items()}, shape, AdapterLimits())
    except AdapterInvalid as error:
        return [reason.code for reason in error.reasons]
    return []


ROWS = np.ones((2, SHAPE.hidden_size), np.float32)
MATRIX = np.ones((SHAPE.vocab_size, SHAPE.hidden_size), np.float32)
TOKENS_OF_EMBEDDING = "model_dot_embed_tokens_dot_token_adapter_dot_trainable_tokens_delta"
TOKENS_OF_HEAD = "lm_head_dot_token_adapter_dot_trainable_tokens_delta"


def test_no_tensor_of_embedding_or_head_is_ignored() -> None:
    """Born from a review: each of these was accepted, and a tensor or a field of the config had no effect."""
    ids, saved = {"trainable_token_indices": [1, 2]}, {"modules_to_save": ["lm_head"]}
    head = {"lm_head_dot_weight": MATRIX}
    assert with_rows(True, ids | saved, **{TOKENS_OF_EMBEDDING: ROWS}, **head) == ["trainable_token_indices"]
    assert with_rows(False, ids | saved, **{TOKENS_OF_EMBEDDING: ROWS}, **head) == []
    both = {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}}
    rows = {TOKENS_OF_EMBEDDING: ROWS, TOKENS_OF_HEAD: ROWS}
    assert with_rows(True, both, **rows) == ["trainable_token_indices"]
    assert with_rows(False, both, **rows) == []
    twice = {**head, "base_model_dot_model_dot_lm_head_dot_weight": MATRIX}
    assert with_rows(False, saved, **twice) == ["duplicate_tensor"]
    assert with_rows(False, saved, **head, **{TOKENS_OF_HEAD: ROWS}) == ["duplicate_tensor"]
    assert with_rows(False, saved, lm_head_dot_weight=np.ones((0, 24), np.float32)) == ["shape_mismatch"]


def test_no_tensor_of_a_norm_is_ignored() -> None:
    final = NormShape("model.norm", 24)
    shape = replace(SHAPE, layer_norms=(NormShape("norm", 24, has_bias=True),), final_norm=final)
    names = [f"model.layers.{n}.norm.{part}" for n in range(2) for part in ("weight", "bias")]
    ones = np.ones(24, np.float32)
    every, saved = {"modules_to_save": ["norm"]}, dict.fromkeys([*names, "model.norm.weight"], ones)

    assert refuse(shape, every, saved) == []
    for name in saved:
        rest = {other: values for other, values in saved.items() if other != name}
        assert refuse(shape, every, rest) == ["missing_tensors"]
        assert "shape_mismatch" in refuse(shape, every, {**rest, name: np.ones(23, np.float32)})
        assert set(refuse(shape, {}, saved)) == {"modules_to_save"}
    assert refuse(shape, every, saved | {"base_model.model.model.norm.weight": ones}) == ["duplicate_tensor"]
    assert refuse(shape, every, saved | {"model.norm.bias": ones})[0] == "modules_to_save"
    assert refuse(shape, {"modules_to_save": ["model.norm"]}, {"model.norm.weight": ones}) == []
    assert refuse(SHAPE, every, saved)[0] == "modules_to_save"


def test_tied_rows_are_refused_where_training_tied_more_than_is_served() -> None:
    tying = {"ensure_weight_tying": True}
    embedding = {"model_dot_embed_tokens_dot_weight": MATRIX}
    saved = {"modules_to_save": ["embed_tokens"], **tying}
    head = {"lm_head_dot_weight": MATRIX}
    assert with_rows(True, saved, **embedding) == ["missing_tensors"]
    assert with_rows(True, saved, **embedding, **head) == []
    assert with_rows(True, saved, **embedding, lm_head_dot_weight=MATRIX + 1) == ["ensure_weight_tying"]
    assert with_rows(False, saved, **embedding) == []
    assert with_rows(True, {"trainable_token_indices": [1, 2], **tying}, **{TOKENS_OF_EMBEDDING: ROWS}) == []
    other = {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3, 4]}, **tying}
    rows = {TOKENS_OF_EMBEDDING: ROWS, TOKENS_OF_HEAD: ROWS}
    assert with_rows(True, other, **rows) == ["ensure_weight_tying"]


def test_a_tied_pair_adapts_embedding_and_head() -> None:
    shape = replace(SHAPE, ties_head=True)
    config = {"ensure_weight_tying": True, "target_modules": ["q_proj", "down_proj", "model.embed_tokens"]}
    a, b = np.ones((2, SHAPE.vocab_size), np.float32), np.full((SHAPE.hidden_size, 2), 3, np.float32)
    tensors = {
        "model.embed_tokens.lora_embedding_A": a,
        "model.embed_tokens.lora_embedding_B": b,
        "lm_head.lora_A.weight": b.T,
        "lm_head.lora_B.weight": a.T,
    }
    assert refuse(shape, config, tensors) == []
    assert refuse(SHAPE, config, tensors) == ["untargeted_tensors"]
    assert refuse(shape, config, dict(list(tensors.items())[:2])) == ["missing_tensors"]
    assert refuse(shape, config, tensors | {"lm_head.lora_B.weight": 2 * a.T}) == ["ensure_weight_tying"]
    assert "ensure_weight_tying" in refuse(shape, config | {"rank_pattern": {"lm_head": 3}}, tensors)
    assert "ensure_weight_tying" in refuse(shape, config | {"exclude_modules": ["embed_tokens"]}, tensors)
    members = make_members(make_config(**config), make_tensors() | tensors)
    adapter = parse_adapter({name: memoryview(raw) for name, raw in members.items()}, shape, AdapterLimits())
    # The stored config names the head.
    assert "lm_head" in adapter.config.target_modules


def test_an_activated_adapter_of_the_linear_that_expands_latents_is_refused(tmp_path: Path) -> None:
    """The page has one latent of a token, whose key would be the base's for some rows and the adapter's for others."""
    latent = LatentShape("self_attn.q_proj", 20, 8, 12, num_heads=4)
    shape = replace(SHAPE, num_kv_heads=1, head_dim=28, latent=latent)
    assert shape.layer_page_bytes(16) == 16 * 28 * 4 and ModelShape.from_plain(asdict(shape)) == shape
    assert shape.layer_page_bytes(3) == 512, "a page is padded to whole segments"
    for invocation, kind in (([], shape), ([3, 4], SHAPE), ([3, 4], shape)):
        config = make_config(alora_invocation_tokens=invocation) if invocation else make_config()
        directory = write_directory(tmp_path, make_members(config))
        if invocation and kind is shape:
            with pytest.raises(
                AdapterInvalid, match=r"layers\.0\.self_attn\.q_proj, which would expand the latents"
            ):
                read_adapter(directory, kind, AdapterLimits())
        else:
            assert read_adapter(directory, kind, AdapterLimits()).pairs
