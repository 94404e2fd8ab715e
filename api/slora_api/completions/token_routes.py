"""/tokenize and /detokenize, with vLLM's bodies and answers."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from typing_extensions import TypedDict

from slora.core.request_check import check_token_ids
from slora_adapters.errors import AdapterCorrupt
from slora_api.completions.prompt_tokenizer import PromptTokenizer
from slora_api.completions.schemas import DetokenizeRequest, TokenizeRequest
from slora_api.core.errors import ModelNotFound, Starting
from slora_api.http.json_body import read_json
from slora_api.http.json_slices import LongList, write_json
from slora_api.http.openapi import errors, json_body
from slora_api.http.parted_response import PartedResponse
from slora_api.http.sse import unless_disconnected
from slora_api.keys.authentication import InferenceKey
from slora_api.serve.services import Metered, Wired

router = APIRouter(tags=["tokens"])

_ERRORS = errors(ModelNotFound, AdapterCorrupt, Starting)


class TokenizedText(TypedDict):
    """The tokens of a text. count: the number of tokens. token_strs: null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


async def _tokenize_body(request: Request, _meter: Metered, services: Wired) -> TokenizeRequest:
    bounds = services.bounds()
    return await read_json(request, TokenizeRequest.read_body, bounds, bounds.chat_json)


async def _detokenize_body(request: Request, _meter: Metered, services: Wired) -> DetokenizeRequest:
    bounds = services.bounds()
    return await read_json(request, DetokenizeRequest.read_body, bounds, bounds.completion_json)


@router.post(
    "/tokenize", response_model=TokenizedText, responses=_ERRORS, openapi_extra=json_body(TokenizeRequest)
)
async def tokenize(
    request: Request,
    body: Annotated[TokenizeRequest, Depends(_tokenize_body)],
    key: InferenceKey,
    meter: Metered,
    services: Wired,
) -> Response:
    """Tokenizes a prompt or a conversation as the completion routes do. For quotas, this counts as a request without
    tokens.
    """
    await meter.count_request()
    model = await services.catalog.find_model(key, body.model, None)
    tokenizer = services.prompt_tokenizer(key.tenant, meter, model, request.state.ignored)
    token_ids = await unless_disconnected(request.receive, _encode(tokenizer, body))
    token_string = services.encoder.tokenizer.token_string
    answer = {
        "count": len(token_ids),
        "max_model_len": services.generator.engine_info().max_model_len,
        "tokens": LongList(lambda: token_ids),
        "token_strs": LongList(lambda: map(token_string, token_ids)) if body.return_token_strs else None,
    }
    writing = write_json(answer, key.tenant, services.writing)
    return PartedResponse(await unless_disconnected(request.receive, writing), model.headers)


async def _encode(tokenizer: PromptTokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return (await tokenizer.encode_chat(body.messages, body.shown_tools, body)).token_ids
    (token_ids,) = await tokenizer.encode_texts(
        [body.prompt or ""], add_special_tokens=body.add_special_tokens
    )
    return token_ids


@router.post(
    "/detokenize",
    response_model=DetokenizedText,
    responses=_ERRORS,
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(
    request: Request,
    body: Annotated[DetokenizeRequest, Depends(_detokenize_body)],
    key: InferenceKey,
    meter: Metered,
    services: Wired,
) -> Response:
    """Returns the text of token ids, special tokens included. For quotas, this counts as a request without tokens."""
    await meter.count_request()
    await services.catalog.find_model(key, body.model, None)
    if body.tokens:
        check_token_ids(body.tokens, services.generator.engine_info().vocab_size, "tokens")
    decoding = services.encoder.decode(key.tenant, body.tokens, skip_special_tokens=False)
    text = await unless_disconnected(request.receive, decoding)
    services.bounds().check_decoded(len(text))
    writing = write_json({"prompt": text}, key.tenant, services.writing)
    return PartedResponse(await unless_disconnected(request.receive, writing), {})
