"""A backup of a server that goes on working, restored into the directory of another one."""

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slora_api.cli.main import main
from tests.api.conftest import Kit
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import ADMIN_KEY, Served, serving, wait_for
from tests.api.server.test_server import upload
from tests.support.repeated_calls import repeating


def complete(served: Served | Platform, key: str, model: str) -> tuple[str, list[dict[str, Any]]]:
    """The digest of the adapter, and the choices."""
    body = {"model": model, "prompt": "hello hello", "max_tokens": 12, "temperature": 0}
    with served.client(key) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status()
    return answer.headers["x-slora-adapter-digest"], answer.json()["choices"]


@contextmanager
def started(kit: Kit, data: Path, *, soak: bool) -> Iterator[Served | Platform]:
    """A server on restored data. The quick run has an engine without weights, so its tokens mean nothing."""
    if not soak:
        with running_platform(data, ScriptedEngine([deltas_of(b"ok")])) as platform:
            yield platform
        return
    with serving(kit.base, data, kernels="auto") as served:
        served.wait_until_ready()
        yield served


def blob(data: Path, digest: str) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (data / "adapters" / "blobs" / digest[:2] / digest).iterdir()
    }


def test_a_restored_server_gives_the_same_tokens_to_the_same_key(
    server: Served, kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, soak: bool
) -> None:
    key = server.make_key("backup-owner", "voice@prod")
    revoked = server.make_key("backup-owner")
    upload(server, key, "voice", kit.wide).raise_for_status()
    with server.client(ADMIN_KEY) as admin:
        admin.delete(f"/admin/keys/{revoked.split('_')[1]}").raise_for_status()
    with server.client(key) as client:
        client.put("/v1/adapters/voice/aliases/prod", json={"versions": {"1": 100}}).raise_for_status()
    digest, expected = complete(server, key, "default")
    other, pushed = server.make_key("backup-busy"), list[str]()

    def push_and_ask() -> None:
        name = f"late{len(pushed)}"
        upload(server, other, name, kit.small).raise_for_status()
        complete(server, other, name)
        pushed.append(name)

    with repeating(push_and_ask) as check:
        wait_for(lambda: pushed or None, check)
        assert main(["backup", str(tmp_path / "backup"), "--data-dir", str(server.data_dir)]) == 0
    assert "keep it as safe as the servers" in capsys.readouterr().err
    data = tmp_path / "other" / "data"
    assert main(["restore", str(tmp_path / "backup"), "--data-dir", str(data)]) == 0
    assert main(["restore", str(tmp_path / "backup"), "--data-dir", str(data)]) == 1
    assert "nothing was restored: --data-dir" in capsys.readouterr().err
    assert blob(data, digest) == blob(server.data_dir, digest)
    with started(kit, data, soak=soak) as restored:
        found, tokens = complete(restored, key, "default")
        assert found == digest and (tokens == expected or not soak)
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
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path):
        assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_shared_database_is_not_restored_beside_a_store_of_one_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["restore", "b", "--data-dir", str(tmp_path / "new"), "--database", "postgresql://host/name"])
    assert "give the --store that all of them can reach" in capsys.readouterr().err
