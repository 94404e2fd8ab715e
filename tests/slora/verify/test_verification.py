"""`slora adapter verify` accepts correct adapters and names the faulty part of others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.numpy import load_file

from slora import LoraAdapter
from slora.models.model_spec import read_model_spec
from slora.verify.peft_reference import PeftReference
from slora.verify.verification import TOLERANCES, Verification, VerificationRequest, verify_adapter
from slora_api.cli.main import main
from tests.support.coded_checkpoints import CodedForm, write_coded_checkpoint
from tests.support.covering import soaked
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import (
    ACTIVATED_KINDS,
    DORA_KINDS,
    EMBEDDING_KINDS,
    KINDS,
    ROW_KINDS,
    make_adapter,
)
from tests.support.tiny_models import LONGROPE, count_layers, make_model, write_model
from tests.support.tiny_tokenizers import byte_level, write_tokenizer

# Layers times adapted linears of each kind, in a model of three layers. The last kind adapts the embedding and the head
# too.
NUM_MODULES = {"odd_rank": 21, "patterns": 21, "rslora": 21, "some_layers": 8, "r8_on_q_and_v": 6}
NUM_MODULES |= {"both_and_linears": 8, "dora": 21, "activated": 21, "whole_both_with_dora": 6}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    known = KINDS | EMBEDDING_KINDS | DORA_KINDS | ACTIVATED_KINDS | ROW_KINDS
    kinds = {kind: known[kind] for kind in NUM_MODULES}
    kit = make_kit(tmp_path_factory.mktemp("verification"), "llama", kinds, vocab_size=400)
    write_tokenizer(kit.directory, byte_level(vocab_size=400))
    return kit


def compare(kit: ModelKit, kind: str, served: LoraAdapter | None = None, **question: Any) -> Verification:
    asked = VerificationRequest(
        kit.directory, kit.adapters[kind], **{"max_tokens": 8, "device": "cpu", **question}
    )
    return verify_adapter(asked, served)


def changed(
    directory: Path, change: Callable[[dict[str, np.ndarray]], None], **fields: object
) -> LoraAdapter:
    """The adapter in `directory` with changed tensors or config fields."""
    tensors = {
        name: array.copy() for name, array in load_file(directory / "adapter_model.safetensors").items()
    }
    change(tensors)
    return LoraAdapter.from_tensors(tensors, {**LoraConfig.from_pretrained(directory).to_dict(), **fields})


@pytest.mark.parametrize(
    "kind", soaked(NUM_MODULES, "patterns", "some_layers", "both_and_linears", "dora", "activated")
)
def test_adapters_of_every_kind_are_found_equal(
    kit: ModelKit, report: Callable[[str], None], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    command = [
        "adapter",
        "verify",
        str(kit.adapters[kind]),
        "--model",
        str(kit.directory),
        "--max-tokens",
        "8",
    ]
    assert main([*command, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["problems"], found["warnings"]) == ("equal", [], [])
    assert len(found["modules"]) == NUM_MODULES[kind]
    logprob = max(check["deviation"] for check in found["prompts"])
    delta = max(check["deviation"] for check in found["modules"])
    report(f"verify {kind}: largest deviations, of a log-probability {logprob:.1e}, of a delta {delta:.1e}")
    # Far enough below the limits that the remaining tolerance cannot hide a real difference.
    limit = TOLERANCES["float32"]
    assert logprob < limit.logprob / 10 and delta < limit.delta / 10
    assert all(check["effect"] > 0.01 for check in found["prompts"])


@pytest.mark.parametrize(
    "model", soaked(["phi3_window", "gemma3_text", "gpt2", "gpt_neox"], "phi3_window", "gpt_neox")
)
def test_models_of_other_families_are_compared(tmp_path: Path, model: str) -> None:
    """Covers fused linears, scaled embeddings, transposed weights, and transformers' own classes."""
    base = write_model(tmp_path / "base", model, num_hidden_layers=count_layers(model))
    make_adapter(tmp_path / "adapter", base, std=0.15, r=5, fan_in_fan_out=model == "gpt2")
    found = verify_adapter(
        VerificationRequest(tmp_path / "base", tmp_path / "adapter", max_tokens=8, device="cpu")
    )
    assert found.equal, found.problems
    # All linears except the embedding and the head.
    assert len(found.modules) == found.num_modules - 2


