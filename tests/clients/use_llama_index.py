"""llama-index: several turns with appended answers, plain and streamed, and a completion."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
options = {"model": "default", "api_base": url, "api_key": key, "max_tokens": 32, "context_window": 256}
model = OpenAILike(is_chat_model=True, **options)

messages = [ChatMessage(role="user", content="one")]
for text in ("two", "three"):
    messages += [model.chat(messages).message, ChatMessage(role="user", content=text)]
whole = model.chat(messages).message.content
assert whole and list(model.stream_chat(messages))[-1].message.content == whole
assert OpenAILike(is_chat_model=False, **options).complete("one").text == whole
