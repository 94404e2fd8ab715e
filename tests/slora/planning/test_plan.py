"""A plan has the engine's own sizes, and times that are near those measured on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slora.core.cost_model import StepWork
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.engine.engine import Engine
from slora.models.model_spec import read_model_spec
from slora.planning.devices import DEVICES, Device, cut_device, find_device
from slora.planning.model_size import measure_model
from slora.planning.plan import Plan, PlannedAdapters, PlannedLoad, Question, compare_slices, make_plan
from slora.planning.remedies import find_remedies
from slora.planning.roofline import Roofline
from slora.runner.process_group import NO_GROUP, RankGroup
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import read_adapter
from tests.slora.models.hub_configs import HUB
from tests.support.coded_checkpoints import CodedForm
from tests.support.covering import soaked
from tests.support.driving import COSTS, make_source
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import Kits, ModelKit
from tests.support.thread_group import ThreadGroup

_GIB = 1 << 30
_RESULTS = Path(__file__).parents[3] / "bench/results/gpu-2026-11-22.json"
# Driver and libraries leave a few MiB for the pool of a tiny model.
_SMALL = Device("small", 5 * _GIB // 4 + (12 << 20), 1e10, 1e12, 1e9)


def make_question(directory: Path, device: Device = _SMALL, **changes: Any) -> Question:
    config = EngineConfig(directory, max_num_seqs=8, max_num_batched_tokens=64)
    return Question(
        read_model_spec(directory),
        replace(config, **changes),
        device,
        PlannedAdapters(4, (8,), ("q_proj", "v_proj")),
        PlannedLoad(2.0, 20, 10),
    )


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-8b")
    fields = HUB["Llama-3.2-1B"] | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    write_json(directory / "config.json", fields)
    return directory


def ask_8b(directory: Path, device: str, rate: float = 1.0, **changes: Any) -> Question:
    adapters, load = PlannedAdapters(20, (16,)), PlannedLoad(rate, 256, 16)
    return Question(
        read_model_spec(directory), EngineConfig(directory, **changes), DEVICES[device], adapters, load
    )


def test_a_plan_counts_the_recurrent_state_of_each_sequence(kits: Kits) -> None:
    kit = kits("qwen3_5_text")
    question = make_question(kit.directory, max_num_seqs=64)
    memory = make_plan(question).memory
    engine = Engine(
        replace(question.config, pool_bytes=memory.pool_bytes, device="cpu", kernels="torch"),
        question.spec,
        make_source(kit)[0],
        costs=COSTS,
    )
    assert memory.state_pages == engine.runner.footprint.state_pages > 0
    assert (memory.num_pages, memory.max_model_len) == (engine.info.num_pages, engine.info.max_model_len)
    rounded = replace(question, config=replace(question.config, quantization="int8"))
    with pytest.raises(
        ConfigError, match=r"quantization is int8, but transformers' classes compute this model"
    ):
        make_plan(rounded)


def test_pages_of_a_gpu_hold_latents(kits: Kits) -> None:
    kit = kits("deepseek_v2")
    question = replace(make_question(kit.directory), adapters=PlannedAdapters(4, (8,), ("kv_b_proj",)))
    assert make_plan(question).memory.full_page_bytes == kit.spec.sizes.num_layers * 16 * (20 + 8) * 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_with_the_planned_settings_has_the_planned_pages(kit: ModelKit, num_ranks: int) -> None:
    question = make_question(kit.directory, max_lora_rank=16, tensor_parallel_size=num_ranks)
    plan = make_plan(question)
    config = replace(plan.config, device="cpu", kernels="torch")
    group: RankGroup = ThreadGroup(config, question.spec) if num_ranks > 1 else NO_GROUP
    engine = Engine(config, question.spec, make_source(kit)[0], costs=COSTS, group=group)
    memory, info = plan.memory, engine.info
    assert (memory.num_pages, memory.full_page_bytes) == (info.num_pages, info.full_page_bytes)
    assert memory.max_model_len == info.max_model_len
    assert engine.stats().swap_pages_total == memory.swap_bytes // memory.full_page_bytes
    engine.close()


def test_a_planned_adapter_has_the_bytes_of_a_packed_one(kit: ModelKit) -> None:
    shape = kit.spec.shape("float32")
    packed = pack(read_adapter(kit.adapters["r8_on_q_and_v"], shape, AdapterLimits()), shape, "float32")
    (size,) = make_plan(make_question(kit.directory)).memory.adapter_sizes
    assert size.num_bytes == len(packed.buffer)
    assert size.pages == -(
        -len(packed.buffer) // make_plan(make_question(kit.directory)).memory.full_page_bytes
    )


@pytest.mark.parametrize(
    "model",
    soaked(
        ["llama", "qwen2", "gemma2", "phi3_longrope", "qwen2_moe", "qwen3_moe_mixed"],
        "qwen2",
        "qwen3_moe_mixed",
    ),
)
def test_the_weights_have_the_bytes_of_the_checkpoint(kits: Kits, model: str) -> None:
    directory = kits(model).directory
    spec = read_model_spec(directory)
    stored = sum(t.nbytes for path in directory.glob("*.safetensors") for t in load_file(path).values())
    assert spec.decoder is not None
    rows = spec.max_positions * (2 if spec.rope_switch else 1)
    rotary = sum(4 * rows * rope.rotary_dim for rope in spec.decoder.ropes)
    assert measure_model(spec, EngineConfig(directory)).weight_bytes - rotary == stored


@pytest.mark.parametrize("model", ["llama", "qwen2", "gemma2", "qwen2_moe"])
def test_the_parts_of_two_ranks_have_the_bytes_of_their_weights(kits: Kits, model: str) -> None:
    directory = kits(model).directory
    spec, config = read_model_spec(directory), EngineConfig(directory, tensor_parallel_size=2)
    whole = measure_model(spec, EngineConfig(directory))
    part = measure_model(spec, config)
    assert part.token_flop == pytest.approx(whole.token_flop / 2, rel=0.02)  # Routers are on both ranks.
    # Norms, the biases of o and down, routers, and the rotary table are on both ranks.
    assert whole.weight_bytes <= 2 * part.weight_bytes < 1.5 * whole.weight_bytes


def test_steps_of_a_group_pay_for_its_sums_and_are_not_recorded(llama_8b: Path) -> None:
    spec = read_model_spec(llama_8b)
    rooflines = []
    for num_ranks in (1, 2):
        config = EngineConfig(llama_8b, tensor_parallel_size=num_ranks)
        shape = spec.partition("bfloat16", num_ranks).rank_shape
        size = measure_model(spec, config)
        rooflines.append(Roofline.of(DEVICES["H100"], size, shape, config, adapted=(), prompt_tokens=128))
    one, two = rooflines
    assert two.weights_s < 0.6 * one.weights_s and two.token_s < one.token_s
    assert (one.sums_s, two.sums_s > 0) == (0.0, True)
    assert two.step_seconds(StepWork(0, 1, 0, 0, 0), 0) > two.launch_s


def test_quantized_weights_take_a_byte_each(llama_8b: Path) -> None:
    spec = read_model_spec(llama_8b)
    whole = measure_model(spec, EngineConfig(llama_8b))
    quantized = measure_model(spec, EngineConfig(llama_8b, quantization="int8"))
    numbers = whole.token_flop / 2
    assert whole.weight_bytes - quantized.weight_bytes == pytest.approx(numbers, rel=0.01)


def test_two_plans_of_one_question_are_equal(kits: Kits) -> None:
    question = make_question(kits("llama").directory)
    plans = [make_plan(question) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].fits and plans[0].service is not None


def test_a_load_beyond_the_capacity_does_not_fit_and_more_engines_are_the_remedy(kits: Kits) -> None:
    question = make_question(kits("llama").directory)
    question = replace(question, load=replace(question.load, rate=1e5))
    plan = make_plan(question)
    assert plan.problem is not None and "the queue would grow without end" in plan.problem
    remedies = find_remedies(question, plan)
    assert any("engines like this one" in remedy for remedy in remedies)


def test_weights_that_do_not_fit_lead_to_quantization_or_a_larger_device(llama_8b: Path) -> None:
    # 16 GiB: less than the weights with driver and activations, but enough for weights of 8 bits.
    question = ask_8b(llama_8b, "L4")
    question = replace(question, device=replace(question.device, memory_bytes=16 * _GIB))
    plan = make_plan(question)
    assert plan.problem is not None and "the weights take 15.0 GiB" in plan.problem
    remedies = find_remedies(question, plan)
    assert [remedy.partition(":")[0] for remedy in remedies[:2]] == ["--quantization fp8", "--device A10G"]
    assert remedies[-1].startswith("--tensor-parallel-size 2: ")


def test_an_engine_on_a_slice_gets_its_part_of_adapters_and_requests(llama_8b: Path) -> None:
    plans = compare_slices(ask_8b(llama_8b, "H100", max_num_seqs=16))
    assert list(plans) == [
        "H100",
        *(f"H100 {name}" for name in ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "50%", "25%")),
    ]
    whole, small, half = plans["H100"], plans["H100 1g.10gb"], plans["H100 3g.40gb"]
    assert isinstance(whole, Plan) and isinstance(small, Plan) and isinstance(half, Plan)
    assert small.problem is not None and small.memory.num_pages == 0
    assert (half.engines, half.memory.num_adapters) == (2, 10)
    assert 0.5 <= half.rate < 0.7 and whole.rate == 1.0
    assert whole.memory.num_pages > 2 * half.memory.num_pages > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": PlannedAdapters(1, (0,))}, "rank is 0; it must be from 1 to"),
        ({"adapters": PlannedAdapters(1, (8,), ("query",))}, "target 'query' matches no module"),
        ({"adapters": PlannedAdapters(-1)}, "adapters is -1"),
        ({"load": PlannedLoad(0.0, 10, 10)}, "rate is 0; it must be above 0"),
        ({"load": PlannedLoad(1.0, 10**6, 10)}, "prompt_tokens is 1000000; it must be from 1 to"),
    ],
)
def test_a_value_that_cannot_be_planned_is_named_with_its_limit(
    kits: Kits, changes: dict[str, Any], message: str
) -> None:
    question = replace(make_question(kits("llama").directory), **changes)
    with pytest.raises(ConfigError, match=message):
        make_plan(question)


def test_8_bit_floats_are_refused_on_a_device_without_them(llama_8b: Path) -> None:
    with pytest.raises(ConfigError, match="A100-80 has no 8-bit floats"):
        make_plan(ask_8b(llama_8b, "A100-80", kv_cache_dtype="fp8"))


def test_experts_of_4_bits_are_refused_on_gpus(kits: Kits) -> None:
    question = make_question(kits("qwen2_moe").directory, quantization="int4")
    with pytest.raises(ConfigError, match="experts in int4 are multiplied on CPUs only, and small is a GPU"):
        make_plan(question)


def test_weights_of_4_bits_leave_more_memory_for_the_pool_and_are_read_faster(llama_8b: Path) -> None:
    plans = [make_plan(ask_8b(llama_8b, "H100", quantization=form)) for form in ("int8", "int4")]
    assert plans[1].memory.num_pages > plans[0].memory.num_pages
    spec = read_model_spec(llama_8b)
    rooflines = [
        Roofline.of(
            DEVICES["H100"],
            measure_model(spec, plan.config),
            spec.shape("bfloat16"),
            plan.config,
            adapted=(),
            prompt_tokens=128,
        )
        for plan in plans
    ]
    # Layers take 5 bits of 8. The head stays in 16 bits.
    assert 0.6 < rooflines[1].weights_s / rooflines[0].weights_s < 0.72


@pytest.mark.parametrize(
    ("form", "num_bits", "num_products"),
    [
        # 4 bits for each number, and a scale of 32 bits for each group.
        (CodedForm("compressed-tensors", 128, torch.bfloat16), 4.25, 1),
        (CodedForm("nf4", 64, torch.float32, is_nested=True), 4.5, 3),
    ],
)
def test_a_checkpoint_of_4_bit_weights_is_measured_and_planned(
    llama_8b: Path, tmp_path: Path, form: CodedForm, num_bits: float, num_products: int
) -> None:
    config = read_json(llama_8b / "config.json")
    write_json(tmp_path / "config.json", config | {"quantization_config": form.config()})
    assert make_plan(ask_8b(tmp_path, "H100")).fits
    sizes = [measure_model(read_model_spec(path), EngineConfig(path)) for path in (llama_8b, tmp_path)]
    saved = (16 - num_bits) / 8 * sizes[0].token_flop / 2
    assert sizes[0].weight_bytes - sizes[1].weight_bytes == pytest.approx(saved, rel=0.01)
    assert sizes[1].token_flop == num_products * sizes[0].token_flop


def test_linears_that_bitsandbytes_left_out_are_measured_in_16_bits(llama_8b: Path, tmp_path: Path) -> None:
    """Born from plans that counted them in 4 bits."""
    config, sizes = read_json(llama_8b / "config.json"), {}
    for name, kept in {"none": None, "some": ["lm_head", "model.layers.1.mlp", "k_proj"]}.items():
        fields = CodedForm("nf4", 64, torch.float32).config() | {"llm_int8_skip_modules": kept}
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", config | {"quantization_config": fields})
        size = measure_model(read_model_spec(tmp_path / name), EngineConfig(tmp_path / name))
        sizes[name] = size.weight_bytes
    numbers = 3 * 4096 * 14336 + 32 * 4096 * 1024
    # Of the others, a scale of 32 bits for 64 numbers joins the codes of 4 bits.
    assert sizes["some"] - sizes["none"] == numbers * (16 - 4.5) / 8


def test_predicted_decode_steps_are_within_a_tenth_of_those_measured_on_an_h200(llama_8b: Path) -> None:
    spec = read_model_spec(llama_8b)
    shape = spec.shape("bfloat16")
    page_bytes = shape.num_layers * shape.layer_page_bytes(16)
    config = EngineConfig(llama_8b)
    size = measure_model(spec, config)
    paths = tuple(linear.path for linear in shape.linears)
    roofline = Roofline.of(DEVICES["H200"], size, shape, config, adapted=paths, prompt_tokens=128)
    rows = read_json(_RESULTS)["tables"]["end to end bdf0a68"]
    measured = [row for row in rows if row["kind"] == "decode" and row["graphs"]]
    assert [row["adapters"] for row in measured] == [0, 1, 8, 32]
    for row in measured:
        # The row's gigabytes are those of the weights and of the KV that a step reads.
        context = int((1e9 * row["base GB"] - size.step_bytes) / (page_bytes / 16))
        work = StepWork(0, row["batch"], context, 0, 0)
        predicted_ms = 1e3 * roofline.step_seconds(work, int(1e9 * row["adapters GB"]))
        assert predicted_ms == pytest.approx(row["step ms"], rel=0.1)


def test_the_predicted_capacity_is_within_a_tenth_of_that_measured_on_an_h200(llama_8b: Path) -> None:
    """S-LoRA's setting S1: rank 8 on the linears of attention, prompts and answers of 260 tokens on average."""
    rows = read_json(_RESULTS)["tables"]["end to end d971222"]
    measured = max(row["requests/s"] for row in rows if row["kind"] == "serving")
    adapters = PlannedAdapters(5, (8,), ("attention",), alpha=0.0)
    service = make_plan(
        replace(ask_8b(llama_8b, "H200"), adapters=adapters, load=PlannedLoad(5.0, 260, 260))
    ).service
    assert service is not None
    assert service.requests_per_s == pytest.approx(measured, rel=0.1)


