"""`slora compare` prints the answers of several models side by side."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from slora.core.request import EngineRequest, TokenDelta
from tests.adapters.hand_made import make_members
from tests.api.command import Ended, run_command
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

ANSWER = deltas_of(b"one two three four five six seven eight\n\nnine")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine([ANSWER], max_model_len=1024)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        running.upload(running.key("acme"), "brief", make_members()).raise_for_status()
        yield running


@pytest.fixture(scope="module")
def key(platform: Platform) -> str:
    return platform.key("acme")


def compare(platform: Platform, key: str, *arguments: str, columns: int = 65) -> Ended:
    return run_command(
        "compare", "hello", *arguments, SLORA_URL=platform.url, SLORA_API_KEY=key, COLUMNS=str(columns)
    )


def test_answers_stand_side_by_side_with_the_version_that_answered(platform: Platform, key: str) -> None:
    ended = compare(platform, key, "--models", "base", "brief")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "base                            | brief@1",
        "-" * 31 + " | " + "-" * 31,
        "one two three four five six     | one two three four five six",
        "seven eight                     | seven eight",
        "                                |",
        "nine                            | nine",
    ]


def test_answers_stand_one_below_the_other_in_a_narrow_terminal(platform: Platform, key: str) -> None:
    ended = compare(platform, key, "--models", "base", "brief", columns=50)
    text = "one two three four five six seven eight\n\nnine"
    assert ended.stdout == f"base\n----\n{text}\n\nbrief@1\n-------\n{text}\n"


def test_a_model_that_fails_shows_its_error_and_the_command_fails(platform: Platform, key: str) -> None:
    ended = compare(platform, key, "--models", "base", "nothing", columns=40)
    assert ended.returncode == 1 and ended.stderr == "slora: 1 of 2 answers failed\n"
    assert "one two" in ended.stdout and "\nerror 404: " in ended.stdout


def test_the_prompt_and_the_flags_reach_each_model(platform: Platform, key: str) -> None:
    flags = ["--system", "Be brief.", "--max-tokens", "3", "--temperature", "0", "--seed", "5"]
    ended = compare(platform, key, "--models", "base", "brief", "--json", *flags)
    found = json.loads(ended.stdout)
    assert [answer["model"] for answer in found["answers"]] == ["base", "brief"]
    assert platform.last_prompt() == "[system]Be brief.[user]hello"
    for request in platform.engine.requests[-2:]:
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (3, 0, 5)
    assert compare(platform, key, "--models", "base", "--raw").returncode == 0
    assert platform.last_prompt() == "hello"
    refused = compare(platform, key, "--models", "base", "--raw", "--system", "x")
    assert refused.returncode == 1 and "omit --raw" in refused.stderr


class EngineOfMany(ScriptedEngine):
    """Answers when it has eight requests."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        async with aclosing(super().generate(request)) as answer:
            async for deltas in answer:
                async with asyncio.timeout(60):
                    while len(self.requests) < 8:
                        await asyncio.sleep(0.01)
                yield deltas


def test_all_models_are_asked_at_the_same_time(tmp_path: Path) -> None:
    with running_platform(tmp_path, EngineOfMany([ANSWER], max_model_len=1024)) as platform:
        ended = compare(platform, platform.key("acme"), "--models", *["base"] * 8)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_complete_says_on_standard_error_which_version_answered(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hello.")])) as platform:
        key = platform.key("acme")
        platform.upload(key, "greeter").raise_for_status()
        for model, said in (("greeter", "answered by greeter@1\n"), ("greeter@1", ""), ("base", "")):
            words = ("complete", "hi", "--max-tokens", "9", "--model", model)
            ended = run_command(*words, SLORA_URL=platform.url, SLORA_API_KEY=key)
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "hello.\n", said)
