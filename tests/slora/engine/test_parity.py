"""Greedy answers equal those of transformers + peft, token for token, for all adapter kinds in one batch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from slora import LLM, SamplingParams
from slora.core.engine_state import EngineStats
from slora.core.request import EngineRequest, single_adapter
from slora.models.families import read_model_config
from tests.support import oracle
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS, MOSTLY_FASTEST, TRITON_DEVICE
from tests.support.driving import drive, start_engine
from tests.support.model_kit import Kits, ModelKit, kinds_for, make_kit
from tests.support.oracle import Oracle, Verdict
from tests.support.tiny_models import MODELS, SEEING, VOCAB_SIZE

# Lengths on both sides of a page's 16 tokens, and up to more than two pages.
LENGTHS = (1, 2, 7, 15, 16, 17, 40)
# Models with windows, soft-caps, norms or ropes that the other models do not have.
FEATURED = [name for name in MODELS if not name.startswith("llama") and name not in ("qwen2", "qwen2_tied")]
# In the quick run, `test_parity_holds_in_chunks_under_preemption_and_behind_windows` has the featured models, with all
# adapter kinds. One of them has the biases of qwen2, and llama_tied_llama3_rope has a tied head.
MOSTLY_PLAIN = [
    name if name.startswith("llama") else pytest.param(name, marks=pytest.mark.soak) for name in MODELS
]
# Others have all that these have: qwen3_biased_layer_types, qwen2_late_windows and qwen3_moe_mixed.
_LIKE_OTHERS = ("qwen3", "qwen2", "qwen3_moe")
ALL_AT_ONCE = [
    pytest.param(name, marks=pytest.mark.soak) if name in _LIKE_OTHERS else name
    for name in ("llama", "qwen2", *FEATURED)
]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts and the adapter kind of each prompt, in the order of the requests."""

    prompts: list[list[int]]
    kinds: list[str | None]


def mix(kit: ModelKit, prompts_each: int, seed: int = 0) -> Work:
    """`prompts_each` random prompts for the base and for each adapter, shuffled."""
    rng = random.Random(seed)
    kinds = [None, *kit.adapters] * prompts_each
    rng.shuffle(kinds)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice(LENGTHS))] for _ in kinds]
    return Work(prompts, kinds)


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]


def answer(llm: LLM, kit: ModelKit, work: Work, params: SamplingParams = GREEDY) -> list[Answer]:
    outputs = llm.generate(work.prompts, params, [kit.path(kind) for kind in work.kinds])
    assert all(len(output.token_ids) == params.max_tokens for output in outputs)
    llm.check()
    return [Answer(o.token_ids, [entry.logprob for entry in o.logprobs or ()]) for o in outputs]


def judge(oracle: Oracle, work: Work, answers: list[Answer]) -> Verdict:
    rows = zip(work.prompts, answers, work.kinds, strict=True)
    return sum((oracle.judge(p, a.token_ids, kind, a.logprobs) for p, a, kind in rows), Verdict())


def answer_by_engine(
    kit: ModelKit, work: Work, params: SamplingParams, num_pages: int, **settings: int | str
) -> tuple[list[Answer], EngineStats]:
    """Unlike the engine of `LLM`, this one does not measure the costs of its steps, which takes seconds in Triton's
    interpreter, and does not read the model again.
    """
    engine, versions = start_engine(kit, num_pages, **settings)
    requests = [
        EngineRequest(str(number), "t", prompt, single_adapter(versions[kind] if kind else None), params)
        for number, (prompt, kind) in enumerate(zip(work.prompts, work.kinds, strict=True))
    ]
    answers = drive(engine, [requests])
    given = [Answer(one.token_ids, one.logprobs) for one in (answers[r.request_id] for r in requests)]
    assert all(len(one.token_ids) == params.max_tokens for one in given)
    return given, engine.stats()


def judge_engine(
    kit: ModelKit, work: Work, params: SamplingParams, num_pages: int, **settings: int | str
) -> tuple[Verdict, EngineStats]:
    """Compares the answers of an engine with peft's."""
    answers, stats = answer_by_engine(kit, work, params, num_pages, **settings)
    return judge(kit.oracle, work, answers), stats


