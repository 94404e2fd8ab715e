"""The exact bytes of the completion routes' answers, over an engine whose tokens the test chooses."""

import asyncio
import gc
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora.core.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    RequestRefused,
)
from slora.core.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora_adapters.database.database import Database
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.http.http_protocol import ConnectionLimits
from slora_api.metrics.engine_metrics import name_tenants
from tests.adapters.hand_made import SHAPE, make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import EOS, ScriptedEngine, deltas_of
from tests.api.served import ask_and_leave, parse_metrics, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "base", "prompt": "hello"}
MESSAGES = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}


def events(answer: httpx.Response) -> list[Any]:
    """The JSON of each event. Also checks the framing."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == "" and all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def test_a_completion_has_openais_shape(platform: Platform, key: str) -> None:
    platform.engine.answers = [deltas_of(b"Hi!", FinishReason.STOP)]
    answer = post(platform, key, COMPLETIONS, PROMPT)
    body = answer.json()
    assert body.pop("id").startswith("cmpl-") and isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "base",
        "choices": [
            {
                "index": 0,
                "text": "Hi!",
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": usage(5, 4),
    }
    assert answer.headers["x-request-id"].startswith("req_") and "openai-processing-ms" in answer.headers


def test_a_chat_completion_has_openais_shape_and_went_through_the_template(
    platform: Platform, key: str
) -> None:
    body = post(platform, key, CHAT, MESSAGES).json()
    assert body.pop("id").startswith("chatcmpl-") and isinstance(body.pop("created"), int)
    message = {"role": "assistant", "content": "Hi!", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "base",
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "token_ids": None}
        ],
        "usage": usage(11, 3),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert bytes(platform.engine.requests[0].prompt_token_ids) == b"[user]hello"


def test_a_valid_request_id_is_echoed_and_an_invalid_one_is_replaced(platform: Platform, key: str) -> None:
    for sent, echoed in (("my-id.7", True), ("x" * 129, False), ("a b", False)):
        answer = platform.api(key).get("/v1/models", headers={"x-request-id": sent})
        assert (answer.headers["x-request-id"] == sent) == echoed


def test_a_streamed_completion_is_one_event_a_chunk_and_ends_with_done(platform: Platform, key: str) -> None:
    chunks = events(post(platform, key, COMPLETIONS, PROMPT | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["H", "i", "!"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(platform: Platform, key: str) -> None:
    platform.engine.answers = [deltas_of(b"Hi!", FinishReason.STOP)]
    chunks = events(post(platform, key, CHAT, MESSAGES | {"stream": True}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("content") for choice in choices[1:]] == ["H", "i", "!", None]
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_unicode_line_separators_do_not_split_events(platform: Platform, key: str) -> None:
    text = "a\u2028b\u2029c\x85d\ne"
    platform.engine.answers = [deltas_of(text.encode())]
    lines = list(post(platform, key, COMPLETIONS, PROMPT | {"stream": True}).iter_lines())
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_requested_usage_is_null_in_every_chunk_and_sent_in_a_last_chunk(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    chunks = events(
        post(platform, key, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    )
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3


def interleaved(*texts: bytes) -> list[TokenDelta]:
    """The choices of one request. Each delta has one token of the next choice in turn."""
    choices = [[replace(delta, index=index) for delta in deltas_of(text)] for index, text in enumerate(texts)]
    steps = zip_longest(*choices)
    return [delta for step in steps for delta in step if delta is not None]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_several_choices_are_one_request_to_the_engine_and_answered_by_index(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    platform.engine.answers = [interleaved(b"one", b"three", b"to")]
    answer = post(platform, key, path, body | {"n": 3}).json()
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["one", "three", "to"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 10
    assert [request.sampling.n for request in platform.engine.requests] == [3]
    assert platform.engine.aborted == []


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_streamed_choices_are_interleaved_and_each_has_its_own_finish_reason(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    platform.engine.answers = [interleaved(b"one", b"three", b"to")]
    chunks = events(
        post(platform, key, path, body | {"n": 3, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 10
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text in enumerate(("one", "three", "to")):
        own = [choice for choice in choices if choice["index"] == index]
        pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in own]
        assert "".join(pieces) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    if path == CHAT:
        roles = [choice["index"] for choice in choices if "role" in choice["delta"]]
        assert roles == [0, 1, 2] and [choice["index"] for choice in choices[:3]] == roles


def test_choices_of_several_prompts_are_numbered_consecutively(platform: Platform, key: str) -> None:
    platform.engine.answers = [interleaved(b"a", b"b")]
    prompts = {"model": "base", "prompt": ["x", "y", "z"]}
    body = post(platform, key, COMPLETIONS, prompts | {"n": 2}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate("ababab"))
    chunks = events(post(platform, key, COMPLETIONS, prompts | {"n": 2, "stream": True}))
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == list(range(6))


def test_a_stop_string_ends_its_own_choice_only(platform: Platform, key: str) -> None:
    platform.engine.answers = [interleaved(b"a STOP b", b"a longer one", b"STOPx")]
    body = post(platform, key, COMPLETIONS, PROMPT | {"n": 3, "stop": "STOP"}).json()
    ends = [(choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert ends == [("a ", "stop"), ("a longer one", "length"), ("", "stop")]
    (request,) = platform.engine.requests
    assert platform.engine.ended == [(request.request_id, 2), (request.request_id, 0)]
    assert platform.engine.aborted == []
    assert body["usage"]["completion_tokens"] == 6 + 12 + 4


def test_best_of_returns_the_likeliest_choices_and_charges_all(platform: Platform, key: str) -> None:
    likely = {b"bad": -3.0, b"best": -0.5, b"good": -0.6, b"worst": -9.0}
    platform.engine.answers = [
        [
            replace(delta, logprobs=(TokenLogprobs(list(likely.values())[delta.index], ()),))
            for delta in interleaved(*likely)
        ]
    ]
    body = post(platform, key, COMPLETIONS, PROMPT | {"n": 2, "best_of": 4}).json()
    assert [(one["index"], one["text"], one["logprobs"]) for one in body["choices"]] == [
        (0, "best", None),
        (1, "good", None),
    ]
    assert body["usage"]["completion_tokens"] == 16
    assert platform.engine.requests[0].sampling.logprobs == 0


def test_each_choice_takes_a_permit(tmp_path: Path) -> None:
    engine = ScriptedEngine([[TokenDelta((65,))]], hang=True)
    with running_platform(tmp_path, engine, max_concurrent_per_tenant=4) as platform:
        key = platform.key("one")
        with platform.client(key) as client:
            body = PROMPT | {"stream": True, "n": 3}
            first = client.send(client.build_request("POST", COMPLETIONS, json=body), stream=True)
            assert post(platform, key, COMPLETIONS, PROMPT | {"n": 2}).status_code == 429
            first.close()
        wait_until(lambda: platform.services.generator.limiter.num_generations == 0)
    assert len(engine.aborted) == 1


def test_token_ids_reach_the_engine_as_they_are(platform: Platform, key: str) -> None:
    post(platform, key, COMPLETIONS, {"model": "base", "prompt": [7, 256, 0]})
    assert platform.engine.requests[0].prompt_token_ids == [7, 256, 0]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_every_sampling_field_reaches_the_engine(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    same = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 11, "ignore_eos": True,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "min_tokens": 2,
            "include_stop_str_in_output": True, "skip_special_tokens": False}  # fmt: skip
    others = {"logit_bias": {"65": -3, "7": 1.5}, "stop_token_ids": [9], "stop": "END", "user": "u"}
    logprobs = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    assert post(platform, key, path, body | same | others | logprobs).status_code == 200
    assert platform.engine.requests[0].sampling == SamplingParams(
        **same, logit_bias={65: -3, 7: 1.5}, stop_token_ids=(9,), stop=("END",), logprobs=2
    )


def test_a_stop_string_waits_for_min_tokens(platform: Platform, key: str) -> None:
    platform.engine.answers = [deltas_of(b"a.b.c.d")]
    body = post(platform, key, COMPLETIONS, PROMPT | {"stop": ".", "min_tokens": 3, "max_tokens": 9}).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("a.b", "stop")
    wait_until(lambda: len(platform.engine.aborted) == 1)


def test_an_answer_is_limited_to_16_tokens_in_completions_and_by_the_context_in_chat(
    platform: Platform, key: str
) -> None:
    post(platform, key, COMPLETIONS, PROMPT)
    post(platform, key, CHAT, MESSAGES)
    post(platform, key, CHAT, MESSAGES | {"max_completion_tokens": 5})
    post(platform, key, COMPLETIONS, {"model": "base", "prompt": "x" * 63})
    assert [request.sampling.max_tokens for request in platform.engine.requests] == [16, 64 - 11, 5, 1]


def with_logprobs() -> list[TokenDelta]:
    top = ((ord("a"), -0.25), (ord("b"), -1.5))
    return [
        TokenDelta((ord("a"),), None, (TokenLogprobs(-0.25, top),)),
        TokenDelta((ord("c"),), FinishReason.LENGTH, (TokenLogprobs(-3.0, top),)),
    ]


def test_log_probabilities_of_a_completion_have_the_old_shape(platform: Platform, key: str) -> None:
    platform.engine.answers = [with_logprobs()]
    expected = {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.25, -3.0],
        "top_logprobs": [{"a": -0.25, "b": -1.5}, {"a": -0.25, "b": -1.5, "c": -3.0}],
        "text_offset": [0, 1],
    }
    body = post(platform, key, COMPLETIONS, PROMPT | {"logprobs": 2}).json()
    assert body["choices"][0]["logprobs"] == expected
    # As in vLLM, the token itself is the first one.
    assert [next(iter(one)) for one in body["choices"][0]["logprobs"]["top_logprobs"]] == ["a", "c"]
    streamed = events(post(platform, key, COMPLETIONS, PROMPT | {"logprobs": 2, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert {name: [item for part in parts for item in part[name]] for name in expected} == expected


def test_log_probabilities_of_a_chat_have_the_new_shape(platform: Platform, key: str) -> None:
    platform.engine.answers = [with_logprobs()]
    body = post(platform, key, CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 2}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert platform.engine.requests[0].sampling.logprobs == 2
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    streamed = events(
        post(platform, key, CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 2, "stream": True})
    )
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [part["content"][0] for part in parts if part] == content


def test_parts_of_characters_are_told_apart_by_their_bytes_and_ids(platform: Platform, key: str) -> None:
    """Born from a bug: each half of a character had the bytes of U+FFFD, and equal texts shared one entry."""
    halves = tuple((byte, -float(byte)) for byte in "é".encode() + b"\xff\x80a")
    platform.engine.answers = [
        [
            TokenDelta((0xC3,), None, (TokenLogprobs(-195.0, halves),)),
            TokenDelta((0xA9,), FinishReason.LENGTH, (TokenLogprobs(-169.0, halves),)),
        ]
    ]
    body = post(platform, key, CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 5}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é"
    assert [one["bytes"] for one in content[0]["top_logprobs"]] == [[byte] for byte, _ in halves]
    body = post(platform, key, COMPLETIONS, PROMPT | {"logprobs": 5}).json()
    first, second = body["choices"][0]["logprobs"]["top_logprobs"]
    assert first == {
        "�": -195.0,
        "token_id:169": -169.0,
        "token_id:255": -255.0,
        "token_id:128": -128.0,
        "a": -97.0,
    }
    assert next(iter(second.items())) == ("�", -169.0) and second["token_id:195"] == -195.0
    assert len(second) == 5


@pytest.mark.parametrize("fields", [{}, {"stop": ["b"]}, {"stop": ["<eos>"]}, {"stop": ["zz"]}])
def test_each_returned_token_id_has_its_log_probability(
    platform: Platform, key: str, fields: dict[str, Any]
) -> None:
    """Born from a bug: the token that ends an answer had an id, but no entry."""
    entry = (TokenLogprobs(-0.5, ((97, -0.5),)),)
    platform.engine.answers = [
        [replace(delta, logprobs=entry) for delta in deltas_of(b"xab", FinishReason.STOP)]
    ]
    wanted = fields | {"return_token_ids": True}
    for body, path in ((PROMPT | {"logprobs": 1}, COMPLETIONS), (MESSAGES | {"logprobs": True}, CHAT)):
        (choice,) = post(platform, key, path, body | wanted).json()["choices"]
        listed = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
        assert choice["token_ids"][:3] == [*b"xab"] and len(listed) == len(choice["token_ids"])
        chunks = [
            chunk["choices"][0]
            for chunk in events(post(platform, key, path, body | wanted | {"stream": True}))
            if chunk["choices"]
        ]
        ids = [token for chunk in chunks for token in chunk.get("token_ids") or ()]
        parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        streamed = [item for part in parts for item in part.get("content") or part["token_logprobs"]]
        assert (ids, streamed) == (choice["token_ids"], listed)
        (plain,) = post(platform, key, path, body | fields).json()["choices"]
        assert len(plain["logprobs"].get("content") or plain["logprobs"]["tokens"]) < len(listed)


BAD_BODIES = [
    (PROMPT | {"max_tokens": -1}, "max_tokens"),
    (PROMPT | {"max_tokens": 0}, "max_tokens"),
    (PROMPT | {"temperature": 3}, "temperature"),
    (PROMPT | {"top_k": -2}, "top_k"),
    (PROMPT | {"presence_penalty": 2.5}, "presence_penalty"),
    (PROMPT | {"logit_bias": {"257": 1}}, "logit_bias"),
    (PROMPT | {"min_tokens": 17}, "min_tokens"),
    (PROMPT | {"logprobs": 21}, "logprobs"),
    (PROMPT | {"prompt_logprobs": -1}, "prompt_logprobs"),
    (PROMPT | {"stop_token_ids": [-1]}, "stop_token_ids"),
    (PROMPT | {"priority": 1001}, "priority"),
    (PROMPT | {"deadline_ms": 0}, "deadline_ms"),
    (PROMPT | {"stop": [""]}, "stop"),
    (PROMPT | {"seed": 2**70}, "seed"),
    (PROMPT | {"n": 0}, "n"),
    (PROMPT | {"n": 129}, "n"),
    (PROMPT | {"n": 9}, "n"),
    (PROMPT | {"n": 8, "prompt": ["x"] * 200}, "n"),
    (PROMPT | {"n": 3, "best_of": 2}, "best_of"),
    (PROMPT | {"best_of": 9}, "best_of"),
    (PROMPT | {"best_of": 2, "stream": True}, "best_of"),
    (PROMPT | {"unheard_of": 1}, "unheard_of"),
    (PROMPT | {"prompt": ""}, "prompt"),
    (PROMPT | {"prompt": [257]}, "prompt"),
    (PROMPT | {"prompt": [-1]}, "prompt"),
    ({"prompt": "x"}, "model"),
    ({"model": "base"}, "prompt"),
]


@pytest.mark.parametrize(
    ("body", "param"), BAD_BODIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bad_field_is_a_400_that_names_it_and_never_reaches_the_engine(
    platform: Platform, key: str, body: dict[str, Any], param: str
) -> None:
    answer = post(platform, key, COMPLETIONS, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert platform.engine.requests == []


def test_fields_that_ask_for_nothing_do_not_change_what_the_engine_gets(platform: Platform, key: str) -> None:
    for fields in ({}, {"modalities": ["text"], "top_k": -1}, {"modalities": None, "store": None}):
        answer = post(platform, key, CHAT, MESSAGES | fields)
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi!")
    plain, *others = platform.engine.requests
    assert len(others) == 2
    for other in others:
        assert replace(other, request_id=plain.request_id) == plain


def test_a_chat_field_that_is_not_honoured_is_a_400_with_its_name_its_value_and_the_remedy(
    platform: Platform, key: str
) -> None:
    answer = post(platform, key, CHAT, MESSAGES | {"modalities": ["audio"], "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "`modalities` is not supported by this server with the value ['audio']; omit it "
        "(accepted: ['text'] or null).",
        "type": "invalid_request_error",
        "param": "modalities",
        "code": "unsupported_parameter",
    }
    assert platform.engine.requests == []


_TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 400}}
_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"model": "base", "prompt": "x" * 64}, "prompt"),
    (COMPLETIONS, {"model": "base", "prompt": "x" * 400}, "prompt"),
    (COMPLETIONS, {"model": "base", "prompt": "x " * 100_000}, "prompt"),
    (COMPLETIONS, {"model": "base", "prompt": [65] * 64}, "prompt"),
    (COMPLETIONS, {"model": "base", "prompt": [[65] * 64]}, "prompt"),
    (COMPLETIONS, PROMPT | {"max_tokens": 60}, "max_tokens"),
    (COMPLETIONS, {"model": "base", "prompt": "x" * 64, "stream": True}, "prompt"),
    (CHAT, {"model": "base", "messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
    (CHAT, {"model": "base", "messages": [{"role": "user", "content": "x" * 400}], "stream": True}, "messages"),
    (CHAT, MESSAGES | {"max_completion_tokens": 54}, "max_completion_tokens"),
    (CHAT, MESSAGES | {"tools": [_TOOL]}, "tools"),
    ("/v1/responses", {"model": "base", "input": "x" * 64}, "input"),
    ("/v1/responses", {"model": "base", "input": "x", "instructions": "x" * 400}, "input"),
    ("/v1/embeddings", {"model": "base", "input": "x" * 65}, "input"),
    ("/v1/embeddings", {"model": "base", "input": [65] * 65}, "input"),
    ("/v1/embeddings", {"model": "base", "input": [[65] * 65]}, "input"),
    ("/tokenize", {"prompt": "x" * 400}, "prompt"),
    # These exceed limits of a body, too.
    (COMPLETIONS, {"model": "base", "prompt": [65] * 200_000}, "prompt"),
    (CHAT, {"model": "base", "messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), _LONG, ids=range(len(_LONG)))
def test_a_prompt_over_the_context_is_refused_before_the_engine_with_openais_phrase(
    platform: Platform, key: str, path: str, body: dict[str, Any], param: str
) -> None:
    """litellm looks for the phrase, and then asks the next model of a list."""
    answer = post(platform, key, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "This model's maximum context length is 64 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert platform.engine.requests == []


def test_json_without_its_content_type_is_refused_with_the_remedy(platform: Platform, key: str) -> None:
    answer = platform.api(key).post(COMPLETIONS, content=b'{"model": "default", "prompt": "x"}')
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_framework_errors_have_the_same_form(platform: Platform, key: str) -> None:
    client = platform.api(key)
    missing, wrong_method = client.get("/v1/nothing"), client.get(COMPLETIONS)
    too_large = client.post(COMPLETIONS, content=b"x" * ((4 << 20) + 1))
    two_routes = client.patch("/v1/adapters/voice/aliases/prod")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong_method.status_code, wrong_method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (two_routes.status_code, two_routes.headers["allow"]) == (405, "DELETE, GET, PUT")
    assert wrong_method.headers["allow"] == "POST"
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    assert "This model's maximum context length is 64 tokens" in too_large.json()["error"]["message"]
    for answer in (missing, wrong_method, too_large):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "x-request-id" in answer.headers


ENGINE_ERRORS = [
    (RequestRefused("never fits the pool", "max_tokens"), 400, None),
    (AdapterFetchFailed("gone", "not_found"), 404, "model_not_found"),
    (AdapterFetchFailed("down", "unavailable"), 503, "store_unavailable"),
    (EngineUnavailable("it died"), 503, "engine_unavailable"),
    (DeadlineMissed("the first token would come too late"), 503, "deadline_missed"),
    (RequestFailed("not finite"), 500, "generation_failed"),
]


@pytest.mark.parametrize(("error", "status", "code"), ENGINE_ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_of_the_engine_before_the_first_token_is_a_status_even_when_streaming(
    platform: Platform, key: str, error: Exception, status: int, code: str | None
) -> None:
    platform.engine.answers = [[error]]
    for stream in (False, True):
        answer = post(platform, key, COMPLETIONS, PROMPT | {"stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "failure", [RequestFailed, RequestRefused, partial(AdapterFetchFailed, code="corrupt")]
)
def test_an_error_of_the_engine_names_the_requests_adapter_and_no_other(
    platform: Platform, failure: Callable[[str], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    key = platform.key("engine-errors")
    digest = platform.upload(key, "voice").json()["digest"]
    others = "ab" * 32
    asked = [(COMPLETIONS, PROMPT), (CHAT, MESSAGES), (CHAT, MESSAGES | {"stream": True})]
    for path, fields in (*asked, ("/v1/embeddings", {"input": "a"})):
        error = failure(f"adapter {digest} ({digest[:12]}) failed, not {others}")
        platform.engine.answers = [[error]]
        platform.engine.embeddings = lambda _, error=error: [error]
        told = post(platform, key, path, fields | {"model": "voice"}).json()["error"]
        assert told["message"] == f"adapter voice@1 (voice@1) failed, not {others}"
    assert (digest in caplog.text) == (failure is RequestFailed)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_the_middle_is_an_event_and_the_last_thing_sent(
    platform: Platform, key: str, path: str
) -> None:
    platform.engine.answers = [[TokenDelta((65,)), EngineUnavailable("it died")]]
    body = (PROMPT if path == COMPLETIONS else MESSAGES) | {"stream": True}
    answer = post(platform, key, path, body)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_unavailable" and "it died" in last["error"]["message"]
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("url", ["/v1/adapters?after=%00", "/v1/adapters/%00", "/v1/nothing?x=a%00b"])
def test_a_nul_character_in_a_url_is_refused(platform: Platform, key: str, url: str) -> None:
    """PostgreSQL refuses it in text. SQLite found all names that begin with what stands before it."""
    answer = platform.api(key).get(url)
    assert answer.status_code == 400 and "NUL character (%00)" in answer.json()["error"]["message"]


def test_an_unforeseen_error_is_a_500_in_the_same_form_and_the_server_lives_on(
    platform: Platform, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    platform.engine.answers = [[ZeroDivisionError("secret detail")]]
    answer = post(platform, key, COMPLETIONS, PROMPT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret detail" not in answer.text
    # The answer is sent before the log entry is written.
    wait_until(lambda: answer.headers["x-request-id"] in caplog.text and "ZeroDivisionError" in caplog.text)
    platform.engine.answers = [deltas_of(b"ok")]
    assert post(platform, key, COMPLETIONS, PROMPT).status_code == 200


def test_without_an_engine_a_request_is_a_503_with_retry_after(platform: Platform, key: str) -> None:
    platform.engine.ready = False
    answer = post(platform, key, COMPLETIONS, PROMPT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    ready, alive = httpx.get(platform.url + "/readyz"), httpx.get(platform.url + "/healthz")
    assert (ready.status_code, alive.status_code) == (503, 200)
    platform.engine.ready = True
    assert httpx.get(platform.url + "/readyz").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_aborts_its_request(platform: Platform, key: str, stream: bool) -> None:
    platform.engine.answers = [[TokenDelta((65,))]]
    platform.engine.hang = True
    ask_and_leave(
        platform.api(key), COMPLETIONS, lambda: bool(platform.engine.hung), json=PROMPT | {"stream": stream}
    )
    wait_until(lambda: len(platform.engine.aborted) == 1)
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_a_stream_that_is_not_read_is_aborted_and_releases_its_permit(tmp_path: Path) -> None:
    """Born from a bug: such a stream held its place as long as its connection was open."""
    engine = ScriptedEngine([[TokenDelta((65,))] * 20_000], hang=True)
    limits = ConnectionLimits(write_grace_s=0.5, sweep_s=0.05)
    with running_platform(tmp_path, engine, connection_limits=limits) as platform:
        key = platform.key("mute")
        host, port = platform.url.removeprefix("http://").split(":")
        body = json.dumps(PROMPT | {"stream": True})
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            wait_until(lambda: len(engine.aborted) == 1)
            wait_until(lambda: platform.services.generator.limiter.num_generations == 0)
    assert len(engine.requests) == 1


def test_requests_over_the_limits_are_refused_as_busy_and_permits_are_released(tmp_path: Path) -> None:
    engine = ScriptedEngine([[TokenDelta((65,))]], hang=True)
    limits = {"max_concurrent_requests": 4, "max_concurrent_per_tenant": 2}
    with running_platform(tmp_path, engine, **limits) as platform:
        keys = [platform.key(tenant) for tenant in ("one", "two", "three", "four")]
        clients = [platform.client(key) for key in keys[:3]]
        with clients[0] as one, clients[1] as two, clients[2] as three:
            stream = {"stream": True}
            first = one.send(
                one.build_request("POST", COMPLETIONS, json=PROMPT | stream | {"prompt": ["a", "b"]}),
                stream=True,
            )
            busy_tenant = post(platform, keys[0], COMPLETIONS, PROMPT)
            second = two.send(two.build_request("POST", COMPLETIONS, json=PROMPT | stream), stream=True)
            third = three.send(three.build_request("POST", COMPLETIONS, json=PROMPT | stream), stream=True)
            busy_server = post(platform, keys[3], COMPLETIONS, PROMPT)
            never = post(platform, keys[3], COMPLETIONS, PROMPT | {"prompt": ["x"] * 3})
            for answer in (first, second, third):
                answer.close()
        wait_until(lambda: platform.services.generator.limiter.num_generations == 0)
    assert (busy_tenant.status_code, busy_tenant.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (busy_server.status_code, busy_server.json()["error"]["code"]) == (503, "server_busy")
    assert int(busy_tenant.headers["retry-after"]) > 0 and int(busy_server.headers["retry-after"]) > 0
    assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")


def test_models_are_the_base_and_the_tenants_own(platform: Platform, key: str) -> None:
    other = platform.key("other-models")
    platform.upload(other, "theirs")
    digest = platform.upload(key, "mine").json()["digest"]
    client = platform.api(key)
    models = client.get("/v1/models").json()
    assert [(model["id"], model["parent"]) for model in models["data"]] == [("base", None), ("mine", "base")]
    assert models["data"][1]["root"] == digest and models["data"][0]["max_model_len"] == 64
    mine = client.get("/v1/models/mine").json()
    assert mine.pop("limits")["max_model_len"] == 64 and mine == models["data"][1]
    assert client.get("/v1/models/default").json()["id"] == "base"


def test_another_tenants_adapter_looks_like_a_missing_one(platform: Platform, key: str) -> None:
    platform.upload(platform.key("neighbour"), "private")
    answers = []
    for name in ("private", "nothing"):
        client = platform.api(key)
        answers += [
            client.post(COMPLETIONS, json=PROMPT | {"model": name}),
            client.post(CHAT, json=MESSAGES | {"model": name}),
            client.get(f"/v1/models/{name}"),
            client.get(f"/v1/adapters/{name}"),
            client.delete(f"/v1/adapters/{name}"),
        ]
    assert {answer.status_code for answer in answers} == {404}
    # The answers differ only in the requested name.
    texts = {answer.text.replace("private", "NAME").replace("nothing", "NAME") for answer in answers}
    assert len(texts) == 1
    names = ("x-request-id", "openai-processing-ms", "date")
    shapes = {tuple(name for name in answer.headers if name not in names) for answer in answers}
    assert len(shapes) == 1


def test_adapter_name_default_and_base_resolve_to_the_right_version(platform: Platform) -> None:
    key = platform.key("picker", "picked")
    digest = platform.upload(key, "picked").json()["digest"]
    for name in ("picked", "default", "base"):
        answer = post(platform, key, COMPLETIONS, PROMPT | {"model": name})
        assert answer.json()["model"] == name
        label = answer.headers.get("x-slora-adapter"), answer.headers.get("x-slora-adapter-digest")
        assert label == ((None, None) if name == "base" else ("picked@1", digest))
    versions = [request.versions for request in platform.engine.requests]
    assert versions[0] == versions[1] and versions[2] == ()
    (version,) = versions[0]
    assert (version.tenant, version.digest) == (platform.tenant_id("picker"), digest)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_adapter_was_replaced_is_answered_by_the_newer_one(
    platform: Platform, stream: bool
) -> None:
    tenant = f"mover-{stream}".lower()
    key = platform.key(tenant, "moving")
    platform.upload(key, "moving")
    newer = make_members(tensors=make_tensors(seed=3))
    platform.engine.answers = [[AdapterFetchFailed("forgotten", "not_found")], deltas_of(b"new")]

    def replace(request: EngineRequest) -> None:
        # The alias moves while the first request is on its way to the engine.
        platform.engine.on_request = lambda request: None
        adapter = parse_adapter({n: memoryview(raw) for n, raw in newer.items()}, SHAPE, AdapterLimits())
        database = Database(platform.directory / "slora.db")
        details = AdapterDetails(2, ("q_proj",), 1)
        mover, registry = platform.tenant_id(tenant), Registry(database)
        registry.put("moving", AdapterVersion(mover, adapter.digest), details)
        registry.delete(mover, "moving@1")
        database.close()

    platform.engine.on_request = replace
    answer = post(platform, key, COMPLETIONS, PROMPT | {"model": "default", "stream": stream})
    assert answer.status_code == 200 and answer.headers["x-slora-adapter"] == "moving@2"
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "new"
    else:
        assert answer.json()["choices"][0]["text"] == "new"


def test_a_request_whose_adapter_is_deleted_meanwhile_is_a_404(platform: Platform) -> None:
    key = platform.key("loser")
    platform.upload(key, "gone")
    platform.engine.answers = [[AdapterFetchFailed("forgotten", "not_found")]]

    def delete(request: EngineRequest) -> None:
        database = Database(platform.directory / "slora.db")
        Registry(database).delete(platform.tenant_id("loser"), "gone")
        database.close()

    platform.engine.on_request = delete
    answer = post(platform, key, COMPLETIONS, PROMPT | {"model": "gone", "stream": True})
    platform.engine.on_request = lambda request: None
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        "The model `gone` does not exist.",
    )


def test_default_without_an_adapter_is_the_base_and_with_a_missing_one_is_never_the_base(
    platform: Platform,
) -> None:
    assert (
        post(platform, platform.key("plain"), COMPLETIONS, PROMPT | {"model": "default"}).status_code == 200
    )
    assert platform.engine.requests[0].adapters == ()
    answer = post(platform, platform.key("empty", "not-yet"), COMPLETIONS, PROMPT | {"model": "default"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_adapters_own_template_and_sampling_defaults_are_used(platform: Platform) -> None:
    key = platform.key("stylist", "styled")
    members = make_members(
        chat_template_dot_jinja="<<{{ messages[0].content }}>>",
        generation_config_dot_json='{"do_sample": false, "eos_token_id": [9], "max_new_tokens": 7, '
        '"min_new_tokens": 3, "repetition_penalty": 1.05}',
    )
    assert platform.upload(key, "styled", members).status_code == 201
    assert post(platform, key, CHAT, MESSAGES | {"model": "styled"}).status_code == 200
    assert (
        post(
            platform, key, CHAT, MESSAGES | {"model": "styled", "temperature": 1, "max_tokens": 2}
        ).status_code
        == 200
    )
    assert post(platform, key, CHAT, MESSAGES).status_code == 200
    first, second, base = platform.engine.requests
    assert bytes(first.prompt_token_ids) == b"<<hello>>" and bytes(base.prompt_token_ids) == b"[user]hello"
    assert (first.sampling.temperature, first.sampling.max_tokens, first.sampling.stop_token_ids) == (
        0.0,
        7,
        (9,),
    )
    assert (second.sampling.temperature, second.sampling.max_tokens) == (1.0, 2)
    assert (base.sampling.temperature, base.sampling.stop_token_ids) == (1.0, ())
    assert first.sampling.repetition_penalty == second.sampling.repetition_penalty == 1.05
    # The request's maximum overrides a larger minimum of the generation config.
    assert (first.sampling.min_tokens, second.sampling.min_tokens) == (3, 2)


def test_metrics_keep_vllms_names_and_show_routes_not_paths(platform: Platform, key: str) -> None:
    post(platform, key, COMPLETIONS, PROMPT)
    platform.api(key).get("/v1/models/some-name")
    # These are refused before they reach their routes.
    platform.api("sk-unknown").get("/v1/models/some-name")
    platform.api(key).post("/v1/batches", content=bytes(2 << 20))
    platform.api(key).get("/v1/no-route")
    text = platform.api(ADMIN_KEY).get("/metrics").text
    lines = {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    for name in (
        'vllm:num_requests_running{engine="0",model_name="base"}',
        'vllm:num_requests_waiting{engine="0",model_name="base"}',
        'vllm:kv_cache_usage_perc{engine="0",model_name="base"}',
        'vllm:num_preemptions_total{engine="0",model_name="base"}',
        'vllm:prompt_tokens_total{engine="0",model_name="base"}',
        'vllm:generation_tokens_total{engine="0",model_name="base"}',
        'vllm:prompt_tokens_cached_total{engine="0",model_name="base"}',
        'vllm:prefix_cache_queries_total{engine="0",model_name="base"}',
        'vllm:prefix_cache_hits_total{engine="0",model_name="base"}',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="base"}',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="base"}',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="base"}',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="deferred"}',
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="base",source="local_compute"}',
        'vllm:request_decode_time_seconds_bucket{engine="0",le="0.3",model_name="base"}',
        'vllm:request_generation_tokens_sum{engine="0",model_name="base"}',
        'vllm:request_params_max_tokens_sum{engine="0",model_name="base"}',
        'vllm:request_params_n_bucket{engine="0",le="1.0",model_name="base"}',
        'vllm:request_num_preemptions_sum{engine="0",model_name="base"}',
        'vllm:lora_requests_info{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""}',
        'slora_http_requests_total{route="/v1/completions",status="200"}',
        'slora_http_requests_total{route="/v1/models/{model:path}",status="404"}',
        'slora_http_requests_total{route="/v1/models/{model:path}",status="401"}',
        'slora_http_requests_total{route="/v1/batches",status="413"}',
        'slora_http_requests_total{route="unknown",status="404"}',
        'slora_pages{state="free"}',
        'slora_pages_by_owner{owner="free"}',
        "slora_adapter_loads_total",
        "slora_ready",
    ):
        assert name in lines, name
    assert "some-name" not in text
    # The scripted engine's statistics of its prefix cache and its swap space.
    for line in (
        'vllm:prefix_cache_queries_total{engine="0",model_name="base"} 90.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="base"} 32.0',
        "slora_prefix_evictions_total 7.0",
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="1.0",model_name="base"} 3.0',
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="base"} 6.0',
        'vllm:corrupted_requests_total{engine="0",model_name="base"} 3.0',
        'slora_adapter_loads_by_cause_total{cause="pin"} 1.0',
        'slora_preemptions_total{kind="recompute"} 3.0',
        'slora_adapter_fetches_total{outcome="corrupt"} 1.0',
        'slora_tenant_tokens_total{kind="cached",tenant="t"} 32.0',
        'slora_tenant_queue_seconds_total{tenant="t"} 0.5',
        'slora_tenant_requests_total{tenant="other"} 1.0',
        'slora_adapter_cold_starts_total{adapter="abc",tenant="t"} 1.0',
        'slora_adapter_requests_total{adapter="other",tenant="other"} 0.0',
        'slora_adapter_resident{adapter="abc",tenant="t",tier="pool"} 1.0',
        'slora_adapter_resident{adapter="def",tenant="t",tier="pool"} 0.0',
        'slora_adapter_resident{adapter="def",tenant="t",tier="host"} 1.0',
        "slora_host_cache_adapters 5.0",
        'slora_host_cache_bytes{state="free"} 400.0',
        'slora_tenant_host_cache_bytes{tenant="other"} 200.0',
        'slora_pages_by_owner{owner="idle_adapters"} 2.0',
        'slora_tenant_pages{owner="kv",tenant="t"} 20.0',
        # 7 pages of further tenants. The tenant that is named "other" is one of them.
        'slora_tenant_pages{owner="kv",tenant="other"} 7.0',
        'slora_swapped_pages_total{direction="out"} 5.0',
        'slora_swapped_pages_total{direction="in"} 4.0',
        'slora_swap_pages{state="free"} 14.0',
        'slora_swap_pages{state="used"} 6.0',
        "slora_deadline_misses_total 2.0",
        'slora_cost_seconds{work="decode"} 0.002',
    ):
        assert line in text.splitlines(), line
    # In the scripted engine, 30 of 100 pages are held.
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.3' in text


def test_each_stage_of_a_request_is_counted_once_for_each_prompt(platform: Platform, key: str) -> None:
    """The scripted engine says how long each stage took. Lines of batches would hide what interactive users see."""
    operator = platform.api(ADMIN_KEY)

    def read() -> dict[str, float]:
        return parse_metrics(operator.get("/metrics").text)

    before = read()
    post(platform, key, COMPLETIONS, {**PROMPT, "prompt": [[65], [66]]})
    after = read()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    vllm = '{engine="0",model_name="base"}'
    for name, seconds in (("queue", 3.0), ("prefill", 3.0), ("decode", 4.0), ("inference", 7.0)):
        assert grown[f"vllm:request_{name}_time_seconds_count{vllm}"] == 2
        assert grown[f"vllm:request_{name}_time_seconds_sum{vllm}"] == 2 * seconds
    assert grown['slora_first_token_seconds_count{start="base"}'] == 2
    assert grown['slora_first_token_seconds_sum{start="base"}'] == 12.0
    assert grown['slora_first_token_seconds_count{start="cold"}'] == 0
    assert grown['slora_adapter_wait_seconds_count{stage="fetch"}'] == 0


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_usage_counts_cached_prompt_tokens_once_for_all_choices(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    platform.engine.answers = [
        [
            TokenDelta((65,), num_cached=4),
            TokenDelta((66,), index=1),
            TokenDelta((67,), FinishReason.LENGTH),
            TokenDelta((68,), FinishReason.LENGTH, index=1),
        ]
    ]
    num_prompt = 5 if path == COMPLETIONS else 11
    whole = post(platform, key, path, body | {"n": 2}).json()
    assert whole["usage"] == usage(num_prompt, 4, 4)
    options = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    assert events(post(platform, key, path, body | options))[-1]["usage"] == usage(num_prompt, 4, 4)


def test_cached_tokens_of_several_prompts_add_up(platform: Platform, key: str) -> None:
    platform.engine.answers = [
        [TokenDelta((65,), FinishReason.LENGTH, num_cached=cached)] for cached in (2, 3)
    ]
    answer = post(platform, key, COMPLETIONS, PROMPT | {"prompt": ["one", "three"]}).json()
    assert answer["usage"] == usage(8, 2, 5)


def test_cached_tokens_are_counted_when_only_the_prompt_is_echoed(platform: Platform, key: str) -> None:
    platform.engine.answers = [[TokenDelta((65,), FinishReason.LENGTH, num_cached=4)]]
    answer = post(platform, key, COMPLETIONS, PROMPT | {"echo": True, "max_tokens": 0}).json()
    assert (answer["choices"][0]["text"], answer["usage"]) == ("hello", usage(5, 0, 4))
    answer = post(platform, key, COMPLETIONS, PROMPT | {"echo": True, "max_tokens": 1}).json()
    assert (answer["choices"][0]["text"], answer["usage"]) == ("helloA", usage(5, 1, 4))


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_priority_and_deadline_reach_the_engine(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    for fields, expected in (
        ({}, (0, None)),
        ({"priority": None, "deadline_ms": None}, (0, None)),
        ({"priority": -7, "deadline_ms": 1500}, (-7, 1.5)),
        ({"priority": 1000, "deadline_ms": 86_400_000}, (1000, 86_400.0)),
    ):
        assert post(platform, key, path, body | fields).status_code == 200
        request = platform.engine.requests[-1]
        assert (request.priority, request.deadline_s) == expected


def test_the_end_token_alone_is_an_empty_answer(platform: Platform, key: str) -> None:
    platform.engine.answers = [[TokenDelta((EOS,), FinishReason.STOP)]]
    assert post(platform, key, COMPLETIONS, PROMPT).json()["choices"][0]["text"] == ""
    chunks = events(post(platform, key, CHAT, MESSAGES | {"stream": True}))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_a_request_leaves_nothing_to_the_collector_of_cycles(
    platform: Platform, key: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    """A collection blocks the event loop, and a prompt would stay in memory until then."""
    post(platform, key, path, body | {"stream": stream})  # The first request fills caches.
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            assert post(platform, key, path, body | {"stream": stream}).status_code == 200
        gc.collect()
        kinds = {f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not [kind for kind in kinds if kind.startswith("slora")]


def test_metrics_show_the_names_of_tenants() -> None:
    stats = asyncio.run(ScriptedEngine().stats())
    named = name_tenants(stats, {"t": "acme"})
    assert set(named.tenants) == {"acme", "other"} and "acme/abc" in named.adapters
    assert set(named.tenant_pages) >= {"acme"} and "acme/abc" in named.pooled_adapters
    assert named.host_cache.labels == ("acme/abc", "acme/def")
    # The label "other" stands for further tenants.
    assert set(name_tenants(stats, {"t": "other"}).tenants) == {"t", "other"}
