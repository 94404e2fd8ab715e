"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from slora_api.answer_format import ChatFormat, CompletionFormat
from slora_api.answering import answer_request
from slora_api.authentication import CurrentKey
from slora_api.prompts import chat_prompt, completion_prompts
from slora_api.schemas import ChatRequest, CompletionRequest
from slora_api.services import Wired

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest, key: CurrentKey, services: Wired) -> Response:
    generator = services.generator
    model = services.catalog.find_model(key, body.model)
    prompts = await completion_prompts(body, model, generator.tokenizer, generator.engine_info())
    shape = CompletionFormat(
        model.asked_for, include_usage=body.include_usage, logprobs=body.logprobs is not None
    )
    return await answer_request(
        request,
        body,
        generator.run(key.tenant, model, prompts),
        shape,
        prompt_tokens=[len(prompt.token_ids) for prompt in prompts],
        headers=model.headers,
    )


@router.post("/v1/chat/completions")
async def chat(request: Request, body: ChatRequest, key: CurrentKey, services: Wired) -> Response:
    generator = services.generator
    model = services.catalog.find_model(key, body.model)
    prompt = await chat_prompt(body, model, generator.tokenizer, services.templates, generator.engine_info())
    shape = ChatFormat(model.asked_for, include_usage=body.include_usage, logprobs=bool(body.logprobs))
    return await answer_request(
        request,
        body,
        generator.run(key.tenant, model, [prompt]),
        shape,
        prompt_tokens=[len(prompt.token_ids)],
        headers=model.headers,
    )