def judge_with_triton(kit: ModelKit, work: Work, max_tokens: int = 2) -> Verdict:
    """Compares answers that Triton's kernels compute, on a GPU or in the interpreter, with peft's."""
    params = replace(GREEDY, max_tokens=max_tokens)
    settings = {"kernels": "triton", "device": TRITON_DEVICE, "max_model_len": 128}
    return judge_engine(kit, work, params, 100, **settings)[0]


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", MOSTLY_PLAIN)
def test_every_kind_of_adapter_in_one_batch_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=40 if soak else 1)
    params = replace(GREEDY, max_tokens=64 if soak else 20)
    verdict, _ = judge_engine(kit, work, params, 4000, kernels=kernels)
    report(f"parity of {model} with {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


def test_the_oracle_tells_each_adapter_from_the_base_and_from_each_other(kits: Kits) -> None:
    kit = kits("llama")
    work = mix(kit, prompts_each=1)
    answers = answer(LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(400)), kit, work)
    for offset in range(1, len(work.kinds)):
        mistaken = Work(work.prompts, [*work.kinds[offset:], *work.kinds[:offset]])
        for prompt, given, kind in zip(mistaken.prompts, answers, mistaken.kinds, strict=True):
            assert kit.oracle.judge(prompt, given.token_ids, kind).wrong > 10


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", ["mistral_window", pytest.param("phi3_window", marks=pytest.mark.soak)])
def test_windowed_sequences_longer_than_the_pool_answer_as_transformers_does(
    kits: Kits, model: str, kernels: str
) -> None:
    kit = kits(model)
    rng = random.Random(8)
    work = Work([[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (40, 9, 70)], [None] * 3)
    settings = {"max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 12}
    verdict, _ = judge_engine(kit, work, GREEDY, 6, kernels=kernels, **settings)
    assert 70 + GREEDY.max_tokens > 6 * 16
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_longrope_uses_short_factors_up_to_its_switch_and_long_ones_beyond(
    kits: Kits, report: Callable[[str], None], kernels: str
) -> None:
    kit = kits("phi3_longrope")
    switch = read_model_config(kit.directory).rope_switch
    assert switch == 48
    rng = random.Random(7)
    # Answers have 20 tokens. With these prompt lengths, an answer ends before the switch, at it or one token after it,
    # crosses the switch, or begins at it or after it.
    lengths = (3, switch - 20, switch - 19, switch - 18, switch - 10, switch - 1, switch, switch + 1, 75)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths] * 2
    work = Work(prompts, [None] * len(lengths) + ["rslora"] * len(lengths))
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    verdict, _ = judge_engine(kit, work, replace(GREEDY, max_tokens=20), 400, kernels=kernels, **settings)
    report(f"longrope on both sides of its switch with {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


def test_the_text_part_of_a_vision_model_answers_as_the_whole_model_does(tmp_path: Path) -> None:
    text_linears = r".*language_model.*_proj"
    kinds = {
        "some": {"r": 3, "target_modules": r".*language_model.*(k|up)_proj"},
        "all": {"r": 5, "target_modules": text_linears},
    }
    kit = make_kit(tmp_path, f"gemma3_text{SEEING}", kinds)
    work = mix(kit, prompts_each=2, seed=6)
    verdict, _ = judge_engine(kit, work, GREEDY, 400)
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", ALL_AT_ONCE)
def test_parity_holds_in_chunks_under_preemption_and_behind_windows(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str, *, soak: bool
) -> None:
    """Runs all prompts at once. Every sequence outgrows its attention windows."""
    kit = kits(model)
    work = mix(kit, prompts_each=8 if soak else 1, seed=5)
    settings = {"max_model_len": 128, "max_num_seqs": 9, "max_num_batched_tokens": 11}
    # With answers of 40 tokens, one of the models needs no preemption.
    params = replace(GREEDY, max_tokens=64 if soak else 48)
    num_pages = 36 if soak else 33
    verdict, stats = judge_engine(kit, work, params, num_pages, kernels=kernels, **settings)
    report(f"{model} with {kernels} kernels, {stats.preemptions} preemptions: {verdict}")
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.soak)])
def test_parity_holds_when_adapters_are_evicted_and_come_back(kits: Kits, model: str, kernels: str) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=2, seed=3)
    verdict, stats = judge_engine(kit, work, GREEDY, 28, kernels=kernels, max_model_len=128)
    assert stats.adapter_evictions > 0
    assert stats.adapter_loads > len(kit.adapters), "no adapter was loaded twice"
    assert verdict.equal, verdict


