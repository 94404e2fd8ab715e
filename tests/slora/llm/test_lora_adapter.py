"""Adapters in the library: loaded from directories or from memory, and with a separate weight for each request."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.numpy import load_file

from slora import LLM, LoraAdapter, SamplingParams
from slora.core.errors import RequestRefused
from slora_adapters.errors import AdapterInvalid, StoreUnavailable
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.hub import adapter_files, hub_client, lay_out_snapshot
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import Oracle, Verdict
from tests.support.peft_adapters import EMBEDDING_KINDS, KINDS, make_adapter
from tests.support.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    kinds = {"odd_rank": KINDS["odd_rank"], "patterns": KINDS["patterns"]}
    kinds["both_and_linears"] = EMBEDDING_KINDS["both_and_linears"]
    return make_kit(tmp_path_factory.mktemp("lora_adapter"), "llama", kinds, num_hidden_layers=2)


@pytest.fixture
def llm(kit: ModelKit) -> Iterator[LLM]:
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300))
    yield llm
    llm.check()


def config_of(directory: Path) -> dict[str, Any]:
    return LoraConfig.from_pretrained(directory).to_dict()


def in_memory(directory: Path) -> LoraAdapter:
    return LoraAdapter.from_tensors(load_file(directory / "adapter_model.safetensors"), config_of(directory))


def test_tensors_in_memory_are_the_same_version_as_the_files_that_peft_writes(
    llm: LLM, kit: ModelKit
) -> None:
    for path in kit.adapters.values():
        from_files, from_tensors = llm.generate([PROMPT] * 2, GREEDY, [path, in_memory(path)])
        assert from_files == from_tensors
    assert llm.stats().resident_adapters == len(kit.adapters)


def test_a_peft_model_is_served_with_the_weights_at_the_time_of_the_call(
    llm: LLM, kit: ModelKit, tmp_path: Path
) -> None:
    model = make_adapter(tmp_path / "saved", kit.read_model(), seed=9, std=0.15, r=3)
    adapter = LoraAdapter.from_tensors(
        get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    )
    with torch.no_grad():  # later training must not change an adapter that was handed over before
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    expected, base = llm.generate([PROMPT] * 2, GREEDY, [tmp_path / "saved", None])
    assert llm.generate(PROMPT, GREEDY, adapter) == [expected] != [base]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_sixteen_bits_keep_their_values(llm: LLM, kit: ModelKit, dtype: torch.dtype) -> None:
    path = kit.adapters["odd_rank"]
    files = load_file(path / "adapter_model.safetensors")
    halves = {name: torch.from_numpy(array).to(dtype) for name, array in files.items()}
    whole = {name: tensor.float().numpy() for name, tensor in halves.items()}
    ours, expected = (LoraAdapter.from_tensors(tensors, config_of(path)) for tensors in (halves, whole))
    assert llm.generate(PROMPT, GREEDY, ours) == llm.generate(PROMPT, GREEDY, expected)


def test_tensors_that_a_file_would_be_refused_for_are_refused_with_all_reasons(
    llm: LLM, kit: ModelKit
) -> None:
    path = kit.adapters["odd_rank"]
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(iter(tensors))
    with pytest.raises(AdapterInvalid, match=f"'{name}' is int64; accepted are float32, float16, bfloat16"):
        LoraAdapter.from_tensors({**tensors, name: tensors[name].astype(np.int64)}, config_of(path))
    with pytest.raises(AdapterInvalid, match="cannot be written as JSON"):
        LoraAdapter.from_tensors(tensors, {**config_of(path), "r": object()})
    broken = LoraAdapter.from_tensors(
        {**tensors, name: np.full_like(tensors[name], np.nan)}, {**config_of(path), "use_qalora": True}
    )
    with pytest.raises(AdapterInvalid) as caught:
        llm.generate(PROMPT, GREEDY, broken)
    assert {reason.code for reason in caught.value.reasons} == {"use_qalora", "non_finite"}


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_each_request_may_weight_its_adapter_differently(
    kit: ModelKit, report: Callable[[str], None], kernels: str
) -> None:
    """One batch uses the same adapter with several weights, so tiles are split where the weight changes."""
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(600))
    work = [
        (kind, weight, [(position * 7 + number) % VOCAB_SIZE for position in range(3 + 9 * number)])
        for kind in kit.adapters
        for number, weight in enumerate((1.0, 0.5, -0.7, 0.0, 0.5))
    ]
    adapters = [LoraAdapter(kit.adapters[kind], weight=weight) for kind, weight, _ in work]
    answers = llm.generate([prompt for _, _, prompt in work], GREEDY, adapters)
    verdict = Verdict()
    oracle = Oracle(kit.directory, kit.adapters)
    for (kind, weight, prompt), answer in zip(work, answers, strict=True):
        scaled = f"{kind} at {weight}".replace(".", ",")  # peft takes names without dots.
        oracle.add_sum(scaled, {kind: weight})
        verdict += oracle.judge(prompt, answer.token_ids, scaled)
    report(f"parity at several weights with {kernels} kernels: {verdict}")
    assert verdict.equal, verdict
    assert llm.stats().resident_adapters == llm.stats().adapter_loads == len(kit.adapters)
    llm.check()


def test_a_weight_of_zero_is_the_base_and_other_weights_change_the_answer(llm: LLM, kit: ModelKit) -> None:
    adapter = in_memory(kit.adapters["patterns"])
    whole, half, nothing, base = llm.generate(
        [PROMPT] * 4, GREEDY, [adapter, adapter.weighted(0.5), adapter.weighted(0), None]
    )
    assert nothing == base
    assert len({tuple(answer.token_ids) for answer in (whole, half, base)}) == 3


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -20_000.0])
def test_a_weight_that_is_nan_or_too_large_is_refused(llm: LLM, kit: ModelKit, weight: float) -> None:
    with pytest.raises(RequestRefused, match="from -10000 to 10000") as caught:
        llm.generate(PROMPT, GREEDY, LoraAdapter(kit.adapters["odd_rank"], weight=weight))
    assert caught.value.param == "adapters"


def test_a_removed_adapter_is_freed_and_can_be_loaded_again(llm: LLM, kit: ModelKit) -> None:
    adapter = in_memory(kit.adapters["odd_rank"])
    expected = llm.generate(PROMPT, GREEDY, adapter)
    llm.remove_adapter(adapter)
    stats = llm.stats()
    assert stats.resident_adapters == stats.adapter_pages == 0
    assert llm.generate(PROMPT, GREEDY, adapter) == expected
    stream = llm.stream(PROMPT, GREEDY, adapter)
    pieces = [next(stream)]
    llm.remove_adapter(adapter)  # while a request uses it
    assert llm.generate(PROMPT, GREEDY, adapter) == expected
    tokens = [token for delta in [*pieces, *stream] for token in delta.token_ids]
    assert tokens == expected[0].token_ids
    assert llm.stats().resident_adapters == 1


@pytest.fixture
def offline_hub(tmp_path: Path) -> Iterator[None]:
    with hub_client(tmp_path):
        yield


def test_an_adapter_of_the_hub_keeps_the_commit_of_its_first_request(
    llm: LLM, kit: ModelKit, tmp_path: Path, offline_hub: None
) -> None:
    one, other = kit.adapters["odd_rank"], kit.adapters["patterns"]
    ours, theirs = llm.generate([PROMPT] * 2, GREEDY, [one, other])
    assert ours != theirs
    lay_out_snapshot(tmp_path, "org/repo", adapter_files(one))
    assert llm.generate(PROMPT, GREEDY, "hf://org/repo") == [ours]
    assert llm.generate(PROMPT, GREEDY, LoraAdapter("hf://org/repo", weight=0.0)) == llm.generate(
        PROMPT, GREEDY
    )
    lay_out_snapshot(tmp_path, "org/repo", adapter_files(other), commit="f" * 40)
    assert llm.generate(PROMPT, GREEDY, "hf://org/repo") == [ours]
    assert llm.generate(PROMPT, GREEDY, "hf://org/repo@" + "f" * 40) == [theirs]
    llm.remove_adapter("hf://org/repo")
    assert llm.generate(PROMPT, GREEDY, "hf://org/repo") == [theirs]
    with pytest.raises(StoreUnavailable, match="hf://org/nothing"):
        llm.generate(PROMPT, GREEDY, "hf://org/nothing")
    with pytest.raises(ValueError, match="hf://ORG/REPO"):
        LoraAdapter("hf://nothing")
