"""`LLM` for asyncio: many concurrent requests, each in its own coroutine, computed in shared batches.

    async with AsyncLLM("path/to/model") as llm:
        async for delta in llm.stream("one", SamplingParams(max_tokens=8), "path/to/adapter"):
            print(delta.text, end="")

The engine runs on a thread of this process. The HTTP API needs separate processes, because several API processes share
one engine. Here there is one caller, so sockets would only add cost, and adapters given as tensors would have to be
copied through them.

Cancelling the task that waits for a request, or closing its iterator, aborts the request and frees its pages.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Self

from slora.core.engine_state import EngineInfo, EngineStats
from slora.core.request import Pooling
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.llm.local_engine import LocalEngine
from slora.llm.request_builder import (
    AdapterLike,
    Messages,
    Prompt,
    PromptAdapters,
    RequestBuilder,
    Vector,
    make_config,
    read_embedding,
)
from slora.runner.process_group import start_group
from slora.text.answer import Answer, Completion, CompletionDelta


class AsyncLLM:
    """A model with its page pool. Further settings are passed as keywords; `EngineConfig` lists them.

    The constructor loads the model and blocks until it is loaded. In a running server, use `await
    asyncio.to_thread(AsyncLLM, ...)`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        **settings: int | str | None,
    ) -> None:
        config = make_config(model, dtype, device, settings)
        self._engine = LocalEngine()
        # Threads load adapters while the engine computes steps for running requests.
        self._builder = RequestBuilder(config, notify=self._engine.wake, num_threads=2)
        self._engine.start(
            lambda: Engine(
                config,
                self._builder.model,
                self._builder.source,
                notify=self._engine.wake,
                group=start_group(config, self._builder.model),
            )
        )
        self._builder.max_model_len = self._engine.info.max_model_len

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: PromptAdapters = None
    ) -> Completion:
        """Returns the whole answer to one prompt, like `LLM.generate`.

        For several prompts, await several calls concurrently.
        """
        return await self._finish(lambda: self._builder.answers([prompt], params, [adapter]))

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, adapter: PromptAdapters = None
    ) -> Completion:
        """Returns the whole answer to one conversation, like `LLM.chat`."""
        return await self._finish(lambda: self._builder.chat_answers([messages], params, [adapter]))

    async def embed(
        self, prompt: Prompt, pooling: Pooling | None = None, adapter: PromptAdapters = None
    ) -> Vector:
        """Returns the embedding of one prompt, like `LLM.embed`."""
        (request,) = await asyncio.to_thread(
            self._builder.embeddings, [prompt], pooling or Pooling(), [adapter]
        )
        async with aclosing(self._engine.generate(request)) as deltas:
            async for arrived in deltas:
                return read_embedding(arrived[-1])
        raise AssertionError("a request ends with a delta or an error")

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: PromptAdapters = None
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Like `generate`, but yields the answer in deltas.

        A best_of above n is refused. Errors are raised at the first await.
        """
        return self._stream(lambda: self._builder.answers([prompt], params, [adapter]))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, adapter: PromptAdapters = None
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Like `chat`, but yields the answer in deltas."""
        return self._stream(lambda: self._builder.chat_answers([messages], params, [adapter]))

    async def remove_adapter(self, adapter: AdapterLike) -> None:
        """Removes an adapter from pool and host as soon as no request uses it.

        An adapter given as tensors stays in memory until it is removed.
        """
        if (version := self._builder.discard(adapter)) is not None:
            await self._engine.remove_adapter(version)

    async def close(self) -> None:
        """Stops the engine. Unfinished requests fail with EngineUnavailable."""
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._builder.source.close)

    async def _stream(self, build: Callable[[], list[Answer]]) -> AsyncGenerator[CompletionDelta, None]:
        # This runs on a thread, because tokenizing a long text and reading an adapter take time.
        (answer,) = await asyncio.to_thread(build)
        answer.request.sampling.refuse_streaming()
        async with aclosing(self._read(answer)) as deltas:
            async for delta in deltas:
                yield delta

    async def _finish(self, build: Callable[[], list[Answer]]) -> Completion:
        (answer,) = await asyncio.to_thread(build)
        async with aclosing(self._read(answer)) as deltas:
            async for _ in deltas:
                pass
        return answer.completion()

    async def _read(self, answer: Answer) -> AsyncGenerator[CompletionDelta, None]:
        async with aclosing(self._engine.generate(answer.request)) as deltas:
            async for arrived in deltas:
                for delta in answer.take_list(arrived, self._engine.end_choice):
                    yield delta
                if answer.is_over:
                    return
