"""Sends thousands of random requests to the real processes. Requests finish, are closed early, are cancelled, are
refused, or lose their connection.

Adapters are deleted and uploaded again, and the pool is short of pages throughout. With --soak there are 10,000
requests.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count, islice

import pytest

from slora.client.client import RemoteEngine
from slora.core.engine_state import EngineStats
from slora.core.errors import EngineUnavailable, RequestRefused
from slora.core.request import EngineRequest, TokenDelta, single_adapter
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from tests.support.driving import drive, make_engine, make_source
from tests.support.engine_stack import EngineStack, connect, one_by_one, open_stack
from tests.support.model_kit import Kits, ModelKit
from tests.support.tiny_models import VOCAB_SIZE

NUM_PROMPTS = 8
MOST_TOKENS = 24
NUM_CLIENTS = 4
REQUESTS_AT_ONCE = 32
REQUESTS_PER_CONNECTION = 40
GREEDY = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, an adapter, and the complete answer that a lone request gets."""

    prompt: list[int]
    adapter: AdapterVersion | None
    answer: list[int]


def make_questions(kit: ModelKit) -> list[Question]:
    source, versions = make_source(kit)
    # The adapters in the store belong to another tenant than those in the source.
    adapters = [None, *versions.values()]
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(NUM_PROMPTS)]
    pairs = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    requests = [
        EngineRequest(str(n), "t", prompt, single_adapter(one), GREEDY)
        for n, (prompt, one) in enumerate(pairs)
    ]
    answers = drive(make_engine(kit, source, 2000), [requests])
    return [
        Question(prompt, replace(one, tenant="tenant") if one else None, answers[str(n)].token_ids)
        for n, (prompt, one) in enumerate(pairs)
    ]


class Crowd:
    """Many concurrent clients, whose requests end in every possible way. `fates` counts the ways."""

    def __init__(self, stack: EngineStack, questions: list[Question]) -> None:
        self.fates: Counter[str] = Counter()
        self._stack = stack
        self._questions = questions
        self._all_numbers = count()
        self._rng = random.Random(2)

    async def run(self, num_requests: int) -> None:
        self._numbers = islice(self._all_numbers, num_requests)
        await asyncio.gather(*(self._keep_connecting() for _ in range(NUM_CLIENTS)))

    async def _keep_connecting(self) -> None:
        """Opens one connection after the other. Each is cut while its requests are in progress."""
        while numbers := list(islice(self._numbers, REQUESTS_PER_CONNECTION)):
            async with connect(self._stack) as client:
                rest = iter(numbers)
                readers = [
                    asyncio.create_task(self._read(client, rest))
                    for _ in range(REQUESTS_AT_ONCE // NUM_CLIENTS)
                ]
                await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*readers)

    async def _read(self, client: RemoteEngine, numbers: Iterator[int]) -> None:
        for number in numbers:
            fate = self._rng.choices(("end", "close", "cancel", "refuse", "forget"), (12, 4, 2, 1, 1))[0]
            try:
                await getattr(self, f"_{fate}")(client, str(number))
                self.fates[fate] += 1
            except EngineUnavailable:
                self.fates["disconnected"] += 1

    def _ask(
        self, client: RemoteEngine, name: str
    ) -> tuple[AsyncGenerator[list[TokenDelta], None], list[int]]:
        """A stream, and the expected tokens of each choice. Sampling is greedy, so all choices are equal."""
        question = self._rng.choice(self._questions)
        n = self._rng.choice((1, 1, 1, 3))
        params = replace(GREEDY, max_tokens=self._rng.randint(1, MOST_TOKENS), n=n)
        request = EngineRequest(name, "tenant", question.prompt, single_adapter(question.adapter), params)
        return client.generate(request), question.answer[: params.max_tokens]

    async def _end(self, client: RemoteEngine, name: str) -> None:
        stream, expected = self._ask(client, name)
        answers: dict[int, list[int]] = defaultdict(list)
        async for delta in one_by_one(stream):
            answers[delta.index] += delta.token_ids
        assert all(tokens == expected for tokens in answers.values()), (
            f"{name} got another answer in the crowd"
        )

    async def _close(self, client: RemoteEngine, name: str) -> None:
        stream, expected = self._ask(client, name)
        answers: dict[int, list[int]] = defaultdict(list)
        enough = self._rng.randint(0, len(expected))
        async with aclosing(one_by_one(stream)) as deltas:
            async for delta in deltas:
                tokens = answers[delta.index]
                tokens += delta.token_ids
                if len(tokens) >= enough and delta.index != 1:
                    break
                if len(tokens) >= enough:
                    client.end_choice(name, 1)
        for tokens in answers.values():
            assert tokens == expected[: len(tokens)], f"request {name} got another answer in the crowd"

    async def _cancel(self, client: RemoteEngine, name: str) -> None:
        reading = asyncio.create_task(self._end(client, name))
        await asyncio.sleep(self._rng.random() * 0.05)
        reading.cancel()
        for error in await asyncio.gather(reading, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _refuse(self, client: RemoteEngine, name: str) -> None:
        request = EngineRequest(name, "tenant", [1] * 1000, (), GREEDY)
        with pytest.raises(RequestRefused):
            async for _ in client.generate(request):
                pass

    async def _forget(self, client: RemoteEngine, name: str) -> None:
        version = self._rng.choice(self._questions).adapter
        if version is not None:
            await client.remove_adapter(version)


async def settle(stack: EngineStack) -> EngineStats:
    """The statistics once no request runs or waits, and after the engine's own check. A lost page would end the
    engine."""
    async with connect(stack) as client:
        while (stats := await client.stats()).running or stats.waiting:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)
        return await client.stats()


def test_after_random_requests_and_aborts_every_page_is_free_or_cached(
    kits: Kits, report: Callable[[str], None], *, soak: bool
) -> None:
    kit = kits("llama")
    num_requests = 10_000 if soak else 80
    with open_stack(kit, 45, max_num_seqs=16, max_num_batched_tokens=64) as stack:
        stack.ensure_running()
        crowd = Crowd(stack, make_questions(kit))
        # On a slow machine, the requests of one crowd may end one after the other, so that none is preempted.
        for _ in range(6):
            asyncio.run(crowd.run(num_requests))
            stats = asyncio.run(settle(stack))
            if stats.preemptions and stats.adapter_evictions:
                break
        assert stack.engine is not None and stack.engine.running
        assert not {"Traceback", "ERROR", "CRITICAL"} & set(stack.engine.log.split())
    report(
        f"{crowd.fates.total()} requests: {dict(crowd.fates)}, {stats.preemptions} preemptions, "
        f"{stats.adapter_loads} loads, {stats.adapter_evictions} evictions"
    )
    assert crowd.fates.total() % num_requests == 0
    assert all(crowd.fates[fate] for fate in ("end", "close", "cancel", "refuse", "forget", "disconnected"))
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total == 45
    assert stats.pages_cached >= stats.adapter_pages
