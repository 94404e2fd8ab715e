"""instructor, in the mode that reads JSON from a plain answer."""

import sys

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str


url, key = sys.argv[1:]
client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=key), mode=instructor.Mode.MD_JSON)
messages = [{"role": "user", "content": "Who is it?"}]
person = client.chat.completions.create(
    model="default", messages=messages, response_model=Person, max_tokens=64
)
assert person.name == "Ann", person
