"""The engine with weights of 8 or 4 bits, compared with transformers on the dequantized weights."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slora import LLM, SamplingParams
from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from slora.models.weights.linear import quantize_groups
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.cpu.machine_code import find_worker
from tests.support.covering import soaked
from tests.support.cpu_kernels import CPU_KERNELS, ENGINE_KERNELS, KERNELS
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import Oracle, Verdict
from tests.support.peft_adapters import DORA_EMBEDDING_KINDS, DORA_KINDS, KINDS, ROW_KINDS
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.trained_model import Figures, ask_trained_model

FORMS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
HEADS = {"dora_on_head": DORA_EMBEDDING_KINDS["dora_on_head"]} | {
    kind: ROW_KINDS[kind] for kind in ("whole_head", "tokens_of_head")
}
ADAPTERS = {"patterns": KINDS["patterns"], "dora": DORA_KINDS["dora"]} | HEADS
# Prompts, the adapter kind of each prompt, and the answers.
Work = tuple[list[list[int]], list[str | None], list[list[int]]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def round_rows(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Quantized numbers and scales [N, 1] by the definition: the largest magnitude of a row maps to the largest
    number."""
    dtype, largest = FORMS[form]
    scales = weight.abs().amax(1, keepdim=True) / largest
    numbers = weight / scales
    return (numbers.round() if form == "int8" else numbers).to(dtype), scales


def rewrite(source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Copies a checkpoint and replaces the weight tensor of each linear with the tensors that `change` returns."""
    target.mkdir()
    for file in ("config.json", "generation_config.json"):
        (target / file).write_text((source / file).read_text(encoding="utf-8"), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= change(name, tensor) if is_linear(name) else {name: tensor}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def round_head(directory: Path) -> None:
    """Rounds the head to 8 bits. If it is the embedding's weight, it becomes a weight of its own."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    numbers, scales = round_rows(head, "int8")
    save_file(tensors | {"lm_head.weight": numbers.float() * scales}, path, metadata={"format": "pt"})
    set_config(directory, tie_word_embeddings=False)


def drop_copies(kit: ModelKit) -> ModelKit:
    """Removes the copies of the base's head that PEFT saves with adapters of the head. The oracle would use them."""
    for path in kit.adapters.values():
        file = path / "adapter_model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(file).items() if "base_layer" not in name}
        save_file(tensors, file, metadata={"format": "pt"})
    return kit


def set_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    write_json(path, read_json(path) | fields)


def round_groups(weight: Tensor) -> Tensor:
    parts = quantize_groups(weight.clone(), 32 if weight.shape[1] % 64 else 64)
    return CodedWeight(*parts, torch.arange(16.0)).decode()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    return drop_copies(make_kit(tmp_path_factory.mktemp("quantized"), "llama", ADAPTERS, num_hidden_layers=2))


def answer(kit: ModelKit, directory: Path, **settings: Any) -> Work:
    rng = random.Random(3)
    kinds = [None, *kit.adapters] * 3
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 16, 17, 40)))] for _ in kinds]
    llm = LLM(directory, pool_bytes=kit.pool_bytes(400), **settings)
    num_compiled = find_worker.cache_info().misses
    outputs = llm.generate(prompts, GREEDY, [kit.path(kind) for kind in kinds])
    assert find_worker.cache_info().misses == num_compiled, "a request waited until a kernel was compiled"
    return prompts, kinds, [output.token_ids for output in outputs]


def judge(kit: ModelKit, exact: Path, work: Work) -> Verdict:
    return sum(map(Oracle(exact, kit.adapters).judge, work[0], work[2], work[1]), Verdict())


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ENGINE_KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_the_rounded_weights_with_and_without_adapters(
    kit: ModelKit, tmp_path: Path, report: Callable[[str], None], form: str, kernels: str
) -> None:
    def dequantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = round_rows(weight, form)
        return {name: numbers.float() * scales}

    rewrite(kit.directory, tmp_path / "exact", dequantize)
    # On a GPU, the head stays as it is.
    if form == "int8" and kernels != "triton":
        round_head(tmp_path / "exact")
    work = answer(kit, kit.directory, quantization=form, kernels=kernels)
    verdict = judge(kit, tmp_path / "exact", work)
    report(f"parity of weights in {form} with {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


# Half of each input width is a multiple of 64, so that two ranks round the same groups as one.
WIDE = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "attention_bias": True},
    "qwen2_tied": {"hidden_size": 128, "intermediate_size": 128},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 128, "head_dim": 32},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", WIDE)
