"""A request in a replica model, and the log of its times."""

import math
from array import array
from dataclasses import dataclass

from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import MAX_REPEAT_PREEMPTIONS


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request that has not ended.

    ready_s: time of arrival at the replica.
    num_computed: tokens whose KV is computed. For a decoding request it is out of date; see `ReplicaModel`.
    num_charged: prompt tokens that its tenant was charged for.
    num_pages: KV pages that the request holds before it decodes.
    num_host_pages: pages on the host while the request is swapped out.
    num_repeats: number of preemptions since the last token.
    """

    number: int
    ready_s: float
    tenant: TenantAccount
    adapter: int
    prompt_tokens: int
    output_tokens: int
    num_generated: int = 0
    num_computed: int = 0
    num_charged: int = 0
    num_pages: int = 0
    num_host_pages: int = 0
    num_preemptions: int = 0
    num_repeats: int = 0
    generated_at_preemption: int = -1

    def __lt__(self, other: "ModelRequest") -> bool:
        return self.number < other.number

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.num_generated

    @property
    def is_starving(self) -> bool:
        return self.num_repeats >= MAX_REPEAT_PREEMPTIONS

    def record_preemption(self) -> None:
        self.num_preemptions += 1
        self.num_repeats = self.num_repeats + 1 if self.num_generated == self.generated_at_preemption else 1
        self.generated_at_preemption = self.num_generated

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges the prompt tokens among the next `num_tokens` tokens, each once; see `slora.scheduler.charges`."""
        end = min(self.num_computed + num_tokens, self.prompt_tokens)
        if end > self.num_charged:
            self.tenant.charge(end - self.num_charged)
            self.num_charged = end


@dataclass(slots=True)
class FleetLog:
    """The times of all requests by number; NaN until they are known."""

    first_token_s: "array[float]"
    end_s: "array[float]"

    @classmethod
    def empty(cls, count: int) -> "FleetLog":
        return cls(array("d", [math.nan]) * count, array("d", [math.nan]) * count)
