"""Stages the files of an adapter until they have been checked: an upload, or a directory on the server's disk.

Each upload has a folder of its own, which is deleted when the upload ends, with or without an error. `RequestLimiter`
bounds the number of folders. The files get fixed names. The client's file names are only used to refuse pickles.

Operators who migrate from vLLM may load adapters from below one root directory. Symbolic links in a path are resolved
first, and the resulting path must be below the root. So no link leads out of the root. Each file is opened once and
copied into the quarantine, and is then inspected like an upload. Later changes below the root have no effect on the
adapter.

This module does not interpret the files.
"""

import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slora.core.errors import ConfigError
from slora_adapters.errors import AdapterInvalid, DiskFull
from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.extras import EXTRA_FIELDS, max_extra_bytes
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES, refuse_pickles
from slora_adapters.process.full_disk import DiskReserve, is_full
from slora_api.core.errors import BadRequest, Forbidden, NotFound
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import control_thread, tenant_thread
from slora_api.http.multipart_form import FormPart, check_fields, read_boundary, read_form

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """An upload whose files are on the disk and have not been checked.

    source: a directory with the files of a PEFT adapter, or an archive file.
    base_fingerprint: fingerprint of the base model that the adapter was trained on; None if the client sent none.
    """

    name: str
    source: Path
    base_fingerprint: str | None = None


class Quarantine:
    """Owns one directory and empties it at the start, because a killed server may have left files there.

    reserve: the disk reserve; None if there is none.
    """

    def __init__(self, directory: Path, reserve: DiskReserve | None = None) -> None:
        self._directory = directory
        self._reserve = reserve
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self, tenant: str) -> AsyncIterator[Path]:
        """Yields an empty folder for an upload of the tenant, and always deletes it at the end of the context. Raises
        DiskFull if the disk has no room for what the context writes.
        """
        if self._reserve is not None:
            self._reserve.check()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._directory))
            try:
                yield folder
            finally:
                # This runs on a thread, because a stalled disk must not delay the tokens of all tenants.
                await tenant_thread(tenant, shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            if not is_full(error):
                raise
            _log.error("there is no space for an upload in %s: %s", self._directory, error)
            if self._reserve is not None:
                # Check the reserve only now, when the folder is deleted and the disk has room again. One upload that is
                # too large for the disk must not make the server read-only.
                await control_thread(self._reserve.watch)
            raise DiskFull(self._directory.parent) from None


# Multipart field -> the name of the file in the quarantine.
_FILES: Mapping[str, str] = {
    "config": CONFIG_NAME,
    "weights": TENSORS_NAME,
    **EXTRA_FIELDS,
}
_REQUIRED_FILES = ("config", "weights")
# The field that replaces all files above.
_ARCHIVE = "archive"
_ARCHIVE_NAME = "archive"
# Fields that only the body limit bounds. All other files are small.
_LARGE_FILES = ("weights", _ARCHIVE)
_TEXTS = ("name", "base_fingerprint")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_TEXT_BYTES = 256
_MAX_HEADER_BYTES = 1024


def _open_part(folder: Path, field: str, file_name: str, earlier: Collection[str]) -> FormPart:
    """Opens the part of a multipart field. Raises BadRequest or AdapterInvalid."""
    if field in _TEXTS:
        return FormPart(field, file_name, None, _MAX_TEXT_BYTES)
    if field not in _FILES and field != _ARCHIVE:
        raise BadRequest(
            f"`{field[:80]}` is not a multipart field of an upload; the fields are "
            f"{', '.join((*_TEXTS, *_FILES, _ARCHIVE))}.",
            field[:80],
            "unknown_parameter",
        )
    if pickles := refuse_pickles([file_name]):
        raise AdapterInvalid(tuple(pickles))
    fields = {*earlier, field}
    if _ARCHIVE in fields and fields & _FILES.keys():
        raise BadRequest(f"Send the adapter's files or the multipart field `{_ARCHIVE}`, not both.", field)
    path = folder / _FILES.get(field, _ARCHIVE_NAME)
    path.parent.mkdir(exist_ok=True)
    limit = None if field in _LARGE_FILES else max_extra_bytes(path.relative_to(folder).as_posix())
    return FormPart(field, file_name, path.open("xb"), limit)


class Uploads:
    """Receives uploads into a quarantine."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    @asynccontextmanager
    async def receive(
        self, tenant: str, content_type: str, stream: AsyncIterator[bytes]
    ) -> AsyncIterator[StagedUpload]:
        """Receives the tenant's upload in `stream`. The files exist for the duration of the context.

        Raises BadRequest, AdapterInvalid, and the errors of `stream`.
        """
        boundary = read_boundary(
            content_type,
            "Send the adapter as multipart/form-data with the fields name, config and weights, or name and archive.",
        )
        async with self._quarantine.folder(tenant) as folder:
            parts = await read_form(tenant, stream, boundary, _MAX_HEADER_BYTES, partial(_open_part, folder))
            has_archive = _ARCHIVE in parts
            check_fields(parts, "name", *(() if has_archive else _REQUIRED_FILES))
            fingerprint = parts.get("base_fingerprint")
            yield StagedUpload(
                parts["name"].text,
                folder / _ARCHIVE_NAME if has_archive else folder,
                None if fingerprint is None else _read_fingerprint(fingerprint.text),
            )


def _read_fingerprint(text: str) -> str:
    if not _FINGERPRINT.fullmatch(text):
        raise BadRequest(
            f"`base_fingerprint` is {text[:80]!r}; it must be 64 hexadecimal digits, as `slora adapter push --base` "
            "sends them.",
            "base_fingerprint",
        )
    return text


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
