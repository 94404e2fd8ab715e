"""The Unix sockets of the engines and the loader."""

import os
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.process.durable_file import replace_durably
from slora_adapters.process.full_disk import is_full
from slora_api.core.data_dir import DataDir

# Linux's limit for the path of a Unix socket, in bytes, without the terminating zero byte.
_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Sockets:
    """The Unix sockets of the child processes. num_engines: one or more."""

    directory: Path
    num_engines: int = 1

    @property
    def engines(self) -> list[Path]:
        """The socket of each engine. Its stem is the name of the engine process in logs and metrics."""
        if self.num_engines == 1:
            return [self.directory / "engine.sock"]
        return [self.directory / f"engine-{number}.sock" for number in range(self.num_engines)]

    @property
    def loader(self) -> Path:
        return self.directory / "loader.sock"

    def write_arguments(self, *arguments: str) -> str:
        """Writes the loader's arguments to a file that only the owner can read, one per line. Returns the argument that
        names the file.
        """
        path = self.directory / "loader.arguments"
        replace_durably(path, "\n".join(arguments).encode())
        return f"@{path}"


def open_sockets(stack: AsyncExitStack, data: DataDir, num_engines: int = 1) -> Sockets:
    """Returns the paths of the sockets.

    They are in the data directory if its path is short enough and its disk has room, else in a temporary directory. A
    kill -9 leaves the temporary directory behind.
    """
    sockets = Sockets(data.path / "run", num_engines)
    if len(os.fsencode(sockets.engines[-1])) > _SOCKET_PATH_BYTES:
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))), num_engines)
    try:
        sockets.directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if not is_full(error):
            raise
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))), num_engines)
    # Remove the sockets of a killed server. Its children may still run for a moment and must not be mistaken for ours.
    for stale in (*sockets.engines, sockets.loader):
        stale.unlink(missing_ok=True)
    return sockets
