"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from slora_api.adapters.served_model import ServedModel
from slora_api.chat.chat_parts import ChatParts
from slora_api.completions.answer_format import ChatFormat, CompletionFormat, LogprobsFormat
from slora_api.completions.answer_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from slora_api.completions.answers import ANSWER_ERRORS, Prepared, answer_prompts
from slora_api.completions.prompts import PromptMaker
from slora_api.completions.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.http.json_body import read_json
from slora_api.http.openapi import event_stream, json_body
from slora_api.keys.authentication import InferenceKey
from slora_api.serve.services import Services, Wired, open_meter

router = APIRouter(tags=["completions"])


def _logprobs_format(services: Services, body: GenerationFields, num_top: int | None) -> LogprobsFormat:
    return LogprobsFormat(
        services.generator.tokenizer,
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
async def complete(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Continues one or several prompts."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, CompletionRequest.read_body, bounds, bounds.completion_json)

    async def prepare(maker: PromptMaker, model: ServedModel) -> Prepared:
        prompts = await maker.completion_prompts(body)
        shape = CompletionFormat(
            model.asked_for,
            body,
            _logprobs_format(services, body, body.logprobs),
            [prompt.token_ids for prompt in prompts],
            prompts[0].sampling.num_choices,
        )
        return prompts, shape

    return await answer_prompts(request, body, key, meter, services, prepare)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=event_stream(ChatCompletionChunk) | ANSWER_ERRORS,
    openapi_extra=json_body(ChatRequest),
)
async def chat(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Answers a conversation."""
    meter, bounds = await open_meter(request, key, services), services.bounds()
    body = await read_json(request, ChatRequest.read_body, bounds, bounds.chat_json)

    async def prepare(maker: PromptMaker, model: ServedModel) -> Prepared:
        prompt = await maker.conversation_prompt(body)
        shape = ChatFormat(
            model.asked_for,
            body,
            _logprobs_format(services, body, body.num_top_logprobs),
            prompt.token_ids,
            prompt.sampling.num_choices,
            None
            if prompt.syntax is None
            else ChatParts(
                prompt.syntax,
                shows_reasoning=body.include_reasoning is not False,
                is_legacy=body.is_legacy,
            ),
        )
        return [prompt], shape

    return await answer_prompts(request, body, key, meter, services, prepare)
