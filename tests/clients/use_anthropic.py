"""anthropic, with its key header alone: several turns with appended answers, plain, asynchronous and streamed."""

import asyncio
import sys

import anthropic

url, key = sys.argv[1:]
server = url.removesuffix("/v1")
client = anthropic.Anthropic(base_url=server, api_key=key)
options = {"model": "default", "max_tokens": 32}

messages = [{"role": "user", "content": "one"}]
for text in ("two", "three"):
    answer = client.messages.create(messages=messages, system="Be brief.", **options)
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0, answer
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": text}]
counted = client.messages.count_tokens(model="default", messages=messages).input_tokens
assert counted == client.messages.create(messages=messages, **options).usage.input_tokens

system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
with client.messages.stream(messages=messages, system=system, **options) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert streamed == final.content[0].text == answer.content[0].text and final.stop_reason == "end_turn", final
beta = client.beta.messages.create(
    messages=messages,
    betas=["context-management-2025-06-27"],
    context_management={"edits": []},
    metadata={"user_id": "somebody"},
    thinking={"type": "enabled", "budget_tokens": 1024},
    **options,
)
assert beta.content[0].text == streamed


listed = list(client.models.list(limit=1))
assert {"base", "voice-a", "voice-b", "voice-c"} <= {model.id for model in listed}, listed
page = client.models.list(limit=2, before_id="voice-c")
assert [model.id for model in page.data] == ["voice-a", "voice-b"] and page.has_more, page
assert [model.id for model in page.get_next_page().data] == ["base"]
model = client.models.retrieve("voice-b")
assert (model.type, model.id, model.lifecycle, model.max_input_tokens) == ("model", "voice-b", "active", 4096)
assert model.created_at.year > 2020 and model == page.data[1]
assert list(client.models.list(lifecycle=["retired"])) == []
try:
    client.models.retrieve("nope")
except anthropic.NotFoundError as caught:
    assert caught.body["error"]["type"] == "not_found_error", caught


async def ask() -> str:
    async with anthropic.AsyncAnthropic(base_url=server, api_key=key) as client:
        return (await client.messages.create(messages=messages, **options)).content[0].text


assert asyncio.run(ask()) == streamed
for wrong, error in (
    ({"model": "nope"}, anthropic.NotFoundError),
    ({"max_tokens": 0}, anthropic.BadRequestError),
):
    try:
        client.messages.create(messages=messages, **options | wrong)
    except error as caught:
        assert caught.body["type"] == "error" and caught.request_id, caught
    else:
        raise AssertionError(wrong)
try:
    anthropic.Anthropic(base_url=server, api_key="wrong").messages.create(messages=messages, **options)
except anthropic.AuthenticationError as caught:
    assert caught.body["error"]["type"] == "authentication_error"
