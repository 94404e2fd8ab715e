"""langchain-openai: embeddings of documents and queries, plain and asynchronous, in batches of its own."""

import asyncio
import sys

from langchain_openai import OpenAIEmbeddings

url, key = sys.argv[1:]
# Without this, the package sends the token ids of OpenAI's own tokenizer.
model = OpenAIEmbeddings(model="default", base_url=url, api_key=key, check_embedding_ctx_length=False)

texts = [f"{chr(97 + number % 26)} text" for number in range(300)]
vectors = model.embed_documents(texts)
assert len(vectors) == 300 and len({len(vector) for vector in vectors}) == 1
assert model.embed_query(texts[7]) == vectors[7] != vectors[8]
assert asyncio.run(model.aembed_documents(texts[:3])) == vectors[:3]

short = OpenAIEmbeddings(
    model="default", base_url=url, api_key=key, check_embedding_ctx_length=False, dimensions=5
)
assert len(short.embed_query("a")) == 5
