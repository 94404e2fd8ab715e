"""The backlog of an engine: the work that its unfinished requests still need. Routers compare it between engines."""

from typing import NamedTuple

# The expected number of further tokens of an answer, unless `max_tokens` allows fewer. It is the same for new and for
# long answers, because nothing is known of their lengths.
ANSWER_TOKENS = 256


class Backlog(NamedTuple):
    """num_waiting, num_running: numbers of sequences.

    load_s: estimated seconds of work of these sequences, in full batches.
    prompt_token_s, answer_token_s: estimated seconds of work of each further token of a prompt or an answer.
    """

    num_waiting: int = 0
    num_running: int = 0
    load_s: float = 0.0
    prompt_token_s: float = 0.0
    answer_token_s: float = 0.0
