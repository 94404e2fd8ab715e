import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from slora_adapters.errors import AdapterInvalid
from slora_adapters.loader.stored_adapter import StoredAdapter, make_buffers
from slora_adapters.peft.adapter import TENSORS_NAME, Adapter, AdapterLimits, bundle
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.tensor_file import StoredTensor, read_tensors, tensor_file_parts
from slora_adapters.store.file_store import LocalBlob
from tests.adapters.peft_models import SHAPE, base_model, make_adapter

EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"
HEAD = "base_model.model.lm_head.base_layer.weight"
BOTH = {"r": 3, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(directory)
    yield directory


def read(directory: Path, base: Path | None) -> Adapter:
    return read_adapter(directory, SHAPE, AdapterLimits(base_directory=base))


def refusal(directory: Path, base: Path | None, code: str = "embeddings") -> str:
    with pytest.raises(AdapterInvalid) as caught:
        read(directory, base)
    assert {reason.code for reason in caught.value.reasons} == {code}
    return str(caught.value)


def tensors_of(directory: Path) -> dict[str, StoredTensor]:
    return read_tensors((directory / TENSORS_NAME).read_bytes())


def rewrite(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    (directory / TENSORS_NAME).write_bytes(b"".join(tensor_file_parts(tensors.values())))


@pytest.mark.covering(2)
@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_of_the_bases_own_matrices_are_accepted_if_they_are_exact_in_the_served_dtype(
    tmp_path: Path, base_dtype: torch.dtype, saved_as: torch.dtype, served: str
) -> None:
    """Born from a bug: a copy in bfloat16 was taken for the base's float32 matrix, but PEFT would use the copy."""
    base_model().to(base_dtype).save_pretrained(tmp_path / "base")
    make_adapter(tmp_path, **BOTH)
    # A training run in the dtype `saved_as` loads these weights, and PEFT saves them in it.
    loaded = base_model().to(base_dtype).to(saved_as)
    copies = {EMBEDDING: loaded.model.embed_tokens.weight, HEAD: loaded.lm_head.weight}
    rewrite(tmp_path, {**tensors_of(tmp_path), **{name: store(name, copy) for name, copy in copies.items()}})
    own = base_model().to(base_dtype)
    limits = AdapterLimits(served_dtype=served, base_directory=tmp_path / "base")
    is_exact = all(
        torch.equal(copy.to(getattr(torch, served)), matrix.to(getattr(torch, served)))
        for copy, matrix in zip(
            copies.values(), (own.model.embed_tokens.weight, own.lm_head.weight), strict=True
        )
    )
    assert is_exact or saved_as != torch.float32
    if is_exact:
        adapter = read_adapter(tmp_path, SHAPE, limits)
        assert adapter.has_unused and adapter.target_modules == ("q_proj", "embed_tokens", "lm_head")
    else:
        with pytest.raises(
            AdapterInvalid, match=r"rounded to \w+, which PEFT .* save_embedding_layers=False"
        ):
            read_adapter(tmp_path, SHAPE, limits)


def store(name: str, tensor: torch.Tensor) -> StoredTensor:
    formats = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    values = tensor.detach().contiguous()
    bits = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    return StoredTensor(name, formats[values.dtype], bits.numpy())


def test_copies_are_found_in_the_shards_of_a_large_base(tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    make_adapter(tmp_path, **BOTH)
    assert read(tmp_path, tmp_path / "base").has_unused


def test_linears_of_the_base_may_have_dtypes_that_adapters_cannot_have(tmp_path: Path) -> None:
    model = base_model()
    model.model.layers[0].mlp.to(torch.float8_e4m3fn)
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    make_adapter(tmp_path, **BOTH)
    assert read(tmp_path, tmp_path / "base").has_unused


def test_tensor_names_of_the_base_may_lack_the_first_prefix(tmp_path: Path, base: Path) -> None:
    model = base_model()
    model.model.save_pretrained(tmp_path / "base")
    make_adapter(tmp_path, r=2, target_modules=["embed_tokens"])
    assert read(tmp_path, tmp_path / "base").has_unused


def test_the_head_of_a_tied_base_is_its_embedding(tmp_path: Path, base: Path) -> None:
    untied = tensors_of_base(base)
    (tmp_path / "base").mkdir()
    tied = {name: tensor for name, tensor in untied.items() if name != "lm_head.weight"}
    (tmp_path / "base" / "model.safetensors").write_bytes(b"".join(tensor_file_parts(tied.values())))
    make_adapter(tmp_path, r=2, target_modules=["lm_head"])
    tensors = tensors_of(tmp_path)
    tensors[HEAD] = StoredTensor(HEAD, "F32", untied["model.embed_tokens.weight"].values)
    rewrite(tmp_path, tensors)
    assert read(tmp_path, tmp_path / "base").target_modules == ("lm_head",)
    assert "differs from the base model's" in refusal(tmp_path, base)


def tensors_of_base(base: Path) -> dict[str, StoredTensor]:
    return read_tensors((base / "model.safetensors").read_bytes())


def test_a_changed_matrix_is_refused_whether_or_not_it_is_adapted(tmp_path: Path, base: Path) -> None:
    for target in ("embed_tokens", "q_proj"):
        make_adapter(tmp_path, target_modules=[target])
        tensors = tensors_of(tmp_path)
        name = "base_model.model.model.embed_tokens.weight"
        tensors.pop(EMBEDDING, None)
        values = tensors_of_base(base)["model.embed_tokens.weight"].values.copy()
        values[-1, -1] += 1e-6
        rewrite(tmp_path, {**tensors, name: StoredTensor(name, "F32", values)})
        assert "another embedding matrix" in refusal(tmp_path, base)


def test_resized_embeddings_are_refused_with_both_shapes(tmp_path: Path, base: Path) -> None:
    make_adapter(tmp_path, target_modules=["lm_head"])
    tensors = tensors_of(tmp_path)
    tensors[HEAD] = StoredTensor(HEAD, "F32", tensors[HEAD].values[:-2])
    rewrite(tmp_path, tensors)
    assert "shape [62, 48], but the base model's has [64, 48]" in refusal(tmp_path, base)


def test_rows_behind_those_of_the_base_are_refused_in_an_activated_adapter(
    tmp_path: Path, base: Path
) -> None:
    """Born from wrong answers: copies became rows after the config's fields had been checked together."""
    for invocation in (None, [3, 4]):
        make_adapter(tmp_path, target_modules=["q_proj"], alora_invocation_tokens=invocation)
        tensors = tensors_of(tmp_path)
        for module in ("model.embed_tokens", "lm_head"):
            name, values = (
                f"base_model.model.{module}.weight",
                tensors_of_base(base)[f"{module}.weight"].values,
            )
            tensors[name] = StoredTensor(name, "F32", np.concatenate([values, values[:2]]))
        rewrite(tmp_path, tensors)
        if invocation is None:
            assert read(tmp_path, base).tensors.num_added == 2
        else:
            refused = refusal(tmp_path, base, "trainable_token_indices")
            assert "alora_invocation_tokens" in refused and "added tokens" in refused


HEAD_BIAS = "base_model.model.lm_head.base_layer.bias"


def with_biased_head(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A base whose head has a bias, like Phi's and CTRL's, and an adapter on that head. PEFT saves copies of both in
    it."""
    model = base_model()
    model.lm_head = torch.nn.Linear(SHAPE.hidden_size, SHAPE.vocab_size)
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    make_adapter(tmp_path, r=2, target_modules=["lm_head"])
    copies = {HEAD: model.lm_head.weight, HEAD_BIAS: model.lm_head.bias}
    rewrite(tmp_path, {**tensors_of(tmp_path), **{name: store(name, copy) for name, copy in copies.items()}})
    return tmp_path / "base", model.lm_head.bias.detach()


def test_a_copy_of_the_head_s_own_bias_is_accepted(tmp_path: Path, base: Path) -> None:
    """Born from a bug: PEFT saves a copy of the bias with any adapter on such a head. It was refused as a trained
    bias."""
    biased, _ = with_biased_head(tmp_path)
    adapter = read(tmp_path, biased)
    assert adapter.has_unused and adapter.target_modules == ("lm_head",)


def test_a_trained_bias_of_the_head_is_refused(tmp_path: Path, base: Path) -> None:
    biased, bias = with_biased_head(tmp_path)
    trained = bias.clone()
    trained[-1] += 1e-6
    rewrite(tmp_path, {**tensors_of(tmp_path), HEAD_BIAS: store(HEAD_BIAS, trained)})
    assert "a trained bias is not supported" in refusal(tmp_path, biased, "bias")
    rewrite(tmp_path, {**tensors_of(tmp_path), HEAD_BIAS: store(HEAD_BIAS, bias[:-1])})
    assert "shape [63], but the base model's has [64]" in refusal(tmp_path, biased, "bias")


def test_a_bias_is_refused_where_the_base_has_none(tmp_path: Path, base: Path) -> None:
    make_adapter(tmp_path, r=2, target_modules=["lm_head"])
    rewrite(tmp_path, {**tensors_of(tmp_path), HEAD_BIAS: store(HEAD_BIAS, torch.zeros(SHAPE.vocab_size))})
    assert "has no tensor lm_head.bias [64]" in refusal(tmp_path, base, "bias")


def test_copies_are_refused_if_the_base_is_not_available_for_comparison(tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["lm_head"])
    assert "base model is not available" in refusal(tmp_path, None)
    assert "cannot be compared" in refusal(tmp_path, tmp_path / "nowhere")


def test_copies_are_neither_part_of_the_digest_nor_stored(tmp_path: Path, base: Path) -> None:
    model = make_adapter(tmp_path, **BOTH)
    adapter = read(tmp_path, base)
    (tmp_path / "scratch").mkdir()
    members = bundle(adapter, tmp_path, tmp_path / "scratch")
    views = {
        name: memoryview(Path(raw).read_bytes() if isinstance(raw, Path) else raw)
        for name, raw in members.items()
    }
    kept = read_tensors(views[TENSORS_NAME])
    assert set(kept) == set(get_peft_model_state_dict(model, save_embedding_layers=False))
    # The loader does not know the base model's directory. It must find the same adapter in the stored files.
    with closing(LocalBlob(members)) as blob:
        stored = StoredAdapter(blob, adapter.digest, SHAPE, AdapterLimits())
        region = np.empty(stored.layout.num_bytes, np.uint8)
        stored.pour(region, "float32", make_buffers())
    rewrite(tmp_path, kept)
    assert read(tmp_path, None).digest == adapter.digest


def test_an_adapter_without_copies_is_stored_as_it_was_uploaded(tmp_path: Path) -> None:
    make_adapter(tmp_path, r=2)
    assert bundle(read(tmp_path, None), tmp_path, tmp_path)[TENSORS_NAME] == tmp_path / TENSORS_NAME


def test_ensure_weight_tying_matters_only_where_the_embedding_or_the_head_is_adapted(tmp_path: Path) -> None:
    make_adapter(tmp_path, r=2)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    plain = read(tmp_path, None).digest
    path.write_text(json.dumps({**config, "ensure_weight_tying": True}), encoding="utf-8")
    assert read(tmp_path, None).digest == plain
