"""Patterns of untrusted configs: they mean what they mean to Python's matcher, and cannot run for long."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft import pattern_process
from slora_adapters.peft.adapter import TENSORS_NAME, AdapterLimits, bundle
from slora_adapters.peft.peft_directory import CONFIG_NAME, parse_adapter, read_adapter
from slora_adapters.peft.targeting import PatternField, match_fields
from tests.adapters.hand_made import SHAPE, make_config, make_members, reason_codes, write_directory

_LINEARS_OF_80_LAYERS = [f"model.layers.{layer}.{x.path}" for layer in range(80) for x in SHAPE.linears]
HOSTILE = "(.*.*.*.*.*.*.*.*.*.*)*(x+x+)+y"
WILD_CONFIG = make_config(
    target_modules=r"^(?!.*lm_head).*layers\.\d+\.(self_attn\.q|mlp\.down)_proj",
    exclude_modules=r".*\.(k|v)_proj",
    alpha_pattern={r"layers\.0\..*": 5, "down_proj": 7},
    rank_pattern={r"(q|down)_proj": 2},
)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.[qk]_proj",
        r"^(?!.*layers\.1\.).*\.(?:q|o)_proj$",
        r"(?i).*Q_PROJ",
        r".*(a)t\1?.*",
        r"(?<=x)y|.*up.*",
    ],
)
def test_a_pattern_matches_what_it_matches_in_python(pattern: str) -> None:
    names = [module.path for module in SHAPE.modules]
    (whole,), _ = match_fields([PatternField("target_modules", [pattern], is_whole=True)], names)
    assert whole == [0 if re.fullmatch(pattern, name) else None for name in names]


MANY_LONG_PATTERNS = PatternField("rank_pattern", [f"x{number}" + r"\w." * 650 for number in range(2048)])


@pytest.mark.usefixtures("no_process")
def test_many_long_plain_patterns_are_matched_in_a_limited_process() -> None:
    """4,000,000 characters in plain patterns took the loader seconds to compile, for each load."""
    assert MANY_LONG_PATTERNS.is_plain
    with pytest.raises(AssertionError, match="a process was started"):
        match_fields([MANY_LONG_PATTERNS], [module.path for module in SHAPE.modules])


@pytest.mark.soak
def test_many_long_plain_patterns_are_refused() -> None:
    _, (reason,) = match_fields([MANY_LONG_PATTERNS], [module.path for module in SHAPE.modules])
    assert reason.code == "rank_pattern" and "more than 2 s of CPU time" in reason.message


def test_the_first_matching_pattern_of_each_field_wins() -> None:
    fields = [PatternField("rank_pattern", ["(q)_proj", "(.*)_proj"]), PatternField("alpha_pattern", ["b"])]
    assert match_fields(fields, ["a.q_proj", "up_proj", "x_proj.b"]) == ([[0, 1, None], [None, None, 0]], [])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"target_modules": HOSTILE}, id="target_modules"),
        pytest.param({"exclude_modules": HOSTILE}, id="exclude_modules", marks=pytest.mark.soak),
        pytest.param({"rank_pattern": {HOSTILE: 2}}, id="rank_pattern", marks=pytest.mark.soak),
        pytest.param(
            {"alpha_pattern": {"q_proj": 4, HOSTILE: 4}}, id="alpha_pattern", marks=pytest.mark.soak
        ),
    ],
)
def test_a_pattern_with_unbounded_matching_time_is_refused_by_its_field(change: dict[str, object]) -> None:
    (field,) = change
    members = {name: memoryview(raw) for name, raw in make_members(make_config(**change)).items()}
    with pytest.raises(AdapterInvalid, match=rf"{field}: matching takes more than 2 s of CPU time; simplify"):
        parse_adapter(members, SHAPE, AdapterLimits())


@pytest.mark.parametrize("pattern", ["(", "*", "(?(7)a)", "(a)" + "(" * 4000 + "a" + ")" * 4000])
def test_an_invalid_pattern_is_refused_by_its_field(pattern: str) -> None:
    for field in ("exclude_modules", "rank_pattern"):
        value = pattern if field == "exclude_modules" else {pattern: 2}
        assert field in reason_codes(make_members(make_config(**{field: value})))


def test_a_failure_of_the_matching_process_is_not_blamed_on_the_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pattern_process, "__file__", "/nowhere.py")
    with pytest.raises(OSError, match="the process that matches patterns ended with exit code 2"):
        reason_codes(make_members(make_config(exclude_modules=".*")))


@pytest.mark.usefixtures("no_process")
def test_the_patterns_of_eva_for_an_80_layer_model_need_no_process() -> None:
    modules = _LINEARS_OF_80_LAYERS
    field = PatternField("rank_pattern", [name.replace(".", r"\.") for name in modules])
    assert match_fields([field], modules) == ([list(range(560))], [])


def test_a_config_is_stored_with_the_modules_that_its_patterns_matched(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """So a load starts no process, and the digest covers what is served."""
    directory = write_directory(tmp_path / "adapter", make_members(WILD_CONFIG))
    adapter = read_adapter(directory, SHAPE, AdapterLimits())
    assert [pair.scale for pair in adapter.pairs.values()] == [2.5, 2.5, 2.0, 3.5]
    members = bundle(adapter, directory, tmp_path)
    config, tensors = members[CONFIG_NAME], members[TENSORS_NAME]
    assert isinstance(config, bytes) and isinstance(tensors, Path)
    request.getfixturevalue("no_process")
    stored = {CONFIG_NAME: memoryview(config), TENSORS_NAME: memoryview(tensors.read_bytes())}
    again = parse_adapter(stored, SHAPE, AdapterLimits())
    assert again.digest == adapter.digest and again.config == adapter.config
    assert [pair.scale for pair in again.pairs.values()] == [2.5, 2.5, 2.0, 3.5]
    assert json.loads(config)["exclude_modules"] is None
    assert json.loads(config)["slora_digest"] == 2, "so a load hashes with BLAKE3 first"


def test_patterns_that_match_the_same_modules_give_the_same_digest() -> None:
    targets = (r".*\.(q|down)_proj", r".*(down|q)_proj")
    digests = {
        parse_adapter(
            {n: memoryview(raw) for n, raw in make_members(make_config(target_modules=target)).items()},
            SHAPE,
            AdapterLimits(),
        ).digest
        for target in targets
    }
    assert len(digests) == 1
