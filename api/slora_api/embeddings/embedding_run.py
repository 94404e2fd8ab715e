"""Computes the embeddings of one request, a few inputs at a time.

A request may have thousands of inputs. Each lane sends one input to the engine and waits for the embedding before
sending the next input. So a large request never holds more permits or sequences than it has lanes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from slora.core.request import NOT_SAMPLED, EngineRequest, FinishReason, Pooling
from slora_api.completions.inference_call import InferenceCall
from slora_api.http.json_slices import LongList
from slora_api.usage.usage_recorder import OpenRequest

# This many short texts are enough to fill the token budget of a step. By default, one tenant may have four times as
# many answers in progress.
_MAX_LANES = 64


@dataclass(slots=True)
class EmbeddedInput:
    """One input of a request. embedding: what `encode` of `compute_embeddings` returned; None until the engine has
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


async def compute_embeddings(
    call: InferenceCall,
    inputs: Sequence[list[int]],
    pooling: Pooling,
    encode: Callable[[bytes], str | LongList | bytes],
) -> list[EmbeddedInput]:
    """Computes the embeddings of a request. Returns the inputs, in order, as soon as the usage of all of them is
    durable.

    inputs: the token ids of each input. encode: called with each embedding as it arrives.

    Raises the same errors as `compute_answers`. After an error, no engine request is left running.
    """
    generator = call.services.generator
    generator.usage.check()
    started_at = time.perf_counter()
    is_background = call.background_id is not None
    num_lanes = count_lanes(len(inputs), call.bounds.prompts, call.meter.most_answers)
    requests = (
        call.engine_request(index, token_ids, NOT_SAMPLED, pooling) for index, token_ids in enumerate(inputs)
    )
    sent: list[OpenRequest] = []

    async def compute(one: EmbeddedInput) -> None:
        sent.append(generator.usage.open(one, spending.open()))
        async with aclosing(generator.client.generate(one.request)) as deltas:
            async for arrived in deltas:
                for delta in arrived:
                    assert delta.embedding is not None, "the only delta has the embedding"
                    one.embedding = encode(delta.embedding)
        if not is_background:
            generator.metrics.finished(FinishReason.STOP, time.perf_counter() - started_at)

    async with call.meter.hold(sum(map(len, inputs)), 0, num_lanes, param="input") as spending:
        embedded = await run_lanes(requests, num_lanes, compute)
        await generator.usage.wait(sent)
    return embedded
