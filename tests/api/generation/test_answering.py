"""How answers are sent: in writes of a bounded size, and with the work on long texts in the slots of the tenant."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from slora.core.request import EngineRequest, FinishReason
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, Choice, Completion, CompletionDelta
from slora_api.completions.answer_format import AnswerUsage
from slora_api.completions.answering import write_answer, write_events
from slora_api.core.errors import ErrorAnswer
from slora_api.core.fair_slots import FairSlots

EVENT = b"x" * 40_000


class Shape:
    """Sends each delta as one long event, and shows whether a whole answer was made in a slot of the tenant."""

    reads_text = True

    def __init__(self) -> None:
        self.num_holders: list[int] = []
        self.slots = CountedSlots(1, 1, "answers to write")

    def opening(self, usage: AnswerUsage) -> Iterable[bytes]:
        return ()

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterable[bytes]:
        return (EVENT,)

    def closing(self, usage: AnswerUsage) -> Iterable[bytes]:
        return ()

    def failure(self, error: ErrorAnswer) -> Iterable[bytes]:
        return ()

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> dict[str, Any]:
        self.num_holders.append(self.slots.num_held)
        return {"text": completions[0].choices[0].text}


class CountedSlots(FairSlots):
    @property
    def num_held(self) -> int:
        return sum(state.num_held for state in self._active.values())


def completion(text: str) -> Completion:
    return Completion([1], (Choice(text, [7], FinishReason.STOP, None),))


def test_events_that_arrive_together_are_sent_in_bounded_writes() -> None:
    async def arrive() -> AsyncGenerator[list[CompletionDelta], None]:
        yield [CompletionDelta(0, "a", (7,))] * 7

    async def collect() -> list[bytes]:
        return [events async for events in write_events(arrive(), Shape(), AnswerUsage(1), [])]

    sent = asyncio.run(collect())
    assert b"".join(sent) == EVENT * 7
    assert all(len(events) <= (1 << 16) + len(EVENT) for events in sent)


def test_the_last_deltas_leave_with_the_end_of_the_stream_after_the_request_has_ended() -> None:
    class ClosedShape(Shape):
        def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterable[bytes]:
            return (delta.text.encode(),)

        def closing(self, usage: AnswerUsage) -> Iterable[bytes]:
            return (b"[DONE]",)

    log: list[bytes] = []

    async def arrive() -> AsyncGenerator[list[CompletionDelta], None]:
        yield [CompletionDelta(0, "a", (7,))]
        yield [CompletionDelta(0, "b", (7,), FinishReason.STOP), CompletionDelta(0, "c", (7,), choice=1)]
        yield [CompletionDelta(0, "d", (7,), FinishReason.STOP, choice=1)]
        log.append(b"ended")

    async def collect() -> None:
        answer = Answer(EngineRequest("request", "acme", [1], (), SamplingParams(n=2)), None)
        async for events in write_events(arrive(), ClosedShape(), AnswerUsage(1), [answer]):
            log.append(events)

    asyncio.run(collect())
    assert log == [b"a", b"bc", b"ended", b"d[DONE]"]


def test_reading_a_long_text_takes_a_slot_of_the_tenant() -> None:
    async def write(shape: Shape, text: str) -> bytes:
        parts = await write_answer(shape, [completion(text)], AnswerUsage(1), "acme", shape.slots)
        return b"".join(parts)

    shape = Shape()
    assert asyncio.run(write(shape, "short")) == b'{"text":"short"}'
    long = "é\n" * 50_000
    assert asyncio.run(write(shape, long)) == f'{{"text":"{long}"}}'.replace("\n", "\\n").encode()
    assert shape.num_holders == [0, 1]
