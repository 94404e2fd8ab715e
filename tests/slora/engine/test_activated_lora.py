"""Activated LoRA: an adapter has an effect from its invocation tokens on, and the blocks before them are shared."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from slora import LLM, LoraAdapter
from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, single_adapter
from slora.scheduler.sequence import find_last
from slora_adapters.peft.adapter import AdapterLimits, summarise
from slora_adapters.peft.peft_directory import read_adapter
from tests.slora.engine.test_parity import GREEDY, Work, answer, judge, judge_engine, judge_with_triton
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, start_engine
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.peft_adapters import ACTIVATED_KINDS, KINDS
from tests.support.tiny_models import few_layers

INVOCATIONS: dict[str, list[int]] = {
    kind: lora["alora_invocation_tokens"]  # type: ignore[misc]
    for kind, lora in ACTIVATED_KINDS.items()
}


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Kits:
    kinds = ACTIVATED_KINDS | {"plain": KINDS["patterns"]}
    return cache(
        lambda model: make_kit(tmp_path_factory.mktemp(model), model, kinds, **few_layers(model, soak=soak))
    )


def mix(kit: ModelKit, prompts_each: int, seed: int = 0) -> Work:
    """Prompts that invoke their adapter at the begin, at the end, on both sides of a block's edge, twice, or never.

    Each time, a kind has a third of the places, and each place is one of some kind."""
    rng, prompts, kinds = random.Random(seed), [], []
    places = ((0, 3), (1, 0), (15, 2), (16, 20), (17, 1), (40, 9))
    for number, kind in enumerate([None, *kit.adapters] * prompts_each):
        invocation = INVOCATIONS.get(kind or "", [])
        # No other token is part of an invocation.
        text = [rng.randrange(10, 70) for _ in range(50)]
        for before, after in places[number % 3 :: 3]:
            prompts.append([*text[:before], *invocation, *text[before : before + after]] or text[:1])
        prompts.append([*text[:5], *invocation, *text[5:30], *invocation, *text[30:35]])
        prompts.append(text)
        kinds += [kind] * 4
    return Work(prompts, kinds)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("num_pages", "settings"),
    [(900, {}), (22, {"max_num_seqs": 9, "max_num_batched_tokens": 11, "max_model_len": 128})],
    ids=["in one batch", "in chunks, preempted and evicted"],
)
def test_prompts_that_invoke_their_adapters_anywhere_answer_as_peft_does(
    kits: Kits,
    report: Callable[[str], None],
    model: str,
    kernels: str,
    num_pages: int,
    settings: dict[str, int],
    *,
    soak: bool,
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=6 if soak else 1)
    params = replace(GREEDY, max_tokens=24)
    verdict, stats = judge_engine(kit, work, params, num_pages, kernels=kernels, **settings)
    report(f"parity of {model} with activated adapters, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict
    assert num_pages > 100 or stats.preemptions > 0


@pytest.mark.interpreted_slowly
def test_triton_kernels_answer_as_peft_does(tmp_path: Path) -> None:
    kinds = ("activated", "activated_elsewhere")
    kit = make_kit(tmp_path, "llama", {kind: ACTIVATED_KINDS[kind] for kind in kinds}, num_hidden_layers=1)
    work = Work([[12, 5, 6, 13], [3, 4, 3, 14], [15, 16, 17]], [*kinds, "activated"])
    verdict = judge_with_triton(kit, work)
    assert verdict.equal, verdict


def test_blocks_before_the_invocation_are_computed_once_for_the_base_and_all_adapters(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 900, kernels=KERNELS)
    context = [random.Random(7).randrange(10, 70) for _ in range(100)]
    prompts = {
        "base": [*context, 11],
        **{kind: [*context, *tokens, 11] for kind, tokens in INVOCATIONS.items()},
    }
    prompts["plain"] = [*context, 11]
    cached = {}
    for kind, prompt in prompts.items():
        adapter = single_adapter(versions[kind] if kind != "base" else None)
        before = engine.stats().prefix_hits
        # The tenant of all requests is that of the adapters.
        request = EngineRequest(kind, "tenant", prompt, adapter, replace(GREEDY, max_tokens=8))
        answers = drive(engine, [[request]])
        cached[kind] = engine.stats().prefix_hits - before
        name = None if kind == "base" else kind
        assert kit.oracle.judge(prompt, answers[kind].token_ids, name, answers[kind].logprobs).equal
    # Six blocks of 16 tokens lie before the invocation.
    assert cached == {"base": 0, **dict.fromkeys(INVOCATIONS, 96), "plain": 0}
    # The same prompt finds all of its blocks again, with those that depend on the adapter.
    long = [*context, *INVOCATIONS["activated"], *context[:60]]
    for expected in (96, 160):
        before = engine.stats().prefix_hits
        request = EngineRequest("again", "tenant", long, single_adapter(versions["activated"]), GREEDY)
        answers = drive(engine, [[request]])
        assert engine.stats().prefix_hits - before == expected
        assert kit.oracle.judge(long, answers["again"].token_ids, "activated").equal


def test_a_later_invocation_changes_the_key_of_the_same_tokens(kits: Kits) -> None:
    """The tokens of the first three blocks are equal, but in the second prompt they have no adapter."""
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    first = [11, 12, *INVOCATIONS["activated"], *range(20, 70)]
    second = [*first, *INVOCATIONS["activated"], 13]
    params = replace(GREEDY, max_tokens=8)
    for prompts in ([first], [second], [first], [second]):
        work = Work(prompts, ["activated"])
        assert judge(kit.oracle, work, answer(llm, kit, work, params)).equal


def test_the_same_prompt_has_other_blocks_for_the_base_and_each_activated_adapter(
    kits: Kits, *, soak: bool
) -> None:
    """Born from a review: after a whole block before the invocation, all of them had the keys of the base."""
    kit = kits("llama")
    prompt = [*range(10, 50), 5, 6, 9, *range(12, 60), 5, 6]
    kinds: list[str | None] = [None, "activated", "activated_with_bias"]
    # In one of these orders, each kind comes before each other kind.
    rotations = (kinds[first:] + kinds[:first] for first in range(3))
    for order in itertools.permutations(kinds) if soak else rotations:
        llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
        for kind in (*order, *order):
            work = Work([prompt], [kind])
            verdict = judge(kit.oracle, work, answer(llm, kit, work, replace(GREEDY, max_tokens=8)))
            assert verdict.equal, (order, kind, verdict)


def test_an_activated_adapter_is_refused_in_a_sum(kits: Kits) -> None:
    kit = kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    asked = [LoraAdapter(kit.adapters["activated"]), LoraAdapter(kit.adapters["plain"])]
    with pytest.raises(RequestRefused, match="invocation tokens, so it is served alone"):
        llm.generate([[1, 2, 3]], GREEDY, [asked])


@pytest.mark.parametrize(
    ("token_ids", "pattern", "expected"),
    [
        ([1, 2, 3, 1, 2], (1, 2), 3),
        ([1, 2, 3], (1, 2, 3), 0),
        ([1, 2, 3], (2, 1), None),
        ([], (1,), None),
        ([1], (1, 1), None),
        ([5, 5, 5], (5, 5), 1),
        ([256, 0, 0x01000000, 0], (1,), None),
        ([1, 1 << 24, 1 << 16], (1 << 16,), 2),
    ],
)
def test_the_last_occurrence_is_found(
    token_ids: list[int], pattern: tuple[int, ...], expected: int | None
) -> None:
    assert find_last(token_ids, pattern) == expected


def test_the_canary_of_an_upload_invokes_the_adapter(kits: Kits, tmp_path: Path) -> None:
    kit = kits("llama")
    shape = kit.spec.shape("float32")
    for kind, invocation in INVOCATIONS.items():
        (tmp_path / kind).mkdir()
        adapter = read_adapter(kit.adapters[kind], shape, AdapterLimits())
        checked = summarise(adapter, kit.adapters[kind], tmp_path / kind, shape)
        assert list(checked.canary_tokens) == invocation
        uses = f"{len(invocation)} invocation tokens, from which on the adapter is active"
        assert uses in checked.extras.uses
