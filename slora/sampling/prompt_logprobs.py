"""Log-probabilities of prompt tokens (`prompt_logprobs`), computed chunk by chunk during prefill.

The hidden state of each token gives the logits of the next token. A chunk has hundreds of rows. With a large
vocabulary, the logits of all rows would need more memory than a layer of the model. So they are computed in blocks of
rows, and only the requested values are kept. Each sequence records how far its prompt is scored, so a recompute after a
preemption scores no token twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.request import TokenLogprobs
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
