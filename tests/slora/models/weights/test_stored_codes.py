"""The engine with checkpoints of 4-bit weights, compared with transformers on the dequantized weights."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slora import LLM, SamplingParams
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.models.model import load_model
from slora.models.model_spec import read_model_spec
from slora.models.stored_quantization import StoredCodes
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import Linear, check_codes
from slora.models.weights.weight_reader import LinearPart, WeightReader
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import LoraSite
from slora_kernels.torch.torch_kernels import TorchKernels
from tests.kernels.test_coded_linear import make_coded
from tests.support.coded_checkpoints import CodedForm, dequantize, write_coded_checkpoint, write_codes
from tests.support.covering import soaked
from tests.support.cpu_kernels import CPU_KERNELS, KERNELS, TRITON_DEVICE
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.oracle import Oracle, Verdict
from tests.support.peft_adapters import DORA_KINDS, KINDS
from tests.support.tiny_models import VOCAB_SIZE

ADAPTERS = {kind: KINDS[kind] for kind in ("r8_on_q_and_v", "patterns")} | {"dora": DORA_KINDS["dora"]}
# Their input widths are multiples of 128.
WIDE = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "attention_bias": True},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32},
}
METHOD = "compressed-tensors"
FORMS = {
    "groups_of_32": CodedForm(METHOD, 32, torch.bfloat16),
    "groups_of_128": CodedForm(METHOD, 128, torch.float16, has_order=True),
    "rows": CodedForm(METHOD, None, torch.float32),
    "zero_points": CodedForm(METHOD, 64, torch.bfloat16, is_symmetric=False),
    "zero_points_of_rows": CodedForm(METHOD, None, torch.float16, is_symmetric=False),
    "gptq": CodedForm("gptq", 64, torch.float16),
    "gptq_zero_points": CodedForm("gptq", 32, torch.float16, is_symmetric=False),
    "gptq_v2": CodedForm("gptq_v2", None, torch.bfloat16, is_symmetric=False),
    "awq": CodedForm("awq", 128, torch.float16, is_symmetric=False),
    "nf4": CodedForm("nf4", 64, torch.float32, is_nested=True),
    "nf4_as_bfloat16": CodedForm("nf4", 32, torch.float32, storage=torch.bfloat16),
    "fp4": CodedForm("fp4", 128, torch.float32),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    made: dict[str, ModelKit] = {}

    def find(model: str) -> ModelKit:
        if model not in made:
            kinds = ADAPTERS if model == "llama" else {"r8_on_q_and_v": KINDS["r8_on_q_and_v"]}
            root = tmp_path_factory.mktemp(model)
            made[model] = make_kit(root, model, kinds, num_hidden_layers=2, **WIDE[model])
        return made[model]

    return find


@pytest.fixture(scope="module")
def kit(kits: Kits) -> ModelKit:
    return kits("llama")


def judge(
    kit: ModelKit,
    stored: Path,
    exact: Path,
    *,
    num_rounds: int = 3,
    num_tokens: int = 16,
    device: str = "cpu",
    **settings: Any,
) -> Verdict:
    """Compares tokens and their log-probabilities. A step computes 24 tokens at most, so prompts are in chunks."""
    rng = random.Random(3)
    kinds = [None, *kit.adapters] * num_rounds
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 17, 40, 75)))] for _ in kinds]
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    llm = LLM(stored, device=device, pool_bytes=kit.pool_bytes(400), **limits, **settings)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, sampling, [kit.path(kind) for kind in kinds])
    oracle, verdict = Oracle(exact, kit.adapters), Verdict()
    for prompt, kind, output in zip(prompts, kinds, outputs, strict=True):
        assert output.logprobs is not None
        scores = [entry.logprob for entry in output.logprobs]
        verdict += oracle.judge(prompt, output.token_ids, kind, scores)
    return verdict


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "form", soaked(FORMS, "groups_of_32", "zero_points_of_rows", "gptq_zero_points", "awq", "nf4")
)
@pytest.mark.parametrize("model", WIDE)
@pytest.mark.parametrize("kernels", CPU_KERNELS[::-1])
def test_a_checkpoint_of_4_bit_weights_answers_as_its_dequantized_weights(
    kits: Kits, tmp_path: Path, report: Callable[[str], None], form: str, model: str, kernels: str
) -> None:
    kit = kits(model)
    stored, exact = write_coded_checkpoint(kit.directory, tmp_path, FORMS[form], kept="layers.1.mlp")
    verdict = judge(kit, stored, exact, kernels=kernels)
    report(f"parity of {model} with 4-bit weights ({form}) and {kernels} kernels: {verdict}")
    assert verdict.equal, verdict


@pytest.mark.interpreted_slowly
@pytest.mark.parametrize("form", ["awq", "zero_points", "nf4"])
def test_triton_kernels_answer_as_the_dequantized_weights(kit: ModelKit, tmp_path: Path, form: str) -> None:
    stored, exact = write_coded_checkpoint(kit.directory, tmp_path, FORMS[form], kept="layers.1.mlp")
    size = {"num_rounds": 1, "num_tokens": 3} if TRITON_DEVICE == "cpu" else {}
    verdict = judge(kit, stored, exact, device=TRITON_DEVICE, kernels="triton", **size)
    assert verdict.equal, verdict


def read_weight(
    directory: Path, form: CodedForm, parts: list[tuple[str, int]], width: int, columns: range | None = None
) -> CodedWeight:
    """Reads the weights in the given order as one. columns: those of this rank."""
    codes = StoredCodes(form.method, form.group, has_zero_points=not form.is_symmetric)  # type: ignore[arg-type]
    reader = WeightReader(Checkpoint(directory), torch.float32, CPU, codes=codes)
    columns = range(width) if columns is None else columns
    weight = reader.linear(
        [LinearPart(f"{name}.weight", (rows, width), (range(rows),), columns) for name, rows in parts]
    )
    reader.read()
    assert isinstance(weight, CodedWeight)
    return weight


def write_linears(directory: Path, form: CodedForm, width: int, **rows: int) -> Tensor:
    """Writes random linears. Returns their dequantized weights below each other."""
    random = torch.Generator().manual_seed(len(rows))
    weights = {name: torch.randn(count, width, generator=random) for name, count in rows.items()}
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors |= write_codes(f"{name}.weight", weight, form)
    save_file(tensors, directory / "model.safetensors")
    return torch.cat([dequantize(weight, form) for weight in weights.values()])


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_that_are_stored_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("slora.models.weights.weight_reader._BLOCK_BYTES", 400)
    # Words of GPTQ and AWQ have codes or zero points of eight rows.
    has_eights = FORMS[form].method in ("gptq", "gptq_v2", "awq")
    rows = {"a": 16, "b": 40, "c": 8} if has_eights else {"a": 13, "b": 40, "c": 1}
    exact = write_linears(tmp_path, FORMS[form], 256, **rows)
    weight = read_weight(tmp_path, FORMS[form], [*rows.items()], 256)
    assert weight.codes.numel() == exact.numel() // 2
    assert all(part.is_contiguous() for part in (weight.codes, weight.scales, weight.minimums))
    if FORMS[form].is_symmetric:
        assert not weight.minimums.numel()
        is_half = FORMS[form].dtype == torch.float16
        assert weight.scales.dtype == (torch.float16 if is_half else torch.float32)
    assert torch.equal(weight.decode(), exact)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_the_columns_of_whole_groups(tmp_path: Path, form: str) -> None:
    exact = write_linears(tmp_path, FORMS[form], 256, a=24)
    halves = [
        read_weight(tmp_path, FORMS[form], [("a", 24)], 256, columns)
        for columns in (range(128), range(128, 256))
    ]
    assert torch.equal(torch.cat([half.decode() for half in halves], dim=1), exact)


def test_a_rank_with_a_part_of_a_group_is_refused(tmp_path: Path) -> None:
    form = FORMS["groups_of_128"]
    write_linears(tmp_path, form, 256, a=24)
    said = r"a\.weight has 256 columns, .* computes 64 to 127.*groups of 128.*smaller --tensor-parallel-size"
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, form, [("a", 24)], 256, range(64, 128))


def test_a_width_that_has_no_whole_groups_is_refused(tmp_path: Path) -> None:
    form = FORMS["rows"]
    write_linears(tmp_path, form, 72, a=24)
    with pytest.raises(ConfigError, match=r"a\.weight has 72 columns.*multiple of 32: use the unquantized"):
        read_weight(tmp_path, form, [("a", 24)], 72)


def test_zero_points_are_exact_with_scales_in_float32_of_few_bits(tmp_path: Path) -> None:
    form = replace(FORMS["zero_points"], dtype=torch.float32)
    write_linears(tmp_path, form, 64, a=8)
    with pytest.raises(ConfigError, match=r"a\.weight_scale has float32 scales .*not exact.*unquantized"):
        read_weight(tmp_path, form, [("a", 8)], 64)
    tensors = load_file(tmp_path / "model.safetensors")
    narrow = tensors["a.weight_scale"].half().float()
    save_file(tensors | {"a.weight_scale": narrow}, tmp_path / "model.safetensors")
    assert read_weight(tmp_path, form, [("a", 8)], 64).minimums.dtype == torch.float32


def test_columns_in_activation_order_are_refused(tmp_path: Path) -> None:
    form = FORMS["groups_of_128"]
    write_linears(tmp_path, form, 256, a=8)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["a.weight_g_idx"] = tensors["a.weight_g_idx"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a\.weight_g_idx groups columns .*activation order.*unquantized"):
        read_weight(tmp_path, form, [("a", 8)], 256)


DAMAGES = {
    "infinite": ("a.weight_scale", torch.full((8, 4), torch.inf), "not finite"),
    "other_groups": ("a.weight_scale", torch.ones(8, 2), r"shape \[8, 2\]; config.json requires \[8, 4\]"),
    "float64": ("a.weight_scale", torch.ones(8, 4).double(), "scales are read in F16, BF16, F32"),
    "codes": ("a.weight_packed", torch.zeros(8, 16, dtype=torch.int64), "weight_packed is I64"),
    "zero_points": ("a.weight_zero_point", torch.zeros(1, 4), "weight_zero_point is F32; it must be I32"),
    "no_zero_points": ("a.weight_zero_point", None, "has no tensor 'a.weight_zero_point'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_tensors_that_do_not_belong_together_are_refused(tmp_path: Path, name: str) -> None:
    form = replace(FORMS["zero_points"], group=32)
    write_linears(tmp_path, form, 128, a=8)
    tensors = load_file(tmp_path / "model.safetensors")
    key, tensor, said = DAMAGES[name]
    del tensors[key]
    save_file(tensors | ({} if tensor is None else {key: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, form, [("a", 8)], 128)


def test_rows_are_chosen_in_any_order(tmp_path: Path) -> None:
    """As of phi3, whose q, k and v are stored as one matrix of which a rank holds parts."""
    for form in FORMS.values():
        exact = write_linears(tmp_path, form, 256, a=64)
        codes = StoredCodes(form.method, form.group, has_zero_points=not form.is_symmetric)  # type: ignore[arg-type]
        reader = WeightReader(Checkpoint(tmp_path), torch.float32, CPU, codes=codes)
        rows = (range(40, 56), range(3, 7))
        weight = reader.linear([LinearPart("a.weight", (64, 256), rows, range(128, 256))])
        reader.read()
        assert isinstance(weight, CodedWeight)
        assert torch.equal(weight.decode(), torch.cat([exact[40:56], exact[3:7]])[:, 128:])


def test_gptq_refuses_activation_order_and_ambiguous_zero_points(tmp_path: Path) -> None:
    form = FORMS["gptq"]
    write_linears(tmp_path, form, 128, a=8)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"a.g_idx": tensors["a.g_idx"].flip(0)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"a\.g_idx groups columns that are not adjacent \(activation order\)"
    ):
        read_weight(tmp_path, form, [("a", 8)], 128)
    save_file(
        tensors | {"a.qzeros": torch.full((2, 1), -1, dtype=torch.int32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"a\.qzeros has zero points of 15, which some programs read as 16"):
        read_weight(tmp_path, replace(form, is_symmetric=False), [("a", 8)], 128)
    save_file(tensors | {"a.qzeros": torch.zeros(2, 1, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a\.qzeros has zero points other than 8, but .* symmetric"):
        read_weight(tmp_path, form, [("a", 8)], 128)


def test_a_bias_of_zeros_that_a_model_does_not_have_is_skipped(tmp_path: Path) -> None:
    form = FORMS["gptq"]
    exact = write_linears(tmp_path, form, 128, a=8)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"a.bias": torch.zeros(8)}, tmp_path / "model.safetensors")
    assert torch.equal(read_weight(tmp_path, form, [("a", 8)], 128).decode(), exact)
    save_file(tensors | {"a.bias": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has 1 tensors that its config.json does not describe.*a\.bias"):
        read_weight(tmp_path, form, [("a", 8)], 128)


@pytest.mark.parametrize("form", ["rows", "nf4"])
def test_linears_of_one_product_are_all_stored_in_4_bits_or_none(
    kit: ModelKit, tmp_path: Path, form: str
) -> None:
    stored, _ = write_coded_checkpoint(kit.directory, tmp_path, FORMS[form], kept="k_proj")
    with pytest.raises(ConfigError, match=r"k_proj\.weight is not stored in 4 bits, but.*unquantized"):
        LLM(stored, device="cpu")


@pytest.mark.parametrize("form", ["rows", "nf4"])
def test_a_head_of_4_bits_is_refused(kit: ModelKit, tmp_path: Path, form: str) -> None:
    stored, _ = write_coded_checkpoint(kit.directory, tmp_path, FORMS[form])
    tensors = load_file(stored / "model.safetensors")
    head = write_codes("lm_head.weight", tensors.pop("lm_head.weight"), FORMS[form])
    save_file(tensors | head, stored / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight is stored in 4 bits, but embeddings, heads and"):
        LLM(stored, device="cpu")


def test_weights_of_4_bits_are_not_rounded_again(kit: ModelKit, tmp_path: Path) -> None:
    stored, exact = write_coded_checkpoint(kit.directory, tmp_path, FORMS["groups_of_32"])
    with pytest.raises(ConfigError, match="quantization is int8, but this checkpoint is stored as int4"):
        LLM(stored, device="cpu", quantization="int8")
    verdict = judge(kit, stored, exact, kernels=KERNELS, quantization="int4")
    assert verdict.equal, verdict


@pytest.mark.parametrize("is_stored", (False, True))
def test_a_gpu_refuses_experts_of_4_bits_before_anything_is_read(
    kits: Kits, tmp_path: Path, *, is_stored: bool
) -> None:
    directory, remedy = kits("qwen3_moe").directory, "choose"
    if is_stored:
        config = read_json(directory / "config.json") | {"quantization_config": FORMS["awq"].config()}
        write_json(tmp_path / "config.json", config)
        directory, remedy = tmp_path, "use the unquantized checkpoint with"
    said = rf"experts in int4 .* CPUs only, .*has \d+ in a layer; {remedy} --quantization int8 or fp8"
    with pytest.raises(ConfigError, match=said):
        load_model(
            EngineConfig(directory, quantization="auto" if is_stored else "int4"),
            read_model_spec(directory),
            torch.bfloat16,
            torch.device("cuda"),
            max_model_len=64,
        )


def change(**changes: Any) -> dict[str, Any]:
    """The quantization_config of groups of 32 with other fields of its weights."""
    config = FORMS["groups_of_32"].config()
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def change_group(**changes: Any) -> dict[str, Any]:
    config = FORMS["groups_of_32"].config()
    config["config_groups"]["group_0"] |= changes
    return config


GPTQ, AWQ, NF4 = (FORMS[name].config() for name in ("gptq", "awq", "nf4"))
REFUSED = {
    "small_groups": (change(group_size=16), r"group_size is 16; it must be a multiple of 32"),
    "no_group_size": (change(group_size=None), r"group_size is None; it must be a positive whole number"),
    "bits": (change(num_bits=3), r"only symmetric 8-bit numbers and 4-bit integers are served"),
    "floats": (change(type="float"), r"only symmetric 8-bit numbers and 4-bit integers are served"),
    "strategy": (change(strategy="block"), r"strategy is 'block'; supported for 4-bit numbers are group and"),
    "activations": (
        change_group(input_activations={"num_bits": 8, "type": "int", "dynamic": True}),
        r"input_activations is .*only activations that are not quantized are served",
    ),
    "format": ({**change(), "format": "int-quantized"}, r"format is 'int-quantized'; 4-bit numbers are"),
    "gptq_bits": ({**GPTQ, "bits": 8}, r"bits is 8; of this quant_method, only 4 bits are served"),
    "gptq_groups": ({**GPTQ, "group_size": 16}, r"group_size is 16; it must be a multiple of 32"),
    "gptq_format": ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'; supported are gptq"),
    "gptq_layers": ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, r"dynamic is .*quantized in the same way"),
    "gptq_words": ({**GPTQ, "pack_dtype": "int16"}, r"pack_dtype is 'int16'; only int32 is served"),
    "awq_bits": ({**AWQ, "bits": 3}, r"bits is 3; of this quant_method, only 4 bits are served"),
    "awq_version": ({**AWQ, "version": "gemv"}, r"version is 'gemv'; only gemm is served"),
    "awq_backend": ({**AWQ, "backend": "llm-awq"}, r"backend is 'llm-awq'; only autoawq is served"),
    "awq_symmetric": ({**AWQ, "zero_point": False}, r"zero_point is False; AWQ is served only with zero points"),
    "bnb_8_bits": (
        {**NF4, "load_in_4bit": False, "load_in_8bit": True},
        r"load_in_8bit is True; LLM.int8 rounds activations too, .*unquantized checkpoint, .*to int8",
    ),
    "bnb_bits": ({**NF4, "load_in_4bit": False}, r"load_in_4bit is False; only 4 bits of bitsandbytes"),
    "bnb_type": ({**NF4, "bnb_4bit_quant_type": "af4"}, r"bnb_4bit_quant_type is 'af4'; supported are nf4 and fp4"),
    "sparse": ({**change(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_form_is_refused_by_name(kit: ModelKit, tmp_path: Path, name: str) -> None:
    config, said = REFUSED[name]
    fields = read_json(kit.directory / "config.json")
    content = json.dumps(fields | {"quantization_config": config})
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"quantization_config.*{said}"):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", ["integers", "any"])
def test_wrong_products_with_4_bit_weights_are_found_at_start(dtype: torch.dtype, table: str) -> None:
    weight = make_coded(96, 256, 64, table, scale_dtype=torch.float16, has_minimums=True)
    site = LoraSite(0, 0, 0, 256, (96,))

    class Wrong(TorchKernels):
        def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
            product = super().coded_linear(x, weight, bias)
            if len(x) == 17:
                product[16, 95] *= 1.5
            return product

    check_codes(Linear(weight, None, site), dtype, TorchKernels())
    check_codes(Linear(weight, None, site), dtype, select_kernels(KERNELS, CPU))
    check_codes(Linear(weight.decode(), None, site), dtype, Wrong())
    with pytest.raises(ConfigError, match="wrong products of 17 rows with 4-bit weights"):
        check_codes(Linear(weight, None, site), dtype, Wrong())
