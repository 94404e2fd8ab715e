"""Biases, barred tokens and penalties, compared with transformers' own processors and OpenAI's formula."""

import math
import random

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.sampling.sampler import apply_penalties, apply_penalties_to_all_tokens, process_logits
from slora.sampling.sampling_table import SamplingTable
from slora.scheduler.sequence import Sequence

VOCAB_SIZE = 50
CPU = torch.device("cpu")


def make_sequence(
    params: SamplingParams, prompt: list[int], generated: list[int], stop_ids: frozenset[int] = frozenset()
) -> Sequence:
    sequence = Sequence(
        EngineRequest("r", "t", prompt, (), params), TenantAccount("t"), 100, stop_ids, 0, BlockTable(16)
    )
    sequence.token_ids.extend(generated)
    return sequence


def processed(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    table = SamplingTable(len(sequences) + 2, logits.shape[1], CPU)
    # Rows are not in the order of the batch, as in a server.
    for row, sequence in enumerate(reversed(sequences), start=1):
        sequence.row = row
        table.write(row, sequence)
    return process_logits(logits, table.gather(sequences), table)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 5


def random_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(4)
    params = SamplingParams(repetition_penalty=penalty)
    sequences = [make_sequence(params, random_tokens(n, 9), random_tokens(n + 9, n * 7)) for n in range(4)]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row, (result, sequence) in enumerate(zip(processed(logits, sequences), sequences, strict=True)):
        expected = processor(torch.tensor([sequence.token_ids]), logits[row : row + 1])[0]
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.5), (1.5, 0.0), (-2.0, 2.0), (0.3, -0.7)])
def test_presence_and_frequency_follow_openais_formula_over_the_answer_alone(
    presence: float, frequency: float
) -> None:
    """OpenAI's formula: mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence"""
    logits = random_logits(3)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    answers = [[], [7], random_tokens(1, 200)]
    sequences = [make_sequence(params, random_tokens(2, 30), answer) for answer in answers]
    results = processed(logits, sequences)
    for result, before, answer in zip(results, logits, answers, strict=True):
        for token in range(VOCAB_SIZE):
            count = answer.count(token)
            expected = before[token] - count * frequency - float(count > 0) * presence
            assert result[token].item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_bias_is_added_to_its_token_alone() -> None:
    logits = random_logits(3)
    biases: list[dict[int, float]] = [{0: 100.0, 49: -100.0, 7: 0.5}, {}, {0: -1.5}]
    sequences = [make_sequence(SamplingParams(logit_bias=bias), [1], []) for bias in biases]
    results = processed(logits, sequences)
    for result, before, bias in zip(results, logits, biases, strict=True):
        expected = before.clone()
        if bias:
            processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
            expected = processor(torch.tensor([[1]]), before[None])[0]
        assert torch.equal(result, expected)


@pytest.mark.parametrize("num_generated", [0, 2, 3, 5])
def test_stop_tokens_are_barred_until_min_tokens_as_in_transformers(num_generated: int) -> None:
    logits = random_logits(1)
    params = SamplingParams(min_tokens=3)
    sequence = make_sequence(params, [4, 5], [6] * num_generated, frozenset({9, 0, 1000}))
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [9, 0], device="cpu")
    expected = processor(torch.tensor([sequence.token_ids]), logits)
    assert torch.equal(processed(logits, [sequence]), expected)
    assert torch.isinf(expected).any() == (num_generated < 3)


def test_a_barred_token_stays_barred_whatever_its_bias_and_penalty() -> None:
    params = SamplingParams(
        min_tokens=1, logit_bias={3: 100.0}, presence_penalty=-2.0, repetition_penalty=0.5
    )
    sequence = make_sequence(params, [3], [], frozenset({3}))
    assert processed(random_logits(1), [sequence])[0, 3] == -math.inf


def test_biases_come_before_penalties() -> None:
    params = SamplingParams(logit_bias={3: 4.0}, repetition_penalty=2.0, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert processed(logits, [make_sequence(params, [1], [3, 3])])[0, 3] == 4.0 / 2 - 2


def test_a_request_without_penalties_keeps_its_logits_unchanged() -> None:
    logits = random_logits(2)
    before = logits.clone()
    plain = make_sequence(SamplingParams(), [1], [2])
    assert processed(logits, [plain]) is logits
    results = processed(logits, [plain, make_sequence(SamplingParams(presence_penalty=1), [1], [2])])
    assert torch.equal(results[0], logits[0]) and not torch.equal(results[1], logits[1])
    assert torch.equal(logits, before)


def test_incremental_counts_equal_those_of_a_rewritten_row() -> None:
    """A row is written anew after a preemption, when a sequence restarts with the tokens that it has generated."""
    rng = random.Random(3)
    params = SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=6)
    table = SamplingTable(6, VOCAB_SIZE, CPU)
    sequences = [make_sequence(params, random_tokens(n, 5), [], frozenset({1, 2})) for n in range(4)]
    for row, sequence in enumerate(sequences):
        sequence.row = row
        table.write(row, sequence)
    for _ in range(12):
        some = rng.sample(sequences, rng.randint(1, 4))
        tokens = [rng.randrange(VOCAB_SIZE) for _ in some]
        table.advance(table.gather(some), torch.tensor(tokens))
        for sequence, token in zip(some, tokens, strict=True):
            sequence.token_ids.append(token)
        logits = random_logits(4)
        kept = process_logits(logits, table.gather(sequences), table)
        assert torch.equal(kept, processed(logits, sequences))
        for row, sequence in enumerate(sequences):
            sequence.row = row


def test_a_reused_row_keeps_nothing_of_its_previous_sequence() -> None:
    logits = random_logits(1)
    table = SamplingTable(1, VOCAB_SIZE, CPU)
    wild = SamplingParams(logit_bias=dict.fromkeys(range(30), 9.0), presence_penalty=2.0, min_tokens=5)
    for params, generated in ((wild, [1, 2, 3]), (SamplingParams(presence_penalty=1.0), [])):
        sequence = make_sequence(params, [4], generated, frozenset({8}))
        table.write(0, sequence)
    assert torch.equal(process_logits(logits, table.gather([sequence]), table), logits)


def test_penalties_over_whole_rows_equal_penalties_over_seen_tokens() -> None:
    """A GPU processes whole rows, so that the host does not have to wait for the number of tokens."""
    random = torch.Generator().manual_seed(1)
    logits = random_logits(5)
    logits[:, 7] = -math.inf
    index = torch.tensor([3, 0, 4])
    token_counts = torch.randint(0, 9, (3, VOCAB_SIZE), generator=random, dtype=torch.int32)
    token_counts[torch.rand(3, VOCAB_SIZE, generator=random) < 0.5] = 0
    columns = torch.tensor([[[1.3], [0.7], [1.0]], [[0.5], [-1.0], [0.0]], [[0.25], [0.0], [-2.0]]])
    some, all_tokens = logits.clone(), logits.clone()
    apply_penalties(some, index, token_counts, *columns)
    apply_penalties_to_all_tokens(all_tokens, index, token_counts, *columns)
    assert torch.equal(some, all_tokens) and not torch.equal(some[3], logits[3])
    assert torch.equal(some[[1, 2]], logits[[1, 2]])
