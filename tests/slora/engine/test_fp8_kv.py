"""The engine with an fp8 KV cache: its answers are close to those of a full-precision cache, whatever happens to its
pages."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from slora import LLM, SamplingParams
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.core.request import EngineRequest
from slora.engine.engine import Engine
from slora.models.float8_support import check_float8_kv
from slora_adapters.loader.source import AdapterSource
from slora_kernels.kv_format import KVFormat
from tests.slora.engine.test_forks import ask, assert_same, compare_choices
from tests.support.cpu_kernels import ENGINE_KERNELS, KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import Kits, ModelKit, make_kit, spoil_token
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.trained_model import ask_trained_model

FP8: dict[str, str] = {"kv_cache_dtype": "fp8"}
SCORED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
# Steps of other sizes may round a sum differently, and its last bit may be one step of e4m3.
TOLERANCE = 0.02


def make_fp8_engine(kit: ModelKit, source: AdapterSource, num_pages: int, **settings: int | str) -> Engine:
    pool_bytes = kit.pool_bytes(num_pages, kv_format=KVFormat.FP8)
    return make_engine(kit, source, 0, **{"pool_bytes": pool_bytes, **FP8, **settings})


def score(kit: ModelKit, prompts: list[list[int]], **settings: int | str) -> torch.Tensor:
    """Log-probabilities of the prompts' tokens, without the first ones."""
    llm = LLM(kit.directory, pool_bytes=kit.pool_bytes(400), **settings)
    adapters = [None, *kit.adapters.values()]
    outputs = llm.generate(prompts, SCORED, [adapters[n % len(adapters)] for n in range(len(prompts))])
    llm.check()
    return torch.tensor([x.logprob for one in outputs for x in one.prompt_logprobs or () if x is not None])


def draw_prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


@pytest.mark.soak  # compilation takes half a minute
def test_an_fp8_pool_has_more_pages_of_the_same_tokens(kits: Kits) -> None:
    kit = kits("qwen3")
    pool_bytes = kit.pool_bytes(90, dtype="bfloat16")
    settings = {"dtype": "bfloat16", "pool_bytes": pool_bytes, "kernels": KERNELS}
    plain, fp8 = (
        make_engine(kit, make_source(kit, "bfloat16")[0], 0, **settings, **kind) for kind in ({}, FP8)
    )
    # Two KV heads of size 24 take 3072 bytes per layer. In fp8 they take 1536 bytes and 128 bytes of scales, padded to
    # 1792.
    assert (plain.info.num_pages, fp8.info.num_pages) == (90, 90 * 3072 // 1792)
    assert fp8.info.full_page_bytes == 3 * 1792 and fp8.info.kv_cache_dtype == "fp8"
    assert fp8.info.shape == plain.info.shape, "adapters are packed alike"


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ENGINE_KERNELS)
@pytest.mark.parametrize("model", ["llama", "gemma2", "mistral_window"])
def test_log_probabilities_are_close_to_those_without_fp8(
    kits: Kits, report: Callable[[str], None], model: str, kernels: str
) -> None:
    """The models have random weights, whose attention is as sharp as their logits are wide. A trained model loses
    less."""
    kit, prompts = kits(model), draw_prompts(8, 100)
    exact = score(kit, prompts, kernels=kernels)
    rounded = score(kit, prompts, kernels=kernels, **FP8)
    error = (rounded - exact).abs()
    report(
        f"{model} with KV in fp8 and {kernels} kernels: log-probabilities of spread {exact.std():.2f} are off by "
        f"{error.mean():.4f}, at most {error.max():.3f}"
    )
    # Measured: a mean error of 0.05 to 0.063 times the standard deviation, and at most 0.52 times.
    assert 0 < error.mean() < 0.08 * exact.std()
    assert error.max() < 0.75 * exact.std()


