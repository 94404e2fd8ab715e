"""langchain-openai: several turns with appended answers, plain, asynchronous and streamed."""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]
model = ChatOpenAI(model="default", base_url=url, api_key=key, max_tokens=32, temperature=0)

messages = [SystemMessage("Be brief."), HumanMessage("one")]
messages += [model.invoke(messages), HumanMessage("two")]
messages += [asyncio.run(model.ainvoke(messages)), HumanMessage("three")]
whole = model.invoke(messages)
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.text for chunk in model.stream(messages)) == whole.text
assert len(model.batch([messages, messages])) == 2
