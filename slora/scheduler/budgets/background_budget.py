"""How much background work one step may compute.

In a step with interactive requests, background work may lengthen the step by at most `MAX_GROWTH` of its estimated
duration. So the time between two tokens of an interactive request hardly changes. Often not even one background row
fits, for example on a CPU, where each row takes additional time. Background requests then wait for a step without
interactive requests.

A step without interactive requests is also kept short (`short_prefill_s`), because an interactive request that arrives
during the step must wait until the step ends. The first row of such a step is computed even if it takes longer, for
example because of its mask. Otherwise the request of this row would never end.
"""

from slora.core.cost_model import Costs, StepWork
from slora.scheduler.budgets.prefill_budget import short_prefill_s
from slora.scheduler.sequence import Sequence

MAX_GROWTH = 0.03


class BackgroundBudget:
    """The remaining budget of one step for background work.

    num_tokens: tokens that the step may still compute.
    interactive: the interactive work of the step; None if no interactive request runs.
    """

    def __init__(self, costs: Costs, num_tokens: int, interactive: StepWork | None) -> None:
        self._costs = costs
        self._num_tokens = num_tokens
        if interactive is not None:
            self._seconds = MAX_GROWTH * costs.step_seconds(interactive)
        else:
            self._seconds = short_prefill_s(costs)
        self._must_fit = interactive is None

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the sequence's next `num_tokens` tokens fit; 0 if none does."""
        num_tokens = min(num_tokens, self._num_tokens)
        if num_tokens > 0 and _decodes(sequence):
            return int(self._must_fit or self._row_s(sequence) <= self._seconds)
        # A prefill chunk can have any length. Without the 1e-6, rounding errors could lose a token: 0.03 s at 0.001 s
        # per token are 30 tokens, not 29.
        return max(0, min(num_tokens, int(self._costs.tokens(self._seconds) + 1e-6)))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens that the step computes. Called after `fit`, before the sequence changes."""
        self._num_tokens -= num_tokens
        self._must_fit = self._must_fit and not num_tokens
        if num_tokens and _decodes(sequence):
            self._seconds -= self._row_s(sequence)
        else:
            self._seconds -= self._costs.prefill_s(num_tokens)

    def _row_s(self, sequence: Sequence) -> float:
        """Seconds of a decode row, including the mask for structured output."""
        return self._costs.row_s(len(sequence.token_ids)) + sequence.mask_s


def _decodes(sequence: Sequence) -> bool:
    """Whether the sequence computes only the KV of its last generated token, as `StepPlan.measure_work` counts rows."""
    return sequence.num_uncomputed == 1 and sequence.num_computed >= sequence.num_prompt
