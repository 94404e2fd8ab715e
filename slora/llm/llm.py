"""The engine as a library: one call answers many prompts, each with its own adapter or with none.

    llm = LLM("path/to/model")
    outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=8), adapters=["path/to/adapter", None])

Needs no HTTP stack and no database. Adapters are PEFT directories, or tensors (`LoraAdapter`). The engine runs its
steps on the caller's thread, while the call waits for its answers. `AsyncLLM` serves many concurrent callers.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from slora.engine.engine import Engine
from slora.engine.info import EngineInfo, EngineStats
from slora.engine_config import EngineConfig
from slora.llm.request_builder import (
    AdapterLike,
    Adapters,
    Messages,
    Params,
    Prompt,
    RequestBuilder,
    as_conversations,
    as_prompts,
)
from slora.request import StepOutput
from slora.text.answer import Answer, Completion, CompletionDelta

__all__ = ["LLM"]


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
        config = EngineConfig(Path(model), dtype=dtype, device=device, **settings)  # type: ignore[arg-type]
        # Adapters load synchronously inside `request`. The caller waits anyway, so a thread would only add delay.
        self._builder = RequestBuilder(config, num_threads=0)
        self._engine = Engine(config, self._builder.model, self._builder.source)
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
        adapters: one PEFT directory or LoraAdapter for all prompts, or one per prompt. None: the base model.

        Raises RequestRefused naming what can't be served, or AdapterInvalid for an adapter that does not fit this
        model. Then no prompt is answered.
        """
        return self._finish(self._builder.answers(as_prompts(prompts), params, adapters))

    def chat(
        self, messages: Messages | Sequence[Messages], params: Params = None, adapters: Adapters = None
    ) -> list[Completion]:
        """Answers one conversation or several, like `generate`, with the adapter's or the model's chat template."""
        return self._finish(self._builder.chat_answers(as_conversations(messages), params, adapters))

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

        Adapters given as tensors are kept until then.
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
        """Runs engine steps until this stream has an output. Outputs of other streams go to their own inboxes."""
        inbox: deque[StepOutput] = deque()
        unfinished = {answer.request.request_id: answer for answer in answers}
        self._inboxes |= dict.fromkeys(unfinished, inbox)
        try:
            for answer in answers:
                self._engine.add(answer.request)
            while unfinished:
                while not inbox:
                    self._step()
                output = inbox.popleft()
                asked = unfinished.get(output.request_id)
                if asked is None or (output.delta is not None and not asked.wants(output.delta.index)):
                    # Computed during a step of another stream, after a stop string had ended the choice.
                    continue
                delta = _take(asked, output)
                if asked.is_over:
                    self._end(asked, unfinished)
                elif delta.finish_reason is not None:
                    self._engine.abort(output.request_id, delta.choice)
                yield delta
        finally:
            for answer in list(unfinished.values()):
                self._end(answer, unfinished)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)
        self._engine.pop_usage()  # The library bills no one.

    def _end(self, answer: Answer, unfinished: dict[str, Answer]) -> None:
        """Aborts the request in the engine. A stop string may have ended a choice that the engine would continue."""
        request_id = answer.request.request_id
        del unfinished[request_id], self._inboxes[request_id]
        self._engine.abort(request_id)


def _streamable(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        answer.request.sampling.refuse_streaming()
    return answers


def _take(answer: Answer, output: StepOutput) -> CompletionDelta:
    """Raises the error that ended the request."""
    if output.error is not None:
        raise output.error
    assert output.delta is not None, "an output has a delta or an error"
    return answer.take(output.delta)
