"""Reads the ModelSpec of a model directory.

For a model that our decoder does not support, `slora.models.model_structure` derives the ModelSpec with torch. A
process that has not imported torch runs that module in a subprocess.
"""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

from slora.core.errors import ConfigError
from slora.models.config_fields import read_json_object
from slora.models.model_config import ModelConfig
from slora.models.model_family import FAMILIES
from slora.models.model_spec import REFUSED_EXIT_CODE, ModelSpec

__all__ = ["MODEL_IMPLS", "read_model_spec"]

MODEL_IMPLS = ("auto", "slora", "transformers")
# Building modules without data takes seconds, and so does importing torch. A busy machine needs much longer.
_SUBPROCESS_TIMEOUT_S = 300
# Classes of transformers whose head does not write text.
_OTHER_HEAD = re.compile(
    r".*For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)"
)


def read_model_spec(directory: Path, model_impl: str = "auto") -> ModelSpec:
    """Reads the model in `directory`. Raises ConfigError naming the file and field, or what can't be served.

    model_impl: `slora` for our decoder, `transformers` for transformers' classes. `auto` uses our decoder for the
    families that it supports, and transformers for all others.
    """
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl is {model_impl!r}; it must be one of {', '.join(MODEL_IMPLS)}")
    model_type = _read_model_type(directory)
    if model_impl == "slora" or (model_impl == "auto" and model_type in FAMILIES):
        return ModelSpec.from_config(ModelConfig.from_directory(directory))
    # A process that has imported torch reads the spec itself. Other processes must not import torch.
    return _read_spec_in_process(directory) if "torch" in sys.modules else _read_spec_in_subprocess(directory)


def _read_model_type(directory: Path) -> str | None:
    """Raises ConfigError for a model whose head does not write text."""
    path = directory / "config.json"
    try:
        config = read_json_object(path)
    except OSError as error:
        raise ConfigError(f"no model at {directory}: {path} can't be read ({error.strerror})") from error
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and _OTHER_HEAD.fullmatch(name):
            raise ConfigError(
                f"{path}: architectures is [{name[:128]!r}], a model with a head for classification, which is not "
                "served; use the model for text that it was trained from (...ForCausalLM)"
            )
    value = config.get("model_type")
    return value if isinstance(value, str) else None


def _read_spec_in_process(directory: Path) -> ModelSpec:
    return cast(
        ModelSpec, importlib.import_module("slora.models.model_structure").read_transformers_spec(directory)
    )


def _read_spec_in_subprocess(directory: Path) -> ModelSpec:
    command = [sys.executable, "-P", "-m", "slora.models.model_structure", str(directory)]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            timeout=_SUBPROCESS_TIMEOUT_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{directory}: reading the model's module tree took more than {_SUBPROCESS_TIMEOUT_S} s"
        ) from error
    if answer.returncode != 0:
        if answer.returncode == REFUSED_EXIT_CODE and answer.stdout.strip():
            raise ConfigError(answer.stdout.strip())
        last_line = (answer.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(
            f"{directory}: the program that reads the model's module tree ended with {answer.returncode}: {last_line}"
        )
    return ModelSpec.from_plain(json.loads(answer.stdout))