# Models with one rope for all layers, and models with two ropes, one of which switches.
_FULL_ROPE = {**LONGROPE, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 48}
_SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_ROPES = {"full_attention": _FULL_ROPE, "sliding_attention": _SLIDING_ROPE}
LONGROPES: dict[str, dict[str, object]] = {
    "phi3_longrope": {},
    "gemma3_text": {"head_dim": 12, "rope_parameters": _TWO_ROPES},
}


@pytest.mark.parametrize("model", soaked(LONGROPES, "phi3_longrope"))
def test_tokens_before_the_longrope_switch_are_verified_with_short_factors(
    tmp_path: Path, model: str
) -> None:
    """Born from a false alarm: the reference computes all tokens in one pass, and so gives the early ones the long
    factors."""
    base = write_model(tmp_path / "base", model, num_hidden_layers=count_layers(model), **LONGROPES[model])
    make_adapter(tmp_path / "adapter", base, std=0.15, r=5)
    found = verify_adapter(
        VerificationRequest(tmp_path / "base", tmp_path / "adapter", max_tokens=40, device="cpu")
    )
    assert read_model_spec(tmp_path / "base").rope_switch == 48
    lengths = [(check.prompt_tokens, check.prompt_tokens + check.answer_tokens) for check in found.prompts]
    assert {prompt <= 48 < end for prompt, end in lengths} == {True, False}
    assert found.equal, found.problems


def test_sixteen_bits_on_both_sides_are_found_equal(kit: ModelKit) -> None:
    found = compare(kit, "patterns", dtype="bfloat16")
    assert found.equal, found.problems
    assert found.dtype == "bfloat16"
    stronger = LoraAdapter(kit.adapters["patterns"], weight=1.1)
    assert not compare(kit, "patterns", stronger, dtype="bfloat16").equal


def test_a_scale_that_is_off_by_a_thousandth_is_found_in_every_module(kit: ModelKit) -> None:
    found = compare(kit, "patterns", LoraAdapter(kit.adapters["patterns"], weight=1.001))
    assert not found.equal
    assert all(check.deviation == pytest.approx(1e-3, rel=0.1) for check in found.modules)


def test_one_wrong_factor_is_found_by_its_name(kit: ModelKit) -> None:
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][3] *= 1.5

    found = compare(kit, "odd_rank", changed(kit.adapters["odd_rank"], change))
    limit = TOLERANCES["float32"].delta
    assert [check.path for check in found.modules if check.deviation > limit] == [
        "model.layers.1.mlp.up_proj"
    ]
    assert "model.layers.1.mlp.up_proj" in found.problems[0]
    assert any("prompt" in problem for problem in found.problems)


