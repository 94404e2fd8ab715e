"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

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
from slora_api.completions.prompts import add_completion_answers, add_conversation_answer
from slora_api.completions.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.completions.services import AnswerServices
from slora_api.http.openapi import event_stream, json_body
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import InferenceKey

router = APIRouter(tags=["completions"])


def _logprobs_format(call: InferenceCall, body: GenerationFields, num_top: int | None) -> LogprobsFormat:
    return LogprobsFormat(
        call.services.generator.tokenizer,
        body.count_listed(num_top),
        body.prompt_logprobs,
        shows_ids=bool(body.return_tokens_as_token_ids),
    )


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=event_stream(CompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(CompletionRequest),
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
    openapi_extra=json_body(ChatRequest),
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
