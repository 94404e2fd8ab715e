from dataclasses import replace
from pathlib import Path

import pytest

from slora.core.engine_config import EngineConfig
from slora_api.completions.prompts import AnswerSize
from slora_api.core.errors import BadRequest
from slora_api.core.settings import Settings
from slora_api.http.request_bounds import RequestBounds
from tests.api.scripted_engine import ScriptedEngine

SETTINGS = Settings(EngineConfig(Path("base")))
BOUNDS = RequestBounds.of(SETTINGS, ScriptedEngine(max_model_len=131_072).info, 16)


def test_the_bounds_follow_the_context_the_tokenizer_and_the_settings() -> None:
    assert (BOUNDS.prompt_chars, BOUNDS.prompts, BOUNDS.choices) == (131_072 * 16, 256, 8)
    assert BOUNDS.answer_tokens == BOUNDS.prompt_tokens == 1 << 20
    small = RequestBounds.of(
        replace(SETTINGS, max_body_bytes=1000, max_concurrent_requests=10), ScriptedEngine().info, 500
    )
    assert (small.prompt_chars, small.prompts, small.small_body_bytes) == (1000, 10, 1000)


@pytest.mark.parametrize(
    ("size", "prompt_tokens", "answer_tokens", "param"),
    [
        (AnswerSize(8, None, None, echoes=False), 100_000, 131_073, "max_tokens"),
        (AnswerSize(8, None, None, echoes=True), 100_000, 31_073, "max_tokens"),
        (AnswerSize(8, None, None, echoes=True, lists_prompts=True), 50_000, 31_073, "max_tokens"),
        (AnswerSize(1, None, 1, echoes=False), 131_073, 1, "prompt_logprobs"),
        (AnswerSize(1, 0, None, echoes=False, param="top_logprobs"), 1, 262_145, "top_logprobs"),
        (AnswerSize(1, 0, None, echoes=True), 131_072, 131_073, "logprobs"),
    ],
)
def test_an_answer_at_the_bound_is_accepted_and_one_above_it_refused(
    size: AnswerSize, prompt_tokens: int, answer_tokens: int, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        size.check(BOUNDS, prompt_tokens, answer_tokens)
    assert caught.value.param == param
    size.check(BOUNDS, prompt_tokens - (param == "prompt_logprobs"), answer_tokens - 1)


def test_the_room_for_each_answer_is_the_largest_within_the_bounds() -> None:
    size = AnswerSize(8, 20, None, echoes=True)
    room = size.answer_room(BOUNDS, 2, 100)
    size.check(BOUNDS, 100, 2 * room)
    with pytest.raises(BadRequest):
        size.check(BOUNDS, 100, 2 * (room + 1))
    assert AnswerSize(128, 20, None, echoes=True).answer_room(BOUNDS, 1, 10_000) == 1


def test_an_echo_is_bounded_in_characters() -> None:
    bounds = replace(BOUNDS, echo_chars=1000)
    bounds.check_echo(1000)
    with pytest.raises(BadRequest, match=r"1001 characters.*at most 1000") as caught:
        bounds.check_echo(1001)
    assert caught.value.param == "echo"
