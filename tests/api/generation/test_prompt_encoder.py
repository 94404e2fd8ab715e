import asyncio
import threading

import pytest

from slora.core.errors import ContextTooLong
from slora.text.tokenizer import Tokenizer
from slora_adapters.peft.extras import AddedToken
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.core.errors import TenantBusy
from slora_api.core.fair_slots import cpu_slots
from tests.api.scripted_engine import byte_tokenizer


class CountedTokenizer:
    """A tokenizer that records the characters and the thread of each call. A test can block it."""

    def __init__(self) -> None:
        self._inner = byte_tokenizer()
        self.longest_token_chars = self._inner.longest_token_chars
        self.encoded: list[int] = []
        self.counted: list[int] = []
        self.threads: set[int] = set()
        self.num_built = 0
        self.go = threading.Event()
        self.go.set()

    def encode(self, text: str) -> list[int]:
        self._note(self.encoded, text)
        return self._inner.encode(text)

    def count_tokens(self, text: str) -> int:
        self._note(self.counted, text)
        return self._inner.count_tokens(text)

    def with_added_tokens(self, tokens: tuple[AddedToken, ...]) -> Tokenizer:
        self.num_built += 1
        self.go.wait()
        return self._inner.with_added_tokens(tokens)

    def _note(self, calls: list[int], text: str) -> None:
        self.go.wait()
        calls.append(len(text))
        self.threads.add(threading.get_ident())


async def encode(
    tokenizer: CountedTokenizer, texts: list[str], encoder: PromptEncoder | None = None, tenant: str = "acme"
) -> list[list[int]]:
    encoder = encoder or PromptEncoder(tokenizer, cpu_slots(8))  # type: ignore[arg-type]
    return await encoder.encode(tenant, texts, tokenizer.encode, max_model_len=100_000, param="prompt")


def test_short_prompts_are_tokenized_at_once_and_long_ones_on_a_thread() -> None:
    tokenizer = CountedTokenizer()
    assert asyncio.run(encode(tokenizer, ["ab", "c"])) == [[97, 98], [99]]
    assert tokenizer.threads == {threading.get_ident()}
    tokenizer.threads.clear()
    texts = ["x" * 90_000, "y" * 10_000, "z"]
    assert list(map(len, asyncio.run(encode(tokenizer, texts)))) == [90_000, 10_000, 1]
    assert tokenizer.threads and threading.get_ident() not in tokenizer.threads


def test_a_text_that_the_context_cannot_hold_is_not_tokenized_to_its_end() -> None:
    tokenizer = CountedTokenizer()
    with pytest.raises(ContextTooLong, match="first 131072 of its 4000000 characters") as caught:
        asyncio.run(encode(tokenizer, ["x" * 4_000_000]))
    assert caught.value.param == "prompt"
    assert (tokenizer.encoded, tokenizer.counted) == ([], [65_536, 65_536])


def test_a_request_that_is_cancelled_ends_after_the_slice_that_runs() -> None:
    tokenizer = CountedTokenizer()
    tokenizer.go.clear()

    async def leave() -> None:
        task = asyncio.create_task(encode(tokenizer, ["x" * 300_000]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokenizer.go.set()

    asyncio.run(leave())
    assert len(tokenizer.counted) <= 1 and not tokenizer.encoded


def test_one_tenant_cannot_take_all_slots_and_its_queue_is_bounded() -> None:
    tokenizer = CountedTokenizer()
    tokenizer.go.clear()
    text = "x" * 10_000

    async def crowd() -> None:
        encoder = PromptEncoder(tokenizer, cpu_slots(2))  # type: ignore[arg-type]
        greedy = [asyncio.create_task(encode(tokenizer, [text], encoder)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(TenantBusy):
            await encode(tokenizer, [text], encoder)
        other = asyncio.create_task(encode(tokenizer, [text], encoder, "other"))
        await asyncio.sleep(0)
        tokenizer.go.set()
        # The other tenant's prompt does not wait for this queue.
        assert len(await other) == 1
        for result in await asyncio.gather(*greedy, return_exceptions=True):
            assert isinstance(result, list | TenantBusy)

    asyncio.run(crowd())


def test_long_token_ids_are_decoded_as_short_ones() -> None:
    tokenizer: Tokenizer = byte_tokenizer()
    encoder = PromptEncoder(tokenizer, cpu_slots(8))
    assert asyncio.run(encoder.decode("acme", list(b"ab" * 5000))) == "ab" * 5000
    assert asyncio.run(encoder.decode("acme", list(b"ab"))) == "ab"


@pytest.mark.parametrize("is_refused", [False, True])
def test_requests_at_once_share_one_build_of_an_adapters_tokenizer(is_refused: bool) -> None:
    """The first of them is cancelled, which does not end the build. One that comes later waits for no slot."""
    tokenizer = CountedTokenizer()
    tokenizer.go.clear()
    tokens = (AddedToken(byte_tokenizer().vocab_size + is_refused, "<own>"),)

    async def crowd() -> list[PromptEncoder | BaseException]:
        encoder = PromptEncoder(tokenizer, cpu_slots(4))  # type: ignore[arg-type]
        tasks = []
        for tenant in ("acme", "acme", "acme", "acme", "other"):
            tasks.append(asyncio.create_task(encoder.with_added_tokens(tenant, tokens)))
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(encoder.with_added_tokens("acme", tokens)) for _ in range(10)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0)
        tokenizer.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(crowd())
    assert isinstance(first, asyncio.CancelledError)
    if is_refused:
        assert {type(error) for error in others} == {ValueError}
    else:
        (encoder,) = set(others)
        assert isinstance(encoder, PromptEncoder) and encoder.tokenizer.encode("<own>") == [
            tokens[0].token_id
        ]
        assert tokenizer.num_built == 1
