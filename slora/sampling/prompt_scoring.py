"""Log-probabilities of the tokens of a prompt, for requests that ask for them, chunk by chunk as they are computed.

The row of each token gives the logits of the one behind it. A chunk has hundreds of rows, and logits of a large
vocabulary for all of them would take more memory than the model's layers, so they are made in blocks of rows, of
which only what was asked for is kept. What is scored is noted on the sequence, so a prompt that is computed again
after a preemption is scored only as far as it was not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.request import TokenLogprobs
from slora.sampling.sampler import token_logprobs
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk
from slora_kernels.layout import Int32Array

# At 128k tokens of vocabulary a block's logits take 32 MB in float32.
_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step that lie side by side, from `first_token` on, and the ones behind them: what to score."""

    sequence: Sequence
    first_token: int
    targets: list[int]

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.first_token + len(self.targets))


def find_prompt_rows(chunks: list[Chunk], first_tokens: Int32Array) -> list[PromptRows]:
    """What is to be scored in a step. first_tokens: where each chunk begins in it."""
    found = []
    for chunk, first_token in zip(chunks, first_tokens, strict=False):
        sequence = chunk.sequence
        if sequence.num_scored < sequence.num_prompt:
            # Token p of the prompt is scored by the row of token p - 1.
            first = max(sequence.num_scored, chunk.start + 1)
            end = min(sequence.num_prompt, chunk.start + chunk.num_tokens + 1)
            if first < end:
                row = int(first_token) + first - 1 - chunk.start
                found.append(PromptRows(sequence, row, sequence.token_ids[first:end]))
    return found


def score_prompts(
    hidden: Tensor, asked: list[PromptRows], project: Callable[[Tensor, Sequence], Tensor]
) -> None:
    """hidden [P, H]: of the rows of `asked`, one behind the other; project: hidden states of a sequence to logits.

    Extends the `scores` of each sequence.
    """
    begin = 0
    for rows in asked:
        count = rows.sequence.request.sampling.prompt_logprobs or 0
        end = begin + len(rows.targets)
        targets = torch.tensor(rows.targets, device=hidden.device)
        blocks = zip(
            torch.split(hidden[begin:end], _BLOCK_ROWS), torch.split(targets, _BLOCK_ROWS), strict=True
        )
        scores: list[TokenLogprobs | None] = []
        for block, tokens in blocks:
            scores += token_logprobs(project(block, rows.sequence).float(), tokens, [count] * len(tokens))
        # Both at once: where a block breaks, the whole chunk is computed and scored again.
        rows.sequence.scores.extend(scores)
        rows.sequence.num_scored += len(rows.targets)
        begin = end
