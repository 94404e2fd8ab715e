"""How the engine's outputs reach the coroutines that wait for them."""

import asyncio
from contextlib import aclosing

from slora.client.open_streams import OpenStreams
from slora.core.request import EngineRequest, FinishReason, StepOutput, TokenDelta
from slora.core.sampling_params import SamplingParams


def test_other_tasks_run_while_a_slow_reader_catches_up() -> None:
    """Born from a bug: a reader with many outputs wrote all of them, even if its client had left meanwhile."""
    streams, turns = OpenStreams(), 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(request: EngineRequest) -> None:
        for token in range(1000):
            reason = FinishReason.LENGTH if token == 999 else None
            streams.put(StepOutput(request.request_id, TokenDelta((token,), reason)))

    async def read() -> None:
        other = asyncio.create_task(take_turns())
        token_ids: list[int] = []
        request = EngineRequest("r", "t", [1], (), SamplingParams())
        async with aclosing(streams.open(request, send, lambda request_id: None)) as arriving:
            async for arrived in arriving:
                token_ids += [token for delta in arrived for token in delta.token_ids]
                assert len(token_ids) <= 64 * (turns + 1), "no other task runs between two lists"
        other.cancel()
        assert token_ids == list(range(1000))

    asyncio.run(read())
