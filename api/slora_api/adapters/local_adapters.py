"""Copies adapters from a directory on the server's disk, for operators who migrate from vLLM.

The operator names one root directory. Symbolic links in a path are resolved first, and the resulting path must be below
the root. So no link leads out of the root. Each file is opened once and copied into the quarantine, and is then
inspected like an upload. Later changes below the root have no effect on the adapter.

This module does not depend on HTTP and does not interpret the files.
"""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from slora.core.errors import ConfigError
from slora_adapters.peft.peft_directory import MEMBER_NAMES
from slora_adapters.process.full_disk import is_full
from slora_api.adapters.quarantine import Quarantine, StagedUpload
from slora_api.core.errors import BadRequest, Forbidden, NotFound
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import tenant_thread

_CHUNK_BYTES = 1 << 20
# The maximum number of loads of one tenant that may wait for their turn.
_MAX_WAITING = 64


class LocalAdapters:
    """Copies adapters from below one root directory.

    root: the root directory; None if the server reads no local adapters.
    max_bytes: the size limit of each file. A larger file is refused.

    Raises ConfigError if the root is not a directory.
    """

    def __init__(self, root: Path | None, quarantine: Quarantine, max_bytes: int) -> None:
        if root is not None and not root.is_dir():
            raise ConfigError(
                f"lora_root is {str(root)!r}, which is not a directory; create it, or omit the setting"
            )
        self._root = None if root is None else root.resolve()
        self._quarantine = quarantine
        self._max_bytes = max_bytes
        # One of the two slots is a reserve, so a tenant never gets both. Loads of one tenant therefore run one after
        # the other, and hold at most one of the tenant's permits for uploads.
        self._turns = FairSlots(2, _MAX_WAITING, "adapters to load", num_reserved=1)

    def take_turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Waits until no other load of the tenant is in progress. Raises TenantBusy."""
        return self._turns.hold(tenant)

    @asynccontextmanager
    async def copy(self, tenant: str, name: str, path: str) -> AsyncIterator[StagedUpload]:
        """Copies the PEFT directory at `path`, which is absolute or relative to the root. The copy exists for the
        duration of the context. tenant: the tenant that gets the adapter.

        Raises Forbidden if the server reads no local adapters. Raises NotFound if there is no adapter at the path, and
        BadRequest if a file is too large.
        """
        if self._root is None:
            raise Forbidden(
                "This server does not read adapters from its own files; push the adapter, or start "
                "the server with --lora-root DIR."
            )
        async with self._quarantine.folder(tenant) as directory:
            await tenant_thread(tenant, _copy_members, self._root, path, directory, self._max_bytes)
            yield StagedUpload(name, directory)


def _copy_members(root: Path, path: str, directory: Path, max_bytes: int) -> None:
    try:
        source = _below(root, root / path)
        if not source.is_dir():
            raise FileNotFoundError
        for name in MEMBER_NAMES:
            if (source / name).exists():
                (directory / name).parent.mkdir(exist_ok=True)
                _copy(_below(root, source / name), directory / name, max_bytes)
    except (OSError, ValueError) as error:  # A NUL in the path raises ValueError.
        if is_full(error):
            raise
        # A path outside the root and a missing path give the same message, so that a client cannot probe the file
        # system.
        raise NotFound(
            f"`lora_path` is {path[:256]!r}; it must be the directory of an adapter below this "
            "server's lora_root.",
            "lora_path",
        ) from None


def _below(root: Path, path: Path) -> Path:
    """Resolves all links in the path. Raises FileNotFoundError if the result is not below the root."""
    real = path.resolve(strict=True)
    if not real.is_relative_to(root):
        raise FileNotFoundError
    return real


def _copy(source: Path, target: Path, max_bytes: int) -> None:
    """Copies a regular file. Raises BadRequest if the file is too large. Raises OSError if the source is not a regular
    file, or has become a link since the path was resolved. Because of O_NONBLOCK, a named pipe does not block the call.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError
        with target.open("xb") as copy:
            while chunk := file.read(_CHUNK_BYTES):
                # Check the size while copying, because the file may grow.
                if copy.tell() + len(chunk) > max_bytes:
                    raise BadRequest(
                        f"{target.name} is larger than {max_bytes} bytes, this server's limit (max_upload_bytes).",
                        "lora_path",
                    )
                copy.write(chunk)
