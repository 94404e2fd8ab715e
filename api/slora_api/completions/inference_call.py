"""One request for answers or embeddings, from its key to its answers.

The routes open an `InferenceCall`, and every later step finds there what belongs to the request.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from fastapi import Request, Response

from slora.core.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    RequestRefused,
    StepFailed,
    UsageJournalFull,
)
from slora.core.request import EngineRequest, Pooling
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, AnswerOptions
from slora_adapters.errors import AdapterCorrupt
from slora_api.adapters.served_model import ServedModel
from slora_api.chat.answer_reader import AnswerSyntax
from slora_api.completions.prompt_echo import PromptEchoes
from slora_api.completions.schemas import AnswerFields, ModelFields
from slora_api.completions.services import AnswerServices
from slora_api.core.errors import BadRequest, ModelNotFound
from slora_api.core.request_context import BACKGROUND_ID
from slora_api.http.field_types import IgnoredFields
from slora_api.http.json_body import read_json
from slora_api.http.openapi import errors
from slora_api.http.request_bounds import JsonBounds
from slora_api.http.sse import unless_disconnected
from slora_api.keys.key_record import KeyRecord
from slora_api.quotas.quota_meter import RequestMeter

# AdapterFetchFailed is not listed: it has the code of ModelNotFound, StoreUnavailable or AdapterCorrupt.
ANSWER_ERRORS = errors(
    *(
        ModelNotFound,
        EngineUnavailable,
        StepFailed,
        DeadlineMissed,
        RequestFailed,
        AdapterCorrupt,
        UsageJournalFull,
    )
)

# This header identifies the user if the field `user` is missing. An alias that splits requests sends all requests of a
# user to the same version.
_SESSION_HEADER = "x-session-id"

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Response = TypeVar("_Response", bound=Response)


class InferenceCall:
    """The state of one request.

    bounds, info: the bounds of the request, and the engine's facts from which they are derived.
    background_id: the id of the batch line that it computes; None for a request of a client.
    model: set by `find_model` and `answer_with`.
    encoder: tokenizes and decodes for the model.
    priority: order among the tenant's own requests; lower is served sooner.
    deadline_s: limit for each first token, from the request's arrival at the engine; None for no limit.
    answers: one for each prompt. echoes: repeats the prompts before their answers; None if the request asks for no
        echo.
    syntax: how the answer's tool calls and reasoning are written; None if the answer has neither.
    """

    def __init__(self, http: Request, key: KeyRecord, services: AnswerServices, meter: RequestMeter) -> None:
        self.http = http
        self.key = key
        self.services = services
        self.meter = meter
        self.ignored: IgnoredFields = http.state.ignored
        self.info = services.generator.engine_info()
        self.bounds = services.bounds(self.info)
        self.background_id: str | None = getattr(http.state, BACKGROUND_ID, None)
        self.priority = 0
        self.deadline_s: float | None = None
        self.model: ServedModel
        self.encoder = services.encoder
        self.answers: list[Answer] = []
        self.echoes: PromptEchoes | None = None
        self.syntax: AnswerSyntax | None = None

    @classmethod
    async def open(cls, request: Request, key: KeyRecord, services: AnswerServices) -> Self:
        """Opens the meter before the body is read, so that every answer has the meter's headers. Raises Starting while
        there is no engine, and StoreUnavailable.
        """
        is_background = getattr(request.state, BACKGROUND_ID, None) is not None
        meter = await services.quotas.open(key.tenant, key.key_id, is_background=is_background)
        request.state.meter = meter
        request.state.ignored = IgnoredFields(services.settings.unknown_fields == "ignore")
        return cls(request, key, services, meter)

    @property
    def tenant(self) -> str:
        return self.key.tenant

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(answer.request.prompt_token_ids) for answer in self.answers)

    async def read(
        self, validate: Callable[[dict[str, Any], IgnoredFields], _T], json_bounds: JsonBounds
    ) -> _T:
        """See `read_json`."""
        return await read_json(self.http, validate, self.bounds, json_bounds)

    async def until_gone(self, work: Coroutine[Any, Any, _T]) -> _T:
        """See `unless_disconnected`."""
        return await unless_disconnected(self.http.receive, work)

    async def find_model(self, name: str) -> None:
        """Finds the model of a request that computes no answer. Raises ModelNotFound and BadRequest."""
        await self._use_model(await self.services.catalog.find_model(self.key, name, None))

    async def answer_with(self, body: ModelFields, answer: Callable[[], Awaitable[_Response]]) -> _Response:
        """Finds the model and calls `answer`. If the engine reports that the adapter does not exist, looks the model up
        again and retries once.
        """
        self.priority = body.priority or 0
        if isinstance(body, AnswerFields) and body.deadline_ms is not None:
            self.deadline_s = body.deadline_ms / 1000
        await self._find_model(body, is_stale=False)
        try:
            return await answer()
        except AdapterFetchFailed as error:
            await self.find_model_again(body, error)
            return await answer()

    async def find_model_again(self, body: ModelFields, error: Exception) -> None:
        """Looks the model up again after an error. Raises the error, unless it says that an adapter does not exist, and
        the model now has other adapters.
        """
        if not isinstance(error, AdapterFetchFailed) or error.code != "not_found":
            raise error
        adapters = self.model.adapters
        await self._find_model(body, is_stale=True)
        if self.model.adapters == adapters:
            raise error

    def add_answer(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        options: AnswerOptions,
    ) -> Answer:
        """Adds the empty answer to a prompt. It holds the engine request that will fill it. See `Answer`."""
        index = len(self.answers)
        asked = self.engine_request(index, token_ids, sampling)
        answer = Answer(asked, self.encoder.tokenizer, index, options)
        self.answers.append(answer)
        return answer

    def engine_request(
        self, index: int, token_ids: list[int], sampling: SamplingParams, pooling: Pooling | None = None
    ) -> EngineRequest:
        """Returns the engine request of one prompt.

        The request id that the client sent is not used, because two clients could send the same one. A line of a batch
        has the same id each time it is computed, so that the usage ledger counts the line once.
        """
        line_id = self.background_id
        return EngineRequest(
            uuid.uuid4().hex if line_id is None else f"{line_id}-{index}",
            self.tenant,
            token_ids,
            self.model.adapters,
            sampling,
            share=self.key.share,
            priority=self.priority,
            deadline_s=self.deadline_s,
            account=self.key.key_id,
            is_background=line_id is not None,
            pooling=pooling,
        )

    @contextmanager
    def naming_adapters(self) -> Iterator[None]:
        """The engine's errors in the block name the request's adapters as the client knows them. The engine knows only
        their digests, which the log keeps.
        """
        try:
            yield
        except (AdapterFetchFailed, RequestFailed, RequestRefused) as error:
            text = str(error)
            named = self.model.name_adapters(text)
            if named != text:
                if isinstance(error, RequestFailed):
                    logger.warning("a request of tenant %s failed: %s", self.tenant, text)
                else:
                    error.message = named
                error.args = (named,)
            raise

    async def _use_model(self, model: ServedModel) -> None:
        tokens = model.added_tokens
        try:
            encoder = await self.services.encoder.with_added_tokens(self.tenant, tokens)
        except ValueError as error:
            raise BadRequest(
                f"The added tokens of the model {model.asked_for!r} do not fit the base model's tokenizer: {error}. "
                "Upload the adapter again.",
                "model",
            ) from None
        info = self.services.generator.engine_info()
        if encoder is not self.encoder:
            self.encoder, self.bounds = encoder, self.services.bounds(info, encoder)
        self.info = info.with_added_tokens(model.added_rows)
        self.model = model

    async def _find_model(self, body: ModelFields, *, is_stale: bool) -> None:
        """Raises BadRequest if the model combines more adapters than a quota permits."""
        user = body.user or self.http.headers.get(_SESSION_HEADER)
        await self._use_model(
            await self.services.catalog.find_answering_model(
                self.key, body.model, body.adapters, user, is_stale=is_stale
            )
        )
        self.meter.check_adapters(len(self.model.adapters))
        self.answers, self.echoes, self.syntax = [], None, None
