import math
from collections.abc import Sequence as Rows

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.sampling.sampler import sample, token_logprobs
from slora.sampling.sampling_table import SamplingTable
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken
from slora_kernels.kernel_selector import select_kernels
from tests.support.covering import soaked

VOCAB_SIZE = 24
KERNELS = select_kernels("auto", torch.device("cpu"))


def make_sequence(
    params: SamplingParams,
    seed: int = 0,
    num_tokens: int = 1,
    *,
    generated: Rows[int] = (),
    stop_ids: Rows[int] = (),
) -> Sequence:
    """A sequence whose prompt is token 0 repeated `num_tokens` times, followed by the `generated` tokens."""
    request = EngineRequest("r", "t", [0] * num_tokens, (), params)
    sequence = Sequence(request, TenantAccount("t"), 1, frozenset(stop_ids), seed, BlockTable(16))
    sequence.token_ids.extend(generated)
    return sequence


def make_table(
    sequences: Rows[Sequence], vocab_size: int = VOCAB_SIZE, device: torch.device | None = None
) -> SamplingTable:
    table = SamplingTable(len(sequences), vocab_size, device or torch.device("cpu"))
    for row, sequence in enumerate(sequences):
        sequence.row = row
        table.write(row, sequence)
    return table


def sample_once(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[SampledToken]:
    return sample(logits, make_table(sequences, logits.shape[1]), list(sequences), KERNELS).read()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def tokens_of(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[int | None]:
    return [sampled.token_id for sampled in sample_once(logits, sequences)]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [V]: probabilities after transformers' own filters, applied in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].double())[0].softmax(-1)


def check_fits(samples: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square test at about five standard deviations, with the cube-root approximation of Wilson and
    Hilferty."""
    counts = torch.bincount(samples, minlength=VOCAB_SIZE).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "a token that was filtered out was drawn"
    # Rare tokens share a bin, because the approximation needs a few expected samples in each bin.
    expected = probabilities * len(samples)
    rare = possible & (expected < 5)
    observed = torch.cat((counts[possible & ~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[possible & ~rare], expected[rare].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 5


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=1000, top_p=0.01),
    SamplingParams(top_p=0.0),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", soaked(PARAMS, *PARAMS[1:3], *PARAMS[5:8], PARAMS[-1]))
def test_draws_over_seeds_follow_the_filtered_distribution(params: SamplingParams, *, soak: bool) -> None:
    logits = random_logits(1)[0]
    count = 20_000 if soak else 2_000
    sequences = [make_sequence(params, seed=seed) for seed in range(count)]
    samples = torch.tensor(tokens_of(logits.expand(count, -1), sequences))
    check_fits(samples, distribution(logits, params))


def test_a_gpus_kernels_choose_the_same_tokens() -> None:
    """One batch of a 16-bit model has rows sampled with and without filters, rows with biases, greedy rows and rows
    with NaN."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = [*PARAMS, SamplingParams(temperature=0.0), SamplingParams(top_p=0.7, presence_penalty=1.0)] * 3
    sequences = [make_sequence(one, seed=n, generated=[5, 6]) for n, one in enumerate(params)]
    logits = random_logits(len(params)).bfloat16()
    logits[4, 7] = math.nan
    chosen = []
    for name, where in (("torch", torch.device("cpu")), ("triton", device)):
        table = make_table(sequences, device=where)
        sampled = sample(logits.to(where), table, sequences, select_kernels(name, where)).read()
        chosen.append([one.token_id for one in sampled])
    assert chosen[0] == chosen[1] and [token is None for token in chosen[0]].count(True) == 1


def test_draws_over_the_positions_of_one_answer_follow_the_distribution() -> None:
    logits, params = random_logits(1)[0], SamplingParams()
    sequences = [make_sequence(params, seed=1234, num_tokens=n) for n in range(1, 3001)]
    samples = torch.tensor(tokens_of(logits.expand(len(sequences), -1), sequences))
    check_fits(samples, distribution(logits, params))
    # Consecutive samples must be independent too, so pairs are tested.
    pairs = (samples[:-1] < 12) * 2 + (samples[1:] < 12)
    share = distribution(logits, params)[:12].sum()
    check_fits(pairs, torch.tensor([(1 - share) ** 2, *[share * (1 - share)] * 2, share**2, *[0] * 20]))


@given(
    st.integers(0, 1 << 30),
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-40, 1e-6, 0.3, 1.0, 2.0]),
            top_p=st.sampled_from([1e-9, 0.2, 0.9, 1.0]),
            top_k=st.sampled_from([0, 1, 3, VOCAB_SIZE, 10**9]),
            logprobs=st.sampled_from([None, 0, 3]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_row_draws_the_same_token_alone_and_in_any_batch(seed: int, params: list[SamplingParams]) -> None:
    logits = random_logits(len(params), seed)
    sequences = [make_sequence(one, seed=seed + n, num_tokens=n + 1) for n, one in enumerate(params)]
    together = sample_once(logits, sequences)
    alone = [sample_once(logits[n : n + 1], [sequence])[0] for n, sequence in enumerate(sequences)]
    assert [one.token_id for one in together] == [one.token_id for one in alone]
    assert [one.logprobs is None for one in together] == [one.logprobs is None for one in params]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Born from a bug: dividing by 1e-40 overflowed, and the last token of the vocabulary was sampled."""
    logits = random_logits(50) * 10
    sequences = [make_sequence(SamplingParams(temperature=temperature), seed=n) for n in range(50)]
    assert tokens_of(logits, sequences) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-50, 1e-12])
def test_a_tiny_top_p_keeps_only_the_most_likely_token(top_p: float) -> None:
    logits = random_logits(50)
    sequences = [make_sequence(SamplingParams(top_p=top_p), seed=n) for n in range(50)]
    assert tokens_of(logits, sequences) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_unmodified_distribution(temperature: float) -> None:
    logits = random_logits(3, seed=1)
    params = [SamplingParams(temperature=temperature, top_k=2, logprobs=k) for k in (0, 5, None)]
    rows = sample_once(logits, [make_sequence(one, seed=7) for one in params])
    expected = logits.log_softmax(-1)
    for row, wanted, sampled in zip(expected, (0, 5), rows, strict=False):
        assert sampled.token_id is not None and sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(row[sampled.token_id].item())
        values, tokens = row.topk(wanted)
        assert [token for token, _ in sampled.logprobs.top] == tokens.tolist()
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(values.tolist())
    assert rows[2].logprobs is None


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_chosen_token_is_the_first_of_equally_probable_ones(count: int) -> None:
    """Born from a bug: at an exact tie, the first of the listed tokens was another one than the chosen token."""
    logits = torch.zeros(3, 64)
    logits[1, 40:44] = 1
    logits[2, 7] = 1
    tokens = torch.tensor([63, 42, 30])
    for row, token, one in zip(
        logits, tokens.tolist(), token_logprobs(logits, tokens, [count] * 3), strict=True
    ):
        listed = [other for other, _ in one.top]
        assert (
            len(set(listed)) == count
            and [value for _, value in one.top] == sorted(row.log_softmax(0).tolist(), reverse=True)[:count]
        )
        if row[token] == row.max():
            assert one.top[0] == (token, one.logprob)
        elif count > 1:
            assert listed[:2] == [7, token]


def test_logprobs_of_chosen_tokens_take_the_place_of_the_most_probable_ones() -> None:
    """Beside rows that list another number of tokens, or the most probable ones."""
    logits = random_logits(4, seed=1)
    best = int(logits[2].argmax())
    wanted = [(3, 1), (), (best, 0, 2), ()]
    fields = [{"logprob_token_ids": ids, "logprobs": 2} for ids in wanted[:3]] + [{}]
    rows = sample_once(logits, [make_sequence(SamplingParams(temperature=0, **one)) for one in fields])  # type: ignore[arg-type]
    expected = logits.log_softmax(-1)
    for row, ids, sampled in zip(expected, wanted, rows[:3], strict=False):
        assert sampled.token_id is not None and sampled.logprobs is not None
        listed = [sampled.token_id, *(token for token in ids if token != sampled.token_id)]
        tokens = listed if ids else row.topk(2).indices.tolist()
        assert [token for token, _ in sampled.logprobs.top] == tokens
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(row[tokens].tolist())
    assert rows[2].token_id == best and rows[3].logprobs is None


@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_own_row_alone(damage: float, temperature: float) -> None:
    logits = random_logits(3)
    sequences = [make_sequence(SamplingParams(temperature=temperature, logprobs=2), seed=n) for n in range(3)]
    sound = tokens_of(logits, sequences)
    logits[1, 5] = damage
    assert tokens_of(logits, sequences) == [sound[0], None, sound[2]]


def test_a_row_of_nothing_but_minus_infinity_fails() -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    assert tokens_of(logits, [make_sequence(SamplingParams())]) == [None]


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = random_logits(1).repeat(500, 1)
    logits[:, ::2] = -math.inf
    samples = tokens_of(logits, [make_sequence(SamplingParams(temperature=2.0), seed=n) for n in range(500)])
    assert all(token is not None and token % 2 == 1 for token in samples)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_logits_are_drawn_from_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(200).to(dtype)
    sequences = [make_sequence(SamplingParams(top_p=0.9, logprobs=1), seed=n) for n in range(200)]
    assert sample_once(logits, sequences) == sample_once(logits.float(), sequences)


def test_negative_and_huge_seeds_draw_like_any_other() -> None:
    logits = random_logits(1).expand(4, -1)
    seeds = [-1, -(2**63), 2**63 - 1, 0]
    tokens = tokens_of(logits, [make_sequence(SamplingParams(), seed=seed) for seed in seeds])
    assert tokens == tokens_of(logits, [make_sequence(SamplingParams(), seed=seed) for seed in seeds])
    assert all(token is not None for token in tokens)
