import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.numpy import load_file

from slora import LLM, AsyncLLM, Completion, LoraAdapter, SamplingParams
from slora.core.engine_state import EngineStats, Pin
from slora.core.errors import ConfigError, EngineUnavailable, RequestRefused
from slora.llm.local_engine import LocalEngine
from slora_adapters.errors import AdapterNotFound
from tests.support.cpu_kernels import KERNELS
from tests.support.driving import make_engine, make_source
from tests.support.engine_stack import WAIT_S
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import KINDS
from tests.support.tiny_tokenizers import byte_level, write_tokenizer

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    kinds = {kind: KINDS[kind] for kind in ("odd_rank", "rslora")}
    kit = make_kit(tmp_path_factory.mktemp("async_llm"), "llama", kinds, vocab_size=400)
    write_tokenizer(kit.directory, byte_level(vocab_size=400))
    return kit


@pytest.fixture(scope="module")
def llm(kit: ModelKit) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300))
    yield llm
    asyncio.run(llm.close())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(WAIT_S):
            return await work

    return asyncio.run(bounded())


async def wait_for(engine: AsyncLLM | LocalEngine, condition: Callable[[EngineStats], bool]) -> EngineStats:
    while not condition(stats := await engine.stats()):
        await asyncio.sleep(0.005)
    return stats


def test_concurrent_requests_get_the_same_answers_as_single_ones(llm: AsyncLLM, kit: ModelKit) -> None:
    adapters = [None, *kit.adapters.values()]
    work = [("The quick brown"[: 3 + n], adapters[n % 3]) for n in range(12)]
    params = [SamplingParams(max_tokens=9 + n % 4, seed=n) for n in range(12)]

    async def together() -> list[Completion]:
        return await asyncio.gather(
            *(llm.generate(*row[:1], own, row[1]) for row, own in zip(work, params, strict=True))
        )

    before = run(llm.stats())
    answers = run(together())
    after = run(llm.stats())
    alone = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300))
    assert answers == [
        alone.generate(prompt, own, adapter)[0] for (prompt, adapter), own in zip(work, params, strict=True)
    ]
    assert after.generated_tokens - before.generated_tokens == sum(len(one.token_ids) for one in answers)
    assert after.steps - before.steps < 60, "12 requests of up to 12 tokens did not share their steps"


def test_a_stream_is_the_answer_in_pieces(llm: AsyncLLM, kit: ModelKit) -> None:
    async def pieces() -> None:
        messages = [{"role": "user", "content": "fox?"}]
        for whole, stream in (
            (await llm.generate("fox", GREEDY), llm.stream("fox", GREEDY)),
            (await llm.chat(messages, GREEDY), llm.stream_chat(messages, GREEDY)),
        ):
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == whole.text
            assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
            assert deltas[-1].finish_reason is whole.finish_reason

    run(pieces())


def test_concurrent_embeddings_equal_those_of_transformers_and_a_cancelled_one_frees_its_pages(
    llm: AsyncLLM, kit: ModelKit
) -> None:
    prompts = [[1, 2, 3], [4], list(range(40))]

    async def embed() -> None:
        found = await asyncio.gather(*(llm.embed(one, adapter=kit.adapters["odd_rank"]) for one in prompts))
        for prompt, vector in zip(prompts, found, strict=True):
            expected = kit.oracle.embedding(prompt, "odd_rank", mean=False)
            assert vector.tolist() == pytest.approx(expected.tolist(), abs=2e-5)
        with pytest.raises(RequestRefused, match="prompt is empty"):
            await llm.embed([])
        task = asyncio.create_task(llm.embed(list(range(300)) + list(range(100))))
        await asyncio.sleep(0)
        task.cancel()
        await wait_for(llm, lambda stats: stats.running == stats.waiting == 0)

    run(embed())


def test_a_stop_string_ends_the_request_in_the_engine(llm: AsyncLLM) -> None:
    async def stop_early() -> None:
        free = await llm.generate("fox", LONG)
        stop = free.text[5:8]
        cut = await llm.generate("fox", SamplingParams(max_tokens=400, temperature=0.0, stop=(stop,)))
        assert cut.text == free.text[: free.text.find(stop)]
        stats = await wait_for(llm, lambda stats: stats.running == 0)
        assert stats.pages_held == 0

    run(stop_early())


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_cancelled_task_frees_its_pages(llm: AsyncLLM, kit: ModelKit, when: str) -> None:
    async def cancel() -> None:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.stream([1, 2, 3], LONG, kit.adapters["odd_rank"]):
                begun.set()

        task = asyncio.create_task(consume())
        if when == "later":
            await begun.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        generated = (await wait_for(llm, lambda stats: stats.running + stats.waiting == 0)).generated_tokens
        stats = await llm.stats()
        assert stats.pages_held == 0 and stats.generated_tokens == generated

    run(cancel())


