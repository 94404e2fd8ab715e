"""What tenants are charged for their requests, in virtual tokens (VTC, OSDI'24).

A token of a prompt costs 1 and a generated one 2, as they do in the paper, each once: what is computed again after its
sequence gave way is not its tenant's doing, and what was found in the prefix cache was computed before. An adapter that
is brought to the pool costs as much as the prefill that the time would have been good for.
"""

from slora.cost_model import Costs
from slora.pool.tenant import Tenant
from slora.scheduler.sequence import Sequence

_PROMPT_PRICE = 1.0
_OUTPUT_PRICE = 2.0


class Charges:
    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """This step computes so many of its next tokens, of the prompt or behind it."""
        end = min(sequence.num_computed + num_tokens, sequence.num_prompt)
        if end > sequence.num_charged:
            # What it has computed and was not charged for it has found.
            sequence.tenant.charge(_PROMPT_PRICE * (end - max(sequence.num_charged, sequence.num_computed)))
            sequence.num_charged = end

    def output(self, sequence: Sequence) -> None:
        """One token was drawn for it."""
        sequence.tenant.charge(_OUTPUT_PRICE)

    def load(self, tenant: Tenant, num_bytes: int) -> None:
        """An adapter was brought to the pool for its request."""
        tenant.charge(_PROMPT_PRICE * self._costs.tokens(self._costs.load_s(num_bytes)))
