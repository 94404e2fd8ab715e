"""Estimates the backlog of an engine in seconds of work."""

from collections.abc import Iterable
from itertools import islice

from slora.core.backlog import ANSWER_TOKENS, Backlog
from slora.core.cost_model import Costs
from slora.core.scheduler_config import SchedulerConfig
from slora.scheduler.sequence import Sequence

# With more unfinished sequences, the oldest ones are measured and stand for the rest. This takes about 0.3 ms.
_MAX_MEASURED = 512


def estimate_backlog(
    unfinished: Iterable[Sequence], num_waiting: int, num_running: int, costs: Costs, config: SchedulerConfig
) -> Backlog:
    """Estimates the work of the sequences. unfinished: all of them, oldest first.

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
    num_rows = min(config.max_num_seqs, max(1.0, config.num_pages * config.footprint.block_tokens / context))
    prompt_token_s = costs.prefill_s(1)
    answer_token_s = costs.row_s(int(context)) + costs.step_s / num_rows
    load_s = num_prompt * prompt_token_s + num_answer * answer_token_s
    if num_measured:
        load_s *= (num_waiting + num_running) / num_measured
    return Backlog(num_waiting, num_running, load_s, prompt_token_s, answer_token_s)
