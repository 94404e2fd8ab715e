"""How many prompt tokens each tenant may compute in one step.

A step ends for all its sequences at the same time. So a long prefill of one tenant delays the next token of every other
tenant. A prompt that gets no tokens in a step waits for the next step. Two rules limit both delays:

- Beside decode rows of other tenants, the prefills of a step take at most `short_prefill_s`.
- While another tenant also has a prompt to compute, a tenant takes at most half of the tokens that are left. Equal
  parts would be fairer, but every prompt would then complete as late as the last one.

A tenant that is alone in the engine may use the whole step.
"""

from collections.abc import Set

from slora.core.cost_model import Costs
from slora.memory.tenant_account import TenantAccount

# The prefills of a step may take this many times the step's fixed cost. With 2, a flood of prompts makes the steps of
# other tenants at most three times as long. The flood reaches two thirds of the throughput that it would have alone.
# With 4, the steps would be up to five times as long, and the flood would reach four fifths. Ordinary workloads
# complete as many requests with 4 as with 2 (bench.simulate).
_STEP_COSTS = 2
# A step may always prefill this many tokens, even if its fixed cost is tiny.
_MIN_TOKENS = 64


def short_prefill_s(costs: Costs) -> float:
    """Returns how many seconds of prefill a step may contain if other requests may be waiting for its end."""
    return max(_STEP_COSTS * costs.step_s, costs.prefill_s(_MIN_TOKENS))


class PrefillBudget:
    """The prompt tokens that one step may compute.

    num_tokens: the tokens that the step may still compute.
    num_beside_others: how many of these tokens may be prefilled beside decode rows of other tenants.
    decoding: the tenants with decode rows in the step.
    prefilling: the tenants with prompts to compute.
    """

    def __init__(
        self,
        num_tokens: int,
        num_beside_others: int,
        decoding: Set[TenantAccount] = frozenset(),
        prefilling: Set[TenantAccount] = frozenset(),
    ) -> None:
        self.num_tokens = num_tokens
        self._num_beside_others = num_beside_others
        self._decoding = decoding
        self._without_part = set(prefilling)
        self._parts: dict[TenantAccount, int] = {}

    def left(self, tenant: TenantAccount) -> int:
        """Returns how many prompt tokens the step has left for the tenant, ignoring the limit of one half."""
        return min(self.num_tokens, self._num_beside_others) if self._delays(tenant) else self.num_tokens

    def fit(self, tenant: TenantAccount) -> int:
        """Returns how many prompt tokens of the tenant fit into the step."""
        left = self.left(tenant)
        if tenant not in self._parts:
            self._without_part.discard(tenant)
            self._parts[tenant] = -(-left // 2) if self._without_part else left
        return min(left, self._parts[tenant])

    def spend(self, tenant: TenantAccount, num_tokens: int) -> None:
        """Counts tokens that fit. Called after `fit`."""
        self.num_tokens -= num_tokens
        self._parts[tenant] -= num_tokens
        if self._delays(tenant):
            self._num_beside_others -= num_tokens

    def _delays(self, tenant: TenantAccount) -> bool:
        return len(self._decoding) > (tenant in self._decoding)