# In the quick run, test_adapter_features.py has the adapters of these and others.
@pytest.mark.interpreted_slowly
@pytest.mark.parametrize("model", ["llama", "phi3_longrope", "gemma2"])
def test_triton_kernels_answer_as_peft_does(tmp_path: Path, model: str, *, soak: bool) -> None:
    kinds = {kind: kinds_for(model)[kind] for kind in ("r8_on_q_and_v", "patterns")}
    kit = make_kit(tmp_path, model, kinds, num_hidden_layers=2 if soak else 1)
    work = Work([list(range(17)), [5], [9, 8, 7]], [None, *kinds])
    verdict = judge_with_triton(kit, work, 64 if soak else 2)
    assert verdict.equal, verdict


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen2", "bfloat16"),
        # Compilation takes half a minute.
        pytest.param("qwen2", "float16", marks=pytest.mark.soak),
        ("gemma2", "bfloat16"),
        # Rounding may choose other experts, in both programs.
        pytest.param("qwen2_moe", "bfloat16", marks=pytest.mark.soak),
        # It has the scaled embeddings and the wide norms of gemma2.
        pytest.param("gemma3_text", "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_sixteen_bit_answers_are_as_accurate_as_those_of_transformers(
    kits: Kits, report: Callable[[str], None], model: str, dtype: str, kernels: str
) -> None:
    """The truth is the float32 log-probabilities of the model whose weights were rounded to 16 bits. Both programs
    round intermediate results."""
    kit = kits(model)
    work = mix(kit, prompts_each=2, seed=4)
    params = replace(GREEDY, max_tokens=32)
    llm = LLM(kit.directory, dtype=dtype, kernels=kernels, pool_bytes=kit.pool_bytes(400, dtype=dtype))
    given = answer(llm, kit, work, params)
    our_error, their_error = measure_errors(kit, work, given, dtype)
    report(
        f"{model} in {dtype} with {kernels} kernels, error of log-probabilities: mean {our_error.mean():.5f}, "
        f"largest {our_error.max():.4f}; of transformers + peft {their_error.mean():.5f}, {their_error.max():.4f}"
    )
    assert our_error.mean() < 1.3 * their_error.mean()
    assert our_error.max() < 3 * their_error.max()


def measure_errors(
    kit: ModelKit, work: Work, given: list[Answer], dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors of the log-probabilities of the answers' tokens, [requests, tokens]: ours, and those of transformers +
    peft."""
    ours, answers = torch.tensor([a.logprobs for a in given]), [a.token_ids for a in given]
    rounded = Oracle(kit.directory, kit.adapters, getattr(torch, dtype))
    theirs = chosen_logprobs(rounded, work, answers)
    truth = chosen_logprobs(rounded.in_float32(), work, answers)
    return (ours - truth).abs(), (theirs - truth).abs()


def chosen_logprobs(oracle: Oracle, work: Work, answers: list[list[int]]) -> torch.Tensor:
    """float32 [requests, tokens]: the oracle's log-probability of each token of the answers."""
    rows = []
    for prompt, tokens, kind in zip(work.prompts, answers, work.kinds, strict=True):
        logprobs = oracle.answer_logits(prompt, tokens, kind).log_softmax(dim=-1)
        rows.append(logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.stack(rows)


def test_log_probabilities_behind_a_near_tie_of_experts_are_not_compared(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("mixtral")
    prompt, tokens = [5, 3, 8, 1], [7, 2, 4]
    exact = kit.oracle.token_logprobs(prompt, tokens, "rslora")
    wrong = [exact[0], exact[1] + 0.1, exact[2]]
    gap = kit.oracle.least_router_gap(prompt, tokens, "rslora")
    assert 1e-4 < gap < 10
    assert kit.oracle.judge(prompt, tokens, "rslora", exact).logprob_error == pytest.approx(0, abs=1e-6)
    assert kit.oracle.judge(prompt, tokens, "rslora", wrong).logprob_error == pytest.approx(0.1, abs=1e-5)
    monkeypatch.setattr(oracle, "ROUTER_MARGIN", 1.01 * gap)
    assert kit.oracle.judge(prompt, tokens, "rslora", wrong).logprob_error is None
    assert kits("llama").oracle.least_router_gap(prompt, tokens, None) == float("inf")
