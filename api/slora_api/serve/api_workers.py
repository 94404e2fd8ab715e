"""The API workers: child processes that answer HTTP requests. They exist if `--api-workers` is more than one.

The main process does the tasks that must be done only once per host. It holds the lock of the data directory and the
listening socket, and supervises the other processes. It also sends pins to the engine, deletes unreferenced adapters,
and publishes the demo. Each worker has an event loop, an engine client, database connections and caches of its own.

All workers accept connections from the inherited socket. If a worker dies, connections that are not accepted yet wait
for another worker.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slora_api.core.host_board import BoardSize, HostBoard
from slora_api.processes.replica_list import ReplicaListFiles
from slora_api.processes.supervisor import Child, Supervisor
from slora_api.serve.host import Host

_MODULE = "slora_api.serve.api_process"
# Settings that may contain secrets. A worker gets them in its environment, because every user of the machine can read
# its command line.
_SECRET_SETTINGS = ("admin_key", "database", "store", "redis", "quota_redis")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The configuration that a worker receives in addition to its environment.

    number: 1 for the first worker. flags: see `read_settings`. started_at: Unix time of the server's start. metrics:
    the folder of metrics files. engine_sockets: the paths at which the engines listen. replicas: the engines of other
    hosts; None if there are none. listener, board: inherited descriptors.
    """

    number: int
    flags: Mapping[str, str]
    started_at: int
    metrics: Path
    engine_sockets: tuple[Path, ...]
    listener: int
    board: int
    board_size: BoardSize
    replicas: ReplicaListFiles | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "WorkerConfig":
        raw = json.loads(text)
        paths = {"metrics": Path(raw["metrics"]), "engine_sockets": tuple(map(Path, raw["engine_sockets"]))}
        replicas = raw["replicas"] and ReplicaListFiles(*map(Path, raw["replicas"].values()))
        board_size = BoardSize(**raw["board_size"])
        return WorkerConfig(**{**raw, **paths, "board_size": board_size, "replicas": replicas})


class ApiWorkers:
    """Starts the workers and restarts those that die. on_death: called with the name and the number of a worker that
    died, before it is restarted.
    """

    def __init__(
        self,
        host: Host,
        flags: Mapping[str, Any],
        started_at: int,
        metrics: Path,
        board: HostBoard,
        on_death: Callable[[str, int], None],
    ) -> None:
        replicas = None if host.cluster is None else host.cluster.files
        assert board.descriptor is not None, "a board without other processes"
        given = {name: text for name, text in flags.items() if isinstance(text, str)}
        secrets = {f"SLORA_{name.upper()}": given.pop(name) for name in _SECRET_SETTINGS if name in given}
        configs = [
            WorkerConfig(
                number,
                given,
                started_at,
                metrics,
                () if replicas else tuple(host.sockets.engines),
                host.listener.fileno(),
                board.descriptor,
                board.size,
                replicas,
            )
            for number in range(1, board.size.num_processes)
        ]
        numbers = {_name(config.number): config.number for config in configs}
        # The dict of stalls is not used. The supervisor only logs the stall of a worker, because the other workers
        # continue to answer.
        self._supervisor = Supervisor(
            _children(configs, secrets),
            host.settings.stall_seconds,
            {},
            lambda name: on_death(name, numbers[name]),
        )

    async def run(self) -> None:
        await self._supervisor.run()

    def stop(self, _at_once: bool) -> None:
        self._supervisor.stop()  # A second SIGTERM ends a worker at once.


def _name(number: int) -> str:
    return f"API worker {number}"


def _children(configs: Sequence[WorkerConfig], secrets: Mapping[str, str]) -> list[Child]:
    # Workers get the whole environment, because they read the settings as this process did.
    return [
        Child(
            _name(config.number),
            _MODULE,
            ["--config", config.to_json()],
            {**os.environ, **secrets},
            descriptors=(config.listener, config.board),
        )
        for config in configs
    ]
