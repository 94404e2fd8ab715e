"""Experts of a mixture: which tokens they compute, and how checkpoints name them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slora import LLM, SamplingParams
from slora.models.decoder import ExpertChoice
from slora.models.mixture_layers import avoid_grouped_products
from slora.models.model_config import ExpertConfig
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS
from tests.support.tiny_models import make_model, write_model


def make_experts(count: int, chosen: int, *, normalizes: bool) -> ExpertConfig:
    return ExpertConfig(count, chosen, 8, "moe_intermediate_size", normalizes, frozenset({0}))


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("num_tokens", "count", "chosen"), [(1, 4, 1), (7, 5, 3), (40, 6, 6)])
def test_each_token_gets_the_weighted_sum_of_its_experts(
    num_tokens: int, count: int, chosen: int, normalizes: bool
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, count, generator=random)
    x = torch.randn(num_tokens, 3, generator=random)
    choice = ExpertChoice.of(logits, make_experts(count, chosen, normalizes=normalizes))
    starts, factors = choice.starts.tolist(), torch.arange(1.0, count + 1)
    assert (starts[0], starts[-1]) == (0, num_tokens * chosen)
    rows = choice.spread(x)
    for expert in range(count):
        rows[starts[expert] : starts[expert + 1]] *= factors[expert]
    weights = logits.softmax(-1)
    weights = weights * (weights >= weights.topk(chosen).values[:, -1:])
    if normalizes:
        weights /= weights.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.combine(rows), x * (weights @ factors)[:, None])


def test_a_token_has_the_same_bits_in_any_order_of_the_tokens() -> None:
    config = make_experts(5, 3, normalizes=True)
    random = torch.Generator().manual_seed(4)
    logits, x = torch.randn(30, 5, generator=random), torch.randn(30, 8, generator=random)
    order = torch.randperm(30, generator=random)
    straight, shuffled = (ExpertChoice.of(logits[rows], config) for rows in (torch.arange(30), order))
    mixed = straight.combine(straight.spread(x).square())
    assert torch.equal(shuffled.combine(shuffled.spread(x[order]).square()), mixed[order])


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
