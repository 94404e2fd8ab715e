"""Charges tenants for their requests, in virtual tokens (VTC, OSDI'24).

As in the paper, a prompt token costs 1 and a generated token costs 2. A drafted token that is rejected costs 1. Each
token is charged once: recomputed tokens after a preemption and tokens found in the prefix cache are free. Loading an
adapter and computing the mask of a token cost as many prompt tokens as could be prefilled in the same time.
"""

from slora.core.cost_model import Costs
from slora.scheduler.sequence import Sequence

_PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0


def charge_prompt(sequence: Sequence, num_tokens: int) -> None:
    """Charges the prompt tokens among the next `num_tokens` tokens, which this step computes."""
    end = min(sequence.num_computed + num_tokens, sequence.num_prompt)
    if end > sequence.num_charged:
        # Tokens that are computed but were never charged came from the prefix cache: they are free.
        sequence.tenant.charge(_PROMPT_PRICE * (end - max(sequence.num_charged, sequence.num_computed)))
        sequence.num_charged = end


def charge_output(sequence: Sequence) -> None:
    """Charges one sampled token."""
    sequence.usage.generated_tokens += 1
    sequence.tenant.charge(OUTPUT_PRICE)


def charge_rejected(sequence: Sequence, num_tokens: int) -> None:
    """Charges drafted tokens that were computed and rejected. Accepted drafts are charged as generated tokens."""
    sequence.tenant.charge(_PROMPT_PRICE * num_tokens)


def charge_mask(sequence: Sequence, costs: Costs) -> None:
    """Charges the CPU time of the last mask."""
    if sequence.mask_s:
        sequence.tenant.charge(_PROMPT_PRICE * costs.tokens(sequence.mask_s))


def charge_load(sequence: Sequence, num_bytes: int, costs: Costs) -> None:
    """Charges a sequence for loading its adapter into the pool."""
    sequence.usage.adapter_bytes += num_bytes
    sequence.tenant.charge(_PROMPT_PRICE * costs.tokens(costs.load_s(num_bytes)))
