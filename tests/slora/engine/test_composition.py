"""Requests that combine several adapters answer as peft does with `add_weighted_adapter`, and do not depend on their
batch."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slora import LLM, LoraAdapter, SamplingParams
from slora.core.request import EngineRequest, WeightedAdapter, compose_adapters, single_adapter
from slora.engine.engine import Engine
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST, TRITON_DEVICE
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits, ModelKit, kinds_for, make_kit
from tests.support.oracle import Verdict
from tests.support.peft_adapters import EMBEDDING_KINDS, KINDS
from tests.support.tiny_models import VOCAB_SIZE, few_layers

Weights = dict[str, float]

# Ranks, targets, layers and scales differ between the adapters of each sum. The first one is no rsLoRA, because peft
# gives the sum the flags of the first.
SUMS: dict[str, Weights] = {
    "overlapping": {"r8_on_q_and_v": 1.0, "r16_on_all_seven": 0.6},
    "a difference": {"odd_rank": 0.9, "patterns": -0.7},
    "disjoint": {"r8_on_q_and_v": -1.3, "r3_on_others": 0.8},
    "three": {"odd_rank": 0.7, "rslora": 0.5, "some_layers": -0.4},
}
# peft's "cat" needs an adapter for each linear that the names of the targets match in any layer.
MORE_KINDS = {
    "r3_on_others": {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj", "gate_proj", "down_proj"]}
}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> ModelKit:
    changes = few_layers("qwen2", soak=soak)
    kit = make_kit(tmp_path_factory.mktemp("sums"), "qwen2", KINDS | MORE_KINDS, **changes)
    for name, weights in SUMS.items():
        kit.oracle.add_sum(name, weights)
    return kit


def mix_work(prompts_each: int) -> tuple[list[list[int]], list[str | None]]:
    """Prompts for sums, single adapters and the base, shuffled, and what each of them uses."""
    rng = random.Random(3)
    kinds = [None, "odd_rank", "r16_on_all_seven", *SUMS] * prompts_each
    rng.shuffle(kinds)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 7, 16, 33)))] for _ in kinds], kinds


def name_adapters(kit: ModelKit, kind: str | None) -> list[LoraAdapter]:
    weights = SUMS.get(kind, {kind: 1.0}) if kind is not None else {}
    return [LoraAdapter(kit.adapters[name], weight=weight) for name, weight in weights.items()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    ("num_pages", "settings"),
    [(400, {}), (32, {"max_model_len": 64, "max_num_seqs": 9, "max_num_batched_tokens": 11})],
    ids=["in one batch", "in chunks, preempted and evicted"],
)
def test_sums_of_adapters_answer_as_peft_does_beside_single_adapters_and_the_base(
    kit: ModelKit, report: Callable[[str], None], kernels: str, num_pages: int, settings: dict[str, int]
) -> None:
    prompts, kinds = mix_work(prompts_each=2)
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(num_pages), **settings)
    outputs = llm.generate(prompts, GREEDY, [name_adapters(kit, kind) for kind in kinds])
    llm.check()
    verdict = Verdict()
    for prompt, kind, output in zip(prompts, kinds, outputs, strict=True):
        logprobs = [entry.logprob for entry in output.logprobs or ()]
        verdict += kit.oracle.judge(prompt, output.token_ids, kind, logprobs)
    stats = llm.stats()
    report(f"sums of adapters with {kernels} kernels, {stats.preemptions} preemptions: {verdict}")
    assert verdict.equal and verdict.positions == len(kinds) * GREEDY.max_tokens, verdict
    assert num_pages == 400 or (stats.preemptions > 0 and stats.adapter_evictions > 0)


def test_adapters_of_embedding_and_head_are_added_up_as_in_peft(tmp_path: Path) -> None:
    kinds = {
        "embedding": EMBEDDING_KINDS["embedding"],
        "head": EMBEDDING_KINDS["head"],
        "both": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    }
    kit = make_kit(tmp_path, "llama", kinds, num_hidden_layers=2)
    sums = {"embeddings": {"embedding": 1.0, "both": -0.5}, "heads": {"both": 0.8, "head": 0.7}}
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400))
    params = replace(GREEDY, prompt_logprobs=0)
    prompts = [[5, 6, 7, 8] * 5, [9, 1]]
    for name, weights in sums.items():
        kit.oracle.add_sum(name, weights)
        adapters = [LoraAdapter(kit.adapters[kind], weight=weight) for kind, weight in weights.items()]
        for prompt, output in zip(prompts, llm.generate(prompts, params, [adapters, adapters]), strict=True):
            logprobs = [entry.logprob for entry in output.logprobs or ()]
            verdict = kit.oracle.judge(prompt, output.token_ids, name, logprobs)
            assert verdict.equal, (name, verdict)
            scored = kit.oracle.answer_logits(prompt[:1], prompt[1:], name).log_softmax(dim=-1)
            expected = [row[token].item() for row, token in zip(scored, prompt[1:], strict=True)]
            given = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
            assert given == pytest.approx(expected, abs=1e-4)


# In the quick run, tests of kernels and of graphs have steps with sums.
@pytest.mark.interpreted_slowly
def test_triton_kernels_add_adapters_up_as_peft_does(tmp_path: Path) -> None:
    kinds = {kind: kinds_for("llama")[kind] for kind in ("r8_on_q_and_v", "odd_rank")}
    kit = make_kit(tmp_path, "llama", kinds, num_hidden_layers=1)
    kit.oracle.add_sum("sum", {"r8_on_q_and_v": 0.8, "odd_rank": -0.6})
    engine, versions = start_engine(kit, 100, kernels="triton", device=TRITON_DEVICE, max_model_len=128)
    composed = compose(versions, {"r8_on_q_and_v": 0.8, "odd_rank": -0.6})
    params = replace(GREEDY, max_tokens=1)
    asked = {"sum": composed, "odd_rank": single_adapter(versions["odd_rank"]), None: ()}
    prompts = {"sum": [5, 4], "odd_rank": [5], None: [9]}
    requests = [EngineRequest(str(kind), "t", prompts[kind], asked[kind], params) for kind in asked]
    answers = drive(engine, [requests])
    for kind, prompt in prompts.items():
        given = answers[str(kind)]
        assert kit.oracle.judge(prompt, given.token_ids, kind, given.logprobs).equal


def compose(versions: dict[str, AdapterVersion], weights: Weights) -> tuple[WeightedAdapter, ...]:
    return compose_adapters(WeightedAdapter(versions[kind], weight) for kind, weight in weights.items())


def test_a_sum_has_the_same_bits_in_any_order_and_in_any_company(kits: Kits) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    weights = SUMS["three"]
    backwards = dict(reversed(weights.items()))
    prompt = list(range(3, 40))

    def ask(name: str, adapters: tuple[WeightedAdapter, ...]) -> EngineRequest:
        return EngineRequest(name, "t", prompt, adapters, GREEDY)

    alone = drive(make_engine(kit, source, 400), [[ask("sum", compose(versions, weights))]])["sum"]
    assert compose(versions, backwards) == compose(versions, weights)
    company = [
        ask("one", single_adapter(versions["odd_rank"])),
        ask("base", ()),
        *(ask(name, compose(versions, SUMS[name])) for name in ("overlapping", "a difference")),
    ]
    among = drive(
        make_engine(kit, source, 400), [company[:1], [ask("sum", compose(versions, backwards))], company[1:]]
    )
    assert (among["sum"].token_ids, among["sum"].logprobs) == (alone.token_ids, alone.logprobs)
    assert among["one"].token_ids != among["sum"].token_ids != among["base"].token_ids


def find_cached(engine: Engine, name: str, adapters: tuple[WeightedAdapter, ...]) -> Answer:
    return drive(engine, [[EngineRequest(name, "t", list(range(3, 60)), adapters, GREEDY)]])[name]


def test_the_prefix_cache_tells_sums_apart_and_knows_an_equal_sum(kits: Kits) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 800)
    one, other = versions["odd_rank"], versions["rslora"]
    first = find_cached(
        engine, "first", compose_adapters([WeightedAdapter(one), WeightedAdapter(other, 0.5)])
    )
    assert first.num_cached == 0
    others = [
        single_adapter(one),
        single_adapter(other, 0.5),
        compose_adapters([WeightedAdapter(one, 0.5), WeightedAdapter(other)]),
        compose_adapters([WeightedAdapter(one), WeightedAdapter(other, -0.5)]),
        (),
    ]
    for number, adapters in enumerate(others):
        assert find_cached(engine, str(number), adapters).num_cached == 0
    halves = [WeightedAdapter(other, 0.25), WeightedAdapter(one), WeightedAdapter(other, 0.25)]
    again = find_cached(engine, "again", compose_adapters(halves))
    assert again.num_cached == 48 and again.token_ids == first.token_ids
