"""Beam search over HTTP: results equal those of transformers, errors name the field, and an early end releases
everything.

Searches run on a real server. Cases that depend only on the engine's answers use a scripted engine.
"""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from tests.api.conftest import Kit
from tests.api.generation.test_completions import CHAT, COMPLETIONS, MESSAGES, PROMPT
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import EOS as SCRIPTED_EOS
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import CHARACTERS, EOS, Served, wait_for
from tests.api.server.test_server import ids, upload
from tests.support.oracle import LOGPROB_TOLERANCE, Oracle

HELLO = "[user]hello"  # as rendered by the chat template
SEARCH = {"use_beam_search": True, "best_of": 4}
# 501 tokens of 4 beams take seconds, so that a client can disconnect during the search.
LONG = {**SEARCH, "ignore_eos": True}


@pytest.fixture(scope="module")
def key(server: Served, kit: Kit) -> str:
    made = server.make_key("searchers", "small")
    assert upload(server, made, "small", kit.small).status_code == 201
    return made


@pytest.fixture(scope="module")
def client(server: Served, key: str) -> openai.OpenAI:
    return server.sdk(key)


@pytest.fixture(scope="module")
def oracle(kit: Kit) -> Oracle:
    return Oracle(kit.base, {"small": kit.small})


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens if token != EOS)


def expected_texts(oracle: Oracle, prompt: str, adapter: str | None, **settings: object) -> list[str]:
    settings = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, **settings}
    found, _ = oracle.beam_search(ids(prompt), adapter, [EOS], **settings)
    return [text_of(tokens) for tokens in found]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"length_penalty": 2.0, "early_stopping": True}, {"length_penalty": 2.0, "early_stopping": True}),
        ({"logit_bias": {str(EOS): 3.0}}, {"sequence_bias": {(EOS,): 3.0}}),
    ],
    ids=["plain", "long ones early", "short ones"],
)
@pytest.mark.parametrize("model", ["base", "small"])
def test_completions_and_chat_return_the_beams_of_transformers_best_first(
    client: openai.OpenAI, oracle: Oracle, model: str, fields: dict[str, Any], settings: dict[str, object]
) -> None:
    adapter = None if model == "base" else model
    expected = expected_texts(oracle, HELLO, adapter, **settings)
    extra = {**SEARCH, **fields}
    told = client.completions.create(model=model, prompt=HELLO, max_tokens=12, n=3, extra_body=extra)
    assert [choice.text for choice in told.choices] == expected
    assert [choice.index for choice in told.choices] == [0, 1, 2]
    chatted = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=12, n=3, extra_body=extra
    )
    assert [choice.message.content for choice in chatted.choices] == expected
    assert len(set(expected)) == 3


def test_n_is_the_default_beam_width_and_temperature_0_is_accepted(
    client: openai.OpenAI, oracle: Oracle
) -> None:
    expected = expected_texts(oracle, "abc", "small", num_beams=3)
    told = client.completions.create(
        model="default", prompt="abc", max_tokens=12, n=3, temperature=0, top_p=1, seed=5,
        extra_body={"use_beam_search": True},
    )  # fmt: skip
    assert [choice.text for choice in told.choices] == expected


def test_each_prompt_of_a_list_is_searched_alone(client: openai.OpenAI, oracle: Oracle) -> None:
    prompts = ["hello", "0123456789" * 5]
    told = client.completions.create(
        model="small", prompt=prompts, max_tokens=12, n=2, echo=True, extra_body=SEARCH
    )
    expected = [
        prompt + text
        for prompt in prompts
        for text in expected_texts(oracle, prompt, "small", num_return_sequences=2)
    ]
    assert [choice.text for choice in told.choices] == expected


def test_log_probabilities_add_up_to_the_rank(client: openai.OpenAI, oracle: Oracle) -> None:
    """All answers have the same length, so their sums decrease from choice to choice."""
    extra = {**SEARCH, "ignore_eos": True}
    told = client.completions.create(
        model="base", prompt="hello", max_tokens=8, n=4, logprobs=2, extra_body=extra
    )
    sums = []
    for choice in told.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        tokens = [EOS if token == "<eos>" else CHARACTERS.index(token) for token in choice.logprobs.tokens]
        assert text_of(tokens) == choice.text and choice.finish_reason == "length"
        judged = oracle.token_logprobs(ids("hello"), tokens, None)
        assert choice.logprobs.token_logprobs == pytest.approx(judged, abs=LOGPROB_TOLERANCE)
        assert choice.logprobs.top_logprobs is not None
        assert all(len(likely) >= 2 for likely in choice.logprobs.top_logprobs)
        sums.append(sum(judged))
    assert sums == sorted(sums, reverse=True) and len(set(sums)) == 4
    chatted = client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hello"}], max_tokens=8, n=2, logprobs=True,
        top_logprobs=3, extra_body=extra,
    )  # fmt: skip
    for answer in chatted.choices:
        assert answer.logprobs is not None and answer.logprobs.content is not None
        assert len(answer.logprobs.content) == 8
        assert all(len(token.top_logprobs) == 3 for token in answer.logprobs.content)


