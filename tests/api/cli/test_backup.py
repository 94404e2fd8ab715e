"""A backup of a server that goes on working, restored into the directory of another one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slora_api.cli.main import main
from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, Served, serving


def push(served: Served, key: str, name: str, adapter: Path) -> None:
    files = {
        "config": (adapter / "adapter_config.json").read_bytes(),
        "weights": (adapter / "adapter_model.safetensors").read_bytes(),
    }
    with served.client(key) as client:
        client.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()


def complete(served: Served, key: str, model: str) -> list[dict[str, Any]]:
    body = {"model": model, "prompt": "hello hello", "max_tokens": 12, "temperature": 0}
    with served.client(key) as client:
        choices: list[dict[str, Any]] = (
            client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        )
    return choices


@contextmanager
def busy(server: Served, kit: Kit) -> Iterator[None]:
    """Sends requests and pushes during the block, each as soon as the one before has ended. The block begins after the
    first."""
    key = server.make_key("backup-busy")
    begun, stopped, errors = threading.Event(), threading.Event(), []

    def work() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            try:
                push(server, key, f"late{number}", kit.small)
                complete(server, key, f"late{number}")
            except Exception as error:
                errors.append(error)
                return
            finally:
                begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert not errors


def test_a_restored_server_gives_the_same_tokens_to_the_same_key(
    server: Served,
    kit: Kit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = server.make_key("backup-owner", "voice@prod")
    revoked = server.make_key("backup-owner")
    push(server, key, "voice", kit.wide)
    with server.client(ADMIN_KEY) as admin:
        admin.delete(f"/admin/keys/{revoked.split('_')[1]}").raise_for_status()
    with server.client(key) as client:
        client.put("/v1/adapters/voice/aliases/prod", json={"versions": {"1": 100}}).raise_for_status()
    expected = complete(server, key, "default")
    with busy(server, kit):
        assert main(["backup", str(tmp_path / "backup"), "--data-dir", str(server.data_dir)]) == 0
    assert "keep it as safe as the servers" in capsys.readouterr().err
    assert main(["restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "other" / "data")]) == 0
    assert main(["restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "other" / "data")]) == 1
    assert "nothing was restored: --data-dir" in capsys.readouterr().err
    with serving(kit.base, tmp_path / "other" / "data", kernels="auto") as restored:
        restored.wait_until_ready()
        assert complete(restored, key, "default") == expected
        with restored.client(revoked) as client:
            assert client.get("/v1/models").status_code == 401
        with restored.client(ADMIN_KEY) as admin:
            tenants = {tenant["name"] for tenant in admin.get("/admin/tenants").json()["data"]}
            actions = [entry["action"] for entry in admin.get("/admin/audit").json()["data"]]
    assert {"backup-owner", "backup-busy"} <= tenants and "backup.restore" in actions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["backup", "new", "--data-dir", "nowhere"],
            "is not the data directory of a server: check --data-dir",
        ),
        (["restore", "nowhere", "--data-dir", "new"], "is not a complete backup"),
    ],
)
def test_what_cannot_be_backed_up_or_restored_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_shared_database_is_not_restored_beside_a_store_of_one_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["restore", "b", "--data-dir", str(tmp_path / "new"), "--database", "postgresql://host/name"])
    assert "give the --store that all of them can reach" in capsys.readouterr().err
