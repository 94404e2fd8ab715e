"""Embeddings of prompts: pools the hidden states of the last layer, chunk by chunk during prefill.

The hidden states of each sequence are summed separately, in float32. Each sequence records how far its prompt is
pooled, so a recompute after a preemption, or after a failed step, adds no token twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk
from slora_kernels.layout import Int32Array


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


def pool_hidden_states(hidden: Tensor, pooled_rows: list[PooledRows]) -> None:
    """Adds the rows to the sums of their sequences, and makes the embedding of each sequence whose sum is complete.

    hidden: [P, H], hidden states of the rows of `pooled_rows`, concatenated.
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
        _make_embeddings(complete)


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


def _make_embeddings(sequences: list[Sequence]) -> None:
    """Copies the embeddings of a step to the host together, because each copy waits for the device."""
    means = torch.stack([one.pooled.total / one.pooled.count for one in sequences if one.pooled is not None])
    are_finite = means.isfinite().all(1).tolist()
    vectors = [_finish(mean, one) for mean, one in zip(means, sequences, strict=True)]
    on_host = torch.split(torch.cat(vectors).cpu(), [len(vector) for vector in vectors])
    for sequence, vector, is_finite in zip(sequences, on_host, are_finite, strict=True):
        if sequence.pooled is not None and is_finite:
            sequence.pooled.embedding = vector.numpy().tobytes()


def _finish(mean: Tensor, sequence: Sequence) -> Tensor:
    """Returns the embedding, float32 [dimensions], of a prompt whose pooled hidden states are `mean`, float32 [H]."""
    pooling = sequence.request.pooling
    assert pooling is not None
    vector = mean[: pooling.dimensions]
    if not pooling.normalize:
        return vector
    # In float64, because the squares of large float32 values overflow float32.
    exact = vector.double()
    norm = torch.linalg.vector_norm(exact)
    return torch.where(norm > 0, exact / norm, exact).float()