@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize("size", (1, pytest.param(2, marks=pytest.mark.soak)))
def test_answers_are_those_of_weights_rounded_to_4_bits(
    tmp_path: Path, report: Callable[[str], None], model: str, kernels: str, size: int
) -> None:
    def dequantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        return {
            name: round_groups(weight) if weight.dim() == 2 else torch.stack([*map(round_groups, weight)])
        }

    kinds = {"r8_on_q_and_v": KINDS["r8_on_q_and_v"]} | (HEADS if model == "llama" else {})
    kit = drop_copies(make_kit(tmp_path, model, kinds, num_hidden_layers=2, **WIDE[model]))
    rewrite(kit.directory, tmp_path / "exact", dequantize)
    round_head(tmp_path / "exact")
    settings = {"kernels": kernels, "tensor_parallel_size": size, "device": "cpu"}
    work = answer(kit, kit.directory, quantization="int4", **settings)
    verdict = judge(kit, tmp_path / "exact", work)
    report(f"parity of weights in int4 with {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


def test_widths_that_int4_cannot_group_are_refused_by_name(kit: ModelKit) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight has 48 columns.*multiples of 32.*int8"):
        LLM(kit.directory, pool_bytes=kit.pool_bytes(400), quantization="int4")


@cache
def ask_unquantized(count: int) -> Figures:
    return ask_trained_model(count)


@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.soak), "int4"])
def test_quantization_hardly_changes_a_trained_models_accuracy(
    report: Callable[[str], None], form: str, *, soak: bool
) -> None:
    count = 200 if soak else 8
    plain, rounded = ask_unquantized(count), ask_trained_model(count, quantization=form)
    report(f"{form} weights: {rounded}; without: {plain}")
    assert rounded.right >= 0.95 * rounded.asked
    assert rounded.nats <= plain.nats + 0.005


def compressed(form: str, strategy: str, **weights: Any) -> dict[str, Any]:
    kind = {"int8": "int", "fp8": "float"}[form]
    scheme = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": {"num_bits": 8, "type": kind}}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


BLOCK = (16, 32)
STORED = {
    "compressed_int8_rows": ("int8", "rows", "weight_scale", compressed("int8", "channel")),
    "compressed_fp8_tensor": ("fp8", "tensor", "weight_scale", compressed("fp8", "tensor")),
    "compressed_fp8_blocks": ("fp8", "blocks", "weight_scale", compressed("fp8", "block", block_structure=BLOCK)),
    "compressed_int8_packed": (
        "int8", "rows", "weight_scale", {**compressed("int8", "channel"), "format": "pack-quantized"},
    ),
    "fbgemm_fp8": ("fp8", "rows", "weight_scale", {"quant_method": "fbgemm_fp8"}),
    "autofp8": ("fp8", "tensor", "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "deepseek_fp8": (
        "fp8", "blocks", "weight_scale_inv", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK},
    ),
}  # fmt: skip


