"""Computes the embeddings of one request, a few inputs at a time.

A request may have thousands of inputs. Each lane sends one input to the engine and waits for the embedding before
sending the next input. So a large request never holds more permits or sequences than it has lanes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from slora.core.request import EngineRequest
from slora_api.http.json_slices import LongList

# This many short texts are enough to fill the token budget of a step. By default, one tenant may have four times as
# many answers in progress.
_MAX_LANES = 64


@dataclass(slots=True)
class EmbeddedInput:
    """One input of a request. embedding: what `encode` of `Generator.embed` returned; None until the engine has
    returned the embedding.

    num_cached, num_generated: token counts that `UsageRecorder` reads. Both stay 0, because an embedding arrives all at
    once.
    """

    request: EngineRequest
    embedding: str | LongList | bytes | None = None
    num_cached: int = 0
    num_generated: int = 0
    prompt_only: bool = False


def count_lanes(num_inputs: int, most_permits: int, most_answers: int | None) -> int:
    """Returns how many inputs of one request are computed at a time.

    most_permits: the maximum number of permits that a tenant may hold. most_answers: the tenant's quota of answers in
    progress, if any.
    """
    most = most_permits if most_answers is None else min(most_permits, most_answers)
    return max(1, min(num_inputs, _MAX_LANES, most))


async def run_lanes(
    requests: Iterator[EngineRequest], num_lanes: int, compute: Callable[[EmbeddedInput], Awaitable[None]]
) -> list[EmbeddedInput]:
    """Computes an embedding for each request, `num_lanes` at a time. Returns the inputs in the order of the requests.

    If an input fails, cancels the other inputs and raises the first error. If the caller is cancelled, cancels all
    inputs.
    """
    inputs: list[EmbeddedInput] = []

    async def run_lane() -> None:
        for request in requests:
            inputs.append(EmbeddedInput(request))
            await compute(inputs[-1])

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(num_lanes):
                lanes.create_task(run_lane())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return inputs
