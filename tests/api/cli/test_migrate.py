"""`slora migrate` as operators call it."""

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_api.cli.main import main
from slora_api.data_dir import open_data_dir
from slora_api.tenants.api_key import PEPPER_BYTES, Pepper
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.revocation_journal import RevocationJournal
from tests.api.command import run_command
from tests.api.served import SLORA, environment
from tests.postgresql_server import PostgresqlServer
from tests.redis_server import RedisServer

OLD = Path(__file__).parents[2] / "adapters" / "database" / "written_by_0_1"
WITHOUT_NAMES = "".join(
    f"DELETE FROM adapter_{table};" for table in ("names", "versions", "extras", "aliases", "reservations")
)


@pytest.fixture
def old_registry(redis_server: RedisServer) -> Iterator[str]:
    """The URL of a registry that release 0.1 has written."""
    with redis_server.client() as client:
        for line in (OLD / "registry.redis.jsonl").read_text().splitlines():
            client.execute_command(*json.loads(line))
    yield redis_server.url


def names(place: str | Path) -> list[str]:
    with closing(Database(place)) as database:
        return [one.label for one in Registry(RegistryStorage(database)).list("acme")]


def test_a_registry_is_copied_into_the_file_of_a_data_directory(old_registry: str, tmp_path: Path) -> None:
    flags = ("--registry", old_registry, "--data-dir", str(tmp_path / "data"))
    with open_data_dir(tmp_path / "data"):
        refused = run_command("migrate", *flags)
    assert refused.returncode == 1 and f"process {os.getpid()}" in refused.stderr
    done = subprocess.run([*SLORA, "migrate", *flags], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "copied 4 names with their versions and aliases from Redis, which was not changed\n",
    ), done.stderr
    assert names(tmp_path / "data" / "slora.db") == ["a.b-c", "a_b", "voice"]
    again = run_command("migrate", *flags)
    assert (again.returncode, again.stdout) == (
        0,
        "the registry in Redis was already copied to the database\n",
    )


def test_a_host_of_release_0_1_is_copied_into_postgresql_by_the_variables_of_the_server(
    old_registry: str, shared_postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    """Its names were in Redis, and its tenants and keys in its data directory."""
    data, place = tmp_path / "data", shared_postgresql.empty_database()
    data.mkdir()
    with closing(sqlite3.connect(data / "slora.db")) as connection:
        connection.executescript((OLD / "slora.sql").read_text() + WITHOUT_NAMES)
    (data / "pepper").write_bytes(b"p" * PEPPER_BYTES)
    first, revoked, pending = json.loads((OLD / "keys.json").read_text())
    with closing(RevocationJournal(data / "revocations")) as journal:
        journal.add(pending.split("_")[1])  # its database could not be written before it was stopped
    variables = {"SLORA_REGISTRY": old_registry, "SLORA_DATABASE": place, "SLORA_DATA_DIR": str(data)}
    done = run_command("migrate", **variables)
    assert done.returncode == 0, done.stderr
    assert "copied 2 tenants, 3 keys and 0 names" in done.stdout and "copied 4 names" in done.stdout
    assert names(place) == ["a.b-c", "a_b", "voice"]
    again = run_command("migrate", **variables)
    assert again.returncode == 0 and "copied 0 tenants, 0 keys and 0 names" in again.stdout
    with closing(Database(place)) as database, closing(RevocationJournal(tmp_path / "other")) as journal:
        store = KeyStore(database, Pepper.from_file(data / "pepper"), journal)
        assert (found := store.authenticate(first)) is not None and found.adapter == "voice@prod"
        assert store.authenticate(revoked) is None and store.authenticate(pending) is None


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        ((), 2, "give --registry to copy from Redis, or --data-dir and --database to copy from a file"),
        (("--database", "sqlite:////nowhere/slora.db"), 1, "unable to open database file"),
        (("--registry", "unix:///nowhere"), 1, "Redis is unavailable"),
        (("--registry", "unix:///nowhere", "--database", "mysql://x/y"), 1, "not mysql://"),
    ],
)
def test_a_copy_that_cannot_begin_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    exit_code: int,
    message: str,
) -> None:
    for name in ("SLORA_REGISTRY", "SLORA_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLORA_DATA_DIR", str(tmp_path))
    try:
        ended: object = main(["migrate", *flags])
    except SystemExit as wrong_usage:
        ended = wrong_usage.code
    printed = capsys.readouterr()
    assert (ended, printed.out) == (exit_code, "") and message in printed.err