def test_a_trained_model_answers_as_well(report: Callable[[str], None], *, soak: bool) -> None:
    count = 200 if soak else 8
    plain, rounded = (ask_trained_model(count, kv_cache_dtype=form.value) for form in KVFormat)
    report(f"KV in fp8: {rounded}; without: {plain}")
    assert rounded.right >= 0.95 * rounded.asked
    assert rounded.nats <= plain.nats + 0.005


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize(
    ("model", "num_pages", "settings"),
    [
        pytest.param("llama", 200, {"max_num_seqs": 9, "max_num_batched_tokens": 11}, marks=pytest.mark.soak),
        ("llama", 70, {"preemption": "swap"}),
        pytest.param("llama", 70, {"preemption": "recompute"}, marks=pytest.mark.soak),
        ("mistral_window", 70, {"max_num_seqs": 9, "max_num_batched_tokens": 11}),
    ],
    ids=["in chunks", "swapped", "recomputed", "behind windows"],
)
def test_forks_chunks_and_preemption_do_not_change_the_tokens(
    kits: Kits, kernels: str, model: str, num_pages: int, settings: dict[str, int | str]
) -> None:
    """Choices share pages and copy them when they diverge, and sequences are preempted."""
    kit = kits(model)
    source, versions = make_source(kit)
    adapters = [None, *list(versions.values())[:2]] * 3
    requests = [ask(str(number), adapter, n=number % 3 + 1) for number, adapter in enumerate(adapters)]
    plain = make_fp8_engine(kit, source, 2000, kernels=kernels)
    engine = make_fp8_engine(kit, source, num_pages, kernels=kernels, **settings)
    stats = compare_choices(requests, plain, engine, TOLERANCE)
    assert (stats.preemptions > 0) == (num_pages < 100)
    assert (stats.swapped_in_pages > 0) == (num_pages < 100 and settings.get("preemption") != "recompute")


def test_a_cached_prefix_gives_the_same_answer_as_a_computed_one(kits: Kits) -> None:
    kit = kits("llama")
    engine = make_fp8_engine(kit, make_source(kit)[0], 400)
    first = replace(ask("first", None, n=1), prompt_token_ids=list(range(1, 60)))
    answers = drive(engine, [[first]]) | drive(engine, [[replace(first, request_id="again")]])
    assert answers["again"].num_cached == 48
    assert_same({"first": answers["again"]}, {"first": answers["first"]}, TOLERANCE)


def test_a_model_of_transformers_classes_is_served_in_fp8_too(tmp_path: Path) -> None:
    """The parity check at start runs in the model's own dtype, because fp8 rounding would hide errors. Requests are
    served in fp8."""
    kit = make_kit(tmp_path, "llama", {}, num_hidden_layers=2)
    prompts = draw_prompts(3, 50)
    ours = score(kit, prompts, kernels=KERNELS, **FP8)
    theirs = score(kit, prompts, kernels=KERNELS, model_impl="transformers", **FP8)
    assert torch.equal(ours, score(kit, prompts, kernels=KERNELS, **FP8))
    assert float((ours - theirs).abs().mean()) < 1e-3
    exact = score(kit, prompts, kernels=KERNELS, model_impl="transformers")
    assert float((exact - theirs).abs().mean()) > 1e-3


def test_a_row_with_non_finite_values_fails_alone(kits: Kits, tmp_path: Path) -> None:
    """NaN keys and values are written only into the pages of the request that produced them."""
    wrong, fine = 5, 6
    kit = spoil_token(kits("llama"), tmp_path / "spoilt", wrong, torch.inf)
    engine = make_fp8_engine(kit, make_source(kit)[0], 100)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompts = {"wrong": [fine, wrong, fine], "fine": [fine, 7, fine]}
    answers = drive(engine, [[EngineRequest(name, "t", ids, (), params) for name, ids in prompts.items()]])
    assert "not finite" in str(answers["wrong"].error)
    assert answers["fine"].error is None and len(answers["fine"].token_ids) == 4


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8'; it must be auto or fp8"):
        EngineConfig(tmp_path, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("capability", "hip", "said"),
    [
        ((8, 0), None, "fp8, but NVIDIA Test has compute capability 8.0, and e4m3 needs 8.9 or later"),
        ((9, 4), "6.4", "fp8, but NVIDIA Test is an AMD GPU"),
        ((8, 9), None, None),
        ((12, 0), None, None),
    ],
)
def test_a_gpu_without_fp8_support_is_refused_with_the_remedy(
    capability: tuple[int, int], hip: str | None, said: str | None
) -> None:
    answers = {
        "get_device_name": lambda device: "NVIDIA Test",
        "get_device_capability": lambda device: capability,
    }
    refusal = pytest.raises(ConfigError, match=f"kv_cache_dtype is {said}.*--kv-cache-dtype auto")
    with (
        patch.multiple(torch.cuda, **answers),
        patch.object(torch.version, "hip", hip),
        refusal if said else nullcontext(),
    ):
        check_float8_kv(torch.device("cuda"))
