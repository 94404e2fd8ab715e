"""Sampling kernels: filters agree with transformers' own warpers, kernels with their torch twins, and rows are
independent."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slora_kernels.gpu.gumbel_sample import bind_gumbel_sample
from slora_kernels.gpu.token_cutoffs import bind_token_cutoffs
from slora_kernels.gpu.token_weights import SAMPLE_BLOCK, WEIGHT_ONE, bind_token_weights
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.ops import Kernels
from slora_kernels.sampling_tensors import NO_TOP_K, SamplingTensors
from slora_kernels.torch import reference
from slora_kernels.torch.token_sampling import apply_filters, compute_weights, gumbel_sample

# The device of Triton's kernels: a GPU if there is one.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def column(value: float, rows: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, 1), value, dtype=dtype)


def make_sampling(
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    *,
    temperature: Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    device: torch.device = DEVICE,
) -> SamplingTensors:
    """Sampling parameters of each row. A top_k of 0 disables the filter."""
    count = len(top_k)
    whole = [rows or range(count), keys or range(count), [k or NO_TOP_K for k in top_k]]
    fractions = [temperature or [1.0] * count, top_p, min_p]
    return SamplingTensors.upload(np.array(whole, np.int64), np.array(fractions, np.float64), device)


def find_cutoffs(weights: torch.Tensor, sampling: SamplingTensors) -> list[float]:
    """The cutoffs that Triton's kernel finds for integer weights [N, width]."""
    launch, cutoffs = bind_token_cutoffs(weights.float().to(DEVICE), sampling)
    launch.run()
    return cutoffs.tolist()


def whole_weights(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, width]: integer weights of logits [N, V]."""
    max_logits = logits.amax(-1, keepdim=True)
    return compute_weights(logits, max_logits, column(1.0, len(logits))).float()


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool, shaped like `logits` [B, V]: the tokens that pass the filters."""
    rows = len(logits)
    weights = compute_weights(logits, logits.amax(-1, keepdim=True), column(temperature, rows))
    limits = column(top_k or NO_TOP_K, rows, torch.int64), column(top_p, rows), column(min_p, rows)
    return apply_filters(weights, *limits)[:, : logits.shape[1]] > 0


