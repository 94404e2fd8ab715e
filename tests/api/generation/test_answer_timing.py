"""Each answer can carry its own timing: in a header, or in the last chunk of a stream.

The scripted engine says that each request took 1 s for each kind of wait, 3 s of prefill and 4 s of decode.
"""

import json

import pytest

from slora.core.request import EngineRequest, RequestTiming
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer
from slora_api.completions.answer_objects import timing_headers, timing_object
from tests.api.platform import Platform, post

PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
STAGES = (
    "queue;dur=1000.000, fetch;dur=1000.000, load;dur=1000.000, prefill;dur=3000.000, decode;dur=4000.000"
)


def body(path: str) -> dict[str, object]:
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    return {"model": "base", name: [{"role": "user", "content": "hi"}] if name == "messages" else "hi"}


@PATHS
def test_an_answer_that_is_not_streamed_has_its_stages_in_a_header(
    platform: Platform, key: str, path: str
) -> None:
    answer = post(platform, key, path, body(path))
    assert answer.headers["x-slora-timing"] == STAGES
    assert "x-slora-timing" not in post(platform, key, path, body(path) | {"stream": True}).headers
    assert "x-slora-timing" not in post(platform, key, path, {"model": "base"}).headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_chunk_of_a_stream_has_vllms_metrics_on_request(
    platform: Platform, key: str, path: str
) -> None:
    def last_chunk(**options: bool) -> dict[str, object]:
        streamed = body(path) | {"stream": True, "stream_options": options}
        *_, chunk, _, _ = post(platform, key, path, streamed).text.split("\n\n")
        found: dict[str, object] = json.loads(chunk.removeprefix("data: "))
        return found

    chunk = last_chunk(include_usage=True, include_timing=True)
    assert chunk["choices"] == [] and chunk["usage"]
    assert chunk["metrics"] == {
        "queue_time_ms": 3000.0,
        "adapter_fetch_ms": 1000.0,
        "adapter_load_ms": 1000.0,
        "time_to_first_token_ms": 3000.0,
        "generation_time_ms": 4000.0,
        "tokens_per_second": 0.429,
        "mean_itl_ms": 2000.0,
    }
    assert "metrics" not in last_chunk(include_usage=True)
    assert "metrics" not in last_chunk(include_timing=True)


def make_answer(timing: RequestTiming | None, n: int = 1) -> Answer:
    answer = Answer(EngineRequest("r", "t", [1], (), SamplingParams(n=n)), None)
    answer.timing = timing
    return answer


def test_of_several_prompts_the_one_that_ended_last_is_timed() -> None:
    first = RequestTiming(0.0, 0.0, False, 0.0, 0.0, 1.0, 2.0)
    last = RequestTiming(0.0, 0.0, False, 1.0, 1.0, 2.0, 5.0)
    answers = [make_answer(last), make_answer(first), make_answer(None)]
    assert timing_headers(answers).popitem()[1].startswith("queue;dur=1000.000")
    made = timing_object(answers)
    assert made is not None and made["generation_time_ms"] == 3000.0
    assert "tokens_per_second" not in made and "mean_itl_ms" not in made


def test_stages_that_were_not_reached_are_left_out() -> None:
    ended_early = RequestTiming(0.0, 0.5, True, None, None, None, 0.5)
    assert timing_headers([make_answer(ended_early)]) == {
        "x-slora-timing": "queue;dur=0.000, fetch;dur=500.000, load;dur=0.000"
    }
    made = timing_object([make_answer(ended_early)])
    assert made is not None and made["queue_time_ms"] is None and made["time_to_first_token_ms"] is None
    assert timing_headers([make_answer(None)]) == {} and timing_object([make_answer(None)]) is None
