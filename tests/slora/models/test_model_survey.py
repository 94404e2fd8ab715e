"""docs/models.md says of every decoder class of transformers whether it is served."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from slora import LLM, SamplingParams
from slora.models.model_spec import read_model_spec
from slora.models.model_structure import find_auto_class
from tests.slora.engine.test_parity import Work, answer, judge
from tests.slora.models.model_survey import (
    DOCUMENT,
    list_model_types,
    make_small_config,
    read_document,
    survey,
    write_document,
)
from tests.support.config_judge import Verdict
from tests.support.covering import soaked
from tests.support.model_kit import ModelKit
from tests.support.oracle import Verdict as TokenVerdict
from tests.support.peft_adapters import make_adapter
from tests.support.tiny_models import fill_randomly

NATIVE, OTHER = "Computed by slora's decoder", "Computed by transformers' classes"


def test_the_page_names_every_decoder_class_once_and_none_is_wrong() -> None:
    found = read_document()
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "Wrong" not in found.values()
    if f"transformers {transformers.__version__}," in text:
        assert sorted(found) == list_model_types()
    assert set(found.values()) >= {NATIVE, OTHER, "Refused"}


@pytest.mark.parametrize(
    ("model_type", "heading"),
    soaked(
        [("qwen3", NATIVE), ("lfm2", OTHER), ("whisper", "Refused")],
        ("qwen3", NATIVE),
        ("whisper", "Refused"),
    ),
)
def test_the_page_says_what_the_survey_finds(model_type: str, heading: str) -> None:
    (found,) = survey([model_type])
    assert found.verdict is (Verdict.REFUSED if heading == "Refused" else Verdict.EQUAL)
    assert f"## {heading} (1)" in write_document([found])
    assert read_document()[model_type] == heading


@pytest.mark.soak
def test_the_page_is_what_the_survey_of_all_classes_writes() -> None:
    assert write_document(survey(list_model_types())) == DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.soak
def test_adapters_of_experts_and_routers_answer_as_peft_does_on_each_class(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    total, names = TokenVerdict(), []
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    for model_type in (name for name, heading in read_document().items() if heading == OTHER):
        raw, directory = make_small_config(model_type), tmp_path / model_type
        config = CONFIG_MAPPING[model_type].from_dict(raw)
        with torch.device("meta"):
            names_of_modules = [
                name for name, _ in find_auto_class(config).from_config(config).named_modules()
            ]
        if not any(name.endswith(".experts") for name in names_of_modules):
            continue

        def make(config: PreTrainedConfig = config, model_type: str = model_type) -> PreTrainedModel:
            model = find_auto_class(config).from_config(config, dtype=torch.float32).eval()
            fill_randomly(model, model_type)
            return model

        make().save_pretrained(directory / "base")
        linears = read_model_spec(directory / "base").sizes.linears
        parameters = [linear.weight_path for linear in linears if linear.role != "linear"]
        if parameters:
            lora = {"r": 3, "target_modules": [], "target_parameters": parameters}
            make_adapter(directory / "experts", make(), std=0.15, **lora)
            kit = ModelKit(directory / "base", {"experts": directory / "experts"})
            work = Work([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8]], ["experts", None, "experts"])
            llm = LLM(kit.directory, pool_bytes=1 << 24, dtype="float32")
            verdict = judge(kit.oracle, work, answer(llm, kit, work, params))
            assert verdict.equal, (model_type, verdict)
            total, names = total + verdict, [*names, model_type]
        shutil.rmtree(directory)
    report(f"adapters on experts of {len(names)} classes ({', '.join(names)}): {total}")
    assert len(names) > 30
