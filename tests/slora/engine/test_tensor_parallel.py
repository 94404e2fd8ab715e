"""A model that is divided among ranks answers as transformers + peft does, with as many collectives as without
adapters."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slora import LLM, SamplingParams
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError, DeviceFailed
from slora.core.request import EngineRequest, single_adapter
from slora.engine.engine import Engine
from slora.memory.device_memory import AdapterSlice, DeviceMemory
from slora.models.model_spec import read_model_spec
from slora.sampling.sampler import sample
from slora.sampling.sampling_table import SamplingTable
from slora.scheduler.sequence import Sequence
from slora_adapters.loader.source import DirectorySource
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.version import AdapterVersion
from tests.slora.engine.test_parity import answer
from tests.slora.engine.test_parity import judge as judge_work
from tests.slora.engine.test_parity import mix as mix_work
from tests.slora.models.weights.test_quantization import STORED, write_stored
from tests.slora.models.weights.test_stored_codes import FORMS as CODED_FORMS
from tests.slora.models.weights.test_stored_codes import WIDE as CODED_MODELS
from tests.support.coded_checkpoints import write_coded_checkpoint
from tests.support.covering import soaked
from tests.support.driving import COSTS, Answer, drive, read_once
from tests.support.engine_stack import SOURCES, EngineStack, connect, open_stack, wait_until
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.oracle import Verdict
from tests.support.peft_adapters import KINDS, LATENT_DORA_KINDS
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_models import (
    MODELS,
    OTHER_MODELS,
    RECURRENT_MODELS,
    VOCAB_SIZE,
    count_layers,
    make_config,
)


@contextmanager
def divided_engine(
    kit: ModelKit, size: int, num_pages: int = 400, **settings: int | str
) -> Iterator[tuple[Engine, ThreadGroup, dict[str, AdapterVersion]]]:
    defaults = {
        "device": "cpu",
        "kernels": "torch",
        "dtype": "float32",
        "tensor_parallel_size": size,
        "pool_bytes": kit.pool_bytes(num_pages),
    }
    config = EngineConfig(kit.directory, **{**defaults, **settings})  # type: ignore[arg-type]
    spec = kit.spec
    shape = spec.shape("float32")
    limits = AdapterLimits(served_dtype="float32", base_directory=kit.directory)
    source = DirectorySource(shape, "float32", limits, num_threads=0, num_ranks=size)
    versions = {kind: source.hold(read_once(path, shape, limits)) for kind, path in kit.adapters.items()}
    group = ThreadGroup(config, spec)
    try:
        yield Engine(config, spec, source, COSTS, group=group), group, versions
        assert not group.errors
    finally:
        group.close()


def make_requests(
    versions: dict[str, AdapterVersion], prompts: list[list[int]], kinds: list[str | None], **sampling: object
) -> list[EngineRequest]:
    params = SamplingParams(
        **{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **sampling}
    )  # type: ignore[arg-type]
    return [
        EngineRequest(str(number), "t", prompt, single_adapter(versions[kind]) if kind else (), params)
        for number, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def mix(kit: ModelKit, num_each: int = 1) -> tuple[list[list[int]], list[str | None]]:
    rng = random.Random(3)
    kinds = [None, *kit.adapters] * num_each
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 17, 40)))] for _ in kinds]
    return prompts, kinds


def judge(
    kit: ModelKit, prompts: list[list[int]], kinds: list[str | None], answers: dict[str, Answer]
) -> Verdict:
    rows = ((prompts[int(key)], answer, kinds[int(key)]) for key, answer in answers.items())
    return sum((kit.oracle.judge(p, a.token_ids, kind, a.logprobs) for p, a, kind in rows), Verdict())


def judge_divided(kit: ModelKit, size: int) -> Verdict:
    """Compares answers of the base and of each adapter, on `size` ranks, with peft's."""
    prompts, kinds = mix(kit)
    with divided_engine(kit, size) as (engine, _, versions):
        answers = drive(engine, [make_requests(versions, prompts, kinds)])
    return judge(kit, prompts, kinds, answers)


