"""langchain-openai, over chats and over /v1/responses: a tool that is called and answered, plain and streamed, and
structured output by a forced call.
"""

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class get_weather(BaseModel):
    """The weather."""

    city: str


url, key = sys.argv[1:]
options = {"model": "caller", "base_url": url, "api_key": key, "max_tokens": 64}
question = HumanMessage("How is the weather?")
for use_responses_api in (False, True):
    with_tools = ChatOpenAI(use_responses_api=use_responses_api, **options).bind_tools([get_weather])
    call = with_tools.invoke([question])
    assert [(one["name"], one["args"]) for one in call.tool_calls] == [("get_weather", {"city": "Ulm"})], call
    assert call.usage_metadata["output_tokens"] > 0
    result = ToolMessage("20 degrees", tool_call_id=call.tool_calls[0]["id"])
    assert with_tools.invoke([question, call, result]).text == "It is warm."

    whole = AIMessageChunk("")
    for chunk in with_tools.stream([question]):
        whole += chunk
    assert whole.tool_calls[0]["args"] == {"city": "Ulm"}, whole
    answered = [question, whole, ToolMessage("20", tool_call_id=whole.tool_calls[0]["id"])]
    assert "".join(chunk.text for chunk in with_tools.stream(answered)) == "It is warm."

forced = ChatOpenAI(**options).with_structured_output(get_weather, method="function_calling")
assert forced.invoke([question]) == get_weather(city="Ulm")
