"""instructor, in its default mode, which forces a call."""

import sys

import instructor
import openai
from pydantic import BaseModel


class get_weather(BaseModel):
    city: str


url, key = sys.argv[1:]
client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=key))
messages = [{"role": "user", "content": "How is the weather?"}]
asked = client.chat.completions.create(
    model="caller", messages=messages, response_model=get_weather, max_tokens=64
)
assert asked.city == "Ulm", asked
