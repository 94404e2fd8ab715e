"""The experts that compute each token of a step, and the order in which experts compute the tokens.

All tensors have sizes that depend only on the number of tokens, and nothing is read by the host. So the steps of a GPU
can be recorded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.models.expert_config import ExpertConfig


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The choice for T tokens, each computed by k of E experts. There are S = T * k rows, sorted by expert.

    A token's result does not depend on the order of the tokens, because its k outputs are added in the order of their
    weights.

    weights: float32 [T, k], descending. row_of_choice: int64 [T, k], the row that belongs to each weight.
    token_of_row: int64 [S]. starts: int32 [E + 1], the first row of each expert, and S.
    """

    weights: Tensor
    row_of_choice: Tensor
    token_of_row: Tensor
    starts: Tensor

    @staticmethod
    def of(logits: Tensor, config: ExpertConfig) -> "ExpertChoice":
        """Chooses the experts with the greatest router logits [T, E]."""
        weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(config.chosen, dim=-1)
        if config.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # The sort is stable, so the rows of an expert are in the order of the tokens.
        sorted_experts, choices = experts.flatten().sort(stable=True)
        rows = torch.arange(len(choices), device=choices.device)
        bounds = torch.arange(config.count + 1, device=choices.device)
        return ExpertChoice(
            weights=weights,
            row_of_choice=torch.empty_like(choices).scatter_(0, choices, rows).view_as(experts),
            token_of_row=choices // config.chosen,
            starts=torch.searchsorted(sorted_experts, bounds, out_int32=True),
        )

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> [S, H]: a copy of each token for each of its experts."""
        return x[self.token_of_row]

    def combine(self, rows: Tensor) -> Tensor:
        """rows [S, H] -> [T, H]: the weighted sum of each token's rows, rounded once."""
        mixed = rows[self.row_of_choice[:, 0]] * self.weights[:, :1]
        for choice in range(1, self.weights.shape[1]):
            mixed += rows[self.row_of_choice[:, choice]] * self.weights[:, choice, None]
        return mixed.to(rows.dtype)
