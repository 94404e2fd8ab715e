"""Turns prompts into a stream of text: admits the request, sends it to the engine, and records metrics."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from slora.engine.client import EngineClient
from slora.engine.info import EngineInfo
from slora.request import EngineRequest
from slora.text.tokenizer import Tokenizer
from slora_api.errors import Starting
from slora_api.generation.metrics import Metrics
from slora_api.generation.prompts import Prompt
from slora_api.generation.readiness import Readiness
from slora_api.generation.request_limiter import RequestLimiter
from slora_api.generation.served_model import ServedModel
from slora_api.generation.service_terms import ServiceTerms
from slora_api.generation.text_stream import TextDelta, merge_streams, stream_text

__all__ = ["Generator"]


@dataclass(frozen=True, slots=True)
class Generator:
    """The parts that are needed to answer prompts."""

    client: EngineClient
    tokenizer: Tokenizer
    limiter: RequestLimiter
    metrics: Metrics
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

    def missing(self) -> str | None:
        """The reason why this server cannot answer now; None if it can."""
        if self.limiter.stopping:
            return "the server is shutting down"
        return self.readiness.missing if self.client.ready else "the engine or its loader is not connected"

    async def run(
        self, terms: ServiceTerms, model: ServedModel, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[TextDelta, None]:
        """Streams the answers to `prompts`, by index, as they arrive. Closing the stream early aborts all of its
        requests.

        All prompts have the same number of answers. The answers to the first prompt have the lowest indexes.

        Raises what the limiter and the engine raise. No request is left running then.
        """
        started_at = time.perf_counter()
        sampling = prompts[0].sampling
        with self.limiter.admit_generation(terms.tenant, len(prompts), sampling.width, sampling.width_param):
            seen_first = False
            async with aclosing(self._streams(terms, model, prompts)) as deltas:
                async for delta in deltas:
                    if not seen_first:
                        seen_first = True
                        self.metrics.first_token(time.perf_counter() - started_at)
                    if delta.finish_reason is not None:
                        self.metrics.finished(delta.finish_reason, time.perf_counter() - started_at)
                    yield delta

    def _streams(
        self, terms: ServiceTerms, model: ServedModel, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[TextDelta, None]:
        # The server makes its own ids, because another client could send the same id.
        requests = [
            EngineRequest(
                uuid.uuid4().hex,
                terms.tenant,
                prompt.token_ids,
                model.adapter,
                prompt.sampling,
                share=terms.share,
                priority=terms.priority,
                deadline_s=terms.deadline_s,
            )
            for prompt in prompts
        ]
        streams = [
            stream_text(
                self.client, self.tokenizer, request, index * request.sampling.num_choices, prompt.echo
            )
            for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        return streams[0] if len(streams) == 1 else merge_streams(streams)
