"""What a server has before its main process has imported what answers requests."""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slora_adapters.process.shortage import Work
from slora_api.core.data_dir import DataDir
from slora_api.core.settings import Settings
from slora_api.processes.children import Sockets
from slora_api.processes.replica_list import ReplicaListFiles
from slora_api.processes.supervisor import Child


@dataclass(frozen=True, slots=True)
class ClusterEngines:
    """Engines that a cluster runs, for a server without engines of its own.

    files: the list of these engines. children: the processes that keep the list up to date. They are not needed to
    answer requests, so a stall of them does not stop the server.
    """

    files: ReplicaListFiles
    children: Sequence[Child]


@dataclass(frozen=True, slots=True)
class Host:
    """The children that run, and the places of a server.

    supervise: keeps the engines and the loader running, until cancelled. stalls, restarts: what it notes, see
    `Supervisor`. cluster: None if the engines are those of this server.
    """

    settings: Settings
    data: DataDir
    listener: socket.socket
    sockets: Sockets
    supervise: Work
    stalls: dict[str, str]
    restarts: Counter[str]
    cluster: ClusterEngines | None
