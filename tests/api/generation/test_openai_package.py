"""The openai package works unchanged: what it sends back from an answer is accepted."""

from collections.abc import Callable
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam

from slora.core.request import FinishReason
from tests.api.platform import Platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

ANSWER = deltas_of(b"Hi!", FinishReason.STOP)
CONVERSATION = b"[user]hello[assistant]Hi![user]again"


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine([ANSWER], max_model_len=128))


@pytest.fixture(autouse=True)
def answer(platform: Platform) -> None:
    platform.engine.reset(ANSWER)


@pytest.fixture(scope="module")
def key(platform: Platform) -> str:
    return platform.key("acme")


def say(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def test_an_answer_of_a_client_is_appended_to_its_conversation(platform: Platform, key: str) -> None:
    client = platform.sdk(key)
    messages: list[ChatCompletionMessageParam | ChatCompletionMessage] = [say("hello")]
    messages.append(client.chat.completions.create(model="base", messages=messages).choices[0].message)
    client.chat.completions.create(model="base", messages=[*messages, say("again")])
    assert bytes(platform.engine.requests[-1].prompt_token_ids) == CONVERSATION


class City(pydantic.BaseModel):
    name: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # The package's own.
def test_a_parsed_answer_is_appended_to_its_conversation(platform: Platform, key: str) -> None:
    """`parse` adds the field `parsed` to the message, and the client sends it back."""
    text = '{"name": "Ulm"}'
    platform.says(text)
    client = platform.sdk(key)
    messages: list[Any] = [say("hello")]
    answer = client.chat.completions.parse(model="base", messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Ulm")
    for sent in (answer.choices[0].message, answer.choices[0].message.model_dump(warnings=False)):
        client.chat.completions.parse(
            model="base", messages=[*messages, sent, say("more")], response_format=City
        )
        assert platform.last_prompt() == f"[user]hello[assistant]{text}[user]more"
    response = client.responses.parse(model="base", input="hello", text_format=City)
    items: Any = [{"role": "user", "content": "hello"}, *response.output, {"role": "user", "content": "more"}]
    client.responses.parse(model="base", input=items, text_format=City)
    assert platform.last_prompt() == f"[user]hello[assistant]{text}[user]more"