# In the quick run, one model for each way to divide: KV heads that several ranks share, biases, a tied head, fused
# linears, shared experts, other experts, and norms with soft-caps. Four ranks have fewer KV heads than ranks.
QUICK_SIZES = (("llama", 4), ("llama_biased_linear_rope", 2), ("phi3_window", 4), ("qwen2_moe", 2))


@pytest.mark.parametrize(
    ("model", "size"), soaked([(model, size) for model in MODELS for size in (2, 4)], *QUICK_SIZES)
)
def test_a_divided_model_answers_every_kind_of_adapter_as_peft_does(
    kits: Kits, report: Callable[[str], None], model: str, size: int
) -> None:
    verdict = judge_divided(kits(model), size)
    report(f"{model} on {size} ranks: {verdict}")
    assert verdict.equal, verdict


# In the quick run: plain attention, latents with a mixture, and a recurrence without attention.
QUICK_CLASSES = ("starcoder2", "deepseek_v2", "mamba2")
# They have 6 heads, or a quarter of their experts has rows of another size than torch's own products need.
NOT_ON_FOUR = ("bloom", "mpt", "gpt_oss", "phimoe")
CLASSES = [
    pytest.param(model, marks=[] if model in QUICK_CLASSES else pytest.mark.soak)
    for model in (*OTHER_MODELS, *RECURRENT_MODELS)
]


def make_other_kit(root: Path, model: str, kinds: Mapping[str, dict[str, object]] | None = None) -> ModelKit:
    changes = {"num_hidden_layers": count_layers(model)} if model in OTHER_MODELS else {}
    return make_kit(root, model, kinds, **changes)


@pytest.mark.parametrize("model", CLASSES)
def test_a_class_of_transformers_that_is_divided_answers_as_peft_does(
    tmp_path: Path, report: Callable[[str], None], model: str, *, soak: bool
) -> None:
    kit = make_other_kit(tmp_path, model)
    for size in (2, 4) if soak and model in OTHER_MODELS and model not in NOT_ON_FOUR else (2,):
        verdict = judge_divided(kit, size)
        report(f"{model} by transformers' classes on {size} ranks: {verdict}")
        assert verdict.equal, verdict


def test_a_divided_class_of_transformers_adds_scales_biases_and_rows_once(tmp_path: Path) -> None:
    """The ranks hold some columns of `c_proj`, and some tokens of the embedding and of the head."""
    kinds: dict[str, dict[str, object]] = {
        "scales_and_biases": {
            "r": 4,
            "use_dora": True,
            "bias": "lora_only",
            "target_modules": ["q_proj", "c_fc", "c_proj", "embed_tokens", "lm_head"],
        },
        "rows": {"r": 3, "target_modules": ["c_proj"], "trainable_token_indices": [90, 3, 17]},
    }
    verdict = judge_divided(make_other_kit(tmp_path, "starcoder2", kinds), 2)
    assert verdict.equal, verdict


@pytest.mark.soak
def test_scales_and_biases_of_latents_are_those_of_the_heads_of_a_rank(tmp_path: Path) -> None:
    verdict = judge_divided(make_other_kit(tmp_path, "minicpm3", LATENT_DORA_KINDS), 2)
    assert verdict.equal, verdict


