"""langchain-openai over /v1/responses: a tool that is called and answered, plain and streamed."""

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class get_weather(BaseModel):
    """The weather."""

    city: str


url, key = sys.argv[1:]
model = ChatOpenAI(model="caller", base_url=url, api_key=key, max_tokens=64, use_responses_api=True)
with_tools = model.bind_tools([get_weather])

messages = [HumanMessage("How is the weather?")]
call = with_tools.invoke(messages)
assert [(one["name"], one["args"]) for one in call.tool_calls] == [("get_weather", {"city": "Ulm"})], call
assert call.usage_metadata["output_tokens"] > 0
messages += [call, ToolMessage("20 degrees", tool_call_id=call.tool_calls[0]["id"])]
assert with_tools.invoke(messages).text == "It is warm."

whole = AIMessageChunk("")
for chunk in with_tools.stream(messages[:1]):
    whole += chunk
assert whole.tool_calls[0]["args"] == {"city": "Ulm"}, whole
answered = [*messages[:1], whole, ToolMessage("20", tool_call_id=whole.tool_calls[0]["id"])]
assert "".join(chunk.text for chunk in with_tools.stream(answered)) == "It is warm."
