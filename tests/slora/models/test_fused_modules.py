"""Which modules of transformers' classes kernels compute, and that those get what the module's own code gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from slora.models.fused_modules import MlpForm, find_mlp_division, find_mlp_form, fuse_norms
from slora_kernels.torch.torch_kernels import TorchKernels


class Scaled(LlamaRMSNorm):
    """Multiplies before it rounds, and by twice the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class Counted(TorchKernels):
    calls = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.calls += 1
        assert x.is_contiguous(), "Triton's kernel takes rows that lie one after the other"
        return super().rms_norm(x, weight, eps)


@pytest.mark.parametrize(
    ("norm", "is_fused"),
    [
        (LlamaRMSNorm(64, eps=1e-3), True),
        (Gemma3RMSNorm(64, eps=1e-6), True),
        (Scaled(64), False),
        (nn.LayerNorm(64, bias=False), False),
        (nn.RMSNorm(64, eps=1e-5), True),
        (Qwen3_5RMSNormGated(64), False),
        (GraniteMoeHybridRMSNormGated(64, 32), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_is_fused_if_its_own_code_computes_the_same(norm: nn.Module, *, is_fused: bool) -> None:
    kernels, is_in_step = Counted(), True

    def find_step() -> Any:
        return (None, kernels) if is_in_step else None

    weight = norm.get_parameter("weight")
    weight.data = torch.randn(64)
    model = nn.ModuleList([norm])
    fuse_norms(model, find_step)
    assert ("forward" in vars(norm)) == is_fused
    if is_fused:
        x = torch.randn(1, 5, 4, 128)[..., :64]
        found, own = norm(x), torch.func.functional_call(norm, {"weight": torch.ones(64)}, (x,))
        assert kernels.calls == 2
        is_in_step = False
        torch.testing.assert_close(found, norm(x))
        torch.testing.assert_close(own, torch.func.functional_call(norm, {"weight": torch.ones(64)}, (x,)))
        assert kernels.calls == 2


class Mlp(nn.Module):
    """An MLP with linears a, b and c, and code of its own."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        self.compute = compute
        self.act = nn.GELU()
        for name in "abc"[:count]:
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def halve(m: Any, x: Tensor) -> Tensor:
    gate, up = m.a(x).chunk(2, dim=-1)
    return m.b(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("compute", "form"),
    [
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(x)), MlpForm(("c", "a"), "b", "gelu")),
        (lambda m, x: m.c(m.b(x) * torch.nn.functional.silu(m.a(x))), MlpForm(("a", "b"), "c", "silu")),
        (halve, MlpForm(("a",), "b", "silu")),
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(x) * 1.01), None),
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(2 * x)), None),
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(x)) + x, None),
        (lambda m, x: m.b(m.a(x) * m.c(x)), None),
        (lambda m, x: m.b(torch.relu(m.a(x)) * m.c(x)), None),
        (lambda m, x: m.c(m.b(m.act(m.a(x)))), None),
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(x) * m.a.weight[0]), None),
        (lambda m, x: m.b(m.act(m.c(x).clamp(max=10.0)) * m.a(x)), None),
        (lambda m, x: m.b(m.act(m.c(x)) * m.a(x).clamp(-1000.0, 1000.0)), None),
        (lambda m, x: m.b(m.act(m.c(x)).clamp(max=16.0) * m.a(x)), None),
    ],
)
def test_an_mlp_is_recognised_by_what_it_does_with_its_linears(
    compute: Callable[[Any, Tensor], Tensor], form: MlpForm | None
) -> None:
    assert find_mlp_form(Mlp(compute, 2 if compute is halve else 3)) == form


def interleave(m: Any, x: Tensor) -> Tensor:
    between = m.a(x)
    return m.b(between[..., ::2] * between[..., 1::2].tanh())


def normalize(m: Any, x: Tensor) -> Tensor:
    between = m.act(m.a(x))
    return m.b(between / between.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize(
    ("compute", "count", "division"),
    [
        (lambda m, x: 3 * m.b(m.act(m.c(x)) * m.a(2 * x)), 3, {"c": "rows", "a": "rows", "b": "columns"}),
        (lambda m, x: m.b(m.act(m.a(x)).square()), 2, {"a": "rows", "b": "columns"}),
        (halve, 2, {"a": "halves", "b": "columns"}),
        (interleave, 2, {"a": "rows", "b": "columns"}),
        (normalize, 2, {}),
        (lambda m, x: m.b(m.act(m.a(x)).flip(-1)), 2, {}),
        (lambda m, x: m.c(m.b(m.act(m.a(x)))), 3, {}),
        (lambda m, x: m.b(m.a(x)) * m.a(x).mean(-1, keepdim=True), 2, {}),
        (lambda m, x: m.b(m.act(m.c(x))) + m.a(x).mean(-1, keepdim=True), 3, {}),
        (lambda m, x: m.b(m.act(m.a(x)) * m.a.weight[0]), 2, {}),
        (lambda m, x: (m.b(m.act(m.a(x))), None), 2, {}),
    ],
)
def test_an_mlp_is_divided_if_its_last_linear_needs_no_outputs_of_other_ranks(
    compute: Callable[[Any, Tensor], Tensor], count: int, division: dict[str, str]
) -> None:
    assert find_mlp_division(Mlp(compute, count)) == division
