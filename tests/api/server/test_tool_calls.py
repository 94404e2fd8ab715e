"""Required tool calls over HTTP: the openai package against a real server with a tiny random model."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.api.conftest import Kit
from tests.api.served import Served

# In the manner of Mistral. The model has no character for a line break.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "{% if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls[0].function.name }}"
    "{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)


class Paint(BaseModel):
    colour: Literal["red", "blue"]
    twice: bool


@pytest.fixture(scope="module")
def client(kit: Kit, server: Served) -> Iterator[openai.OpenAI]:
    key = server.make_key("tools")
    files = {
        "config": (kit.small / "adapter_config.json").read_bytes(),
        "weights": (kit.small / "adapter_model.safetensors").read_bytes(),
        "chat_template": TEMPLATE.encode(),
    }
    with server.client(key) as uploading:
        answer = uploading.post("/v1/adapters", data={"name": "painter"}, files=files)
        assert answer.status_code == 201, answer.text
    with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as made:
        yield made


def test_a_required_call_of_a_random_model_parses_over_two_turns(client: openai.OpenAI) -> None:
    """A random model may go on for long, so it gets several seeds to end an answer."""
    tools = [openai.pydantic_function_tool(Paint, name="paint")]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for seed in range(20):
        with client.chat.completions.stream(
            model="painter", messages=messages, tools=tools, tool_choice="required",
            parallel_tool_calls=False, max_tokens=120, seed=seed,
        ) as events:  # fmt: skip
            try:
                (choice,) = events.get_final_completion().choices
            except openai.LengthFinishReasonError:
                continue
        break
    else:
        pytest.fail("no answer ended")
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint) and json.loads(call.function.arguments)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    last = client.chat.completions.create(model="painter", messages=messages, tools=tools, max_tokens=3)
    # One token for each character.
    assert last.usage is not None and last.usage.prompt_tokens == len(
        "paint [user]hi[TOOL_CALLS]paint[tool]done"
    )


def test_the_input_of_a_custom_tool_follows_its_lark_grammar(client: openai.OpenAI) -> None:
    grammar = {
        "syntax": "lark",
        "definition": """
            start: command (LF command)?
            command: "go" WAY~1..2 | "say" /[^"x]/ "\\"" -> say
            WAY: " " ("north"i | "south")
            %import common.LF
            """,
    }
    command = r'(go( (?i:north)| south){1,2}|say[^"x]")'
    expected = re.compile(rf"{command}(\n{command})?")
    tool: Any = {
        "type": "custom",
        "custom": {"name": "run", "format": {"type": "grammar", "grammar": grammar}},
    }
    choice: Any = {"type": "custom", "custom": {"name": "run"}}
    messages: Any = [{"role": "user", "content": "hi"}]
    for seed in range(2):
        chat = client.chat.completions.create(
            model="painter", messages=messages, tools=[tool], tool_choice=choice, max_tokens=120, seed=seed
        )
        assert chat.choices[0].message.tool_calls is not None
        call = chat.choices[0].message.tool_calls[0]
        assert call.type == "custom" and expected.fullmatch(call.custom.input), call
    flat: Any = {"type": "custom", "name": "run", "format": {"type": "grammar", **grammar}}
    response = client.responses.create(
        model="painter", input="hi", tools=[flat], tool_choice="required", max_output_tokens=120
    )
    item = response.output[0]
    assert item.type == "custom_tool_call" and expected.fullmatch(item.input), item
