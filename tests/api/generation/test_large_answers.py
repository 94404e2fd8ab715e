"""The largest possible answers are written in slices, so that the event loop serves other requests in between.

Born from a bug: all choices repeated the prompt's log-probabilities, and 244 MB of JSON were written at once in 8 s.
"""

import gc
import json
from array import array
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest

from slora.core.request import FinishReason, TokenDelta, TokenLogprobs
from tests.api.platform import Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.support.slow_callbacks import Recorder, repeated_if_slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_TOKENS, CHOICES = 1000, 5
TOP = tuple((65 + rank, -0.5 - rank) for rank in range(20))
ENTRY = TokenLogprobs(-1.25, TOP)


@pytest.fixture(scope="module")
def shared(recorder: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine(max_model_len=4096, max_num_seqs=128)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        yield running
        gc.unfreeze()


@pytest.fixture
def platform(shared: Platform, recorder: Recorder) -> Platform:
    # The server does the same. Otherwise a full collection would visit all imported modules of the tests, and what
    # earlier tests left.
    gc.collect()
    gc.freeze()
    shared.engine.requests.clear()
    recorder.found.clear()
    return shared


def scored_prompt() -> TokenDelta:
    return TokenDelta((), prompt_logprobs=(None, *[ENTRY] * (PROMPT_TOKENS - 1)))


def answers(num_tokens: int) -> list[TokenDelta | Exception]:
    """`num_tokens` tokens for each choice, all in one delta, as a beam search returns them."""
    return [
        TokenDelta((97,) * num_tokens, FinishReason.LENGTH, (ENTRY,) * num_tokens, index=index)
        for index in range(CHOICES)
    ]


def echo_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "base",
        "prompt": "x" * PROMPT_TOKENS,
        "n": CHOICES,
        "echo": True,
        "logprobs": 20,
    } | fields


@repeated_if_slow
def test_echoed_log_probabilities_of_all_choices_do_not_block_the_event_loop(
    platform: Platform, recorder: Recorder, key: str
) -> None:
    platform.engine.answers = [[scored_prompt(), *answers(2)]]
    answer = post(platform, key, COMPLETIONS, echo_body(prompt_logprobs=20))
    assert int(answer.headers["content-length"]) == len(answer.content) > 5_000_000
    choices = answer.json()["choices"]
    for choice in choices:
        assert choice["text"] == "x" * PROMPT_TOKENS + "aa"
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {PROMPT_TOKENS + 2}
        assert logprobs["text_offset"] == list(range(PROMPT_TOKENS + 2))
        assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 21
        assert choice["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    assert len(choices[0]["prompt_logprobs"]) == PROMPT_TOKENS
    assert not recorder.slow()


@repeated_if_slow
def test_an_echo_is_streamed_in_chunks_of_a_bounded_number_of_tokens(
    platform: Platform, recorder: Recorder, key: str
) -> None:
    platform.engine.answers = [[scored_prompt(), *answers(2)]]
    answer = post(platform, key, COMPLETIONS, echo_body(stream=True))
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    texts, offsets = [""] * CHOICES, [0] * CHOICES
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, columns = choice["index"], choice["logprobs"]
        assert len(columns["tokens"]) <= 64
        assert columns["text_offset"] == list(range(offsets[index], offsets[index] + len(columns["tokens"])))
        texts[index] += choice["text"]
        offsets[index] += len(columns["tokens"])
    assert texts == ["x" * PROMPT_TOKENS + "aa"] * CHOICES
    assert not recorder.slow()


@pytest.mark.parametrize("stream", [False, True])
@repeated_if_slow
def test_log_probabilities_in_one_delta_do_not_block_the_event_loop(
    platform: Platform, recorder: Recorder, key: str, stream: bool, soak: bool
) -> None:
    num_tokens = 2000 if soak else 1000
    platform.engine.answers = [answers(num_tokens)]
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "base", "messages": messages, "n": CHOICES, "max_tokens": num_tokens}
    answer = post(platform, key, CHAT, body | {"logprobs": True, "top_logprobs": 20, "stream": stream})
    assert answer.status_code == 200
    if not stream:
        contents = [choice["logprobs"]["content"] for choice in answer.json()["choices"]]
        assert [len(content) for content in contents] == [num_tokens] * CHOICES
        assert contents[0][0]["top_logprobs"][1] == {"token": "B", "logprob": -1.5, "bytes": [66]}
    assert not recorder.slow()


def test_an_answer_without_a_limit_is_cut_to_the_bound_on_listed_logprobs(
    platform: Platform, key: str
) -> None:
    platform.engine.answers = [answers(1)]
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "n": CHOICES}
    assert post(platform, key, CHAT, body | {"logprobs": True, "top_logprobs": 20}).status_code == 200
    (request,) = platform.engine.requests
    assert request.sampling.max_tokens == (1 << 18) // (CHOICES * 21)


@pytest.mark.parametrize(("encoding_format", "num_inputs"), [("float", 300), ("base64", 1500)])
@repeated_if_slow
def test_many_embeddings_do_not_block_the_event_loop(
    platform: Platform, recorder: Recorder, key: str, encoding_format: str, num_inputs: int
) -> None:
    """About 6 MB of floats, or 8 MB of base64."""
    numbers = array("f", (1 / (3 + place) for place in range(1024)))
    delta = TokenDelta((), FinishReason.STOP, embedding=numbers.tobytes())
    platform.engine.embeddings = lambda request: [delta]
    body = {"model": "base", "input": ["a"] * num_inputs, "encoding_format": encoding_format}
    answer = post(platform, key, "/v1/embeddings", body)
    assert int(answer.headers["content-length"]) == len(answer.content) > 5_000_000
    data = answer.json()["data"]
    assert len(data) == num_inputs
    found = data[-1]["embedding"]
    assert (array("f", b64decode(found)) if isinstance(found, str) else array("f", found)) == numbers
    assert not recorder.slow()