def kept_by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.double()) > float("-inf")


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (300, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 0.01, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.02),
        (0, 1.0, 1.0),
        (40, 0.9, 0.0),
        (700, 0.7, 0.001),
        (40, 0.95, 0.05),
    ],
)
@pytest.mark.parametrize("vocab_size", [100, 6007])
def test_filters_keep_what_transformers_keeps(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    mine = kept(logits, temperature, top_k, top_p, min_p)
    theirs = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    # Near 2**-42 of the most probable token, integer weights are too coarse to tell all tokens apart.
    likelihoods = ((logits - logits.amax(-1, keepdim=True)) / temperature).double().exp()
    assert not (mine != theirs)[likelihoods > 2.0**-26].any()


def test_tied_tokens_are_kept_or_filtered_together() -> None:
    """Tokens with equal logits are kept or dropped together, because 16-bit logits have many ties and token ids
    carry no order."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for top_k, top_p in ((2, 1.0), (3, 1.0), (0, 0.6), (3, 0.7)):
        assert kept(logits, 1.0, top_k, top_p, 0.0).tolist() == [[True, True, True, True, False]]


@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 2000), st.booleans())
def test_filters_and_draw_of_a_row_are_the_same_bits_in_any_batch(
    seed: int, rows: int, vocab_size: int, coarse: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=random) * 3
    if coarse:
        logits = logits.bfloat16().float()
    max_logits, temperature = logits.amax(-1, keepdim=True), torch.rand(rows, 1, generator=random) + 0.1
    top_k = torch.randint(1, 2 * vocab_size, (rows, 1), generator=random)
    top_p, min_p = torch.rand(2, rows, 1, generator=random) ** 2
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    weights = apply_filters(compute_weights(logits, max_logits, temperature), top_k, 1 - top_p, min_p / 10)
    tokens = gumbel_sample(weights, keys)
    assert (tokens < vocab_size).all() and (weights.gather(1, tokens[:, None]) > 0).all()
    for n in torch.randperm(rows, generator=random).tolist():
        one = slice(n, n + 1)
        alone = apply_filters(
            compute_weights(logits[one].clone(), max_logits[one], temperature[one]),
            top_k[one],
            1 - top_p[one],
            min_p[one] / 10,
        )
        assert torch.equal(alone, weights[one])
        assert torch.equal(gumbel_sample(alone, keys[one]), tokens[one])


def test_a_rounding_in_the_logits_changes_as_few_draws_as_can_be(soak: bool) -> None:
    """If n logits are off by d, the share of changed samples is about d, whatever the vocabulary size.

    With an inverse CDF, all borders would shift together, and 200 times as many samples would change.
    """
    rounds, rows, vocab_size, off = (400 if soak else 20), 500, (32_000 if soak else 4_000), 1e-4
    random = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(rounds):
        logits = torch.randn(1, vocab_size, generator=random) * 2
        noise = torch.randn(1, vocab_size, generator=random) * off
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
        one = column(1.0)
        before, after = (
            gumbel_sample(compute_weights(x, logits.amax(-1, keepdim=True), one).expand(rows, -1), keys)
            for x in (logits, logits + noise)
        )
        changed += int((before != after).sum())
    assert changed <= 10 * off * rounds * rows


# Rows for which a search for a cutoff is difficult, all of one width.
WIDTHS = (256, 1024, 16_640)
# The width of a real vocabulary takes seconds in Triton's interpreter.
VOCABULARY = pytest.param(128_256, marks=pytest.mark.soak)


def awkward_rows(width: int) -> torch.Tensor:
    """float32 [N, width]: integers up to WEIGHT_ONE."""
    random = torch.Generator().manual_seed(width)
    logits = torch.randn(1, width, generator=random) * 3
    one = torch.tensor([WEIGHT_ONE])
    rows = {
        "normal": whole_weights(logits)[0],
        "of 16 bits, with many ties": whole_weights(logits.bfloat16().float())[0],
        "flat": torch.full((width,), WEIGHT_ONE),
        "flat but for one": torch.cat((one, torch.full((width - 1,), 3.0))),
        "one-hot": torch.cat((torch.zeros(width - 1), one)),
        "two values": torch.where(torch.arange(width) % 3 == 0, WEIGHT_ONE, WEIGHT_ONE / 2),
        "the least weights": torch.cat((one, torch.arange(width - 1) % 2)),
        "as close as can be": torch.cat((one, WEIGHT_ONE - 2.0**18 * (torch.arange(width - 1) % 50 + 1.0))),
        "nothing": torch.zeros(width),
    }  # fmt: skip
    return torch.stack(list(rows.values()))


FILTERS = (
    (1, 1.0, 0.0),
    (2, 1.0, 0.0),
    (50, 1.0, 0.0),
    (0, 1e-30, 0.0),
    (0, 0.5, 0.0),
    (0, 1 - 2**-24, 0.0),
    (0, 1.0, 1e-9),
    (200, 0.999, 0.0),
    (7, 0.9, 0.3),
)


@pytest.mark.parametrize(
    ("width", "top_k", "top_p", "min_p"),
    [
        *((width, *filters) for width in WIDTHS for filters in (FILTERS if width == 1024 else FILTERS[-1:])),
        *(pytest.param(128_256, *filters, marks=pytest.mark.soak) for filters in FILTERS[-2:]),
    ],
)
def test_a_cutoff_is_the_one_that_sorting_finds(width: int, top_k: int, top_p: float, min_p: float) -> None:
    weights = awkward_rows(width)
    count = len(weights)
    sampling = make_sampling([top_k] * count, [top_p] * count, [min_p] * count)
    found, expected = find_cutoffs(weights, sampling), reference.token_cutoffs(weights, sampling)
    sound = weights.amax(-1) == WEIGHT_ONE
    assert [f for f, s in zip(found, sound, strict=True) if s] == [
        e for e, s in zip(expected, sound, strict=True) if s
    ]


@pytest.mark.parametrize("top_k", (255, 257, 1023, 1024, 1025, 1300, 2048, 2049))
def test_a_top_k_near_the_width_and_near_what_is_written_down(top_k: int) -> None:
    random = torch.Generator().manual_seed(top_k)
    weights = whole_weights(torch.randn(3, 2048, generator=random) * 2)
    weights[1, 1300:] = 0
    sampling = make_sampling([top_k] * 3, [1.0, 1.0, 0.99], [0.0] * 3)
    assert find_cutoffs(weights, sampling) == reference.token_cutoffs(weights, sampling)


# In Triton's interpreter an example takes half a second.
@settings(max_examples=settings.default.max_examples // 4)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 7, 256, 511, 512, 600]),
            st.sampled_from([1e-9, 0.1, 0.5, 0.93, 1 - 1e-7, 1.0]),
            st.sampled_from([0.0, 1e-6, 0.2, 1.0]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 30),
)
def test_cutoff_and_draw_of_a_row_are_its_twins_alone_and_in_any_batch(
    asked: list[tuple[int, float, float, int]], seed: int
) -> None:
    """digits: the precision of the weights. Fewer digits make more ties."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(asked),), generator=random).tolist()
    logits = torch.stack(
        [(torch.randn(512, generator=random) * 3 * 2**digits).round() / 2**digits for *_, digits in asked]
    )
    weights = whole_weights(logits)
    top_k, top_p, min_p = ([one[i] for one in asked] for i in range(3))
    sampling = make_sampling(top_k, top_p, min_p, keys=keys)
    expected = reference.token_cutoffs(weights, sampling)
    assert find_cutoffs(weights, sampling) == expected
    tokens = run_gumbel_sample(weights, expected, sampling)
    assert tokens == reference.gumbel_sample(weights, expected, sampling.keys, SAMPLE_BLOCK)
    for n in range(len(asked)):
        alone = make_sampling(top_k[n : n + 1], top_p[n : n + 1], min_p[n : n + 1], keys=keys[n : n + 1])
        one = weights[n : n + 1]
        assert find_cutoffs(one, alone) == expected[n : n + 1]
        assert run_gumbel_sample(one, expected[n : n + 1], alone) == tokens[n : n + 1]


def run_gumbel_sample(
    weights: torch.Tensor, cutoffs: list[int] | None, sampling: SamplingTensors
) -> list[int]:
    least = None if cutoffs is None else torch.tensor(cutoffs, dtype=torch.float32, device=DEVICE)
    launch, tokens = bind_gumbel_sample(weights.to(DEVICE), least, sampling, weights.shape[1])
    launch.run()
    drawn: list[int] = tokens.tolist()
    return drawn


@pytest.mark.parametrize("width", (*WIDTHS, VOCABULARY))
def test_a_row_gets_the_same_token_as_from_the_reference(width: int) -> None:
    weights = awkward_rows(width)[:-1]
    count = len(weights)
    sampling = make_sampling(
        [0] * count, [1.0] * count, [0.0] * count, keys=[-(2**63), 2**63 - 1, *range(2, count)]
    )
    expected = reference.gumbel_sample(weights, [0] * count, sampling.keys, SAMPLE_BLOCK)
    assert run_gumbel_sample(weights, None, sampling) == expected


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("vocab_size", (1, 255, 1000, 2051))
def test_token_weights_are_rounded_down_to_integers(vocab_size: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    wide = (torch.randn(4, vocab_size + 5, generator=random) * 4).to(dtype).to(DEVICE)
    logits = wide[:, :vocab_size]  # a view whose rows are not contiguous
    max_logits = logits.float().amax(-1)
    sampling = make_sampling([0] * 3, [1.0] * 3, [0.0] * 3, temperature=[0.5, 1.0, 2.0], rows=[3, 0, 2])
    launch, weights = bind_token_weights(logits, max_logits, sampling)
    launch.run()
    expected = reference.token_weights(logits, max_logits, sampling)
    assert torch.equal(weights, weights.floor()) and weights.shape[1] % SAMPLE_BLOCK == 0
    assert torch.equal(weights.amax(-1), torch.full_like(weights[:, 0], WEIGHT_ONE)), "the likeliest weighs 1"
    assert not weights[:, vocab_size:].any()
    # The error of exp() of up to 60 in float32, and the truncation.
    bound = expected * 60 * 2.0**-23 + 1
    assert bool(((weights[:, :vocab_size] - expected).abs() <= bound).all())


# The interpreter warns: a tiny temperature turns all logits below the maximum into minus infinity.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.interpreted_slowly))
)
@pytest.mark.parametrize("vocab_size", (3, 1000, 5000))
def test_every_implementation_draws_the_same_tokens(
    kernels: Kernels, device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    """Some rows sample and some do not. A row with NaN gets a token and does not affect other rows."""
    random = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(12, vocab_size, generator=random) * 3).to(dtype)
    asked = {
        "top_k": [0, 1, 5, 0, 40, 0, 0, 0, 0],
        "top_p": [1.0, 1.0, 1.0, 0.3, 0.9, 1.0, 0.5, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.01, 0.2, 0.0, 0.0, 0.0],
    }
    temperature, rows = [1.0, 2.0, 1.5, 1.0, 0.7, 1e-40, 1.0, 1.0, 1.0], [11, 0, 3, 4, 5, 7, 8, 9, 10]
    keys = torch.randint(-(2**63), 2**63 - 1, (9,), generator=random).tolist()

    def draw(with_kernels: Kernels, where: str) -> list[int]:
        sampling = make_sampling(
            **asked, temperature=temperature, rows=rows, keys=keys, device=torch.device(where)
        )
        there = logits.to(where)
        return with_kernels.sample(there, there.float().amax(-1), sampling).tolist()

    sound = draw(select_kernels("torch", torch.device("cpu")), "cpu")
    assert draw(kernels, device) == sound
    logits[8], logits[9, 1], logits[10] = torch.nan, torch.inf, -torch.inf
    damaged = draw(kernels, device)
    assert damaged[:6] == sound[:6]
    assert all(0 <= token < vocab_size for token in damaged)
