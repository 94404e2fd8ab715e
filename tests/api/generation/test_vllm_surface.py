"""Fields and routes that clients of vLLM's server use, in vLLM's form."""

import importlib.metadata
import json
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from slora_api.completions.services import AnswerServices
from slora_api.quotas.routes import QuotaServices
from tests.adapters.hand_made import make_members
from tests.api.platform import ADMIN_KEY, Platform, post
from tests.api.scripted_engine import EOS, byte_tokenizer, deltas_of, fast_byte_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "base", "prompt": "hello"}
MESSAGES = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
BOTH = pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
RENDERED = list(b"[user]hello")


@pytest.fixture
def platform(shared: Platform) -> Platform:
    shared.engine.reset(deltas_of(b"Hi!", FinishReason.STOP))
    return shared


# A template with what published ones have: the generation prompt and a variable of the client.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{{ style }}"
)


@pytest.fixture(scope="module")
def styled(shared: Platform, key: str) -> str:
    """An adapter with this template."""
    members = make_members(chat_template_dot_jinja=TEMPLATE)
    assert shared.upload(key, "styled", members).status_code == 201
    return "styled"


def stream(platform: Platform, key: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *parts, done, end = post(platform, key, path, body | {"stream": True}).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@BOTH
def test_continuous_usage_is_the_usage_so_far_in_every_chunk(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(platform, key, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    opening = [0] if path == CHAT else []
    assert counts == [*opening, 1, 2, 3, 4, 4]
    assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])


@BOTH
def test_a_request_id_is_the_end_of_the_answers_id(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    assert post(platform, key, path, body | {"request_id": "mine"}).json()["id"].endswith("-mine")


def test_the_service_tier_is_echoed_if_it_was_sent(platform: Platform, key: str) -> None:
    answer = post(platform, key, CHAT, MESSAGES | {"service_tier": "auto", "metadata": {"a": "b"}}).json()
    assert answer["service_tier"] == "default"
    chunks = stream(platform, key, CHAT, MESSAGES | {"service_tier": "default"})
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in post(platform, key, CHAT, MESSAGES).json()


def test_the_token_ids_of_a_chat_are_with_the_choice_and_those_of_the_prompt_beside_it(
    platform: Platform, key: str
) -> None:
    body = MESSAGES | {"return_token_ids": True}
    answer = post(platform, key, CHAT, body).json()
    assert answer["prompt_token_ids"] == RENDERED
    assert answer["choices"][0]["token_ids"] == [*b"Hi!", EOS]
    chunks = stream(platform, key, CHAT, body)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [RENDERED] + [None] * (len(chunks) - 1)
    found = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert found == [*b"Hi!", EOS]


def test_tokens_of_log_probabilities_may_be_shown_as_ids(platform: Platform, key: str) -> None:
    entry = TokenLogprobs(-0.5, ((72, -0.5), (73, -1.0)))
    platform.engine.answers = [[TokenDelta((72,), FinishReason.LENGTH, (entry,))]]
    shown = {"return_tokens_as_token_ids": True}
    old = post(platform, key, COMPLETIONS, PROMPT | shown | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert old["tokens"] == ["token_id:72"] and old["top_logprobs"] == [
        {"token_id:72": -0.5, "token_id:73": -1.0}
    ]
    new = post(platform, key, CHAT, MESSAGES | shown | {"logprobs": True, "top_logprobs": 2}).json()
    assert new["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"


def test_health_and_ping_say_whether_a_request_would_be_answered(platform: Platform) -> None:
    for path in ("/health", "/ping"):
        platform.engine.ready = True
        assert httpx.get(platform.url + path).json() == {"status": "ready"}
        platform.engine.ready = False
        assert httpx.get(platform.url + path).status_code == 503


def test_the_version_is_that_of_the_package(platform: Platform) -> None:
    assert httpx.get(platform.url + "/version").json() == {"version": importlib.metadata.version("slora")}


def test_the_load_is_the_number_of_answers_in_progress(platform: Platform) -> None:
    with platform.services.generator.limiter.admit_generation("acme", 3), platform.client(ADMIN_KEY) as admin:
        assert admin.get("/load").json() == {"server_load": 3}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, b"<u>hello</s><a>He</s><a>"),
        ({"add_generation_prompt": False}, b"<u>hello</s><a>He</s>"),
        ({"continue_final_message": True}, b"<u>hello</s><a>He"),
        ({"continue_final_message": True, "add_generation_prompt": False}, b"<u>hello</s><a>He"),
        ({"chat_template_kwargs": {"style": 10**30}}, b"<u>hello</s><a>He</s><a>" + b"1" + b"0" * 30),
    ],
)
def test_a_conversation_is_rendered_as_the_request_asks(
    platform: Platform, key: str, styled: str, fields: dict[str, Any], prompt: bytes
) -> None:
    messages = [*MESSAGES["messages"], {"role": "assistant", "content": "He"}]
    body = {"model": styled, "messages": messages, **fields}
    assert bytes(post(platform, key, "/tokenize", body).json()["tokens"]) == prompt
    post(platform, key, CHAT, body | {"max_tokens": 1}).raise_for_status()
    assert bytes(platform.engine.requests[-1].prompt_token_ids) == prompt


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "sets `messages`"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs", "sets `eos_token`"),
        ({"chat_template_kwargs": {"style": "x" * 20_000}}, "chat_template_kwargs", "at most 16384"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "should be an object"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "contradict each other",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "Upload the template with the adapter"),
    ],
)
def test_fields_of_a_chat_template_that_cannot_be_used_are_refused_by_name(
    platform: Platform, key: str, fields: dict[str, Any], param: str, said: str
) -> None:
    for path in (CHAT, "/tokenize"):
        answer = post(platform, key, path, MESSAGES | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and said in error["message"]


def test_a_text_is_tokenized_and_its_tokens_are_decoded_again(platform: Platform, key: str) -> None:
    answer = post(platform, key, "/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [97, 32, 98], "token_strs": ["a", "Ġ", "b"]}
    assert post(platform, key, "/tokenize", {"prompt": "", "model": "base"}).json()["token_strs"] is None
    tokens = {"tokens": [*answer["tokens"], EOS]}
    assert post(platform, key, "/detokenize", tokens).json() == {"prompt": "a b<eos>"}
    assert post(platform, key, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", **MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 1000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nobodys"}, 404, None),
        ("/detokenize", {"tokens": [257]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [97] * 1000}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nobodys"}, 404, None),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    platform: Platform, key: str, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = post(platform, key, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_tokenizing_counts_as_a_request_of_the_tenant(platform: Platform) -> None:
    key = platform.key("limited")
    platform.find(QuotaServices).quota_store.change_tenant_quota(
        platform.tenant_id("limited"), {"requests_per_minute": 2}
    )
    assert post(platform, key, "/tokenize", {"prompt": "a"}).headers["x-ratelimit-remaining-requests"] == "1"
    assert post(platform, key, "/detokenize", {"tokens": [97]}).status_code == 200
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}), (CHAT, MESSAGES)):
        assert post(platform, key, path, body).status_code == 429


