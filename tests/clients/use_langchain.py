"""langchain-openai: several turns with appended answers, plain, asynchronous and streamed, and embeddings in batches
of its own.
"""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, key = sys.argv[1:]
model = ChatOpenAI(model="default", base_url=url, api_key=key, max_tokens=32, temperature=0)

messages = [SystemMessage("Be brief."), HumanMessage("one")]
messages += [model.invoke(messages), HumanMessage("two")]
messages += [asyncio.run(model.ainvoke(messages)), HumanMessage("three")]
whole = model.invoke(messages)
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.text for chunk in model.stream(messages)) == whole.text
assert len(model.batch([messages, messages])) == 2

# If it checked their length, the package would send the token ids of OpenAI's own tokenizer.
options = {"model": "default", "base_url": url, "api_key": key, "check_embedding_ctx_length": False}
model, texts = OpenAIEmbeddings(**options), [f"{chr(97 + number % 26)} text" for number in range(300)]
vectors = model.embed_documents(texts)
assert len(vectors) == 300 and len({len(vector) for vector in vectors}) == 1
assert model.embed_query(texts[7]) == vectors[7] != vectors[8]
assert asyncio.run(model.aembed_documents(texts[:3])) == vectors[:3]
assert len(OpenAIEmbeddings(dimensions=5, **options).embed_query("a")) == 5
