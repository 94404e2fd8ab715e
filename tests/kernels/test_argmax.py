import pytest
import torch

from slora_kernels.ops import Kernels


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "dtype",
    (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.compiled_late)),
)
@pytest.mark.parametrize("width", (1, 255, 256, 300, 512, 1000, 20_000))
def test_the_likeliest_token_is_the_first_of_equals_wherever_it_lies(
    kernels: Kernels, device: str, dtype: torch.dtype, width: int
) -> None:
    """The kernel agrees with torch's max. A NaN is returned, whatever its sign."""
    random = torch.Generator().manual_seed(width)
    logits = torch.randn(14, width, generator=random).round()
    logits[0, width // 2] = torch.nan
    logits[1, -1] = -torch.nan
    logits[2] = -torch.inf
    logits[3] = 1.0
    logits[4, [0, -1]] = 9.0
    logits[5, -1] = 9.0
    logits[6] = -torch.arange(width).float() - 3
    logits[7, width // 3] = torch.inf
    logits[8] = torch.tensor([-0.0, 0.0]).repeat(width)[:width]
    logits = logits.to(dtype).to(device)
    best, token = kernels.argmax(logits)
    expected = logits.float().max(dim=-1)
    sound = ~expected.values.isnan()
    assert best.dtype == torch.float32 and token.dtype == torch.int64
    assert torch.equal(best.isnan(), ~sound) and bool(((token >= 0) & (token < width)).all())
    assert torch.equal(token[sound], expected.indices[sound]) and torch.equal(
        best[sound], expected.values[sound]
    )


def test_rows_of_a_wider_tensor_are_read_in_place(kernels: Kernels, device: str) -> None:
    wide = torch.randn(5, 700, device=device)
    wide[:, 600:] = 100.0
    best, token = kernels.argmax(wide[:, :600])
    expected = wide[:, :600].max(dim=-1)
    assert torch.equal(token, expected.indices) and torch.equal(best, expected.values)


def test_rows_of_an_expanded_tensor_are_read_in_place(kernels: Kernels, device: str) -> None:
    row = torch.randn(300, device=device)
    best, token = kernels.argmax(row.expand(4, -1))
    assert best.tolist() == [row.max().item()] * 4 and token.tolist() == [row.argmax().item()] * 4
