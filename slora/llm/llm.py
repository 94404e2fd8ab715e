"""The engine as a library: one call answers many prompts, each with its own adapter or with none.

    llm = LLM("path/to/model")
    outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=8), adapters=["path/to/adapter", None])

Needs no HTTP stack and no database. Adapters are PEFT directories, or tensors (`LoraAdapter`). The engine runs its
steps on the caller's thread, while the call waits for its answers. `AsyncLLM` serves many concurrent callers.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slora.core.engine_state import EngineInfo, EngineStats
from slora.core.request import EngineRequest, Pooling, StepOutput
from slora.engine.engine import Engine
from slora.llm.request_builder import (
    AdapterLike,
    Adapters,
    Messages,
    Params,
    Prompt,
    RequestBuilder,
    Vector,
    as_conversations,
    as_prompts,
    make_config,
    read_embedding,
)
from slora.runner.process_group import start_group
from slora.text.answer import Answer, Completion, CompletionDelta


class LLM:
    """A model with its page pool, for use by one thread.

    Further settings are passed as keywords; `EngineConfig` lists them.
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
        # Adapters load synchronously inside `request`. The caller waits anyway, so a thread would only add delay.
        self._builder = RequestBuilder(config, num_threads=0)
        self._engine = Engine(
            config, self._builder.model, self._builder.source, group=start_group(config, self._builder.model)
        )
        self._builder.max_model_len = self._engine.info.max_model_len
        self._inboxes: dict[str, deque[StepOutput]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, adapters: Adapters = None
    ) -> list[Completion]:
        """Continues every prompt, a text or token ids, and returns the answers in the same order.

        params: one for all prompts, or one per prompt. None: the defaults of the adapter's generation_config.json, then
            of the model's.
        adapters: one PEFT directory or LoraAdapter for all prompts, or one entry per prompt. None: the base model. An
            entry may be a list of adapters: their weighted outputs are summed, as if the adapters were merged.

        Raises RequestRefused naming what can't be served, or AdapterInvalid for an adapter that does not fit this
        model. Then no prompt is answered.
        """
        return self._finish(self._builder.answers(as_prompts(prompts), params, adapters))

    def chat(
        self, messages: Messages | Sequence[Messages], params: Params = None, adapters: Adapters = None
    ) -> list[Completion]:
        """Answers one conversation or several, like `generate`, with the adapter's or the model's chat template."""
        return self._finish(self._builder.chat_answers(as_conversations(messages), params, adapters))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        adapters: Adapters = None,
    ) -> list[Vector]:
        """Returns the embedding of every prompt, a text or token ids, as a float32 array, in the same order.

        pooling: None returns the hidden state of the last token, divided by its norm.
        adapters: as in `generate`.

        Raises as `generate` does. RequestFailed is the error of a prompt whose hidden states are not finite.
        """
        requests = self._builder.embeddings(as_prompts(prompts), pooling or Pooling(), adapters)
        found: dict[str, Vector] = {}
        with self._opened(requests) as inbox:
            while len(found) < len(requests):
                output = self._next(inbox)
                if output.error is not None:
                    raise output.error
                found[output.request_id] = read_embedding(output.delta)
        return [found[request.request_id] for request in requests]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, adapters: Adapters = None
    ) -> Iterator[CompletionDelta]:
        """Like `generate`, but yields each answer in deltas.

        A delta's `index` is the number of its prompt, and its `choice` the number of the answer, from 0 to n - 1. Also
        raises RequestRefused for best_of above n. Closing or dropping the iterator aborts unfinished requests.
        """
        return self._stream(_streamable(self._builder.answers(as_prompts(prompts), params, adapters)))

    def stream_chat(
        self, messages: Messages | Sequence[Messages], params: Params = None, adapters: Adapters = None
    ) -> Iterator[CompletionDelta]:
        """Like `chat`, but yields the answers in deltas."""
        return self._stream(
            _streamable(self._builder.chat_answers(as_conversations(messages), params, adapters))
        )

    def remove_adapter(self, adapter: AdapterLike) -> None:
        """Removes an adapter from pool and host as soon as no open stream uses it.

        An adapter given as tensors stays in memory until it is removed.
        """
        if (version := self._builder.discard(adapter)) is not None:
            self._engine.remove_adapter(version)

    def check(self) -> None:
        """Checks that no page of the pool is lost."""
        self._engine.check_invariants()

    def _finish(self, answers: list[Answer]) -> list[Completion]:
        for _ in self._stream(answers):
            pass
        return [answer.completion() for answer in answers]

    def _stream(self, answers: list[Answer]) -> Iterator[CompletionDelta]:
        unfinished = {answer.request.request_id: answer for answer in answers}
        with self._opened([answer.request for answer in answers]) as inbox:
            while unfinished:
                output = self._next(inbox)
                asked = unfinished.get(output.request_id)
                if asked is None or (output.delta is not None and not asked.wants(output.delta.index)):
                    # A stop string had ended this choice before a step of another stream computed this output.
                    continue
                delta = _take(asked, output)
                if asked.is_over:
                    del unfinished[output.request_id]
                    self._end(output.request_id)
                elif delta.finish_reason is not None:
                    self._engine.abort(output.request_id, delta.choice)
                yield delta

    @contextmanager
    def _opened(self, requests: Sequence[EngineRequest]) -> Iterator[deque[StepOutput]]:
        """Adds requests to the engine, with one inbox for their outputs. On exit, aborts unfinished requests."""
        inbox: deque[StepOutput] = deque()
        self._inboxes |= {request.request_id: inbox for request in requests}
        try:
            for request in requests:
                self._engine.add(request)
            yield inbox
        finally:
            for request in requests:
                self._end(request.request_id)

    def _next(self, inbox: deque[StepOutput]) -> StepOutput:
        """Runs engine steps until this inbox has an output. Outputs of other streams go to their own inboxes."""
        while not inbox:
            self._step()
        return inbox.popleft()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)
        self._engine.pop_usage()  # The library does not bill.

    def _end(self, request_id: str) -> None:
        """Aborts the request in the engine. A stop string may have ended a choice that the engine would continue."""
        if self._inboxes.pop(request_id, None) is not None:
            self._engine.abort(request_id)


def _streamable(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        answer.request.sampling.refuse_streaming()
    return answers


def _take(answer: Answer, output: StepOutput) -> CompletionDelta:
    """Adds an output to the answer and returns its delta. Raises the error if the output has one."""
    if output.error is not None:
        raise output.error
    assert output.delta is not None, "an output has a delta or an error"
    return answer.take(output.delta)
