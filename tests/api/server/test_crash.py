"""Kills a server at any step of a change. Acknowledged changes persist, and other changes are atomic.

After a crash, no unreferenced data remains. These are the steps of the API process:
- each change of a file or folder and each process start (audit events of Python),
- each statement that writes to the database,
- the moment after a commit.

The server is the production server with its engine and its loader. The test only adds the crash. Each new server starts
with the data that the previous one left.
"""

import io
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from slora_adapters.database.database import Database
from slora_adapters.registry.record import MAX_ALIASES
from slora_adapters.registry.registry import RESERVATION_S, Registry, StoredAdapters
from slora_adapters.store.file_store import FileStore
from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, READY_S, Served, environment, serving, wait_for
from tests.api.server.test_server import upload

# A process that dies as the file ARMED says. Its first line is the number of steps to live on. If its second line is a
# word, only steps of that name count. While the file exists, each step is written to the file STEPS.
MORTAL = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

left, armed_with = 0, ""
log = os.open(os.environ["STEPS"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "subprocess.Popen"}

def step(what):
    global left, armed_with
    try:
        with open(os.environ["ARMED"]) as file:
            death = file.read()
    except FileNotFoundError:
        return
    number, counted = death.split("\\n")
    if death != armed_with:
        left, armed_with = int(number), death
    left -= not counted or what == counted
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(log, (what + "\\n").encode())

@event.listens_for(Engine, "before_cursor_execute")
def execute(connection, cursor, statement, *others):
    word = statement.split()[0]
    if word not in ("SELECT", "PRAGMA"):
        step(word)

@event.listens_for(Engine, "commit")
def begin_commit(connection):
    step("COMMIT")

def commit(connection, plain=Connection.commit):
    plain(connection)
    step("committed")

Connection.commit = commit

def audit(what, arguments):
    # A file without a name is no change of a folder. The check of the disk's free space makes one at any moment.
    is_nameless = what == "open" and arguments[2] & os.O_TMPFILE == os.O_TMPFILE
    if what in CHANGES or what == "open" and arguments[2] & WRITES and not is_nameless:
        step(f"{what} {arguments[0]}")

sys.addaudithook(audit)
from slora_api.cli.main import main
from slora_api.keys.key_use import KeyUse
from slora_api.usage.usage_shipper import UsageShipper

async def write(key_use):
    pass

# These two take steps of their own at any moment.
UsageShipper.ship = lambda shipper: None
KeyUse.write = write
raise SystemExit(main())
"""
COMMAND = (sys.executable, "-P", "-c", MORTAL)
NEVER = 1 << 30


@dataclass
class Crashes:
    """Consecutive servers on one data directory. database: URL of the database, or empty for the directory's file."""

    base: Path
    folder: Path
    database: str = ""

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @contextmanager
    def life(self) -> Iterator[Served]:
        """A server that can die during a change that `ask` sends."""
        env = environment(
            SLORA_ADMIN_KEY=ADMIN_KEY, ARMED=str(self.folder / "armed"), STEPS=str(self.folder / "steps")
        )
        shared = ("--database", self.database, "--store", str(self.data / "adapters"))
        flags = shared if self.database else ()
        with serving(self.base, self.data, *flags, env=env, command=COMMAND) as served:
            served.wait_for_line("listening on")
            yield served

    def ask(self, client: httpx.Client, change: "Change", death: "PlannedKill") -> httpx.Response:
        """The response to a change. Raises httpx.TransportError if the server died during it, as `death` says."""
        assert change.look(client, death.number) == change.before
        part = self.folder / "armed.part"
        part.write_text(f"{death.die_at}\n{death.die_on}", encoding="utf-8")
        part.rename(self.folder / "armed")
        try:
            return change.do(client, death.number)
        finally:
            (self.folder / "armed").unlink()

    def kill(self, served: Served, client: httpx.Client, change: "Change", death: "PlannedKill") -> None:
        with pytest.raises(httpx.TransportError):
            self.ask(client, change, death)
        served.process.wait(READY_S)

    def steps(self) -> list[str]:
        """The steps of the last server."""
        return (self.folder / "steps").read_text(encoding="utf-8").splitlines()

    def files(self, *below: str) -> list[str]:
        """All files below a folder of the data directory."""
        return sorted(str(path.relative_to(self.data)) for path in self.data.joinpath(*below).rglob("*"))

    def blobs(self) -> set[str]:
        return {path.name for path in (self.data / "adapters" / "blobs").glob("*/*")}

    def check_nothing_is_left(self, served: Served) -> None:
        """Checks that no data of the dead server's unfinished changes remains.

        Unfinished uploads are deleted only when their reservation expires. In a shared store this takes a day, so the
        check uses a later clock.
        """
        assert self.files("quarantine") == []
        with closing(Database(self.database or self.data / "slora.db")) as database:
            if not self.database:
                assert database.read(text("PRAGMA integrity_check")) == [("ok",)]
            storage = database
            now, later = Registry(storage), Registry(storage, lambda: time.time() + RESERVATION_S)
            wanted = {
                record.version.digest
                for (tenant,) in database.read(text("SELECT tenant_id FROM tenants"))
                for name in now.list(tenant)
                for record in now.versions(tenant, name.label)
            }
            if not self.database:
                wait_for(
                    lambda: now.blobs.find_referenced(self.blobs()) == set(self.blobs()) or None, served.alive
                )
            wait_for(lambda: self.files("adapters", "tmp") == [] or None, served.alive)
            StoredAdapters(later, FileStore(self.data / "adapters")).sweep()
            assert self.blobs() == wanted


def answer_of(client: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status()
    return answer.headers["x-slora-adapter-digest"], answer.json()["choices"][0]["text"]


def field(client: httpx.Client, path: str, name: str) -> Any:
    """A field of the JSON at `path`, or None if the server answers with a 404."""
    answer = client.get(path)
    return None if answer.status_code == 404 else answer.raise_for_status().json()[name]


@dataclass(frozen=True)
class Change:
    """A change of the numbered object. look: reads the state that shows whether the change was made.

    status: the expected status of the change, and of the same change when it is repeated after success.
    """

    do: Callable[[httpx.Client, int], httpx.Response]
    look: Callable[[httpx.Client, int], Any]
    before: Any
    after: Any
    status: tuple[int, int] = (200, 404)


def archive(adapter: Path) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as packed:
        packed.add(adapter, "adapter")
    return raw.getvalue()


def alias(number: int) -> str:
    return f"/v1/adapters/voice/aliases/to-{number}"


SPLIT, WHOLE = {"1": 50, "2": 50}, {"2": 100}


def changes(pushed: bytes) -> dict[str, Change]:
    def push(client: httpx.Client, number: int) -> httpx.Response:
        files = {"archive": ("new.tar.gz", pushed)}
        return client.post("/v1/adapters", data={"name": f"new-{number}"}, files=files)

    return {
        "push": Change(
            push,
            lambda client, number: field(client, f"/v1/adapters/new-{number}", "version"),
            None,
            1,
            (201, 201),
        ),
        "move": Change(
            lambda client, number: client.put(alias(number), json={"versions": WHOLE, "expected": SPLIT}),
            lambda client, number: field(client, alias(number), "versions"),
            SPLIT,
            WHOLE,
            (200, 200),
        ),
        "delete a version": Change(
            lambda client, number: client.delete(f"/v1/adapters/voice@{number + 3}"),
            lambda client, number: field(client, f"/v1/adapters/voice@{number + 3}", "name"),
            "voice",
            None,
        ),
        "delete a name": Change(
            lambda client, number: client.delete(f"/v1/adapters/name-{number}?force=true"),
            lambda client, number: field(client, f"/v1/adapters/name-{number}", "version"),
            1,
            None,
        ),
    }


def with_alpha(adapter: Path, folder: Path, alpha: int) -> Path:
    """A copy of the adapter with another scale, which makes it a different adapter."""
    copy = shutil.copytree(adapter, folder / f"alpha-{alpha}")
    config = json.loads((copy / "adapter_config.json").read_text(encoding="utf-8"))
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}), encoding="utf-8")
    return copy