def store(weight: Tensor, form: str, sharing: str) -> tuple[Tensor, Tensor, Tensor]:
    """The quantized numbers, the scales as the checkpoint stores them, and the dequantized weight."""
    rows, columns = weight.shape
    height, width = {"rows": (1, columns), "tensor": (rows, columns), "blocks": BLOCK}[sharing]
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    padded[:rows, :columns] = weight
    blocks = padded.view(len(padded) // height, height, -1, width).transpose(1, 2)
    scales = blocks.abs().amax((2, 3)) / FORMS[form][1]
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    numbers = weight / spread
    numbers = (numbers.round() if form == "int8" else numbers).to(FORMS[form][0])
    return numbers, scales[0] if sharing == "tensor" else scales, numbers.float() * spread


def pack(path: str, numbers: Tensor) -> dict[str, Tensor]:
    """Packs as compressed-tensors does: four numbers, each plus 128, in one int32, the first in the lowest byte.
    Rows are padded."""
    rows, columns = numbers.shape
    positive = torch.zeros(rows, -(-columns // 4) * 4, dtype=torch.int64)
    positive[:, :columns] = numbers.long() + 128
    words = (positive.view(rows, -1, 4) << torch.tensor([0, 8, 16, 24])).sum(-1)
    return {f"{path}_packed": words.to(torch.int32), f"{path}_shape": torch.tensor([rows, columns])}


def write_stored(kit: ModelKit, root: Path, name: str) -> tuple[Path, Path]:
    """Writes the kit's model as the checkpoint `name` of STORED, and with its dequantized weights. Returns both paths.

    The last layer's MLP stays unquantized. Checkpoints do this for layers that suffer most from rounding.
    """
    form, sharing, scale_name, config = STORED[name]
    last = read_model_spec(kit.directory).sizes.num_layers - 1

    def is_kept(path: str) -> bool:
        return f"layers.{last}.mlp" in path

    def quantize(path: str, weight: Tensor) -> dict[str, Tensor]:
        if is_kept(path):
            return {path: weight}
        numbers, scales, _ = store(weight, form, sharing)
        prefix = path.removesuffix("weight")
        if config.get("format") == "pack-quantized":
            return {**pack(path, numbers), f"{prefix}{scale_name}": scales}
        activations = {f"{prefix}input_scale": torch.ones(1)} if sharing == "tensor" else {}
        return {path: numbers, f"{prefix}{scale_name}": scales, **activations}

    def dequantize(path: str, weight: Tensor) -> dict[str, Tensor]:
        return {path: weight if is_kept(path) else store(weight, form, sharing)[2]}

    stored, exact = root / "stored", root / "exact"
    rewrite(kit.directory, exact, dequantize)
    rewrite(kit.directory, stored, quantize)
    set_config(stored, quantization_config=config)
    return stored, exact


@pytest.mark.parametrize("name", STORED)
def test_a_checkpoint_of_8_bit_weights_answers_as_its_dequantized_weights(
    kit: ModelKit, tmp_path: Path, name: str
) -> None:
    stored, exact = write_stored(kit, tmp_path, name)
    verdict = judge(kit, exact, answer(kit, stored, kernels=KERNELS))
    assert verdict.equal, verdict


@pytest.mark.parametrize(
    ("model", "name"),
    soaked(
        [("deepseek_v3", "deepseek_fp8"), ("qwen3_vl", "compressed_int8_rows"), ("mistral3", "autofp8")],
        ("deepseek_v3", "deepseek_fp8"),
    ),
)
def test_transformers_classes_get_weights_of_8_bits_widened(
    tmp_path: Path, report: Callable[[str], None], model: str, name: str
) -> None:
    """Blocks do not divide the widths, as those of DeepSeek V3's latent attention."""
    kinds = {"q": {"r": 8, "lora_alpha": 16, "target_modules": r".*layers.*(q_proj|q_b_proj)"}}
    kit = make_kit(tmp_path / "kit", model, kinds, num_hidden_layers=2)
    stored, exact = write_stored(kit, tmp_path, name)
    verdict = judge(kit, exact, answer(kit, stored, kernels=KERNELS))
    report(f"{model} as {name}: {verdict}")
    assert verdict.equal, verdict


def test_weights_with_a_scale_for_each_block_can_be_rounded_again_by_row(
    kit: ModelKit, tmp_path: Path
) -> None:
    form, sharing, scale_name, config = STORED["deepseek_fp8"]

    def quantize(path: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales, _ = store(weight, form, sharing)
        return {path: numbers, f"{path.removesuffix('weight')}{scale_name}": scales}

    def dequantize(path: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = round_rows(store(weight, form, sharing)[2], "fp8")
        return {path: numbers.float() * scales}

    rewrite(kit.directory, tmp_path / "exact", dequantize)
    rewrite(kit.directory, tmp_path / "stored", quantize)
    set_config(tmp_path / "stored", quantization_config=config)
    verdict = judge(
        kit, tmp_path / "exact", answer(kit, tmp_path / "stored", kernels=KERNELS, quantization="fp8")
    )
    assert verdict.equal, verdict


REFUSED = {
    "quanto": (
        {"quant_method": "quanto", "weights": "int4"},
        r"quant_method is 'quanto'; supported are compressed-tensors, fp8, fbgemm_fp8, gptq, awq, bitsandbytes",
    ),
    "marlin": ({**compressed("int8", "channel"), "format": "marlin-24"}, r"format is 'marlin-24'"),
    "two_bits": (compressed("int8", "channel", num_bits=2), r"only symmetric 8-bit numbers and 4-bit"),
    "asymmetric": (
        compressed("int8", "channel", symmetric=False),
        r"only symmetric 8-bit numbers and 4-bit integers are served",
    ),
    "groups": (
        compressed("int8", "group", group_size=32),
        r"strategy is 'group'; supported for 8-bit numbers are tensor, channel",
    ),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt is 'e5m2'; only e4m3 is served"),
    "sparse": (
        {**compressed("int8", "channel"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        r"sparse weights are not served",
    ),
    "rotated": ({**compressed("int8", "channel"), "transform_config": {"R1": 1}}, r"transformed weights"),
    "mixed": (
        {
            **compressed("int8", "channel"),
            "config_groups": {
                "a": compressed("int8", "channel")["config_groups"]["group_0"],
                "b": compressed("fp8", "channel")["config_groups"]["group_0"],
            },
        },
        r"all linear layers must be quantized in the same way",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_quantization_is_refused_with_a_remedy(
    kit: ModelKit, tmp_path: Path, name: str
) -> None:
    config, said = REFUSED[name]
    rewrite(kit.directory, tmp_path / "stored", lambda path, weight: {path: weight})
    set_config(tmp_path / "stored", quantization_config=config)
    with pytest.raises(ConfigError, match=f"quantization_config.*{said}.*use the unquantized checkpoint"):
        LLM(tmp_path / "stored")


@pytest.mark.parametrize("impl", ["slora", "transformers"])
def test_scales_that_do_not_fit_their_weight_are_refused(kit: ModelKit, tmp_path: Path, impl: str) -> None:
    def quantize(path: str, weight: Tensor) -> dict[str, Tensor]:
        return {path: round_rows(weight, "int8")[0], f"{path}_scale": torch.ones(3)}

    rewrite(kit.directory, tmp_path / "stored", quantize)
    set_config(tmp_path / "stored", quantization_config=compressed("int8", "channel"))
    with pytest.raises(ConfigError, match=r"proj\.weight \[\d+, \d+\] has scales of shape \[3\]"):
        LLM(tmp_path / "stored", model_impl=impl, pool_bytes=kit.pool_bytes(400))


@pytest.mark.parametrize("impl", ["slora", "transformers"])
def test_numbers_without_scales_are_refused(kit: ModelKit, tmp_path: Path, impl: str) -> None:
    rewrite(kit.directory, tmp_path / "stored", lambda path, weight: {path: round_rows(weight, "int8")[0]})
    set_config(tmp_path / "stored", quantization_config=compressed("int8", "channel"))
    with pytest.raises(ConfigError, match=r"proj\.weight is I8, but there is no .*proj\.weight_scale"):
        LLM(tmp_path / "stored", model_impl=impl, pool_bytes=kit.pool_bytes(400))


def test_scales_of_weights_that_need_none_are_refused(kit: ModelKit, tmp_path: Path) -> None:
    rewrite(
        kit.directory,
        tmp_path / "stored",
        lambda path, weight: {path: weight, f"{path}_scale_inv": weight[:1].clone()},
    )
    set_config(tmp_path / "stored", quantization_config=STORED["deepseek_fp8"][3])
    with pytest.raises(ConfigError, match=r"is F32, but there is .*weight_scale_inv, which only numbers"):
        LLM(tmp_path / "stored", model_impl="transformers", pool_bytes=kit.pool_bytes(400))


def test_rounding_twice_is_refused(kit: ModelKit, tmp_path: Path) -> None:
    rewrite(kit.directory, tmp_path / "stored", lambda path, weight: {path: weight})
    set_config(tmp_path / "stored", quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(ConfigError, match="quantization is int8, but this checkpoint is stored as fp8"):
        LLM(tmp_path / "stored", quantization="int8")


def test_an_unknown_format_is_refused(kit: ModelKit, tmp_path: Path) -> None:
    """Born from a fault: a checkpoint that is already quantized got the error about rounding twice."""
    rewrite(kit.directory, tmp_path / "stored", lambda path, weight: {path: weight})
    set_config(tmp_path / "stored", quantization_config={"quant_method": "fbgemm_fp8"})
    for directory in (kit.directory, tmp_path / "stored"):
        spec = read_model_spec(directory)
        with pytest.raises(ConfigError, match="quantization is 'int2'; it must be auto, int8, fp8 or int4"):
            spec.check_quantization("int2")
        spec.check_quantization("auto")


def test_the_form_of_the_weights_is_that_of_the_request_or_of_the_checkpoint(
    kit: ModelKit, tmp_path: Path
) -> None:
    spec = read_model_spec(kit.directory)
    assert [spec.find_weight_form(name) for name in ("auto", "int8", "int4")] == [None, "int8", "int4"]
    rewrite(kit.directory, tmp_path / "stored", lambda path, weight: {path: weight})
    for config, form in (
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
    ):
        set_config(tmp_path / "stored", quantization_config=config)
        assert read_model_spec(tmp_path / "stored").find_weight_form("auto") == form