@pytest.mark.soak
@pytest.mark.parametrize("model", ["starcoder2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_processes_divide_a_class_of_transformers(tmp_path: Path, model: str) -> None:
    """With gloo, and with the fastest kernels."""
    kit = make_other_kit(tmp_path, model)
    work = mix_work(kit, prompts_each=2, seed=6)
    settings = {"pool_bytes": kit.pool_bytes(400), "device": "cpu", "dtype": "float32"}
    llm = LLM(kit.directory, tensor_parallel_size=2, **settings)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    verdict = judge_work(kit.oracle, work, answer(llm, kit, work, params))
    assert verdict.equal, verdict


@pytest.mark.parametrize("model", soaked(["llama", "qwen2_moe", "starcoder2"], "qwen2_moe", "starcoder2"))
def test_adapters_and_experts_add_no_collectives(kits: Kits, model: str) -> None:
    kit = kits(model)
    num_layers = kit.spec.sizes.num_layers
    counts = []
    for kinds in ([None], list(kit.adapters)):
        with divided_engine(kit, 2) as (engine, group, versions):
            group.collectives.calls.clear()
            drive(engine, [make_requests(versions, [[1, 2, 3]] * len(kinds), list(kinds), max_tokens=1)])
            counts.append(dict(group.collectives.calls))
    # A class of transformers sums after the embedding and each MLP, also for its logits. It gathers the outputs of four
    # linears, the heads and the logits.
    one = {"sum": 1 + 2 * num_layers, "gather": 1}
    if model == "starcoder2":
        one = {"sum": 2 + num_layers, "gather": 1 + 5 * num_layers}
    num_steps = counts[0]["gather"] // one["gather"]
    assert counts[0] == {kind: num_steps * calls for kind, calls in one.items()}
    assert counts[1]["gather"] % one["gather"] == 0
    assert counts[1]["sum"] * one["gather"] == counts[1]["gather"] * one["sum"]


def test_a_host_copy_is_released_after_all_ranks_have_read_it(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    read: set[tuple[DeviceMemory, AdapterVersion]] = set()
    released: dict[AdapterVersion, int] = {}
    load_slice = DeviceMemory.load_slice

    def load_late(self: DeviceMemory, part: AdapterSlice) -> None:
        time.sleep(0.01)
        load_slice(self, part)
        read.add((self, part.version))

    def release(_: DirectorySource, version: AdapterVersion) -> None:
        released[version] = sum(found == version for _, found in read)

    monkeypatch.setattr(DeviceMemory, "load_slice", load_late)
    monkeypatch.setattr(DirectorySource, "release", release)
    prompts, kinds = mix(kit)
    with divided_engine(kit, 2) as (engine, _, versions):
        drive(engine, [make_requests(versions, prompts, kinds, max_tokens=1)])
    assert released == dict.fromkeys(versions.values(), 2), "the number of ranks that have read it"


@pytest.mark.parametrize("preemption", ["swap", pytest.param("recompute", marks=pytest.mark.soak)])
def test_all_ranks_swap_and_load_the_same_pages(kits: Kits, preemption: str, *, soak: bool) -> None:
    kit = kits("llama")
    prompts, kinds = mix(kit, num_each=3 if soak else 1)
    settings: dict[str, int | str] = {
        "preemption": preemption, "max_model_len": 128, "max_num_seqs": 9, "max_num_batched_tokens": 11
    }  # fmt: skip
    with divided_engine(kit, 2, 36, **settings) as (engine, _, versions):
        answers = drive(engine, [make_requests(versions, prompts, kinds, max_tokens=40)])
        stats = engine.stats()
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert (stats.swapped_in_pages > 0) == (preemption == "swap")
    verdict = judge(kit, prompts, kinds, answers)
    assert verdict.equal, verdict


def test_forks_prompt_scores_and_a_vocabulary_that_does_not_divide_equal_those_of_one_rank(
    tmp_path: Path,
) -> None:
    kit = make_kit(tmp_path, "llama_tied_llama3_rope", vocab_size=127, num_hidden_layers=2)
    prompts, kinds = mix(kit)
    prompts = [[token % 127 for token in prompt] for prompt in prompts]
    answers = []
    for size in (1, 4):
        with divided_engine(kit, size) as (engine, _, versions):
            sampling = {"n": 2, "seed": 5, "temperature": 0.8, "prompt_logprobs": 1}
            answers.append(drive(engine, [make_requests(versions, prompts, kinds, **sampling)]))
    assert answers[0].keys() == answers[1].keys() and len(answers[0]) == 2 * len(prompts)
    for key, one in answers[0].items():
        other = answers[1][key]
        assert one.token_ids == other.token_ids
        for score, same in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert (score is None) == (same is None)
            if score is not None and same is not None:
                assert abs(score.logprob - same.logprob) < 1e-4


def check_against_one_rank(kit: ModelKit, size: int, max_tokens: int, **settings: str) -> None:
    """Asserts that all adapters' answers on `size` ranks have the tokens and log-probabilities of one rank."""
    prompts, kinds = mix(kit)
    answers = []
    for num_ranks in (1, size):
        with divided_engine(kit, num_ranks, **settings) as (engine, _, versions):
            requests = make_requests(versions, prompts, kinds, max_tokens=max_tokens)
            answers.append(drive(engine, [requests]))
    for key, one in answers[0].items():
        assert one.token_ids == answers[1][key].token_ids
        assert one.logprobs == pytest.approx(answers[1][key].logprobs, abs=1e-4)


@pytest.mark.parametrize("quantization", soaked(["int8", "fp8"], "int8"))
def test_quantized_weights_are_rounded_as_on_one_rank(kits: Kits, quantization: str, *, soak: bool) -> None:
    check_against_one_rank(kits("qwen2"), 2, 12 if soak else 4, quantization=quantization)


def test_quantized_experts_are_rounded_as_on_one_rank(kits: Kits, *, soak: bool) -> None:
    check_against_one_rank(kits("qwen2_moe"), 2, 12 if soak else 4, quantization="int8")


# In the quick run, scales of rows, packed, and of blocks.
@pytest.mark.parametrize("name", soaked(STORED, "compressed_int8_packed", "deepseek_fp8"))
def test_a_checkpoint_of_8_bit_weights_is_divided_with_its_scales(
    kits: Kits, tmp_path: Path, name: str, *, soak: bool
) -> None:
    kit = kits("llama")
    stored, _ = write_stored(kit, tmp_path, name)
    check_against_one_rank(replace(kit, directory=stored), 4, 12 if soak else 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", CODED_MODELS)
@pytest.mark.parametrize(
    "form",
    soaked(
        (name for name, form in CODED_FORMS.items() if form.group != 128),
        "zero_points",
        "rows",
        "gptq",
        "nf4",
    ),
)
def test_a_checkpoint_of_4_bit_weights_is_divided_with_its_groups(
    tmp_path: Path, model: str, form: str, *, soak: bool
) -> None:
    kinds = {"r8_on_q_and_v": KINDS["r8_on_q_and_v"]}
    kit = make_kit(tmp_path, model, kinds, num_hidden_layers=2, **CODED_MODELS[model])
    stored, _ = write_coded_checkpoint(kit.directory, tmp_path, CODED_FORMS[form])
    check_against_one_rank(replace(kit, directory=stored), 2, 12 if soak else 4)


def test_ranks_that_would_cut_a_group_of_4_bit_weights_are_refused(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, "llama", {}, num_hidden_layers=1, **CODED_MODELS["llama"])
    stored, _ = write_coded_checkpoint(kit.directory, tmp_path, CODED_FORMS["groups_of_128"])
    said = r"o_proj\.weight has 128 columns, of which this process computes \d+ to \d+.*groups of 128"
    with pytest.raises(ConfigError, match=said), divided_engine(replace(kit, directory=stored), 2):
        pass


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 22}, r"experts have 22 columns \(moe_intermediate_size\)"),
        ("mixtral", {"intermediate_size": 42}, r"experts have 42 columns \(intermediate_size\)"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 30},
            r"shared experts have 30 columns \(shared_expert_intermediate_size\)",
        ),
        ("starcoder2", {"intermediate_size": 42}, r"mlp\.c_fc has 42 outputs"),
        ("bloom", {}, "6 attention heads"),
        # A rank had half of the queries of its only head.
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, "1 attention heads"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    tmp_path: Path, model: str, changes: dict[str, int], message: str
) -> None:
    make_config(model, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 4: .*{message}, .* among 4 ranks"):
        read_model_spec(tmp_path).partition("float32", 4)


@pytest.fixture(scope="module")
def stack(kits: Kits) -> Iterator[EngineStack]:
    # A rank is started as always. Loading the CPU kernels would take it seconds.
    with open_stack(kits("llama"), 400, tensor_parallel_size=2, kernels="torch") as stack:
        yield stack


def find_rank(stack: EngineStack) -> int:
    """The process id of rank 1."""
    assert stack.engine is not None
    parent = stack.engine.pid
    children = Path(f"/proc/{parent}/task").glob("*/children")
    (pid,) = {int(text) for path in children for text in path.read_text(encoding="utf-8").split()}
    return pid


def test_a_group_of_processes_serves_adapters_from_the_loader_and_ends_when_a_rank_ends(
    kits: Kits, stack: EngineStack, report: Callable[[str], None]
) -> None:
    kit = kits("llama")
    prompts, kinds = mix(kit)

    async def serve() -> dict[str, Answer]:
        answers = {}
        async with connect(stack) as client:
            for request in make_requests(stack.versions, prompts, kinds):
                answer = answers[request.request_id] = Answer()
                async with aclosing(client.generate(request)) as deltas:
                    async for arrived in deltas:
                        for delta in arrived:
                            answer.token_ids.extend(delta.token_ids)
                            answer.logprobs.extend(entry.logprob for entry in delta.logprobs or ())
        return answers

    stack.ensure_running()
    verdict = judge(kit, prompts, kinds, asyncio.run(serve()))
    assert verdict.equal, verdict
    assert stack.engine is not None
    rank = find_rank(stack)
    killed_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    assert stack.engine.wait() == os.EX_SOFTWARE
    report(f"the engine ended {time.monotonic() - killed_s:.3f} s after its rank")
    assert "rank 1 of the tensor-parallel group ended with exit code -9" in stack.engine.log


@pytest.mark.soak
def test_a_rank_ends_with_its_leader_and_a_restarted_group_serves(kits: Kits, stack: EngineStack) -> None:
    async def serve() -> None:
        async with connect(stack) as client:
            (request,) = make_requests({}, [[1, 2, 3]], [None])
            async with aclosing(client.generate(request)) as deltas:
                assert [delta async for delta in deltas]

    for _ in range(2):
        stack.ensure_running()
        asyncio.run(serve())
        rank = find_rank(stack)
        assert stack.engine is not None
        stack.engine.kill()
        asyncio.run(wait_until(lambda pid=rank: not Path(f"/proc/{pid}").exists()))  # type: ignore[misc]


@pytest.mark.soak
def test_the_library_divides_a_model_and_leaves_no_process(kits: Kits) -> None:
    kit = kits("llama")
    program = (
        "import sys; from slora import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', device='cpu', pool_bytes=1 << 22, kernels='torch',"
        " tensor_parallel_size=2)\n"
        "params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)\n"
        "print(llm.generate([[1, 2, 3]], params, sys.argv[2])[0].token_ids)\n"
    )
    command = [sys.executable, "-P", "-c", program, str(kit.directory), str(kit.adapters["rslora"])]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, encoding="utf-8"
    )
    llm = LLM(kit.directory, dtype="float32", device="cpu", pool_bytes=kit.pool_bytes(100), kernels="torch")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (expected,) = llm.generate([[1, 2, 3]], params, kit.adapters["rslora"])
    assert found.stdout == f"{expected.token_ids}\n"


def test_a_request_that_breaks_between_collectives_fails_alone(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")

    def refuse_request_1(logits: Tensor, table: SamplingTable, sequences: list[Sequence], *rest: Any) -> Any:
        if any(sequence.request.request_id == "1" for sequence in sequences):
            raise RuntimeError("broken")
        return sample(logits, table, sequences, *rest)

    prompts = [[1, 2, 3]] * 4
    with divided_engine(kit, 2) as (engine, _, versions):
        monkeypatch.setattr("slora.runner.runner.sample", refuse_request_1)
        answers = drive(engine, [make_requests(versions, prompts, [None] * 4)])
    assert {key for key, answer in answers.items() if answer.error is not None} == {"1"}
    assert len(answers["0"].token_ids) == 8


def test_a_rank_that_fails_within_a_computation_ends_the_engine(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("broken")

    with (
        pytest.raises(DeviceFailed, match="all ranks must start again"),
        divided_engine(kits("llama"), 2) as (engine, group, versions),
    ):
        monkeypatch.setattr(engine.runner.decoder, "forward", fail)
        try:
            drive(engine, [make_requests(versions, [[1, 2, 3]], [None])])
        finally:
            group.abort()