def prepare(served: Served, key: str, kit: Kit, folder: Path, count: int) -> None:
    """Creates the objects to be changed: `count` of each kind, but at most as many aliases as a name may have."""
    with served.client(key) as client:

        def point(path: str, versions: dict[str, int]) -> None:
            client.put(path, json={"versions": versions}).raise_for_status()

        for number in range(count + 3):
            assert upload(served, key, "voice", with_alpha(kit.small, folder, number + 1)).status_code == 201
        for number in range(min(count, MAX_ALIASES - 1)):
            point(alias(number), SPLIT)
        for number in range(count):
            name = f"name-{number}"
            assert upload(served, key, name, with_alpha(kit.wide, folder, number + 100)).status_code == 201
            point(f"/v1/adapters/{name}/aliases/prod", {"1": 100})


@dataclass(frozen=True)
class PlannedKill:
    """The death of a server before step `die_at` of one change. With `die_on`, only steps of that name count."""

    kind: str
    number: int
    die_at: int
    die_on: str = ""


def plan(num_steps: Mapping[str, int], *, soak: bool) -> list[PlannedKill]:
    """One death at every step in soak. Otherwise, a push dies before the commit that counts.

    A push commits its reservation first, then the adapter. `test_lifecycle` shows that an adapter survives a kill
    after it was acknowledged.
    """
    if soak:
        return [
            PlannedKill(kind, number + 1, number)
            for kind, count in num_steps.items()
            for number in range(count)
        ]
    return [PlannedKill("push", 1, 1, "COMMIT")]


