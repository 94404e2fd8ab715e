"""Sends a stream of text deltas to the client, either as one JSON body or as server-sent events.

The first delta is awaited before anything is sent. Until then, a failure can still be sent with its own HTTP status.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from slora_api.fair_slots import FairSlots
from slora_api.generation.answer_format import Answer, AnswerFormat, Usage
from slora_api.generation.json_slices import write_json
from slora_api.generation.parted_response import PartedResponse
from slora_api.generation.prompts import Prompt
from slora_api.generation.sse import EventStream, unless_disconnected
from slora_api.generation.text_stream import TextDelta
from slora_api.schemas import GenerationFields

__all__ = ["answer_request"]

_Deltas = AsyncGenerator[TextDelta, None]
_Chunks = AsyncGenerator[dict[str, Any], None]


async def answer_request(
    request: Request,
    fields: GenerationFields,
    deltas: _Deltas,
    shape: AnswerFormat,
    *,
    prompts: Sequence[Prompt],
    headers: dict[str, str],
    tenant: str,
    writing: FairSlots,
) -> Response:
    """Sends the answers to `prompts` that `deltas` contains, and always closes `deltas`.

    writing: slots for writing long answers.
    """
    usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
    if not fields.stream:
        work = _gather(deltas, prompts, usage)
        answers = await unless_disconnected(request.receive, work)
        parts = await unless_disconnected(
            request.receive, write_json(shape.whole(answers, usage), tenant, writing)
        )
        return PartedResponse(parts, headers)
    chunks = _chunks(deltas, shape, usage, include_usage=fields.include_usage)
    first = await unless_disconnected(request.receive, _first(chunks))
    return EventStream([first], chunks, headers)


async def _gather(deltas: _Deltas, prompts: Sequence[Prompt], usage: Usage) -> list[Answer]:
    """Collects the answers to return. The answers to the first prompt come first. All computed answers count as
    usage.
    """
    drawn = [[Answer() for _ in range(prompt.sampling.num_choices)] for prompt in prompts]
    answers = [answer for group in drawn for answer in group]
    async with aclosing(deltas):
        async for delta in deltas:
            usage.add(delta)
            answers[delta.index].add(delta)
    groups = zip(drawn, prompts, strict=True)
    return [answer for group, prompt in groups for answer in _likeliest(group, prompt.sampling.n)]


def _likeliest(answers: list[Answer], count: int) -> list[Answer]:
    """Returns `count` answers, the most probable first. If all are returned, they keep the order of their seeds."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda answer: answer.logprob, reverse=True)[:count]


async def _first(chunks: _Chunks) -> dict[str, Any]:
    """Returns the first chunk, and closes the stream if that fails."""
    try:
        return await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise


async def _chunks(deltas: _Deltas, shape: AnswerFormat, usage: Usage, *, include_usage: bool) -> _Chunks:
    opened = False
    async with aclosing(deltas):
        async for delta in deltas:
            usage.add(delta)
            if not opened:
                opened = True
                for chunk in shape.opening():
                    yield chunk
            for chunk in shape.chunk(delta):
                yield chunk
    if include_usage:
        yield shape.usage(usage)
