import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from slora.core.errors import EngineUnavailable
from slora.core.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.completions.answering import MergedStreams, stream_completion
from slora_api.completions.prompt_echo import TOKENS_AT_ONCE
from tests.api.scripted_engine import EOS, ScriptedEngine, byte_tokenizer, deltas_of
from tests.support.tiny_tokenizers import byte_fallback

TOKENIZER = byte_tokenizer()


def request(**sampling: object) -> EngineRequest:
    return EngineRequest("r", "t", [1], (), SamplingParams(**sampling))  # type: ignore[arg-type]


async def gather(stream: AsyncGenerator[list[CompletionDelta], None]) -> list[CompletionDelta]:
    async with aclosing(stream) as deltas:
        return [delta async for arrived in deltas for delta in arrived]


def run(engine: ScriptedEngine, **sampling: object) -> list[CompletionDelta]:
    return asyncio.run(gather(stream_completion(engine, Answer(request(**sampling), TOKENIZER))))


def test_text_is_the_decoded_tokens_and_the_end_token_is_counted_but_not_shown() -> None:
    deltas = run(ScriptedEngine([deltas_of(b"hello", FinishReason.STOP)]))
    assert "".join(delta.text for delta in deltas) == "hello"
    assert sum(len(delta.token_ids) for delta in deltas) == 6
    assert [delta.finish_reason for delta in deltas][-2:] == [None, FinishReason.STOP]


def test_a_character_of_several_tokens_is_never_sent_in_parts() -> None:
    deltas = run(ScriptedEngine([deltas_of("aß€😀z".encode())]))
    assert [delta.text for delta in deltas if delta.text] == ["a", "ß", "€", "😀", "z"]


@pytest.mark.parametrize("stop", ["STOP", "P", "xSTOP"])
def test_a_stop_string_ends_the_text_before_it_and_aborts_the_engine_request(stop: str) -> None:
    engine = ScriptedEngine([deltas_of(b"fooxSTOPbar")])
    deltas = run(engine, stop=(stop,))
    assert "".join(delta.text for delta in deltas) == "fooxSTOPbar".split(stop)[0]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert engine.aborted == ["r"]


def test_text_held_back_for_a_stop_string_is_sent_if_the_string_does_not_follow() -> None:
    deltas = run(ScriptedEngine([deltas_of(b"a STO")]), stop=("STOP",))
    assert "".join(delta.text for delta in deltas) == "a STO"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def with_logprobs(text: bytes) -> list[TokenDelta]:
    entries = [TokenLogprobs(-0.5, ((byte, -0.5), (EOS, -1.0))) for byte in text]
    last = len(text) - 1
    return [
        TokenDelta((byte,), FinishReason.LENGTH if at == last else None, (entries[at],))
        for at, byte in enumerate(text)
    ]


def test_log_probabilities_come_with_the_text_that_they_belong_to() -> None:
    deltas = run(ScriptedEngine([with_logprobs(b"abc")]), logprobs=2)
    assert [[token.token_id for token in delta.tokens] for delta in deltas] == [[97], [98], [99]]
    assert deltas[0].tokens[0].logprobs == TokenLogprobs(-0.5, ((97, -0.5), (EOS, -1.0)))


def test_tokens_cut_off_by_a_stop_string_are_not_returned() -> None:
    deltas = run(ScriptedEngine([with_logprobs(b"abSTOP")]), logprobs=0, stop=("STOP",))
    assert [token.token_id for delta in deltas for token in delta.tokens] == [97, 98]