def test_an_engine_whose_adapters_do_not_fit_into_the_pool_copies_them_and_serves_less(
    llama_8b: Path,
) -> None:
    question = ask_8b(llama_8b, "L4", rate=0.5)
    few, many = (
        make_plan(replace(question, adapters=PlannedAdapters(count, (64,), alpha=0.0))).service
        for count in (2, 500)
    )
    assert few is not None and many is not None
    assert few.hit_share == 1.0 and many.hit_share < 0.2
    assert many.requests_per_s < 0.9 * few.requests_per_s
    assert many.ttft_s > few.ttft_s


def test_the_running_sequences_at_a_load_follow_from_the_time_that_each_takes(llama_8b: Path) -> None:
    question = ask_8b(llama_8b, "H100", rate=3.0)
    service = make_plan(question).service
    assert service is not None
    assert service.running == pytest.approx(3.0 * question.load.output_tokens * service.itl_s, rel=1e-3)


@pytest.mark.parametrize(
    ("count", "alpha", "share"), [(3, 0.0, 2 / 3), (50, 0.0, 0.5), (20, 3.0, 0.83), (0, 1.0, 0.5)]
)
def test_the_busiest_of_two_engines_gets_whole_adapters(
    llama_8b: Path, count: int, alpha: float, share: float
) -> None:
    question = ask_8b(llama_8b, "H100")
    half = replace(question.device, count=2)
    plan = make_plan(replace(question, device=half, adapters=PlannedAdapters(count, (16,), alpha=alpha)))
    assert plan.rate == pytest.approx(share, abs=0.01)


