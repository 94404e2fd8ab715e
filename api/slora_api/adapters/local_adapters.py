"""Adapters that lie on this machine, below one directory that the operator has named: for those who come from vLLM.

A path is taken below that directory, and every link on the way is followed before it is judged, so none leads out of
it. The files are copied into the quarantine, each opened once, and go the way of an upload from there: what changes
below the directory meanwhile changes nothing here.

Knows no HTTP and nothing of what is in the files.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slora.errors import ConfigError
from slora_adapters.full_disk import is_full
from slora_adapters.peft.peft_directory import MEMBER_NAMES
from slora_api.adapters.quarantine import Quarantine
from slora_api.errors import BadRequest, Forbidden

__all__ = ["LocalAdapters"]

_CHUNK_BYTES = 1 << 20


class LocalAdapters:
    """root: None where nothing is to be read from this machine. max_bytes: the largest file that is copied.

    Raises ConfigError if the root is no directory.
    """

    def __init__(self, root: Path | None, quarantine: Quarantine, max_bytes: int) -> None:
        if root is not None and not root.is_dir():
            raise ConfigError(f"lora_root is {str(root)!r}, which is no directory; make it, or leave it out")
        self._root = None if root is None else root.resolve()
        self._quarantine = quarantine
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def copy(self, path: str) -> AsyncIterator[Path]:
        """A copy of the PEFT directory at `path`, absolute or below the root, for as long as the context.

        Raises Forbidden where nothing is read from this machine, BadRequest for what is too large or outside the root.
        """
        if self._root is None:
            raise Forbidden(
                "This server reads no adapters from its own files; push them, or start it with --lora-root DIR."
            )
        async with self._quarantine.folder() as directory:
            await asyncio.to_thread(_copy_members, self._root, path, directory, self._max_bytes)
            yield directory


def _copy_members(root: Path, path: str, directory: Path, max_bytes: int) -> None:
    try:
        source = _below(root, root / path)
        if not source.is_dir():
            raise FileNotFoundError
        for name in MEMBER_NAMES:
            if (source / name).exists():
                _copy(_below(root, source / name), directory / name, max_bytes)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        if is_full(error):
            raise
        # The same words for what is elsewhere and for what is nowhere: paths outside are nobody's business.
        raise BadRequest(
            f"`lora_path` is {path[:256]!r}; it must be an adapter's directory below this server's lora_root.",
            "lora_path",
        ) from None


def _below(root: Path, path: Path) -> Path:
    """Where the path leads, links followed. Raises FileNotFoundError if that is not below the root."""
    real = path.resolve(strict=True)
    if not real.is_relative_to(root):
        raise FileNotFoundError
    return real


def _copy(source: Path, target: Path, max_bytes: int) -> None:
    """Raises BadRequest if it is too large, OSError if it has become a link since it was resolved, or is no file:
    nobody waits for a pipe's writer.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError
        with target.open("xb") as copy:
            while chunk := file.read(_CHUNK_BYTES):
                # Counted as it comes: a file may grow.
                if copy.tell() + len(chunk) > max_bytes:
                    raise BadRequest(
                        f"{target.name} is larger than {max_bytes} bytes, this server's limit (max_upload_bytes).",
                        "lora_path",
                    )
                copy.write(chunk)
