"""`echo` and `prompt_logprobs`: the prompt's log-probabilities in an answer, in OpenAI's form and in vLLM's."""

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from tests.api.conftest import Kit
from tests.api.platform import Platform, post
from tests.api.scripted_engine import EOS
from tests.api.served import CHARACTERS, Served
from tests.support.oracle import Oracle

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def scored(prompt: bytes, answer: bytes) -> list[TokenDelta | Exception]:
    """The prompt's log-probabilities in two deltas, as from two steps. Token t has -t / 10, and "z" is the most
    probable."""
    scores = [
        None,
        *(TokenLogprobs(-at / 10, ((ord("z"), -0.05), (EOS, -0.07))) for at in range(1, len(prompt))),
    ]
    pieces = [TokenDelta((), prompt_logprobs=tuple(part)) for part in (scores[:2], scores[2:]) if part]
    tokens = [
        TokenDelta(
            (byte,), FinishReason.LENGTH if at == len(answer) - 1 else None, (TokenLogprobs(-1.0, ()),)
        )
        for at, byte in enumerate(answer)
    ]
    return [*pieces, *tokens]


def body_of(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": prompt, "echo": True, **fields}


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
def test_an_echo_precedes_the_answer(platform: Platform, key: str, prompt: Any) -> None:
    answer = post(platform, key, COMPLETIONS, body_of(prompt)).json()
    assert answer["choices"][0]["text"] == "helloHi!" and answer["choices"][0]["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert platform.engine.requests[0].sampling.prompt_logprobs is None


def test_each_choice_of_each_prompt_has_its_own_echo(platform: Platform, key: str) -> None:
    choices = [
        TokenDelta((65 + index,), FinishReason.LENGTH if last else None, index=index)
        for last in (False, True)
        for index in (0, 1)
    ]
    platform.engine.answers = [choices]
    answer = post(platform, key, COMPLETIONS, body_of(["one", "two"], n=2)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["oneAA", "oneBB", "twoAA", "twoBB"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_an_echo_begin_with_null(platform: Platform, key: str, stream: bool) -> None:
    prompt, end = "aéb", "<eos>"
    # The end token is not part of the text. The second byte of é completes the character.
    token_ids = [EOS, *prompt.encode()]
    platform.engine.answers = [scored(bytes(5), b"xy")]
    answer = post(platform, key, COMPLETIONS, body_of(token_ids, logprobs=1, stream=stream))
    if stream:
        parts = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n")[:-2]]
        choices = [part["choices"][0] for part in parts]
    else:
        choices = answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == prompt + "xy"
    logprobs = {
        name: [item for choice in choices for item in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert logprobs["tokens"][0] == end and logprobs["tokens"][-3:] == ["b", "x", "y"]
    assert logprobs["token_logprobs"] == [None, -0.1, -0.2, -0.3, -0.4, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][4] == {"z": -0.05, "b": -0.4}
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 4]
    assert platform.engine.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_have_vllms_form(platform: Platform, key: str, path: str) -> None:
    asked = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    prompt = b"hi" if path == COMPLETIONS else b"[user]hi"
    platform.engine.answers = [scored(prompt, b"x")]
    answer = post(platform, key, path, {"model": "base", "prompt_logprobs": 1, **asked}).json()
    holder = answer["choices"][0] if path == COMPLETIONS else answer
    assert len(holder["prompt_logprobs"]) == len(prompt)
    assert holder["prompt_logprobs"][:2] == [
        None,
        {
            str(ord("z")): {"logprob": -0.05, "rank": 1, "decoded_token": "z"},
            str(prompt[1]): {"logprob": -0.1, "rank": None, "decoded_token": chr(prompt[1])},
        },
    ]
    answer = post(platform, key, path, {"model": "base", **asked}).json()
    assert (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_unsupported_prompt_options_are_refused_by_name(
    platform: Platform, key: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(platform, key, COMPLETIONS, body_of("hello", **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert platform.engine.requests == []


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    url, key = server.url + "/v1", server.make_key("scorer")
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as connected:
        yield connected


def test_the_openai_package_gets_the_scores_that_transformers_gives(client: openai.OpenAI, kit: Kit) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    answer = client.completions.create(
        model="base", prompt=prompt, echo=True, logprobs=2, max_tokens=4, temperature=0,
        extra_body={"ignore_eos": True, "prompt_logprobs": 3},
    )  # fmt: skip
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text.startswith(prompt) and logprobs is not None
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.text_offset == list(range(len(logprobs.tokens)))
    token_ids = [CHARACTERS.index(character) for character in prompt]
    expected = Oracle(kit.base, {}).logits(token_ids, None).log_softmax(-1)
    found = logprobs.token_logprobs[1 : len(prompt)]
    assert found == pytest.approx(
        [row[token].item() for row, token in zip(expected, token_ids[1:], strict=False)], abs=1e-3
    )
    positions = answer.model_dump()["choices"][0]["prompt_logprobs"]
    assert len(positions) == len(prompt) and positions[0] is None
    assert math.isclose(positions[1][str(token_ids[1])]["logprob"], found[0])
    assert all(len(position) in (3, 4) for position in positions[1:])


def test_the_openai_package_may_use_every_sampling_field(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.4,
                              "frequency_penalty": 0.3, "logit_bias": {"42": -100, "7": 2}}  # fmt: skip
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 24, "stop_token_ids": [3]}
    texts = []
    for _ in range(2):
        completion = client.completions.create(model="base", prompt="fox", extra_body=extra, **fields)
        messages: Any = [{"role": "user", "content": "fox"}]
        chat = client.chat.completions.create(model="base", messages=messages, extra_body=extra, **fields)
        texts.append((completion.choices[0].text, chat.choices[0].message.content))
        assert completion.usage is not None and completion.usage.completion_tokens == 24
    assert texts[0] == texts[1]
    assert all(CHARACTERS[42] not in text and CHARACTERS[3] not in text for text in texts[0])
    banned = client.completions.create(
        model="base",
        prompt="fox",
        max_tokens=24,
        temperature=0,
        logit_bias={"20": 100},
        extra_body={"ignore_eos": True},
    )
    assert banned.choices[0].text == CHARACTERS[20] * 24
