"""`slora key` and `slora admin-key` against a running API."""

import json
import time

import pytest

from slora_api.cli.main import main
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform


def slora(platform: Platform, *arguments: str, key: str = ADMIN_KEY) -> str:
    return run_slora(platform.url, *arguments, SLORA_ADMIN_KEY=key).strip()


def key_id(secret: str) -> str:
    return secret.split("_")[1]


def test_a_key_is_created_listed_rotated_and_revoked(platform: Platform) -> None:
    assert platform.upload(platform.key("acme"), "voice").status_code == 201
    flags = ("--name", "ci", "--scope", "inference", "--scope", "usage:read", "--model", "voice")
    first = slora(platform, "key", "create", "acme", *flags, "--adapter", "voice", "--expires", "30d")
    second = slora(platform, "key", "rotate", key_id(first), "--overlap", "1h", "--expires", "60d")
    assert platform.services.keys.store.authenticate(second) is not None
    listed = {key["key_id"]: key for key in json.loads(slora(platform, "key", "list", "acme", "--json"))}
    old, new = listed[key_id(first)], listed[key_id(second)]
    assert (old["name"], old["scopes"], old["models"]) == ("ci", ["inference", "usage:read"], ["voice"])
    assert old["replaced_by"] == new["key_id"]
    for key, days in ((old, 1 / 24), (new, 60)):
        assert abs(key["expires_at"] - time.time() - days * 86_400) < 60
    slora(platform, "key", "revoke", key_id(second))
    heading, *rows = slora(platform, "key", "list", "acme").splitlines()
    assert heading.split("  ")[0].strip() == "KEY" and "LAST USED" in heading and "SCOPES" in heading
    states = {row.split()[0]: row.split()[2] for row in rows}
    assert (states[key_id(first)], states[key_id(second)]) == ("rotated", "revoked")


def test_operators_keys_are_created_listed_rotated_and_revoked(platform: Platform) -> None:
    ada = slora(platform, "admin-key", "create", "ada", "--expires", "90d")
    again = slora(platform, "admin-key", "rotate", key_id(ada), "--overlap", "1h", key=ada)
    slora(platform, "admin-key", "revoke", key_id(ada), key=again)
    _, *rows = slora(platform, "admin-key", "list", key=again).splitlines()
    states = {row.split()[0]: row.split()[2] for row in rows}
    assert states == {key_id(ada): "revoked", key_id(again): "active"}


@pytest.mark.parametrize("duration", ["30", "d", "-1d", "1w", "0d", "1.5h"])
def test_an_invalid_duration_is_refused_with_an_example(
    duration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["admin-key", "create", "ada", f"--expires={duration}"])
    assert f"{duration!r} is not a duration" in capsys.readouterr().err
