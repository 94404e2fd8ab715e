"""Charges tenants for their requests, in virtual tokens (VTC, OSDI'24).

As in the paper, a prompt token costs 1 and a generated token costs 2. A drafted token that is rejected costs 1. Each
token is charged once: recomputed tokens after a preemption and tokens found in the prefix cache are free. Loading an
adapter and computing the mask of a token cost as many prompt tokens as could be prefilled in the same time.
"""

from collections.abc import Iterable
from itertools import islice

from slora.core.cost_model import CostModel
from slora.core.engine_config import SchedulerConfig
from slora.core.engine_state import ANSWER_TOKENS, Backlog
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


def charge_output(sequence: Sequence, num_tokens: int) -> None:
    """Charges sampled tokens."""
    sequence.usage.generated_tokens += num_tokens
    sequence.tenant.charge(OUTPUT_PRICE * num_tokens)


def charge_rejected(sequence: Sequence, num_tokens: int) -> None:
    """Charges drafted tokens that were computed and rejected. Accepted drafts are charged as generated tokens."""
    sequence.tenant.charge(_PROMPT_PRICE * num_tokens)


def charge_mask(sequence: Sequence, costs: CostModel) -> None:
    """Charges the CPU time of the last mask."""
    if sequence.mask_s:
        sequence.tenant.charge(_PROMPT_PRICE * costs.tokens(sequence.mask_s))


def charge_displaced(sequence: Sequence, displaced: Sequence) -> None:
    """Charges a waiting sequence for preempting another, which may have to compute its tokens again. Otherwise a tenant
    could cause much work with many short requests.
    """
    if not displaced.is_background:
        sequence.tenant.charge(_PROMPT_PRICE * displaced.num_computed)


def charge_load(sequence: Sequence, num_bytes: int, costs: CostModel) -> None:
    """Charges a sequence for loading its adapter into the pool."""
    sequence.usage.adapter_bytes += num_bytes
    sequence.tenant.charge(_PROMPT_PRICE * costs.tokens(costs.load_s(num_bytes)))


# With more unfinished sequences, the oldest ones are measured and stand for the rest. This takes about 0.3 ms.
_MAX_MEASURED = 512


def estimate_backlog(
    unfinished: Iterable[Sequence],
    num_waiting: int,
    num_running: int,
    costs: CostModel,
    config: SchedulerConfig,
) -> Backlog:
    """Estimates the backlog of an engine in seconds of work. unfinished: all of its sequences, oldest first.

    A step costs `step_s`, however many answers it continues. So an answer's share of a step is that of a full batch: as
    many answers as the pool has room for, at most `max_num_seqs`. Otherwise one request would seem to fill an idle
    engine.

    Worked example: step_s 0.02, decode_s 0.0005, no cost of context, and 14,400 tokens of KV. Answers with a mean
    context of 400 tokens fill the pool with 36 rows. So a token takes 0.0005 + 0.02 / 36 = 0.00106 s.
    """
    num_measured = num_prompt = num_answer = num_context = 0
    for sequence in islice(unfinished, _MAX_MEASURED):
        num_measured += 1
        num_context += len(sequence.token_ids)
        num_prompt += sequence.num_uncomputed
        if sequence.pooled is None:
            left = sequence.max_tokens - sequence.num_generated
            num_answer += sequence.num_choices * min(left, ANSWER_TOKENS)
    context = num_context / num_measured if num_measured else ANSWER_TOKENS
    pages_each = context / config.footprint.block_tokens + config.footprint.state_pages
    num_rows = min(config.max_num_seqs, max(1.0, config.num_pages / pages_each))
    prompt_token_s = costs.prefill_s(1)
    answer_token_s = costs.row_s(int(context)) + costs.step_s / num_rows
    load_s = num_prompt * prompt_token_s + num_answer * answer_token_s
    if num_measured:
        load_s *= (num_waiting + num_running) / num_measured
    return Backlog(num_waiting, num_running, load_s, prompt_token_s, answer_token_s)
