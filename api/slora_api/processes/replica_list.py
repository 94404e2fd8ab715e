"""The engines that run on any host of a cluster, as one file on each API host.

A follower process keeps the file up to date. All API processes of the host read it. If the follower or what it follows
is lost, the file keeps the last known engines, and requests go on.
"""

import asyncio
import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from slora.client.replica_group import ReplicaGroup
from slora.core.engine_address import TcpAddress
from slora_adapters.process.durable_file import replace_durably

logger = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ListedReplica:
    """One engine. version: of the settings and the installation of its replica. is_stalled: it makes no progress."""

    name: str
    host: str
    port: int
    version: str
    is_stalled: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaListFiles:
    """The file with the engines, and the file with the secret that connections to them need."""

    replicas: Path
    secret: Path

    def read(self) -> list[ListedReplica]:
        return [ListedReplica(**row) for row in json.loads(self.replicas.read_bytes())]


def write_replicas(path: Path, replicas: Collection[ListedReplica]) -> None:
    rows = [asdict(one) for one in sorted(replicas, key=lambda one: one.name)]
    replace_durably(path, json.dumps(rows, indent=1).encode())


class ReplicaList:
    """Adds and removes engines of `client` as the file lists them."""

    def __init__(self, files: ReplicaListFiles, client: ReplicaGroup) -> None:
        self._files = files
        self._client = client
        self._secret = files.secret.read_bytes().strip()
        self._listed: dict[str, ListedReplica] = {}
        self._read_at: tuple[int, int] | None = None
        self.stalled: frozenset[str] = frozenset()

    async def follow(self) -> None:
        """Applies each new version of the file, until cancelled."""
        while True:
            self.apply()
            await asyncio.sleep(_POLL_S)

    def apply(self) -> None:
        if (changed_at := self._stamp()) in (None, self._read_at):
            return
        self._read_at = changed_at
        listed = {one.name: one for one in self._files.read()}
        self.stalled = frozenset(name for name, one in listed.items() if one.is_stalled)
        for name, known in list(self._listed.items()):
            if name not in listed or _place(listed[name]) != _place(known):
                logger.info("replica %s has left", name)
                del self._listed[name]
                self._client.remove(name)
        for name, one in listed.items():
            if name not in self._listed:
                address = TcpAddress(one.host, one.port, self._secret)
                logger.info("replica %s has joined at %s", name, address)
                self._client.add(name, address)
            self._listed[name] = one

    def _stamp(self) -> tuple[int, int] | None:
        """Returns None before the follower has written the file."""
        try:
            state = self._files.replicas.stat()
        except FileNotFoundError:
            return None
        # The file is replaced, never changed, so a new version has another inode or another time.
        return state.st_ino, state.st_mtime_ns


def _place(replica: ListedReplica) -> tuple[str, int]:
    return replica.host, replica.port