def test_a_closed_iterator_ends_its_request(llm: AsyncLLM) -> None:
    async def close() -> None:
        async with aclosing(llm.stream("fox", LONG)) as deltas:
            await anext(deltas)
        await wait_for(llm, lambda stats: stats.running + stats.pages_held == 0)

    run(close())


def test_a_refused_request_does_not_affect_the_others(llm: AsyncLLM, kit: ModelKit, tmp_path: Path) -> None:
    async def mixed() -> list[Any]:
        return await asyncio.gather(
            llm.generate("fox", GREEDY),
            llm.generate([400], GREEDY),
            llm.generate("fox", GREEDY, tmp_path / "nowhere"),
            return_exceptions=True,
        )

    good, refused, missing = run(mixed())
    assert len(good.token_ids) == 12
    assert isinstance(refused, RequestRefused) and "token id 400" in str(refused)
    assert isinstance(missing, AdapterNotFound)


def test_a_cancelled_call_does_not_end_the_engine(llm: AsyncLLM) -> None:
    """Born from a bug: the reply to a cancelled call ended the engine's thread."""

    async def cancel() -> None:
        for _ in range(20):
            question = asyncio.create_task(llm.stats())
            await asyncio.sleep(0)
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)
        assert len((await llm.generate("fox", GREEDY)).token_ids) == 12

    run(cancel())


def test_an_adapter_requested_concurrently_is_loaded_once(kit: ModelKit) -> None:
    path = kit.adapters["odd_rank"]
    adapter = LoraAdapter.from_tensors(
        load_file(path / "adapter_model.safetensors"), LoraConfig.from_pretrained(path).to_dict()
    )

    async def ask() -> None:
        async with AsyncLLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300)) as llm:
            answers = await asyncio.gather(*(llm.generate("fox", GREEDY, adapter) for _ in range(16)))
            assert (await llm.stats()).adapter_loads == 1
            await llm.remove_adapter(adapter)
            assert await llm.generate("fox", GREEDY, adapter) == answers[0] == answers[15]

    run(ask())


def test_an_engine_of_this_process_takes_pins_like_a_remote_one(kit: ModelKit) -> None:
    source, versions = make_source(kit)

    async def pinned(engine: LocalEngine) -> None:
        await engine.set_pins([Pin(versions["rslora"])])
        await wait_for(engine, lambda stats: stats.pinned_loaded == stats.pinned_adapters == 1)
        await engine.set_pins([])
        await wait_for(engine, lambda stats: stats.pinned_adapters == 0)

    with closing(LocalEngine()) as engine:
        engine.start(lambda: make_engine(kit, source, 300))
        run(pinned(engine))


def test_closing_fails_unfinished_and_later_requests(kit: ModelKit) -> None:
    async def close() -> None:
        async with AsyncLLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300)) as llm:
            stream = llm.stream("fox", LONG)
            await anext(stream)
        with pytest.raises(EngineUnavailable, match="closed"):
            async for _ in stream:
                pass
        for call in (llm.generate("fox", GREEDY), llm.stats()):
            with pytest.raises(EngineUnavailable, match="closed"):
                await call
        await llm.close()

    run(close())


def test_a_model_that_cannot_be_served_is_refused_when_it_is_opened(kit: ModelKit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        AsyncLLM(tmp_path)
    with pytest.raises(ConfigError, match="pool_bytes is 1,"):
        AsyncLLM(kit.directory, kernels=KERNELS, pool_bytes=1)


def test_random_cancellations_corrupt_no_page_and_no_answer(kit: ModelKit, *, soak: bool) -> None:
    """Tasks are cancelled at random moments, in a pool too small for all of them. The other tasks get their answers."""
    adapters = [None, *kit.adapters.values()]
    work = [([n % 400, 7, n * n % 400], adapters[n % 3]) for n in range(400 if soak else 60)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    rng = random.Random(0)

    async def come_and_go(llm: AsyncLLM) -> list[Any]:
        tasks = []
        for prompt, adapter in work:
            tasks.append(asyncio.create_task(llm.generate(prompt, params, adapter)))
            await asyncio.sleep(rng.choice((0, 0.002)))
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        stats = await wait_for(llm, lambda stats: stats.running + stats.waiting == 0)
        assert stats.pages_held == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        return answers

    async def main() -> list[Any]:
        async with AsyncLLM(
            kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(24), max_model_len=64
        ) as llm:
            return await come_and_go(llm)

    answers = run(main())
    stayed = [index for index, answer in enumerate(answers) if isinstance(answer, Completion)]
    assert 0 < len(stayed) < len(work)
    assert all(isinstance(answer, Completion | asyncio.CancelledError) for answer in answers)
    alone = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300))
    expected = alone.generate([work[i][0] for i in stayed], params, [work[i][1] for i in stayed])
    assert [answers[index] for index in stayed] == expected
