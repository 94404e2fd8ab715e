"""The Unix sockets of the engine and the loader."""

import os
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.full_disk import is_full
from slora_api.data_dir import DataDir

__all__ = ["Sockets", "open_sockets"]

# Linux's limit for the path of a Unix socket, in bytes, without the terminating zero byte.
_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Sockets:
    """The Unix sockets of the child processes."""

    directory: Path

    @property
    def engine(self) -> Path:
        return self.directory / "engine.sock"

    @property
    def loader(self) -> Path:
        return self.directory / "loader.sock"


def open_sockets(stack: AsyncExitStack, data: DataDir) -> Sockets:
    """Returns the paths of the sockets.

    They are in the data directory if its path is short enough and its disk has room, else in a temporary directory. A
    kill -9 leaves the temporary directory behind.
    """
    sockets = Sockets(data.path / "run")
    if len(os.fsencode(sockets.engine)) > _SOCKET_PATH_BYTES:
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))))
    try:
        sockets.directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if not is_full(error):
            raise
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))))
    # Remove the sockets of a killed server. Its children may still run for a moment and must not be mistaken for ours.
    for stale in (sockets.engine, sockets.loader):
        stale.unlink(missing_ok=True)
    return sockets
