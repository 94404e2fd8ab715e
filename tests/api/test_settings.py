from collections.abc import Callable
from pathlib import Path

import pytest

from slora.core.engine_config import EngineConfig
from slora.core.setting import ByteSize, SettingRefused
from slora_api.cli.main import make_parser
from slora_api.core.settings import Settings, read_settings, server_setting_specs, unknown_variables

MODEL = {"model": "somewhere"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5gib", 3 * 2**29),
        (" 7 kb ", 7000),
        ("3b", 3),
        ("9007199254740993", 2**53 + 1),  # A float has no such number.
    ],
)
def test_byte_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert ByteSize().read(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1 gigabyte", "1e9", "0x10", "MiB", "9" * 20, "9" * 400])
def test_an_invalid_byte_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        ByteSize().read(text)


def test_defaults_are_the_ones_of_the_dataclass() -> None:
    assert read_settings(MODEL, {}) == Settings(EngineConfig(Path("somewhere")))


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default() -> None:
    environment = {"SLORA_PORT": "9000", "SLORA_MAX_NUM_SEQS": "7"}
    settings = read_settings({**MODEL, "port": "9001"}, environment)
    assert (settings.port, settings.engine.max_num_seqs, settings.host) == (9001, 7, "127.0.0.1")


def test_an_empty_variable_counts_as_unset() -> None:
    assert read_settings(MODEL, {"SLORA_PORT": "", "SLORA_POOL_BYTES": ""}) == read_settings(MODEL, {})


def test_auto_is_resolved_at_start() -> None:
    settings = read_settings({**MODEL, "pool_bytes": "auto", "max_model_len": "2048"}, {})
    assert (settings.engine.pool_bytes, settings.engine.max_model_len) == (None, 2048)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("port", "http", "a whole number from 0 to 65535"),
        ("port", "65536", "a whole number from 0 to 65535"),
        ("pool_bytes", "lots", "auto, or a size in bytes"),
        ("max_model_len", "0", "auto, or a whole number of at least 1"),
        ("device", "tpu", "auto, cpu or cuda"),
        ("dtype", "int8", "auto, float32, bfloat16 or float16"),
        ("prefix_cache", "on", "off, tenant or public"),
        ("swap_bytes", "some", "auto, or a size in bytes"),
        ("drain_seconds", "-1", "a number of seconds, 0 or more"),
        ("drain_seconds", "inf", "a number of seconds, 0 or more"),
    ],
)
def test_a_bad_value_is_refused_with_its_source_the_value_and_what_is_accepted(
    name: str, value: str, accepted: str
) -> None:
    flag, variable = "--" + name.replace("_", "-"), "SLORA_" + name.upper()
    with pytest.raises(SettingRefused) as by_flag:
        read_settings({**MODEL, name: value}, {})
    with pytest.raises(SettingRefused) as by_environment:
        read_settings(MODEL, {variable: value})
    for error, source in ((by_flag, flag), (by_environment, variable)):
        assert source in str(error.value) and repr(value) in str(error.value) and accepted in str(error.value)


def test_a_server_without_a_model_is_refused_by_flag_and_variable_name() -> None:
    with pytest.raises(SettingRefused, match=r"--model \(SLORA_MODEL\)"):
        read_settings({}, {})


def test_hosts_that_share_names_must_share_a_store() -> None:
    shared = {**MODEL, "database": "postgresql://far/slora"}
    with pytest.raises(SettingRefused, match=r"give a --store \(SLORA_STORE\) that all hosts can reach"):
        read_settings(shared, {})
    assert read_settings(shared, {"SLORA_STORE": "s3://bucket"}).database == "postgresql://far/slora"


def test_an_unknown_variable_is_found_with_its_closest_setting() -> None:
    environment = {
        "SLORA_MAX_MODEL_LENGTH": "1",
        "SLORA_PORT": "1",
        "SLORA_URL": "u",
        "PATH": "p",
        "SLORA_ZZZZ": "",
    }
    assert unknown_variables(environment) == {
        "SLORA_MAX_MODEL_LENGTH": "SLORA_MAX_MODEL_LEN",
        "SLORA_ZZZZ": None,
    }


def test_every_setting_is_a_flag_of_serve() -> None:
    given = [part for spec in server_setting_specs() for part in (spec.flag, "x")]
    values = vars(make_parser().parse_args(["serve", *given]))
    assert all(values[spec.name] == "x" for spec in server_setting_specs())
    assert vars(make_parser().parse_args(["demo", "here"]))["demo"] == "here"


@pytest.mark.parametrize("command", ["serve", "demo", "doctor"])
def test_the_help_is_one_screen_and_the_whole_help_explains_every_setting(
    command: str, capsys: pytest.CaptureFixture[str], set_variables: Callable[..., None]
) -> None:
    set_variables(COLUMNS="80")
    helps = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([command, flag])
        assert ended.value.code == 0
        helps.append(capsys.readouterr().out)
    usual, whole = helps
    assert len(usual.splitlines()) <= 50
    words = " ".join(whole.split())
    for spec in server_setting_specs():
        assert " ".join(spec.help_text.replace("%%", "%").split()) in words


@pytest.mark.parametrize("command", ["deploy", "status", "stop"])
def test_the_help_of_a_cluster_shows_how_it_is_found(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command] if command == "deploy" else ["cluster", command]
    with pytest.raises(SystemExit):
        make_parser().parse_args([*words, "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--cluster-name", "--ray-address", "--data-dir"))
