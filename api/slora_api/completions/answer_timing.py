"""The timing of an answer, which the client gets in a header or in the last chunk of a stream."""

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from slora.core.request import RequestTiming
from slora.text.answer import Answer

_HEADER = "x-slora-timing"


class TimingObject(TypedDict):
    """Times in milliseconds, with vLLM's names. A stage that the request did not reach is null. If a request has
    several prompts, the times belong to the prompt that ended last.

    queue_time_ms: from arrival in the engine to the first computed token, including waits for adapters.
    adapter_fetch_ms: the part of the queue time until the adapters were on the host.
    adapter_load_ms: the part of the queue time from admission to the batch until the adapters were in the page pool.
    time_to_first_token_ms: from the first computed token to the first generated token.
    generation_time_ms: from the first generated token to the end.
    tokens_per_second: generated tokens, divided by the time since the first computed token; only with one prompt.
    mean_itl_ms: mean time between two tokens; only with one prompt and one choice.
    """

    queue_time_ms: float | None
    adapter_fetch_ms: float
    adapter_load_ms: float
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """Returns the header Server-Timing with the stages in milliseconds; empty if the engine did not report the
    timing.
    """
    timing = _find_timing(answers)
    if timing is None:
        return {}
    stages = {"queue": timing.queue_s, "fetch": timing.fetch_s, "load": timing.load_s}
    if timing.computed_at is not None:
        first_token_at = timing.ended_at if timing.first_token_at is None else timing.first_token_at
        stages |= {"prefill": first_token_at - timing.computed_at, "decode": timing.ended_at - first_token_at}
    return {_HEADER: ", ".join(f"{name};dur={_ms(seconds):.3f}" for name, seconds in stages.items())}


def timing_object(answers: Sequence[Answer]) -> TimingObject | None:
    """Returns the timing as JSON; None if the engine did not report it."""
    timing = _find_timing(answers)
    if timing is None:
        return None
    computed_at, first_token_at = timing.computed_at, timing.first_token_at
    made: TimingObject = {
        "queue_time_ms": None if computed_at is None else _ms(computed_at - timing.arrived_at),
        "adapter_fetch_ms": _ms(timing.fetch_s),
        "adapter_load_ms": _ms(timing.load_s),
        "time_to_first_token_ms": None,
        "generation_time_ms": None,
    }
    if computed_at is None or first_token_at is None:
        return made
    made["time_to_first_token_ms"] = _ms(first_token_at - computed_at)
    made["generation_time_ms"] = _ms(timing.ended_at - first_token_at)
    num_tokens, is_lone = answers[0].num_generated, len(answers) == 1
    if is_lone and timing.ended_at > computed_at:
        made["tokens_per_second"] = round(num_tokens / (timing.ended_at - computed_at), 3)
    if is_lone and num_tokens > 1 and answers[0].request.sampling.width == 1:
        made["mean_itl_ms"] = _ms((timing.ended_at - first_token_at) / (num_tokens - 1))
    return made


def _find_timing(answers: Sequence[Answer]) -> RequestTiming | None:
    """Returns the timing of the prompt whose answer ended last."""
    timings = [answer.timing for answer in answers if answer.timing is not None]
    return max(timings, key=lambda timing: timing.ended_at, default=None)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
