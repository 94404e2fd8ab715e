"""What a request asks of its prompt's hidden states: log-probabilities (`prompt_logprobs`) and embeddings.

Both are computed chunk by chunk during prefill. Each sequence records how far its prompt is scored and pooled, so a
recompute after a preemption, or after a failed step, counts no token twice.

The hidden state of each token gives the logits of the next token. A chunk has hundreds of rows, and with a large
vocabulary the logits of all rows would need more memory than a layer of the model. So they are computed in blocks of
rows, and only the requested values are kept. For embeddings, the hidden states of each sequence are summed separately,
in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.request import PoolingKind, TokenLogprobs
from slora.sampling.sampler import token_logprobs
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk
from slora_kernels.layout import Int32Array

# With a vocabulary of 128k tokens, the logits of one block need 32 MB in float32.
_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive tokens of one sequence whose log-probabilities are computed in a step.

    The hidden state of token `first_token + i` of the step scores `targets[i]`, which is the next token.
    """

    sequence: Sequence
    first_token: int
    targets: list[int]

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.first_token + len(self.targets))


def find_prompt_rows(chunks: list[Chunk], first_tokens: Int32Array) -> list[PromptRows]:
    """Returns the rows to score in a step. first_tokens: index of each chunk's first token within the step."""
    found = []
    for chunk, first_token in zip(chunks, first_tokens, strict=False):
        sequence = chunk.sequence
        if sequence.num_scored < sequence.num_prompt:
            # The row of prompt token p - 1 scores prompt token p.
            first = max(sequence.num_scored, chunk.start + 1)
            end = min(sequence.num_prompt, chunk.start + chunk.num_tokens + 1)
            if first < end:
                row = int(first_token) + first - 1 - chunk.start
                found.append(PromptRows(sequence, row, sequence.token_ids[first:end]))
    return found


def compute_prompt_logprobs(
    hidden: Tensor, prompt_rows: list[PromptRows], project: Callable[[Tensor, Sequence], Tensor]
) -> None:
    """Extends the `scores` of each sequence in `prompt_rows`.

    hidden: [P, H], hidden states of the rows of `prompt_rows`, concatenated.
    project: maps hidden states of a sequence to logits.
    """
    begin = 0
    for rows in prompt_rows:
        count = rows.sequence.request.sampling.prompt_logprobs or 0
        end = begin + len(rows.targets)
        targets = torch.tensor(rows.targets, device=hidden.device)
        blocks = zip(
            torch.split(hidden[begin:end], _BLOCK_ROWS), torch.split(targets, _BLOCK_ROWS), strict=True
        )
        scores: list[TokenLogprobs | None] = []
        for block, tokens in blocks:
            scores += token_logprobs(project(block, rows.sequence).float(), tokens, [count] * len(tokens))
        # Update `scores` and `num_scored` together: if a block fails, the whole chunk is computed and scored again.
        rows.sequence.scores.extend(scores)
        rows.sequence.num_scored += len(rows.targets)
        begin = end


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Consecutive tokens of one sequence whose hidden states are pooled in a step."""

    sequence: Sequence
    tokens: range


def find_pooled_rows(chunks: list[Chunk], first_tokens: Int32Array) -> list[PooledRows]:
    """Returns the rows to pool in a step. first_tokens: index of each chunk's first token within the step."""
    found = []
    for chunk, first_token in zip(chunks, first_tokens, strict=False):
        pooled, end = chunk.sequence.pooled, chunk.start + chunk.num_tokens
        if pooled is not None and pooled.next_token < end:
            first = max(chunk.start, pooled.next_token)
            row = int(first_token) + first - chunk.start
            found.append(PooledRows(chunk.sequence, range(row, row + end - first)))
    return found


def pool_hidden_states(
    hidden: Tensor, pooled_rows: list[PooledRows], classify: Callable[[Tensor, Sequence], Tensor]
) -> None:
    """Adds the rows to the sums of their sequences, and makes the embedding of each sequence whose sum is complete.

    hidden: [P, H], hidden states of the rows of `pooled_rows`, concatenated.
    classify: returns the logits, float32 [labels], of a hidden state, float32 [H], of a sequence.
    """
    begin = 0
    complete = []
    for rows in pooled_rows:
        pooled, end = rows.sequence.pooled, begin + len(rows.tokens)
        assert pooled is not None
        # Update `total` and `next_token` together: if a later part of the step fails, the chunk is computed again.
        pooled.total = _add_rows(pooled.total, hidden[begin:end].float())
        pooled.next_token += len(rows.tokens)
        if pooled.next_token == rows.sequence.num_prompt:
            complete.append(rows.sequence)
        begin = end
    if complete:
        _make_embeddings(complete, classify)


def _add_rows(total: Tensor | None, rows: Tensor) -> Tensor:
    """Returns the sum of `total` [H] and all rows [n, H], float32.

    On a CPU, one row is added after the other, so the sum does not depend on how the prompt is cut into chunks.
    """
    if rows.device.type != "cpu":
        total_of_rows = rows.sum(0)
        return total_of_rows if total is None else total + total_of_rows
    total = torch.zeros_like(rows[0]) if total is None else total.clone()
    for row in rows:
        total += row
    return total


def _make_embeddings(sequences: list[Sequence], classify: Callable[[Tensor, Sequence], Tensor]) -> None:
    """Copies the embeddings of a step to the host together, because each copy waits for the device."""
    pooled = [sequence.pooled for sequence in sequences if sequence.pooled is not None]
    means = torch.stack([sums.total / sums.count for sums in pooled])
    vectors = [_finish(mean, sequence, classify) for mean, sequence in zip(means, sequences, strict=True)]
    sums = torch.stack([vector.sum() for vector in vectors])
    are_finite = (means.isfinite().all(1) & sums.isfinite()).tolist()
    on_host = torch.split(torch.cat(vectors).cpu(), [len(vector) for vector in vectors])
    for sequence, vector, is_finite in zip(sequences, on_host, are_finite, strict=True):
        if sequence.pooled is not None and is_finite:
            sequence.pooled.embedding = vector.numpy().tobytes()


def _finish(mean: Tensor, sequence: Sequence, classify: Callable[[Tensor, Sequence], Tensor]) -> Tensor:
    """Returns the embedding, float32 [dimensions], of a prompt whose pooled hidden states are `mean`, float32 [H]."""
    pooling = sequence.request.pooling
    assert pooling is not None
    if pooling.kind is PoolingKind.CLASSIFY:
        return classify(mean, sequence)
    vector = mean[: pooling.dimensions]
    if not pooling.normalize:
        return vector
    # In float64, because the squares of large float32 values overflow float32.
    exact = vector.double()
    norm = torch.linalg.vector_norm(exact)
    return torch.where(norm > 0, exact / norm, exact).float()
