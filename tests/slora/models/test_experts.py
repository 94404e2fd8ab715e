"""Experts of a mixture: which tokens they compute, and how checkpoints name them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slora import LLM, SamplingParams
from slora.models.mixture_layers import avoid_grouped_products
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS
from tests.support.tiny_models import make_model, write_model


@torch.inference_mode()
def test_experts_whose_rows_the_grouped_product_refuses_are_multiplied_one_after_the_other() -> None:
    """Rows of 88 bytes. In `test_a_divided_model_answers_as_peft_does`, a division among ranks makes such rows."""
    model = make_model("gpt_oss", intermediate_size=22, num_hidden_layers=2).eval()
    tokens = torch.arange(3, 20)[None]
    model.set_experts_implementation("batched_mm")
    expected = model(tokens).logits
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(RuntimeError, match="16 bytes"):
        model(tokens)
    avoid_grouped_products(model)
    torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.parametrize("model", soaked(["mixtral", "qwen2_moe"], "qwen2_moe"))
def test_a_checkpoint_with_stacks_of_experts_answers_as_one_with_a_tensor_for_each(
    tmp_path: Path, model: str
) -> None:
    base = write_model(tmp_path / "each", model, num_hidden_layers=2)
    base.save_pretrained(tmp_path / "stacks", save_original_format=False)
    names = [set(load_file(tmp_path / form / "model.safetensors")) for form in ("each", "stacks")]
    assert not names[0] & {name for name in names[1] if "experts.gate_up_proj" in name}
    assert any("experts.gate_up_proj" in name for name in names[1])
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    answers = []
    for form in ("each", "stacks"):
        llm = LLM(tmp_path / form, kernels=KERNELS, pool_bytes=1 << 22)
        (answer,) = llm.generate([[5, 6, 7]], params)
        answers.append((answer.token_ids, [entry.logprob for entry in answer.logprobs or ()]))
    assert answers[0] == answers[1]
