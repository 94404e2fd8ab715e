"""The engine on a GPU: compiled Triton kernels, and decode steps recorded as graphs and replayed.

Adapters of many ranks share batches, and the small pool evicts adapters all the time. A graph that was recorded with
one set of adapters is therefore replayed with other adapters in the same slots.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slora import LLM
from slora.runner.runner import Runner
from tests.slora.engine.test_adapter_features import FEATURES
from tests.slora.engine.test_adapter_features import MODELS as MODELS_WITH_FEATURES
from tests.slora.engine.test_parity import (
    GREEDY,
    Answer,
    Work,
    answer,
    judge,
    judge_engine,
    measure_errors,
    mix,
)
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.tiny_models import MODELS, OTHER_MODELS, RECURRENT_MODELS, few_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ON_GPU = {"device": "cuda", "kernels": "triton"}


@pytest.fixture
def compiled_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out kernels that the test does not use. Compiling them takes longer than most of these tests."""
    monkeypatch.setattr(Runner, "compile_lora", lambda runner, num_tokens: None)


def serve(kit: ModelKit, work: Work, num_pages: int, dtype: str, **settings: int) -> tuple[LLM, list[Answer]]:
    """Serves the work on the GPU with Triton's kernels. Sequences have at most 128 tokens."""
    pool_bytes = kit.pool_bytes(num_pages, dtype=dtype)
    sizes = {"pool_bytes": pool_bytes, "max_model_len": 128}
    llm = LLM(kit.directory, dtype=dtype, device="cuda", kernels="triton", **sizes, **settings)
    return llm, answer(llm, kit, work, replace(GREEDY, max_tokens=64 if dtype == "float32" else 32))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_adapters_loaded_and_evicted_between_steps_answer_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, *, cuda_graphs: bool, soak: bool
) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=20 if soak else 3, seed=3)
    # The pages of this model are small, and its largest adapter takes 56 of them.
    num_pages = 100 if model == "qwen2_tied" else 40
    llm, answers = serve(kit, work, num_pages, "float32", cuda_graphs=cuda_graphs)
    verdict = judge(kit.oracle, work, answers)
    stats = llm.stats()
    report(f"{model} on a GPU, {'recorded' if cuda_graphs else 'launched'} steps: {verdict}")
    assert stats.adapter_evictions > 0 and stats.adapter_loads > len(kit.adapters)
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_parity_holds_in_chunks_and_under_preemption(kits: Kits, model: str) -> None:
    kit = kits(model)
    work = mix(kit, prompts_each=3, seed=5)
    llm, answers = serve(kit, work, 36, "float32", max_num_seqs=9, max_num_batched_tokens=11)
    verdict = judge(kit.oracle, work, answers)
    assert llm.stats().preemptions > 0
    assert verdict.equal, verdict


@pytest.mark.usefixtures("compiled_on_demand")
@pytest.mark.parametrize(
    ("feature", "model"),
    [(feature, model) for feature, models in MODELS_WITH_FEATURES.items() for model in models],
)
def test_adapters_with_parts_of_their_own_answer_as_peft_does(
    tmp_path: Path, expert_kits: Kits, report: Callable[[str], None], feature: str, model: str
) -> None:
    """Norms, biases, rows of the embedding or the head, experts, or DoRA. All kinds of a feature share each step."""
    if feature == "experts":
        kit = expert_kits(model)
    else:
        kit = make_kit(tmp_path, model, FEATURES[feature](model), **few_layers(model, soak=False))
    work = mix(kit, prompts_each=2, seed=4)
    verdict, _ = judge_engine(kit, work, replace(GREEDY, max_tokens=24), 900, **ON_GPU)
    report(f"{model} on a GPU with its {feature}: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.usefixtures("compiled_on_demand")
@pytest.mark.parametrize("model", [*OTHER_MODELS, *RECURRENT_MODELS])
def test_transformers_classes_answer_as_peft_does(
    tmp_path: Path, report: Callable[[str], None], model: str
) -> None:
    """Prompts come in chunks. See test_recurrent_states.py for the tolerance."""
    kit = make_kit(tmp_path, model, **few_layers(model, soak=False))
    work = mix(kit, prompts_each=2, seed=6)
    settings = {"max_model_len": 96, "max_num_seqs": 9, "max_num_batched_tokens": 23}
    verdict, _ = judge_engine(kit, work, replace(GREEDY, max_tokens=20), 400, **(ON_GPU | settings))
    report(f"{model} on a GPU by transformers' classes: {verdict}")
    assert verdict.is_within(2e-4), verdict


@pytest.mark.parametrize(
    ("model", "dtype"), [("qwen2", "bfloat16"), ("qwen2", "float16"), ("gemma2", "bfloat16")]
)
def test_sixteen_bit_answers_are_as_accurate_as_those_of_transformers(
    kits: Kits, report: Callable[[str], None], model: str, dtype: str
) -> None:
    """See the test of the same name in test_parity.py. Here the GPU's matrix units multiply the 16-bit numbers."""
    kit = kits(model)
    work = mix(kit, prompts_each=2, seed=4)
    _, given = serve(kit, work, 400, dtype)
    our_error, their_error = measure_errors(kit, work, given, dtype)
    report(
        f"{model} in {dtype} on a GPU, error of log-probabilities: mean {our_error.mean():.5f}, "
        f"largest {our_error.max():.4f}; of transformers + peft {their_error.mean():.5f}, {their_error.max():.4f}"
    )
    assert our_error.mean() < 1.3 * their_error.mean()
    assert our_error.max() < 3 * their_error.max()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs")
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_moe"])
def test_a_model_divided_between_two_gpus_answers_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str
) -> None:
    """The ranks are processes, which exchange their sums by NCCL."""
    kit = kits(model)
    work = mix(kit, prompts_each=3, seed=6)
    _, answers = serve(kit, work, 400, "float32", tensor_parallel_size=2)
    verdict = judge(kit.oracle, work, answers)
    report(f"{model} on two GPUs: {verdict}")
    assert verdict.equal, verdict