def test_each_token_is_returned_with_its_own_part_of_the_text() -> None:
    """Born from a bug: a token decoded alone has no leading space.

    Tokens after a stop string were therefore returned, and each word shifted the offsets by one.
    """
    fast = byte_fallback()
    tokenizer = Tokenizer(fast, {}, None)
    token_ids = tokenizer.encode(" h h h 🎉 w w h", add_special_tokens=False)
    deltas = [TokenDelta((token_id,), None, (TokenLogprobs(-0.5, ()),)) for token_id in token_ids]
    for stop, shown in (((), " h h h 🎉 w w h"), ((" w h",), " h h h 🎉 w"), (("🎉",), " h h h ")):
        asked = request(logprobs=0, stop=stop)
        found = asyncio.run(
            gather(
                stream_completion(ScriptedEngine([[*deltas[:-1], last(deltas)]]), Answer(asked, tokenizer))
            )
        )
        tokens = [token for delta in found for token in delta.tokens]
        assert "".join(delta.text for delta in found) == shown
        assert sum(token.width for token in tokens) == len(shown)


def test_a_long_delta_with_log_probabilities_is_divided_before_it_is_decoded() -> None:
    text = b"abcdefgh" * 20
    entries = tuple(TokenLogprobs(-0.5, ()) for _ in text)
    script = [[TokenDelta(tuple(text), FinishReason.LENGTH, entries, num_cached=3)]]
    deltas = run(ScriptedEngine(script), logprobs=0)
    assert "".join(delta.text for delta in deltas) == text.decode()
    assert [token.token_id for delta in deltas for token in delta.tokens] == list(text)
    assert max(len(delta.token_ids) for delta in deltas) == TOKENS_AT_ONCE
    assert [delta.num_cached_tokens for delta in deltas] == [3] + [0] * (len(deltas) - 1)
    assert [delta.finish_reason for delta in deltas][-2:] == [None, FinishReason.LENGTH]
    cut = run(ScriptedEngine(script), logprobs=0, stop=("ha",))
    assert "".join(delta.text for delta in cut) == "abcdefg"
    assert cut[-1].finish_reason is FinishReason.STOP


def last(deltas: list[TokenDelta]) -> TokenDelta:
    return replace(deltas[-1], finish_reason=FinishReason.LENGTH)


def test_closing_a_stream_early_aborts_its_request() -> None:
    engine = ScriptedEngine([deltas_of(b"hello")])

    async def read_one() -> None:
        async with aclosing(stream_completion(engine, Answer(request(), TOKENIZER))) as deltas:
            await anext(deltas)

    asyncio.run(read_one())
    assert engine.aborted == ["r"]


def merged(engine: ScriptedEngine, count: int) -> MergedStreams:
    return MergedStreams(
        [
            stream_completion(engine, Answer(replace(request(), request_id=f"r{index}"), TOKENIZER, index))
            for index in range(count)
        ]
    )


async def gather_merged(engine: ScriptedEngine, count: int) -> list[CompletionDelta]:
    async with aclosing(merged(engine, count)) as deltas:
        return [delta async for arrived in deltas for delta in arrived]


def test_merged_streams_carry_every_delta_of_each() -> None:
    engine = ScriptedEngine([deltas_of(text) for text in (b"one", b"two", b"three")])
    texts = {0: "", 1: "", 2: ""}
    for delta in asyncio.run(gather_merged(engine, 3)):
        texts[delta.index] += delta.text
    assert texts == {0: "one", 1: "two", 2: "three"}
    assert engine.aborted == []


def test_one_stream_that_fails_ends_the_others() -> None:
    hanging = [TokenDelta((65,))]
    engine = ScriptedEngine([hanging, [EngineUnavailable("gone")], hanging], hang=True)
    with pytest.raises(EngineUnavailable, match="gone"):
        asyncio.run(gather_merged(engine, 3))
    assert len(engine.aborted) == 2


def test_closing_merged_streams_aborts_all_of_them() -> None:
    engine = ScriptedEngine([[TokenDelta((65,))]], hang=True)

    async def read_one() -> None:
        async with aclosing(merged(engine, 4)) as deltas:
            await anext(deltas)

    asyncio.run(read_one())
    assert len(engine.aborted) == len(engine.requests)
