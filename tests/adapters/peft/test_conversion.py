"""Converted adapters of PiSSA and OLoRA answer on the unchanged base model as peft does on the changed one."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

from slora import LLM
from slora_adapters.errors import AdapterInvalid, AdapterNotFound
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.conversion import convert_adapter
from slora_adapters.peft.peft_directory import read_adapter
from slora_api.cli.main import main
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors, write_directory
from tests.slora.engine.test_parity import GREEDY
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS
from tests.support.peft_adapters import quiet_peft
from tests.support.tiny_models import write_model

KINDS: dict[str, dict[str, object]] = {
    "pissa": {"r": 4, "lora_alpha": 8, "init_lora_weights": "pissa"},
    "pissa_with_patterns": {
        "r": 4,
        "use_rslora": True,
        "init_lora_weights": "pissa_niter_4",
        "rank_pattern": {"q_proj": 6},
        "alpha_pattern": {"v_proj": 5},
    },
    "olora": {"r": 3, "lora_alpha": 6, "init_lora_weights": "olora"},
    "olora_with_dora": {"r": 3, "use_dora": True, "init_lora_weights": "olora"},
}


def _train(root: Path, **fields: object) -> PeftModel:
    """Saves an adapter before and after a training, and returns the trained model."""
    base = write_model(root / "base", "llama")
    random = torch.Generator().manual_seed(5)
    with quiet_peft():
        # PEFT's own conversion computes other scales then.
        warnings.filterwarnings("ignore", "Using Rank-Stabilized LoRA with rank_pattern", UserWarning)
        model = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **fields))
        model.create_or_update_model_card = lambda *_: None
        model.save_pretrained(root / "initial")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
        model.save_pretrained(root / "trained")
    return model.eval()


@pytest.mark.parametrize("kind", soaked(KINDS, "pissa_with_patterns", "olora_with_dora"))
def test_a_converted_adapter_answers_as_the_trained_model(tmp_path: Path, kind: str) -> None:
    model = _train(tmp_path, **KINDS[kind])
    arguments = [str(tmp_path / name) for name in ("trained", "initial", "converted")]
    assert (
        main(["adapter", "convert", arguments[0], "--initial", arguments[1], "--output", arguments[2]]) == 0
    )
    llm = LLM(tmp_path / "base", kernels=KERNELS, pool_bytes=1 << 24)
    prompts = [[3, 7, 4, 9, 90, 100], [5], list(range(1, 60))]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, tmp_path / "converted"), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        assert logprobs.argmax(-1).tolist() == list(output.token_ids)
        ours = [entry.logprob for entry in output.logprobs or ()]
        expected = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(ours), expected, atol=1e-4)


def test_factors_are_exact_to_the_rounding_of_float32(tmp_path: Path) -> None:
    _train(tmp_path, **KINDS["pissa"])
    found = convert_adapter(tmp_path / "trained", tmp_path / "initial", tmp_path / "converted")
    assert found.deviation < 1e-6 and found.rank == 8 and found.num_modules == 21
    trained, initial, converted = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("trained", "initial", "converted")
    )
    for name, a in converted.items():
        if ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            parts = [
                part.astype(np.float64)
                for part in (trained[other], trained[name], initial[other], initial[name])
            ]
            delta = parts[0] @ parts[1] - parts[2] @ parts[3]
            assert np.abs(converted[other] @ a - delta).max() < 1e-6 * np.abs(delta).max()
            # Balanced factors.
            assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(converted[other]), rel=1e-4)


def _refuse(tmp_path: Path, config: dict[str, object] | None = None, **initial: object) -> str:
    """Returns the reasons to refuse an adapter. initial: fields of the initial config."""
    trained = make_config(**({"init_lora_weights": "pissa"} | (config or {})))
    write_directory(tmp_path / "trained", make_members(trained, make_tensors(seed=1)))
    write_directory(tmp_path / "initial", make_members(trained | initial, make_tensors(seed=2)))
    with pytest.raises(AdapterInvalid) as refused:
        convert_adapter(tmp_path / "trained", tmp_path / "initial", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    return str(refused.value)


def test_what_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "lora_alpha is 4, but it was 9 at first" in _refuse(tmp_path / "1", lora_alpha=9)
    assert "init_lora_weights is 'loftq'" in _refuse(tmp_path / "2", {"init_lora_weights": "loftq"})
    assert "rank_pattern must be an object" in _refuse(
        tmp_path / "3", {"rank_pattern": {"q": "x"}}, rank_pattern={"q": "x"}
    )
    with pytest.raises(AdapterNotFound):
        convert_adapter(tmp_path / "1" / "trained", tmp_path / "nowhere", tmp_path / "converted")
    good = tmp_path / "1" / "trained"
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(good / "adapter_model.safetensors")
    (broken / "adapter_config.json").write_bytes((good / "adapter_config.json").read_bytes())
    save_file(dict(list(tensors.items())[1:]), broken / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid, match="must be in both adapters, with the same shape"):
        convert_adapter(good, broken, tmp_path / "converted")
    arguments = ["adapter", "convert", str(good), "--initial", str(broken), "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "missing_tensors" in capsys.readouterr().out


def test_a_converted_adapter_is_accepted_and_its_config_keeps_the_scale(tmp_path: Path) -> None:
    config = make_config(init_lora_weights="corda", use_rslora=True, alpha_pattern={"q_proj": 3})
    write_directory(
        tmp_path / "trained", make_members(config, make_tensors(seed=1), chat_template_dot_jinja="x")
    )
    write_directory(tmp_path / "initial", make_members(config, make_tensors(seed=2)))
    convert_adapter(tmp_path / "trained", tmp_path / "initial", tmp_path / "converted")
    adapter = read_adapter(tmp_path / "converted", SHAPE, AdapterLimits())
    scales = {pair.path.rpartition(".")[2]: pair.scale for pair in adapter.pairs.values()}
    assert scales == {"q_proj": pytest.approx(3 / 2**0.5), "down_proj": pytest.approx(4 / 2**0.5)}
    assert adapter.extras.chat_template == "x" and adapter.max_rank == 4
    written = json.loads((tmp_path / "converted" / "adapter_config.json").read_text(encoding="utf-8"))
    assert written["init_lora_weights"] is True
