"""`truncate_prompt_tokens` and `truncation_side`, which shorten a prompt before the engine sees it. Each byte of these
prompts is a token, and the context has 64.
"""

from typing import Any

import pytest

from tests.api.platform import Platform, post

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
TEXT = "".join(map(chr, range(32, 127)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("prompt", [TEXT, list(TEXT.encode())], ids=["text", "token ids"])
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, TEXT[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, TEXT[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, TEXT[:4]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, TEXT[-54:]),
    ],
)
def test_a_completion_gets_the_tokens_of_one_side(
    platform: Platform, key: str, prompt: Any, fields: dict[str, Any], kept: str
) -> None:
    answer = post(platform, key, COMPLETIONS, {"model": "base", "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    assert bytes(platform.engine.requests[0].prompt_token_ids).decode() == kept
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)


def test_an_echo_repeats_what_is_left_of_the_prompt(platform: Platform, key: str) -> None:
    body = {"model": "base", "prompt": TEXT, "echo": True, "truncate_prompt_tokens": 4}
    assert post(platform, key, COMPLETIONS, body).json()["choices"][0]["text"] == TEXT[-4:] + "Hi!"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, TEXT[:4]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, TEXT[-4:]),
        ({"truncate_prompt_tokens": -1}, TEXT[:64]),
    ],
)
def test_an_embedding_keeps_the_beginning_of_each_input_by_default(
    platform: Platform, key: str, fields: dict[str, Any], kept: str
) -> None:
    for given in ([TEXT, "ab"], list(TEXT.encode())):
        answer = post(platform, key, EMBEDDINGS, {"model": "base", "input": given, **fields})
        assert answer.status_code == 200, answer.text
    prompts = sorted(bytes(request.prompt_token_ids).decode() for request in platform.engine.requests)
    assert prompts == sorted([kept, "ab", kept])
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("value", [0, -2])
def test_a_prompt_without_tokens_is_refused(platform: Platform, key: str, path: str, value: int) -> None:
    body = {"model": "base", "truncate_prompt_tokens": value}
    answer = post(platform, key, path, body | ({"prompt": TEXT} if path == COMPLETIONS else {"input": TEXT}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and f"it is {value}" in error["message"], error


def test_a_prompt_that_is_still_too_long_is_refused(platform: Platform, key: str) -> None:
    body = {"model": "base", "prompt": TEXT, "truncate_prompt_tokens": 80}
    answer = post(platform, key, COMPLETIONS, body)
    assert answer.status_code == 400 and "80 tokens" in answer.json()["error"]["message"], answer.text