def test_modules_that_only_one_side_adapts_are_found(kit: ModelKit) -> None:
    def drop_layer_2(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    served = changed(
        kit.adapters["some_layers"], drop_layer_2, layers_to_transform=[0], layers_pattern="layers"
    )
    found = compare(kit, "some_layers", served)
    assert not found.equal and not found.only_here
    assert found.only_peft == tuple(
        f"model.layers.2.{module}"
        for module in ("mlp.down_proj", "mlp.gate_proj", "self_attn.k_proj", "self_attn.o_proj")
    )


class OtherPeft(PeftReference):
    """A peft version that reads alpha_pattern differently."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._layers["model.layers.0.self_attn.q_proj"].scaling["default"] *= 2


def test_a_difference_is_printed_with_its_place_and_exit_code_one(
    kit: ModelKit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slora.verify.verification.PeftReference", OtherPeft)
    prompt = ["--prompt", "The quick brown fox jumps over", "--prompt", "fox", "--max-tokens", "4"]
    command = ["adapter", "verify", str(kit.adapters["patterns"]), "--model", str(kit.directory)]
    assert main([*command, *prompt, "--device", "cpu"]) == 1
    page = capsys.readouterr().out
    assert "verdict: DIFFERENT" in page
    assert (
        "problem: model.layers.0.self_attn.q_proj: the LoRA delta deviates by 0.5 of its largest entry"
        in page
    )
    assert "The quick brown fox j..." in page
    (row,) = [line.split() for line in page.splitlines() if line.split()[:1] == ["self_attn.q_proj"]]
    assert row[:2] == ["self_attn.q_proj", "3"] and row[-1] == "5.0e-01"


def test_an_untrained_adapter_is_equal_with_a_warning(
    kit: ModelKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_adapter(tmp_path, make_model("llama", vocab_size=400), std=0.0, r=4)
    config = read_json(tmp_path / "adapter_config.json")
    config["base_model_name_or_path"] = "somebody/Other-Model"
    write_json(tmp_path / "adapter_config.json", config)
    for name in ("optimizer.pt", "README.md"):
        (tmp_path / name).touch()
    assert main(["adapter", "verify", str(tmp_path), "--model", str(kit.directory), "--device", "cpu"]) == 0
    page = capsys.readouterr().out
    assert "warning: the adapter has no effect" in page
    assert "warning: the adapter was trained on 'somebody/Other-Model'" in page
    assert "not served: README.md, optimizer.pt" in page
    assert page.endswith("verdict: equal\n")


def test_an_adapter_that_cannot_be_served_is_reported_with_all_reasons(
    kit: ModelKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(directory: Path, model: Path, *flags: str) -> str:
        assert main(["adapter", "verify", str(directory), "--model", str(model), *flags]) == 2
        return capsys.readouterr().out

    adapter, model = kit.adapters["odd_rank"], kit.directory
    assert "there is no adapter directory" in verify(tmp_path / "nowhere", model)
    assert "no model at" in verify(adapter, tmp_path)
    assert "max_lora_rank" in verify(adapter, model, "--max-lora-rank", "4")
    write_model(tmp_path / "wider", "qwen2", num_hidden_layers=2)
    page = verify(adapter, tmp_path / "wider")
    assert page.startswith("unusable:\n") and "shape_mismatch:" in page and "unknown_tensor:" in page
    shutil.copytree(adapter, tmp_path / "dora")
    config = read_json(adapter / "adapter_config.json")
    changes = {"use_qalora": True, "modules_to_save": ["projector"]}
    write_json(tmp_path / "dora" / "adapter_config.json", config | changes)
    (tmp_path / "dora" / "generation_config.json").write_text('{"num_beams": 2}', encoding="utf-8")
    found = json.loads(verify(tmp_path / "dora", model, "--json"))
    assert found["verdict"] == "unusable"
    assert {"use_qalora", "modules_to_save"} <= {reason["code"] for reason in found["reasons"]}


def test_an_adapter_that_peft_cannot_load_is_not_compared(
    kit: ModelKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT requires even ranks for this initialisation, even though trained weights replace the initial ones."""
    directory = shutil.copytree(kit.adapters["odd_rank"], tmp_path / "orthogonal")
    config = read_json(directory / "adapter_config.json")
    write_json(directory / "adapter_config.json", {**config, "init_lora_weights": "orthogonal"})
    assert main(["adapter", "verify", str(directory), "--model", str(kit.directory), "--device", "cpu"]) == 2
    page = capsys.readouterr().out
    assert "not_comparable: transformers and peft can't load" in page and "rank to be even" in page


@pytest.mark.parametrize(
    ("form", "library"),
    [
        (CodedForm("awq", 32, torch.float16, is_symmetric=False), "AWQ"),
        (CodedForm("nf4", 64, torch.float32), "bitsandbytes"),
    ],
)
def test_a_checkpoint_whose_library_is_missing_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: CodedForm, library: str
) -> None:
    """Born from a bug: transformers' ImportError was a traceback. slora reads such checkpoints itself."""
    kinds = {"r8_on_q_and_v": KINDS["r8_on_q_and_v"]}
    widths = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    kit = make_kit(tmp_path, "llama", kinds, vocab_size=400, num_hidden_layers=1, **widths)
    stored, _ = write_coded_checkpoint(kit.directory, tmp_path, form)
    write_tokenizer(stored, byte_level(vocab_size=400))
    command = [
        "adapter",
        "verify",
        str(kit.adapters["r8_on_q_and_v"]),
        "--model",
        str(stored),
        "--device",
        "cpu",
    ]
    assert main(command) == 2
    page = capsys.readouterr().out
    assert "not_comparable: transformers and peft can't load" in page and library in page
