"""litellm: several turns with appended answers, plain and streamed, and embeddings."""

import asyncio
import sys

import litellm

url, key = sys.argv[1:]
options = {"model": "openai/default", "api_base": url, "api_key": key, "max_tokens": 32}

messages = [{"role": "user", "content": "one"}]
for text in ("two", "three"):
    messages += [litellm.completion(messages=messages, **options).choices[0].message]
    messages += [{"role": "user", "content": text}]
dumped = [one if isinstance(one, dict) else one.model_dump() for one in messages]
answer = asyncio.run(litellm.acompletion(messages=dumped, user="me", metadata={"a": "b"}, **options))
assert answer.usage.completion_tokens > 0

chunks = list(
    litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **options)
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == answer.choices[0].message.content, text

# A prompt that is too long makes litellm ask the next model.
long = [{"role": "user", "content": "x" * 5000}]
try:
    litellm.completion(messages=long, **options)
except litellm.ContextWindowExceededError as error:
    assert "maximum context length is" in str(error)
else:
    raise AssertionError("the prompt is too long")

# litellm also speaks Anthropic's API.
asked = {"model": "anthropic/default", "api_base": url.removesuffix("/v1"), "api_key": key, "max_tokens": 32}
anthropic = litellm.completion(messages=messages[:1], **asked)
assert anthropic.choices[0].message.content == text, anthropic

options = {"model": "openai/default", "api_base": url, "api_key": key}
answer = litellm.embedding(input=["one", "two"], **options)
assert [one["index"] for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 6, answer
vectors = [one["embedding"] for one in answer.data]
assert isinstance(vectors[0][0], float) and vectors[0] != vectors[1]
again = asyncio.run(litellm.aembedding(input=["one"], encoding_format="float", **options))
assert again.data[0]["embedding"] == vectors[0]
short = litellm.embedding(input="one", dimensions=3, allowed_openai_params=["dimensions"], **options)
assert len(short.data[0]["embedding"]) == 3
