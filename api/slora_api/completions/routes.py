"""/v1/completions and /v1/chat/completions, /tokenize and /detokenize as in vLLM, and /v1/limits."""

from dataclasses import asdict, dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from slora.core.request_check import check_token_ids
from slora_adapters.errors import AdapterCorrupt
from slora_api.chat.chat_parts import ChatParts
from slora_api.completions.answer_format import AnswerFormat, ChatFormat, CompletionFormat, LogprobsFormat
from slora_api.completions.answer_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from slora_api.completions.answering import answer_call
from slora_api.completions.inference_call import ANSWER_ERRORS, InferenceCall
from slora_api.completions.prompt_tokenizer import encode_chat, encode_texts, render_chat
from slora_api.completions.prompts import add_completion_answers, add_conversation_answer
from slora_api.completions.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from slora_api.completions.services import AnswerServices
from slora_api.core.errors import ModelNotFound, Starting
from slora_api.http.json_slices import LongList, PartedResponse, write_json
from slora_api.http.openapi import errors, event_stream, json_body
from slora_api.http.request_bounds import RequestBounds
from slora_api.http.wiring import DirectRoute, Wired
from slora_api.keys.authentication import InferenceKey

router = APIRouter(route_class=DirectRoute, tags=["completions"])


def _logprobs_format(call: InferenceCall, body: GenerationFields, num_top: int | None) -> LogprobsFormat:
    return LogprobsFormat(
        call.encoder.tokenizer,
        body.count_listed(num_top),
        body.prompt_logprobs,
        shows_ids=bool(body.return_tokens_as_token_ids),
    )


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=event_stream(CompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(CompletionRequest, model="default", prompt="Once upon a time", max_tokens=40),
)
async def complete(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Continues one or several prompts."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(CompletionRequest.read_body, call.bounds.completion_json)

    async def prepare() -> AnswerFormat:
        await add_completion_answers(call, body)
        return CompletionFormat(
            call.model.asked_for,
            body,
            _logprobs_format(call, body, body.logprobs),
            [answer.request.prompt_token_ids for answer in call.answers],
            call.answers[0].request.sampling.num_choices,
        )

    return await answer_call(call, body, prepare)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=event_stream(ChatCompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(
        ChatRequest, model="default", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=100
    ),
)
async def chat(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Answers a conversation."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(ChatRequest.read_body, call.bounds.chat_json)

    async def prepare() -> AnswerFormat:
        asked = (await add_conversation_answer(call, body)).request
        parts = None
        if call.syntax is not None:
            parts = ChatParts(
                call.syntax,
                shows_reasoning=body.include_reasoning is not False,
                is_legacy=body.is_legacy,
            )
        return ChatFormat(
            call.model.asked_for,
            body,
            _logprobs_format(call, body, body.num_top_logprobs),
            asked.prompt_token_ids,
            asked.sampling.num_choices,
            parts,
        )

    return await answer_call(call, body, prepare)


token_router = APIRouter(tags=["tokens"])

_ERRORS = errors(ModelNotFound, AdapterCorrupt, Starting)


class TokenizedText(TypedDict):
    """The tokens of a text. count: the number of tokens. token_strs: null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


@token_router.post(
    "/tokenize",
    response_model=TokenizedText,
    responses=_ERRORS,
    openapi_extra=json_body(TokenizeRequest, prompt="Who are you?"),
)
async def tokenize(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Tokenizes a prompt or a conversation as the completion routes do. For quotas, this counts as a request without
    tokens.
    """
    call = await InferenceCall.open(request, key, services)
    body = await call.read(TokenizeRequest.read_body, call.bounds.chat_json)
    await call.meter.count_request()
    await call.find_model(body.model)
    token_ids = await call.until_gone(_encode(call, body))
    token_string = call.encoder.tokenizer.token_string
    answer = {
        "count": len(token_ids),
        "max_model_len": call.info.max_model_len,
        "tokens": LongList(lambda: token_ids),
        "token_strs": LongList(lambda: map(token_string, token_ids)) if body.return_token_strs else None,
    }
    parts = await call.until_gone(write_json(answer, call.tenant, services.cpu_slots))
    return PartedResponse(parts, call.model.headers)


async def _encode(call: InferenceCall, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        text, _ = await render_chat(call, body.messages, body.shown_tools, body)
        return await encode_chat(call, text, body)
    (token_ids,) = await encode_texts(call, [body.prompt or ""], add_special_tokens=body.add_special_tokens)
    return token_ids


@token_router.post(
    "/detokenize",
    response_model=DetokenizedText,
    responses=_ERRORS,
    openapi_extra=json_body(DetokenizeRequest, tokens=[1, 2, 3]),
)
async def detokenize(request: Request, key: InferenceKey, services: Wired[AnswerServices]) -> Response:
    """Returns the text of token ids, special tokens included. For quotas, this counts as a request without tokens."""
    call = await InferenceCall.open(request, key, services)
    body = await call.read(DetokenizeRequest.read_body, call.bounds.completion_json)
    await call.meter.count_request()
    await call.find_model(body.model)
    if body.tokens:
        check_token_ids(body.tokens, call.info.vocab_size, "tokens")
    decoding = call.encoder.decode(call.tenant, body.tokens, skip_special_tokens=False)
    text = await call.until_gone(decoding)
    call.bounds.check_decoded(len(text))
    parts = await call.until_gone(write_json({"prompt": text}, call.tenant, services.cpu_slots))
    return PartedResponse(parts, {})


limits_router = APIRouter(tags=["models"])


@dataclass(frozen=True, slots=True)
class LimitsObject(RequestBounds):
    object: Literal["limits"] = "limits"


@limits_router.get("/v1/limits", responses=errors(Starting))
async def show_limits(_key: InferenceKey, services: Wired[AnswerServices]) -> LimitsObject:
    return LimitsObject(**asdict(services.bounds(services.generator.engine_info())))
