"""`slora key` and `slora admin-key` against a running API."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slora_api.cli.main import main
from tests.adapters.hand_made import make_members
from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

Slora = Callable[..., str]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


@pytest.fixture
def slora(platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Slora:
    """Runs a command that succeeds, and returns what it prints."""
    monkeypatch.setenv("SLORA_URL", platform.url)
    monkeypatch.setenv("SLORA_ADMIN_KEY", ADMIN_KEY)

    def run(*arguments: str) -> str:
        assert main(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out.strip()

    return run


def key_id(secret: str) -> str:
    return secret.split("_")[1]


def test_a_key_is_created_listed_rotated_and_revoked(platform: Platform, slora: Slora) -> None:
    assert platform.upload(platform.key("acme"), "voice", make_members()).status_code == 201
    flags = ("--name", "ci", "--scope", "inference", "--scope", "usage:read", "--model", "voice")
    first = slora("key", "create", "acme", *flags, "--adapter", "voice", "--expires", "30d")
    second = slora("key", "rotate", key_id(first), "--overlap", "1h", "--expires", "60d")
    assert platform.services.key_store.authenticate(second) is not None
    listed = {key["key_id"]: key for key in json.loads(slora("key", "list", "acme", "--json"))}
    old, new = listed[key_id(first)], listed[key_id(second)]
    assert (old["name"], old["scopes"], old["models"]) == ("ci", ["inference", "usage:read"], ["voice"])
    assert old["replaced_by"] == new["key_id"]
    for key, days in ((old, 1 / 24), (new, 60)):
        assert abs(key["expires_at"] - time.time() - days * 86_400) < 60
    slora("key", "revoke", key_id(second))
    heading, *rows = slora("key", "list", "acme").splitlines()
    assert heading.split("  ")[0].strip() == "KEY" and "LAST USED" in heading and "SCOPES" in heading
    states = {row.split()[0]: row.split()[2] for row in rows}
    assert (states[key_id(first)], states[key_id(second)]) == ("rotated", "revoked")


def test_operators_keys_are_created_listed_rotated_and_revoked(
    slora: Slora, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = slora("admin-key", "create", "ada", "--expires", "90d")
    monkeypatch.setenv("SLORA_ADMIN_KEY", ada)
    again = slora("admin-key", "rotate", key_id(ada), "--overlap", "1h")
    monkeypatch.setenv("SLORA_ADMIN_KEY", again)
    slora("admin-key", "revoke", key_id(ada))
    states = {row.split()[0]: row.split()[2] for row in slora("admin-key", "list").splitlines()[1:]}
    assert states == {key_id(ada): "revoked", key_id(again): "active"}


@pytest.mark.parametrize("duration", ["30", "d", "-1d", "1w", "0d", "1.5h"])
def test_an_invalid_duration_is_refused_with_an_example(
    duration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["admin-key", "create", "ada", f"--expires={duration}"])
    assert f"{duration!r} is not a duration" in capsys.readouterr().err
