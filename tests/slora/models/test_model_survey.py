"""docs/models.md says of every decoder class of transformers whether it is served."""

import pytest
import transformers

from tests.slora.models.model_survey import (
    DOCUMENT,
    list_model_types,
    read_document,
    survey,
    write_document,
)
from tests.support.config_judge import Verdict

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
    [("qwen3", NATIVE), ("lfm2", OTHER), ("dbrx", OTHER), ("falcon_mamba", "Refused")],
)
def test_the_page_says_what_the_survey_finds(model_type: str, heading: str) -> None:
    (found,) = survey([model_type])
    assert found.verdict is (Verdict.REFUSED if heading == "Refused" else Verdict.EQUAL)
    assert f"## {heading} (1)" in write_document([found])
    assert read_document()[model_type] == heading


@pytest.mark.soak
def test_the_page_is_what_the_survey_of_all_classes_writes() -> None:
    assert write_document(survey(list_model_types())) == DOCUMENT.read_text(encoding="utf-8")
