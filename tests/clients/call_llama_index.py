"""llama-index: a tool that is called, and its result sent back."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """The weather."""
    return f"20 degrees in {city}"


url, key = sys.argv[1:]
options = {"model": "caller", "api_base": url, "api_key": key, "max_tokens": 64, "context_window": 4096}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
tool = FunctionTool.from_defaults(get_weather)

messages = [ChatMessage(role="user", content="How is the weather?")]
answer = model.chat_with_tools([tool], chat_history=messages)
(call,) = model.get_tool_calls_from_response(answer)
assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Ulm"}), call
result = ChatMessage(
    role="tool",
    content=tool.call(**call.tool_kwargs).content,
    additional_kwargs={"tool_call_id": call.tool_id},
)
last = model.chat_with_tools([tool], chat_history=[*messages, answer.message, result])
assert last.message.content == "It is warm.", last