def check_after(client: httpx.Client, death: PlannedKill, change: Change, new: tuple[str, str]) -> bool:
    """Checks that the change was made completely or not at all, and that it can be made now.

    Returns whether it was made. new: the expected answer of a pushed adapter.
    """
    model = f"new-{death.number}"
    found = change.look(client, death.number)
    assert found in (change.before, change.after)
    if death.kind == "push" and found is not None:
        assert answer_of(client, model) == new
    again = change.do(client, death.number)
    assert again.status_code == change.status[found == change.after]
    assert change.look(client, death.number) == change.after
    if death.kind == "push":
        assert again.json()["new_version"] == (found is None) and answer_of(client, model) == new
        # Deletes the weights, so that the next push stores them again.
        client.delete(f"/v1/adapters/{model}").raise_for_status()
    return bool(found == change.after)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_a_change_killed_at_any_step_is_atomic(
    kit: Kit, tmp_path: Path, kind: str, soak: bool, request: pytest.FixtureRequest
) -> None:
    is_shared = kind == "postgresql"
    url = request.getfixturevalue("shared_postgresql").migrated_database() if is_shared else ""
    crashes, kinds = Crashes(kit.base, tmp_path, url), changes(archive(kit.wide))
    num_steps: dict[str, int] = {}
    with crashes.life() as served:
        served.wait_until_ready()
        key = served.make_key("t")
        prepare(served, key, kit, tmp_path, count=24 if soak else 2)
        with served.client(key) as client:
            for kind, change in kinds.items():
                answer = crashes.ask(client, change, PlannedKill(kind, 0, NEVER))
                assert answer.status_code == change.status[0]
                assert change.look(client, 0) == change.after
                num_steps[kind] = len(crashes.steps()) - sum(num_steps.values())
            new, old = answer_of(client, "new-0"), answer_of(client, "voice@1")
            client.delete("/v1/adapters/new-0").raise_for_status()
            # A lower number would mean that some steps are not recorded.
            assert num_steps["push"] > 25 and num_steps["move"] > 6, num_steps
            assert min(num_steps["delete a version"], num_steps["delete a name"]) > 12, num_steps
            deaths = plan(num_steps, soak=soak)
            crashes.kill(served, client, kinds[deaths[0].kind], deaths[0])
    was_made: dict[str, set[bool]] = {kind: set() for kind in kinds}
    for before, death in zip(deaths, [*deaths[1:], None], strict=True):
        with crashes.life() as served, served.client(key) as client:
            crashes.check_nothing_is_left(served)
            if any(one and one.kind == "push" for one in (before, death)):
                served.wait_until_ready()
                assert answer_of(client, "voice@1") == old
            was_made[before.kind].add(check_after(client, before, kinds[before.kind], new))
            if death:
                crashes.kill(served, client, kinds[death.kind], death)
    if soak:
        assert all(seen == {False, True} for seen in was_made.values()), was_made
    else:
        assert was_made["push"] == {False}, "the push was killed after the step that counts"
