"""litellm: a tool that is called and answered, plain and streamed."""

import sys

import litellm

url, key = sys.argv[1:]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
options = {"model": "openai/caller", "api_base": url, "api_key": key, "max_tokens": 64, "tools": tools}
messages = [{"role": "user", "content": "How is the weather?"}]

first = litellm.completion(messages=messages, **options).choices[0]
assert (
    first.finish_reason == "tool_calls"
    and first.message.tool_calls[0].function.arguments == '{"city": "Ulm"}'
)
messages += [first.message, {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "20"}]
assert litellm.completion(messages=messages, **options).choices[0].message.content == "It is warm."

chunks = list(litellm.completion(messages=messages[:1], stream=True, **options))
whole = litellm.stream_chunk_builder(chunks).choices[0].message
assert whole.tool_calls[0].function.arguments == '{"city": "Ulm"}', whole
result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "20"}
last = litellm.completion(messages=[messages[0], whole.model_dump(), result], **options)
assert last.choices[0].message.content == "It is warm."
