"""litellm: embeddings, plain and asynchronous."""

import asyncio
import sys

import litellm

url, key = sys.argv[1:]
options = {"model": "openai/default", "api_base": url, "api_key": key}

answer = litellm.embedding(input=["one", "two"], **options)
assert [one["index"] for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 6, answer
vectors = [one["embedding"] for one in answer.data]
assert isinstance(vectors[0][0], float) and vectors[0] != vectors[1]

again = asyncio.run(litellm.aembedding(input=["one"], encoding_format="float", **options))
assert again.data[0]["embedding"] == vectors[0]
short = litellm.embedding(input="one", dimensions=3, allowed_openai_params=["dimensions"], **options)
assert len(short.data[0]["embedding"]) == 3