def test_a_stream_sends_each_answer_whole_and_in_order(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "small", "prompt": "hello", "max_tokens": 12, "n": 3}
    whole = client.completions.create(**options, extra_body=SEARCH)
    with client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, extra_body=SEARCH
    ) as stream:
        *chunks, last = list(stream)
    told = [chunk.choices[0] for chunk in chunks]
    assert [(one.index, one.text, one.finish_reason) for one in told] == [
        (one.index, one.text, one.finish_reason) for one in whole.choices
    ]
    assert whole.usage is not None and last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == 5


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 0.7}, "temperature", "set it to 0.0"),
        ({"top_p": 0.5}, "top_p", "set it to 1.0"),
        ({"top_k": 4}, "top_k", "set it to 0"),
        ({"min_p": 0.1}, "min_p", "set it to 0.0"),
        ({"presence_penalty": 1.0}, "presence_penalty", "has no penalties"),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "has no penalties"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "set it to 1.0"),
        ({"stop": "x"}, "stop", "use stop_token_ids"),
        ({"length_penalty": 10.5}, "length_penalty", "between -10 and 10"),
        ({"n": 5}, "best_of", "at least n (5)"),
        ({"best_of": 9}, "best_of", "at most 8 answers at once (max_num_seqs)"),
        ({"best_of": None, "n": 9}, "n", "at most 8 answers at once (max_num_seqs)"),
        ({"use_beam_search": "yes"}, "use_beam_search", "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty", "only beam search uses"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping", "only beam search uses"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_fields_that_beam_search_does_not_support_are_refused_before_the_engine(
    scripted: Platform,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
    words: str,
    stream: bool,
) -> None:
    answer = post(scripted, scripted.key("acme"), path, {**body, **SEARCH, **fields, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"], error
    assert scripted.engine.requests == []


def test_a_search_with_too_few_non_stop_tokens_or_too_many_pages_is_refused(
    client: openai.OpenAI, server: Served
) -> None:
    stops = list(range(len(CHARACTERS) - 2))
    with pytest.raises(openai.BadRequestError, match="only 2 of the 96 tokens are not stop tokens") as few:
        client.completions.create(
            model="base", prompt="x", max_tokens=4, extra_body={**SEARCH, "stop_token_ids": stops}
        )
    assert few.value.param == "best_of"
    with pytest.raises(openai.BadRequestError, match=r"pages for .* for each of 90 beams") as large:
        client.completions.create(
            model="base", prompt="x", max_tokens=500, extra_body={**LONG, "best_of": 90}
        )
    assert large.value.code == "context_length_exceeded"
    assert pages_held(server) == 0


def metric(server: Served, name: str) -> float:
    with server.client(ADMIN_KEY) as operator:
        lines = operator.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def pages_held(server: Served) -> float:
    return metric(server, 'slora_pages{state="held"}')


def send_search(server_url: str, key: str, fields: dict[str, Any]) -> socket.socket:
    """Sends a request and returns its connection. The client disconnects when it is closed."""
    url, body = httpx.URL(server_url), json.dumps(fields).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((url.host, url.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_ends_all_beams(server: Served, key: str, stream: bool) -> None:
    fields = {"model": "small", "prompt": "hello", "max_tokens": 500, "stream": stream, **LONG}
    with send_search(server.url, key, fields):
        wait_for(lambda: metric(server, "vllm:num_requests_running") == 4 or None, server.alive)
    wait_for(lambda: metric(server, "vllm:num_requests_running") == 0 or None, server.alive)
    assert pages_held(server) == 0


def test_a_search_that_misses_its_deadline_is_a_503_and_frees_its_pages(server: Served, key: str) -> None:
    body = {"model": "small", "prompt": "x" * 490, "max_tokens": 12, "deadline_ms": 1, **LONG}
    with server.client(key) as http:
        late = http.post(COMPLETIONS, json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_missed")
        assert int(late.headers["retry-after"]) > 0
        wait_for(lambda: pages_held(server) == 0 or None, server.alive)
        assert http.post(COMPLETIONS, json={**body, "deadline_ms": 60_000}).status_code == 200


@pytest.fixture
def scripted(shared: Platform) -> Platform:
    """An engine with answers that the test chooses, for at most 8 sequences at once."""
    shared.engine.reset(found())
    return shared


def found() -> list[TokenDelta]:
    """The engine's output for a search: two complete answers. The first one ended at a stop token."""
    scores = (TokenLogprobs(-0.25, ((72, -0.25),)), TokenLogprobs(-0.5, ((105, -0.5),)))
    return [
        TokenDelta((*b"Hi", SCRIPTED_EOS), FinishReason.STOP, (*scores, scores[0]), 0, num_cached=3),
        TokenDelta((*b"Ho",), FinishReason.LENGTH, scores, 1),
    ]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_the_engine_gets_the_search_as_it_was_sent(
    scripted: Platform, path: str, body: dict[str, Any]
) -> None:
    sent = {
        "n": 2,
        "length_penalty": -0.5,
        "early_stopping": True,
        "max_tokens": 3,
        "min_tokens": 1,
        "seed": 7,
    }
    answer = post(scripted, scripted.key("acme"), path, {**body, **SEARCH, **sent})
    assert answer.status_code == 200
    (request,) = scripted.engine.requests
    assert request.sampling == SamplingParams(
        **sent,
        temperature=0.0,
        use_beam_search=True,
        best_of=4,
        stop_token_ids=request.sampling.stop_token_ids,
    )
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 5 and usage["prompt_tokens_details"]["cached_tokens"] == 3


def test_each_beam_holds_a_permit_until_its_client_disconnects(tmp_path: Path) -> None:
    """Of 6 permits, a search of width 4 leaves 2, although it returns one answer. A search that needs 7 permits is
    always refused."""
    engine = ScriptedEngine([[]], hang=True)
    with running_platform(tmp_path, engine, max_concurrent_per_tenant=6) as platform:
        key, body = platform.key("one"), {**PROMPT, **SEARCH}
        with send_search(platform.url, key, body):
            wait_for(lambda: engine.requests or None)
            assert post(platform, key, COMPLETIONS, {**body, "best_of": 3}).status_code == 429
            never = post(platform, key, COMPLETIONS, {**body, "best_of": 7})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "best_of")
        wait_for(lambda: platform.services.generator.limiter.num_generations == 0 or None)
    assert len(engine.requests) == len(engine.aborted) == 1
