"""No single request, accepted or refused, blocks the event loop: its work is bounded before it starts.

Born from bugs: without the bounds, each of these requests stalled the server for seconds or was answered with a 500.
"""

import gc
import json
import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, get_args

import httpx
import pytest

from slora_api.completions.schemas import CompletionRequest
from slora_api.serve.api_process import limit_garbage_collection
from tests.adapters.hand_made import make_members
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.covering import soaked
from tests.support.slow_callbacks import Recorder, repeated_if_slow
from tests.support.tool_templates import HERMES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 4096
PROMPT = {"model": "base", "prompt": "x"}
MESSAGES = {"model": "base", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def shared(recorder: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine(max_model_len=CONTEXT, max_num_seqs=128, answers=[deltas_of(b"Hi!")])
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        # Imports and compilation at the first request are not measured.
        assert post(running, running.key("warm"), COMPLETIONS, PROMPT).status_code == 200
        yield running
        gc.unfreeze()


@pytest.fixture
def platform(shared: Platform, recorder: Recorder) -> Iterator[Platform]:
    """The shared server, with its scripted engine and its recorder reset."""
    # Otherwise a full collection would visit all imported modules of the tests, and what earlier tests left.
    usual = gc.get_threshold()
    limit_garbage_collection()
    shared.engine.reset(deltas_of(b"Hi!"))
    shared.engine.max_model_len = CONTEXT
    recorder.found.clear()
    yield shared
    gc.set_threshold(*usual)


TOO_LARGE = {
    "600,000 prompts": (COMPLETIONS, {"prompt": ["a"] * 600_000}, "prompt", "values"),
    "300 prompts": (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt", "300 prompts; this server accepts at most 256"),
    "4 MB of text": (COMPLETIONS, {"prompt": "ab, " * 1_000_000}, "prompt", "4000000 characters"),
    "more text than the context holds": (COMPLETIONS, {"prompt": "x" * CONTEXT * 5}, "prompt", "20480"),
    "more ids than the context holds": (COMPLETIONS, {"prompt": [65] * 100_000}, "prompt", "100000 tokens"),
    "as many ids as 4 MB hold": (COMPLETIONS, {"prompt": [1] * 1_300_000}, "prompt", "values"),
    "an id of no token": (COMPLETIONS, {"prompt": [65] * 4000 + [10**30]}, "prompt", "token id"),
    "110,000 messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 110_000}, "messages", "values"),
    "3,000 messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 3_000}, "messages", "3000 messages"),
    "a long chat": (CHAT, {"messages": [{"role": "user", "content": "x" * 300} for _ in range(2000)]},
                    "messages", "600000 characters"),
    "a message of 4 MB": (CHAT, {"messages": [{"role": "user", "content": "a " * 1_990_000}]},
                          "messages", "3980000 characters"),
    "5,000 content parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]},
                            "messages", "5000 content parts"),
    "15 stop strings of 240,000 characters": (COMPLETIONS, PROMPT | {"stop": ["a" * 240_000] * 15}, "stop", "240000"),
    "a stop string of 100 KB": (COMPLETIONS, PROMPT | {"stop": ["x" * 100_000]}, "stop", "100000 characters"),
    "1,000 stop token ids": (COMPLETIONS, PROMPT | {"stop_token_ids": [1] * 1000}, "stop_token_ids", "1000 ids"),
    "a bias for 10,000 tokens": (COMPLETIONS, PROMPT | {"logit_bias": {str(at): 1 for at in range(10_000)}},
                                 "logit_bias", "10000 tokens"),
    "100,000 unknown fields": (COMPLETIONS, PROMPT | {f"x{at}": 1 for at in range(100_000)}, None, "fields"),
    "10,000 unknown fields of a message": (
        CHAT, {"messages": [{"role": "user", "content": "", **{f"x{at}": 1 for at in range(10_000)}}]},
        "messages", "fields"),
    "10,000 unknown fields of a tool": (
        CHAT, MESSAGES | {"tools": [{"type": "function", "function": {f"x{at}": 1 for at in range(10_000)}}]},
        "tools", "fields"),
    "10,000 unknown fields of a tool call": (
        CHAT, {"messages": [{"role": "assistant", "tool_calls": [{f"x{at}": 1 for at in range(10_000)}]}]},
        "messages", "fields"),
    "10,000 unknown fields of a schema's format": (
        CHAT, MESSAGES | {"response_format": {"json_schema": {f"x{at}": 1 for at in range(10_000)}}},
        "response_format", "fields"),
    "5,000 broken messages": (CHAT, {"messages": [{"x": 1, "y": 2}] * 2000}, "messages.0.role", ""),
    "100,000 stream options": (
        COMPLETIONS, PROMPT | {"stream": True, "stream_options": {f"x{at}": 1 for at in range(100_000)}},
        "stream_options", "fields"),
    "a user's name of 1 MB": (COMPLETIONS, PROMPT | {"user": "x" * 1_000_000}, "user", "1000000 characters"),
    "a model's name of 1 MB": (COMPLETIONS, PROMPT | {"model": "x" * 1_000_000}, "model", "1000000 characters"),
    "a field whose name is 1 MB": (COMPLETIONS, PROMPT | {"x" * 1_000_000: 1}, "x" * 128, "not a parameter"),
    "5 million log-probabilities": (
        COMPLETIONS,
        {"prompt": "x" * 1000, "n": 128, "echo": True, "logprobs": 20, "prompt_logprobs": 20},
        "logprobs", "log-probabilities"),
    "log-probabilities of the prompt for each choice": (
        COMPLETIONS, {"prompt": "x" * 1000, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs", "log-probabilities"),
    "log-probabilities of a chat": (
        CHAT, MESSAGES | {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 1000},
        "top_logprobs", "log-probabilities"),
    "a million log-probabilities of echoes and answers": (
        COMPLETIONS, {"prompt": ["x" * 2001, "x" * 2000], "n": 128, "max_tokens": 2095, "echo": True, "logprobs": 0},
        "logprobs", "1048448 log-probabilities"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
@repeated_if_slow
def test_oversized_fields_are_refused_by_name_before_any_work(
    platform: Platform, recorder: Recorder, key: str, name: str
) -> None:
    path, fields, param, words = TOO_LARGE[name]
    answer = post(platform, key, path, {"model": "base"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]
    assert len(answer.content) < 1000 and not platform.engine.requests
    assert not recorder.slow()


LARGEST = {
    "131,000 token ids": {"prompt": [65] * 131_000},
    "256 prompts of 4,000 characters": {"prompt": ["x" * 4000] * 256},
    "a text of 130,000 tokens": {"prompt": "x" * 130_000},
    "an echo of 130,000 token ids": {"prompt": [65] * 130_000, "echo": True},
}


@pytest.mark.parametrize("name", LARGEST)
@repeated_if_slow
def test_the_largest_accepted_prompts_do_not_block_the_event_loop(
    platform: Platform, recorder: Recorder, key: str, name: str
) -> None:
    platform.engine.max_model_len = 131_072
    answer = post(platform, key, COMPLETIONS, {"model": "base", **LARGEST[name]})
    assert answer.status_code == 200 and not recorder.slow()


ROLES = ("user", "assistant")
TEXTS = [{"role": ROLES[at % 2], "content": "x" * 1500} for at in range(2047)]
PARTS = [
    {"role": ROLES[at % 2], "content": [{"type": "text", "text": text} for text in ("x", "y")]}
    for at in range(2047)
]
CHAT_CALLS = [
    message
    for at in range(1000)
    for message in (
        {
            "role": "assistant",
            "tool_calls": [
                {"id": f"a{at}", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": f"a{at}", "content": "ok"},
    )
]
ITEM_CALLS = [
    item
    for at in range(1000)
    for item in (
        {"type": "function_call", "call_id": f"a{at}", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": f"a{at}", "output": "ok"},
    )
]
USES = [{"type": "tool_use", "id": f"a{at}", "name": "f", "input": {"a": 1}} for at in range(1500)]
RESULTS = [{"type": "tool_result", "tool_use_id": f"a{at}", "content": "ok"} for at in range(1500)]
TURNS_OF_CALLS = [
    {"role": ROLES[1 - at % 2], "content": [(USES, RESULTS)[at % 2][at // 2]]} for at in range(2000)
]
LARGEST_LISTS = {
    "messages of a chat": (CHAT, {"messages": TEXTS}),
    "parts of a chat": (CHAT, {"messages": PARTS}),
    "calls of a chat": (CHAT, {"messages": CHAT_CALLS}),
    "messages to count": ("/tokenize", {"messages": TEXTS}),
    "items of a response": ("/v1/responses", {"input": TEXTS}),
    "calls of a response": ("/v1/responses", {"input": ITEM_CALLS}),
    "calls to count": ("/v1/responses/input_tokens", {"input": ITEM_CALLS}),
    "turns of messages": ("/v1/messages", {"max_tokens": 9, "messages": TEXTS}),
    "turns of one role": ("/v1/messages", {"max_tokens": 9, "messages": TEXTS[::2] * 2}),
    "calls of messages": ("/v1/messages", {"max_tokens": 9, "messages": TURNS_OF_CALLS}),
    "calls of one turn": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [{"role": "assistant", "content": USES}, {"role": "user", "content": RESULTS}],
        },
    ),
    "calls of messages to count": ("/v1/messages/count_tokens", {"messages": TURNS_OF_CALLS}),
    "pairs to score": ("/v1/score", {"text_1": ["x" * 60] * 2048, "text_2": ["y" * 60] * 2048}),
    "documents to rank": ("/v1/rerank", {"query": "x", "documents": [{"text": "y" * 60}] * 2047}),
    "texts to embed": ("/v1/embeddings", {"input": ["y" * 60] * 2048}),
}


@pytest.fixture(scope="module")
def caller(shared: Platform) -> str:
    """The key of a tenant whose adapter `caller` has a template for tools."""
    key = shared.key("with-tools")
    members = make_members() | {"chat_template.jinja": HERMES.encode()}
    assert shared.upload(key, "caller", members).status_code == 201
    return key


# The quick run has each kind of parsing.
MOSTLY_QUICK = soaked(
    LARGEST_LISTS,
    *("parts of a chat", "calls of a chat", "messages to count", "calls of a response", "turns of messages"),
    *("calls of messages", "pairs to score", "texts to embed"),
)


@pytest.mark.parametrize("name", MOSTLY_QUICK)
@repeated_if_slow
def test_the_largest_accepted_lists_do_not_block_the_event_loop(
    platform: Platform, recorder: Recorder, caller: str, name: str
) -> None:
    """Born from a body of /v1/messages that held the event loop for 33 ms, and one of /v1/responses for 45 ms."""
    platform.engine.max_model_len = 131_072
    path, fields = LARGEST_LISTS[name]
    answer = post(platform, caller, path, {"model": "caller", **fields})
    # Some of these prompts are too long for the context, which is known only after all of this work.
    assert answer.status_code == 200 or "maximum context length" in answer.text, answer.text[:1000]
    assert httpx.get(platform.url + "/healthz", verify=False).status_code == 200
    assert not recorder.slow()


@repeated_if_slow
def test_a_scrape_of_many_counters_does_not_block_the_event_loop(
    platform: Platform, recorder: Recorder
) -> None:
    """Born from a fuzzed server, whose /metrics held the event loop for 36 ms."""
    for at in range(400):
        platform.services.generator.metrics.count_answer(f"/route/{at}", 200, 0.1)
    operator = platform.api(ADMIN_KEY)
    assert "/route/399" in operator.get("/metrics").text
    assert operator.get("/healthz").status_code == 200
    assert not recorder.slow()


def test_many_large_tools_keep_the_event_loop_little_longer_than_parsing_them(
    platform: Platform, recorder: Recorder, caller: str
) -> None:
    """Born from an attack: checking 60 tools of 50 properties took four times as long as parsing them.

    It compares CPU times, because other programs slow both.
    """
    schema = {
        "type": "object",
        "properties": {f"a_{at}": {"type": "string", "description": "some words" * 3} for at in range(50)},
    }
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": schema}} for at in range(60)]
    text, longest_ms, parse_ms = json.dumps(tools), [], []
    for _ in range(5):
        recorder.worst_cpu_ms = 0.0
        answer = post(platform, caller, CHAT, MESSAGES | {"model": "caller", "tools": tools})
        assert answer.status_code == 400 and "`tools` has" in answer.text, answer.text
        # A callback is measured when it ends, which may be after its answer has arrived.
        assert httpx.get(platform.url + "/healthz", verify=False).status_code == 200
        longest_ms.append(recorder.worst_cpu_ms)
        started_s = time.thread_time()
        json.loads(text)
        parse_ms.append(1e3 * (time.thread_time() - started_s))
    assert median(longest_ms) < 3 * median(parse_ms), (longest_ms, parse_ms)


NUMBERS = [
    name
    for name, field in CompletionRequest.model_fields.items()
    if {int, float} & {*get_args(field.annotation)}
]


@pytest.mark.parametrize("field", NUMBERS)
def test_no_number_of_any_field_is_a_server_error(
    platform: Platform, key: str, field: str, soak: bool
) -> None:
    """Born from a bug: a top_k of 2^64 or more was a 500, because no message to the engine can carry it."""
    bodies = [(COMPLETIONS, PROMPT), (CHAT, MESSAGES | {"logprobs": True})]
    for at, value in enumerate((2**63, 2**64, -(2**64), 1e308, math.nan)):
        for path, body in bodies if soak else bodies[at % 2 :][:1]:
            name = {"logprobs": "top_logprobs"}.get(field, field) if path == CHAT else field
            raw = json.dumps(body | {name: value}).encode()
            answer = platform.api(key).post(path, content=raw, headers={"Content-Type": "application/json"})
            # A seed or a count of 2^31 may be valid.
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name), (value, error)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a\ud800"}, "prompt"),
        (COMPLETIONS, PROMPT | {"stop": ["\ud800"]}, "stop.0"),
        (COMPLETIONS, PROMPT | {"user": "\ud800"}, "user"),
        (COMPLETIONS, PROMPT | {"model": "\ud800"}, "model"),
        (COMPLETIONS, PROMPT | {"\ud800": 1}, None),
        (COMPLETIONS, PROMPT | {"logit_bias": {"\ud800": 1}}, "logit_bias"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages.0.name"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
         "messages.0.content"),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    platform: Platform, key: str, path: str, fields: dict[str, Any], param: str | None
) -> None:
    raw = json.dumps({"model": "base"} | fields).encode()
    answer = platform.api(key).post(path, content=raw, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/tenants", {"name": "\ud800"}),
        ("/admin/tenants", {"name": "t", "priority": 2**70}),
        ("/admin/tenants", {"name": "t", "weight": 10**400}),
        ("/admin/tenants", {"name": "t", "weight": 1e308}),
        ("/admin/tenants/acme/keys", {"adapter": "\ud800"}),
        ("/v1/load_lora_adapter", {"lora_name": "\ud800", "lora_path": "x"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "\ud800"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x", "tenant": "\ud800"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x", "lora_int_id": 10**400}),
        ("/v1/unload_lora_adapter", {"lora_name": "\ud800"}),
    ],
)
def test_no_value_that_the_operator_sends_is_a_server_error(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    answer = platform.api(ADMIN_KEY).post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500 or body.get("weight") == 1e308, answer.text
    assert answer.status_code < 500


@pytest.mark.parametrize("versions", [{"1": 2**70}, {"1": -(2**70)}, {"9" * 18: 100}, {"\ud800": 100}])
def test_no_target_of_an_alias_is_a_server_error(
    platform: Platform, key: str, versions: dict[str, int]
) -> None:
    answer = platform.api(key).put("/v1/adapters/x/aliases/prod", content=json.dumps({"versions": versions}),
                        headers={"Content-Type": "application/json"})  # fmt: skip
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize(
    "raw",
    [b"[" * 100_000, b'{"a":' * 10_000, b'{"prompt": ' + b"1" * 5000 + b"}", b"\xff\xfe", b'{"prompt": "\xff"}',
     json.dumps(PROMPT).encode("utf-16"), b"{", b"", b"[]", b"[1", b"null", b'{"a": NaN', b"1e999", b'"x"'],
)  # fmt: skip
@repeated_if_slow
def test_a_body_that_is_not_a_json_object_is_a_400(
    platform: Platform, recorder: Recorder, key: str, raw: bytes
) -> None:
    answer = platform.api(key).post(COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert not recorder.slow()
