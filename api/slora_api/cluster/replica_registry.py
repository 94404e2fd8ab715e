"""Where replicas announce themselves: the key-value store of Ray's head (its GCS).

Each replica writes its own entry about once a second. An entry that no longer changes belongs to a replica that was
lost, so the clocks of the hosts do not matter. There is no process whose loss would lose the entries.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

from slora_api.processes.replica_list import ListedReplica

ANNOUNCE_S = 1.0
# A replica that has not announced itself for this long is lost. API processes notice the loss of a connection earlier.
_LOST_S = 15.0
_TIMEOUT_S = 5.0
_REPLICAS, _FACTS = b"replica/", b"facts"


class ReplicaRegistry:
    """The replicas of one cluster. Methods block, and raise an error of Ray if its head does not answer.

    gcs_address: HOST:PORT of the head.
    """

    def __init__(self, gcs_address: str, cluster_name: str) -> None:
        self._client: Any = GcsClient(address=gcs_address)
        self._namespace = f"slora/{cluster_name}".encode()

    def announce(self, replica: ListedReplica, beat: int) -> None:
        """Writes the entry of a replica. beat: another number in each call."""
        entry = json.dumps({**asdict(replica), "beat": beat}).encode()
        self._put(_REPLICAS + replica.name.encode(), entry, overwrite=True)

    def withdraw(self, name: str) -> None:
        self._client.internal_kv_del(_REPLICAS + name.encode(), False, self._namespace, timeout=_TIMEOUT_S)

    def list(self) -> list[tuple[ListedReplica, int]]:
        """Returns each entry with its beat."""
        found = []
        keys = self._client.internal_kv_keys(_REPLICAS, self._namespace, timeout=_TIMEOUT_S)
        for entry in map(self._get, keys):
            if entry is not None:  # It may have been withdrawn meanwhile.
                fields = json.loads(entry)
                beat = fields.pop("beat")
                found.append((ListedReplica(**fields), beat))
        return found

    def agree_on_facts(self, facts: str) -> str:
        """Stores the facts of the first replica, and returns the stored ones."""
        self._put(_FACTS, facts.encode(), overwrite=False)
        stored = self._get(_FACTS)
        return facts if stored is None else stored.decode()

    def clear(self) -> None:
        """Forgets the cluster, after its replicas have ended."""
        self._client.internal_kv_del(b"", True, self._namespace, timeout=_TIMEOUT_S)

    def _put(self, key: bytes, value: bytes, *, overwrite: bool) -> None:
        self._client.internal_kv_put(key, value, overwrite, self._namespace, timeout=_TIMEOUT_S)

    def _get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._client.internal_kv_get(key, self._namespace, timeout=_TIMEOUT_S)
        return value


class Sightings:
    """Tells from the beats of the entries which replicas are alive. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Name -> the last beat, and when it was first seen.
        self._seen: dict[str, tuple[int, float]] = {}

    def select_alive(self, entries: list[tuple[ListedReplica, int]]) -> list[ListedReplica]:
        now = self._clock()
        last, self._seen = self._seen, {}
        alive = []
        for replica, beat in entries:
            seen = last.get(replica.name)
            self._seen[replica.name] = seen if seen is not None and seen[0] == beat else (beat, now)
            if now - self._seen[replica.name][1] < _LOST_S:
                alive.append(replica)
        return alive