def test_a_device_is_found_in_any_spelling() -> None:
    assert find_device("h100") is DEVICES["H100"]
    assert find_device("rtx 4090") is DEVICES["RTX-4090"]


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"device is 'H1000'; known devices are L4, .*B200; describe another"
    ):
        find_device("H1000")


def test_a_mig_slice_has_sevenths_of_the_compute_and_eighths_of_the_memory() -> None:
    whole = find_device("A100-80")
    part = cut_device(whole, "2g.20gb")
    assert part.count == 3
    assert part.flops == pytest.approx(whole.flops * 2 / 7)
    assert part.bandwidth == pytest.approx(whole.bandwidth * 2 / 8)
    assert whole.memory_bytes / 5 < part.memory_bytes < whole.memory_bytes / 4


def test_all_slices_of_a_profile_fit_into_their_device() -> None:
    for device in DEVICES.values():
        for name, profile in device.profiles.items():
            assert profile.count * profile.compute <= 7 and profile.count * profile.memory <= 8
            assert profile.count * cut_device(device, name).memory_bytes <= device.memory_bytes


def test_an_mps_share_is_a_part_of_everything() -> None:
    whole = find_device("L4")
    part = cut_device(whole, "30%")
    assert part.count == 3
    assert part.memory_bytes == int(0.3 * whole.memory_bytes)
    assert part.bandwidth == pytest.approx(0.3 * whole.bandwidth)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("L4", "1g.10gb", "L4 has no MIG profiles; give an MPS share such as 50%"),
        ("H100", "1g.5gb", "H100 has the MIG profiles 1g.10gb, "),
        ("H100", "0%", "H100 has the MIG profiles"),
    ],
)
def test_a_slice_that_a_device_does_not_have_is_refused(device: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_device(find_device(device), name)
