"""Computes the answers to prompts: admits the request, sends it to the engine, and records metrics."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field

from slora.client.client import EngineClient
from slora.core.engine_state import EngineInfo
from slora.core.request import NOT_SAMPLED, EngineRequest, FinishReason, Pooling
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.adapters.served_model import ServedModel
from slora_api.completions.completion_stream import MergedStreams, stream_completion
from slora_api.completions.prompts import Prompt
from slora_api.completions.readiness import Readiness
from slora_api.completions.request_limiter import RequestLimiter
from slora_api.completions.service_terms import ServiceTerms
from slora_api.core.errors import Starting
from slora_api.embeddings.embedding_run import EmbeddedInput, run_lanes
from slora_api.http.json_slices import LongList
from slora_api.metrics.metrics import Metrics
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.usage.usage_recorder import OpenRequest, UsageRecorder


@dataclass(frozen=True, slots=True)
class Generator:
    """Answers prompts and computes embeddings."""

    client: EngineClient
    tokenizer: Tokenizer
    limiter: RequestLimiter
    metrics: Metrics
    usage: UsageRecorder
    readiness: Readiness = field(default_factory=Readiness)

    def engine_info(self) -> EngineInfo:
        """Returns the limits of the engine. Raises Starting while the engine is not connected or a child process is
        stalled.
        """
        if not self.client.ready:
            raise Starting("The engine is starting; try again shortly.")
        if self.readiness.stall is not None:
            raise Starting(f"The server cannot answer now: {self.readiness.stall}. Try again shortly.")
        return self.client.info

    def find_max_model_len(self) -> int | None:
        """Returns the context of the model; None while no engine is connected."""
        return self.client.info.max_model_len if self.client.ready else None

    def missing(self) -> str | None:
        """The reason why this server cannot answer now; None if it can."""
        if self.limiter.stopping:
            return "the server is shutting down"
        return self.readiness.missing if self.client.ready else "the engine or its loader is not connected"

    def open_answers(
        self, terms: ServiceTerms, model: ServedModel, prompts: Sequence[Prompt]
    ) -> list[Answer]:
        """Returns an empty answer for each prompt. Each answer holds the engine request that will fill it."""
        return [
            Answer(
                _engine_request(terms, model, index, prompt.token_ids, prompt.sampling),
                self.tokenizer,
                index,
                prompt_only=prompt.is_alone,
                shown=frozenset() if prompt.syntax is None else prompt.syntax.markers,
                lists_every_token=prompt.lists_every_token,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def run(
        self, answers: Sequence[Answer], meter: RequestMeter
    ) -> AsyncGenerator[list[CompletionDelta], None]:
        """Fills the answers of one tenant and streams the deltas as they arrive, in lists that are never empty. Closing
        the stream early aborts the requests of all answers.

        The stream ends when the usage of all requests is durable and the answers have their timing.

        Raises the errors of the meter, the limiter, the engine and the usage journal. After an error, no request is
        left running.
        """
        self.usage.check()
        started_at = time.perf_counter()
        request = answers[0].request
        width, width_param = request.sampling.width, request.sampling.width_param
        prompt_tokens = sum(len(answer.request.prompt_token_ids) for answer in answers)
        answer_tokens = sum(width * (answer.request.sampling.max_tokens or 0) for answer in answers)
        sent: dict[int, OpenRequest] = {}

        def open_usage(answer: Answer) -> None:
            sent[answer.index] = self.usage.open(answer, spending.open())

        async with meter.hold(prompt_tokens, answer_tokens, len(answers) * width, width_param) as spending:
            with self._permits(
                request.tenant, len(answers), width, width_param, is_background=request.is_background
            ):
                streams = [stream_completion(self.client, answer, open_usage) for answer in answers]
                seen_first = request.is_background
                async with aclosing(streams[0] if len(streams) == 1 else MergedStreams(streams)) as deltas:
                    async for arrived in deltas:
                        if not seen_first:
                            seen_first = True
                            self.metrics.first_token(time.perf_counter() - started_at)
                        if not request.is_background:
                            for delta in arrived:
                                if delta.finish_reason is not None:
                                    seconds = time.perf_counter() - started_at
                                    self.metrics.finished(delta.finish_reason, seconds)
                        yield arrived
                await self.usage.wait(list(sent.values()))
        for answer in answers:
            answer.timing = sent[answer.index].timing

    async def embed(
        self,
        terms: ServiceTerms,
        requests: Iterator[EngineRequest],
        num_tokens: int,
        num_lanes: int,
        meter: RequestMeter,
        encode: Callable[[bytes], str | LongList | bytes],
    ) -> list[EmbeddedInput]:
        """Computes the embeddings of `requests`, `num_lanes` at a time. Returns the inputs, in order, as soon as the
        usage of all requests is durable.

        num_tokens: tokens of all prompts. encode: called with each embedding as it arrives.

        Raises the same errors as `run`. After an error, no request is left running.
        """
        self.usage.check()
        started_at = time.perf_counter()
        is_background = terms.background_id is not None
        sent: list[OpenRequest] = []

        async def compute(one: EmbeddedInput) -> None:
            sent.append(self.usage.open(one, spending.open()))
            async with aclosing(self.client.generate(one.request)) as deltas:
                async for arrived in deltas:
                    for delta in arrived:
                        assert delta.embedding is not None, "the only delta has the embedding"
                        one.embedding = encode(delta.embedding)
            if not is_background:
                self.metrics.finished(FinishReason.STOP, time.perf_counter() - started_at)

        async with meter.hold(num_tokens, 0, num_lanes, "input") as spending:
            with self._permits(terms.tenant, num_lanes, 1, "input", is_background=is_background):
                inputs = await run_lanes(requests, num_lanes, compute)
                await self.usage.wait(sent)
        return inputs

    def _permits(
        self, tenant: str, num_prompts: int, answers_each: int, param: str, *, is_background: bool
    ) -> AbstractContextManager[None]:
        """Returns a context that holds a permit for each answer. Lines of batches need no permits, because the batch
        runner limits how many are in progress. So all permits are left to interactive requests.
        """
        if is_background:
            return nullcontext()
        return self.limiter.admit_generation(tenant, num_prompts, answers_each, param)


def _request_id(terms: ServiceTerms, index: int) -> str:
    """Returns the id of the engine request for one prompt.

    The request id that the client sent is not used, because two clients could send the same one. A line of a batch has
    the same id each time it is computed, so that the usage ledger counts the line once.
    """
    return uuid.uuid4().hex if terms.background_id is None else f"{terms.background_id}-{index}"


def embedding_requests(
    terms: ServiceTerms, model: ServedModel, inputs: Sequence[list[int]], pooling: Pooling
) -> Iterator[EngineRequest]:
    """Yields the engine request of each input. inputs: the token ids of each input."""
    return (
        _engine_request(terms, model, index, token_ids, NOT_SAMPLED, pooling)
        for index, token_ids in enumerate(inputs)
    )


def _engine_request(
    terms: ServiceTerms,
    model: ServedModel,
    index: int,
    token_ids: list[int],
    sampling: SamplingParams,
    pooling: Pooling | None = None,
) -> EngineRequest:
    return EngineRequest(
        _request_id(terms, index),
        terms.tenant,
        token_ids,
        model.adapters,
        sampling,
        share=terms.share,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        account=terms.key_id,
        is_background=terms.background_id is not None,
        pooling=pooling,
    )