def test_special_tokens_of_the_tokenizer_are_added_as_the_request_asks(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = fast_byte_tokenizer()
    fast.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    encoder = platform.find(AnswerServices).encoder
    monkeypatch.setattr(encoder, "tokenizer", byte_tokenizer(fast))
    for path, body, is_default in ((COMPLETIONS, PROMPT, True), (CHAT, MESSAGES, False)):
        for sent in (None, True, False):
            post(platform, key, path, body | {"add_special_tokens": sent}).raise_for_status()
            (first, *_) = platform.engine.requests[-1].prompt_token_ids
            assert (first == EOS) == (is_default if sent is None else sent)


@BOTH
def test_bad_words_reach_the_engine_as_written_alone_and_after_a_space(
    platform: Platform, key: str, path: str, body: dict[str, Any]
) -> None:
    sent = {"bad_words": ["no", " b", "no"], "allowed_token_ids": [65, 66]}
    assert post(platform, key, path, body | sent).status_code == 200
    sampling = platform.engine.requests[-1].sampling
    assert [bytes(tokens) for tokens in sampling.bad_words] == [b"no", b" no", b"b", b" b"]
    assert sampling.allowed_token_ids == (65, 66)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chosen_tokens_are_all_listed(
    platform: Platform, key: str, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    top = tuple((token, -token / 10) for token in b"abcde")
    platform.engine.answers = [[TokenDelta((97,), FinishReason.LENGTH, (TokenLogprobs(-9.7, top),))]]
    sent = {"logprobs": 1 if path == COMPLETIONS else True, "logprob_token_ids": [98, 99, 100, 101, 98]}
    answer = post(platform, key, path, body | sent | {"stream": stream})
    assert platform.engine.requests[-1].sampling.logprob_token_ids == (98, 99, 100, 101)
    texts = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")[1:] if stream else [answer.text]
    logprobs = [choice["logprobs"] for text in texts for choice in json.loads(text)["choices"]]
    (shown,) = filter(None, logprobs)
    if path == COMPLETIONS:
        assert list(shown["top_logprobs"][0]) == list("abcde")
    else:
        assert [one["token"] for one in shown["content"][0]["top_logprobs"]] == list("abcde")


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "only allowed with logprobs"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids", "129 ids; at most 128"),
        ({"bad_words": ["a"] * 33}, "bad_words", "33 words"),
        ({"bad_words": ["a" * 65]}, "bad_words", "65 characters, and at most 64"),
        ({"bad_words": [" "]}, "bad_words", "only white space"),
        ({"bad_words": [1]}, "bad_words.0", "valid string"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "1025 ids; at most 1024"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids", "ids are 0 to 256"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "xb"]}, "allowed_token_ids", "leaves 0 tokens"),
        ({"bad_words": ["a"], "guided_choice": ["yes"]}, "bad_words", "guided_choice"),
        ({"allowed_token_ids": [1], "guided_choice": ["yes"]}, "allowed_token_ids", "guided_choice"),
    ],
)
def test_a_token_filter_that_leaves_no_answer_or_breaks_a_limit_is_refused_by_name(
    platform: Platform,
    key: str,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
    words: str,
) -> None:
    answer = post(platform, key, path, body | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]
