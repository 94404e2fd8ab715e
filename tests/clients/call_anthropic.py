"""anthropic: a tool of a tenant's adapter that is called and answered, plain, streamed and forced."""

import sys

import anthropic

url, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
tool = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
options = {"model": "caller", "max_tokens": 64_000, "tools": [tool]}
messages = [{"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}]


def answer_of(message: anthropic.types.Message) -> list:
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert message.stop_reason == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Ulm"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20"}]}
    return [
        *messages,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]


first = client.messages.create(messages=messages, timeout=60, **options)
last = client.messages.create(messages=answer_of(first), timeout=60, **options)
assert (last.content[0].text, last.stop_reason) == ("It is warm.", "end_turn"), last

with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **options) as stream:
    kinds = [event.type for event in stream]
    whole = stream.get_final_message()
assert "input_json" in kinds and kinds[-1] == "message_stop", kinds
with client.messages.stream(messages=answer_of(whole), **options) as stream:
    assert "".join(stream.text_stream) == "It is warm."
