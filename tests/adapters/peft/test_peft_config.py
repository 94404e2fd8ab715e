import json

import pytest
from peft import LoraConfig

from slora_adapters.peft.peft_config import KNOWN_FIELDS, parse_peft_config
from tests.adapters.hand_made import make_config, make_members, reason_codes

REFUSED = {
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "velora_config": {"num_groups": 4},
    "monteclora_config": {"num_samples": 4},
}


@pytest.mark.parametrize("key", REFUSED)
def test_each_variant_is_refused_by_its_own_name(key: str) -> None:
    assert reason_codes(make_members(make_config(**{key: REFUSED[key]}))) == [key]


@pytest.mark.parametrize(
    "init",
    ["pissa", "pissa_niter_16", "corda", "olora", "OLoRA", "loftq", "lora_ga", "news", ["pissa"], 7, {}],
)
def test_initialisations_that_change_the_base_or_are_unknown_are_refused(init: object) -> None:
    assert reason_codes(make_members(make_config(init_lora_weights=init))) == ["init_lora_weights"]


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_accepted(init: object) -> None:
    assert reason_codes(make_members(make_config(init_lora_weights=init))) == []


@pytest.mark.parametrize("fields", [{"feedforward_modules": ["down_proj"]}, {"r": None, "alpha": 8}])
def test_another_kind_of_adapter_is_refused_with_one_reason_and_the_remedy(fields: dict[str, object]) -> None:
    config, reasons = parse_peft_config(json.dumps(make_config(peft_type="LOKR") | fields).encode())
    assert config is None and [reason.code for reason in reasons] == ["peft_type"]
    assert "'LOKR'" in reasons[0].message and "LoraConfig" in reasons[0].message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"null", "holds the JSON value null, not an object"),
        (b"\xef\xbb\xbf{}", "is not valid JSON: it begins with a byte order mark; save it without one"),
        (json.dumps(make_config(r=None)).encode(), "r is null; it must be a positive whole number"),
        (
            json.dumps(make_config(bias=[None, True])).encode(),
            "bias is [null, true]; it must be one of none, all, lora_only",
        ),
    ],
    ids=["null", "mark", "missing", "list"],
)
def test_a_fault_is_told_in_the_words_of_json(raw: bytes, message: str) -> None:
    """Born from a fault: messages had NoneType, True and a function of Python that an uploader cannot call."""
    _, (reason,) = parse_peft_config(raw)
    assert reason.message.removeprefix("adapter_config.json ") == message


def test_every_field_of_this_version_of_peft_is_known_here() -> None:
    assert set(LoraConfig.__dataclass_fields__) == KNOWN_FIELDS


def test_what_peft_writes_by_default_is_accepted() -> None:
    written = json.loads(json.dumps(LoraConfig(r=2).to_dict(), default=list))
    assert reason_codes(make_members({**written, "target_modules": ["q_proj", "down_proj"]})) == []


def test_an_unknown_key_is_refused_unless_it_is_empty() -> None:
    assert reason_codes(make_members(make_config(use_xlora=False, xlora=None, x_list=[], x_table={}))) == []
    assert reason_codes(make_members(make_config(use_xlora=True))) == ["config_unknown_key"]


WRONG_VALUES = [
    ("rank", {"r": None}),
    ("rank", {"rank_pattern": {"q_proj": "8"}}),
    ("alpha", {"lora_alpha": 10**400}),
    ("alpha", {"alpha_pattern": {"q_proj": None}}),
    ("rank_pattern", {"rank_pattern": ["q_proj"]}),
    ("rank_pattern", {"rank_pattern": {"(q_proj": 2}}),
    ("alpha_pattern", {"alpha_pattern": {r"(?i)q_proj": 2}}),
    ("exclude_modules", {"exclude_modules": "a" * 9000}),
    ("target_modules", {"target_modules": None}),
    ("target_modules", {"target_modules": [1]}),
    ("target_modules", {"target_modules": "*"}),
    ("exclude_modules", {"exclude_modules": {"q_proj": 1}}),
    ("layers_to_transform", {"layers_to_transform": "all"}),
    ("layers_to_transform", {"layers_to_transform": 0, "target_modules": ".*q_proj"}),
    ("layers_pattern", {"layers_pattern": "layers"}),
]


@pytest.mark.parametrize(("code", "change"), WRONG_VALUES)
def test_wrong_values_are_refused_by_field(code: str, change: dict[str, object]) -> None:
    assert code in reason_codes(make_members(make_config(**change)))


def test_several_faults_are_all_reported() -> None:
    config = make_config(use_qalora=True, bias="some", r=-1, lora_alpha="x", surprise=1)
    _, reasons = parse_peft_config(json.dumps(config).encode())
    assert [reason.code for reason in reasons] == [
        "use_qalora",
        "config_unknown_key",
        "rank",
        "alpha",
        "bias",
    ]


def test_normalised_json_of_a_config_reads_as_the_same_config() -> None:
    patterns = {"rank_pattern": {"q_proj": 3, "a": 4}, "alpha_pattern": {"z": 1, "b": 2.5}}
    modules = {"layers_to_transform": 1, "layers_pattern": "layers", "exclude_modules": ["up_proj"] * 2}
    written = make_config(use_rslora=True, **patterns, **modules)
    config, reasons = parse_peft_config(json.dumps(written).encode())
    assert config is not None and not reasons
    assert parse_peft_config(json.dumps(config.to_json()).encode()) == (config, [])
