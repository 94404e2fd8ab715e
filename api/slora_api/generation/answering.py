"""Sends a stream of text back to the client: whole, or as events while it comes.

The first delta is awaited before anything is sent, because until then a failure can still be a status of its own.
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
    """Answers with everything in `deltas`, the answers to `prompts`, and closes it whatever happens.

    writing: slots for the tenant's long answers.
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
    """The answers that are wanted, those of the first prompt first; all that were computed count as used."""
    drawn = [[Answer() for _ in range(prompt.sampling.num_choices)] for prompt in prompts]
    answers = [answer for group in drawn for answer in group]
    async with aclosing(deltas):
        async for delta in deltas:
            usage.add(delta)
            answers[delta.index].add(delta)
    groups = zip(drawn, prompts, strict=True)
    return [answer for group, prompt in groups for answer in _likeliest(group, prompt.sampling.n)]


def _likeliest(answers: list[Answer], count: int) -> list[Answer]:
    """`count` of them, the likeliest first; in the order of their seeds where that is all."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda answer: answer.logprob, reverse=True)[:count]


async def _first(chunks: _Chunks) -> dict[str, Any]:
    """The first chunk; closes the stream if there is to be none."""
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
