import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from slora.core.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora.text.answer import Answer, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.completions.answering import stream_completion
from slora_api.completions.prompt_echo import TOKENS_AT_ONCE
from tests.api.scripted_engine import ScriptedEngine, byte_tokenizer, deltas_of
from tests.support.tiny_tokenizers import byte_fallback

TOKENIZER = byte_tokenizer()


def request(**sampling: object) -> EngineRequest:
    return EngineRequest("r", "t", [1], (), SamplingParams(**sampling))  # type: ignore[arg-type]


async def gather(stream: AsyncGenerator[list[CompletionDelta], None]) -> list[CompletionDelta]:
    async with aclosing(stream) as deltas:
        return [delta async for arrived in deltas for delta in arrived]


def run(engine: ScriptedEngine, **sampling: object) -> list[CompletionDelta]:
    return asyncio.run(gather(stream_completion(engine, Answer(request(**sampling), TOKENIZER))))


def test_a_character_of_several_tokens_is_never_sent_in_parts() -> None:
    deltas = run(ScriptedEngine([deltas_of("aß€😀z".encode())]))
    assert [delta.text for delta in deltas if delta.text] == ["a", "ß", "€", "😀", "z"]


def test_text_held_back_for_a_stop_string_is_sent_if_the_string_does_not_follow() -> None:
    deltas = run(ScriptedEngine([deltas_of(b"a STO")]), stop=("STOP",))
    assert "".join(delta.text for delta in deltas) == "a STO"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


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
