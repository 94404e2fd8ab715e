"""What all features of an API process are built on."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from slora.client.replica_group import ReplicaGroup
from slora_adapters.database.database import Database
from slora_adapters.process.full_disk import DiskReserve
from slora_api.core.data_dir import DataDir
from slora_api.core.host_board import HostBoard, HostChanges
from slora_api.core.settings import Settings


@dataclass(frozen=True, slots=True)
class Foundation:
    """Belongs to one API process. The main process of the host has number 0 on the board."""

    stack: AsyncExitStack  # closes the objects of the features at the end, the last one first
    settings: Settings
    data: DataDir
    board: HostBoard
    changes: HostChanges
    reserve: DiskReserve
    database: Database
    client: ReplicaGroup

    @property
    def is_main(self) -> bool:
        return self.board.process == 0


def lay_foundation(
    stack: AsyncExitStack, settings: Settings, data: DataDir, client: ReplicaGroup, board: HostBoard
) -> Foundation:
    changes = HostChanges(board)
    reserve = DiskReserve(data.reserve, is_keeper=board.process == 0)
    database = Database(settings.database or data.database, reserve, changes.announce, changes.is_behind)
    stack.callback(database.close)
    return Foundation(stack, settings, data, board, changes, reserve, database, client)
